"""Games with external engines, against the obvious program and against what the engines can do.

The obvious program: an env starts an engine's process of its own and waits for it; SubprocVecEnv steps all of them
together. Ours: few engine processes play many games each, and every game goes at its own pace. Both train MaskablePPO
with the same networks, minibatches and numbers of steps and updates, from after the first rollout on. What the engines
can do: the same envs with random legal actions, each in a thread, without policy and learning.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.machine import ROOT
from benchmarks.work import OURS, Sample, Work, works_of

BATCH_SIZE, EPOCHS = 256, 4
ROLLOUTS = 3  # that are measured, after one


class Blocking(gym.Env[Any, Any]):
    """One game, one process, one after another: what people write."""

    _process: subprocess.Popen[Any]
    _mask: Any

    def __init__(self) -> None:
        self.begun = 0
        self.took: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.begun += 1
        return self.begin(int(self.np_random.integers(1 << 31))), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        began = time.perf_counter()
        answer = self.answer(int(action))
        self.took.append(time.perf_counter() - began)
        return *answer, {}

    def begin(self, seed: int) -> Any:
        raise NotImplementedError

    def answer(self, action: int) -> tuple[Any, float, bool, bool]:
        raise NotImplementedError

    def action_masks(self) -> Any:
        return self._mask

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class OverSocket(Blocking):
    """An engine that listens on a port and speaks JSON lines."""

    def __init__(self, command: tuple[str, ...], cwd: Path | None = None) -> None:
        super().__init__()
        port = free_port()
        filled = [part.replace("{port}", str(port)) for part in command]
        self._process = subprocess.Popen(filled, cwd=cwd, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._socket = connected(port)
        self._reader = self._socket.makefile("rb")

    def said(self, message: Any) -> Any:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        return json.loads(self._reader.readline())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connected(port: int) -> socket.socket:
    for _ in range(2000):
        found = socket.socket()
        if not found.connect_ex(("127.0.0.1", port)):
            found.settimeout(60)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        found.close()
        time.sleep(0.02)
    raise SystemExit("the engine does not listen")


# --- the reference engine: examples/engines/PigEngine.java, its Python twin where there is no JDK

EXAMPLES = ROOT / "examples" / "engines"


@cache
def pig(*switches: str) -> tuple[str, ...]:
    """Its command, which thinks for 5 ms; compiled once."""
    start = sys.executable, str(EXAMPLES / "pig_engine.py")
    if shutil.which("javac"):
        folder = Path(tempfile.gettempdir()) / f"fasttrain-pig-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        subprocess.run(["javac", "-d", str(folder), str(EXAMPLES / "PigEngine.java")], check=True)
        start = "java", "-XX:+UseSerialGC", "-Xss512k", "-Xmx64m", "-cp", str(folder), "PigEngine"  # type: ignore[assignment]
    return *start, "--port", "{port}", "--think-ms", "5", *switches


class Pig(OverSocket):
    observation_space, action_space = gym.spaces.Box(0.0, 4.0, (4,), np.float32), gym.spaces.Discrete(2)

    def begin(self, seed: int) -> Any:
        return self.seen(self.said({"type": "new", "game": self.begun, "seed": seed}))

    def answer(self, action: int) -> tuple[Any, float, bool, bool]:
        answer = self.said({"type": "choose", "game": self.begun, "id": self._id, "action": action})
        return self.seen(answer), answer["reward"], answer["type"] == "over", False

    def seen(self, answer: Any) -> Any:
        mine, theirs, turn = answer["state"]
        self._mask, self._id = np.zeros(2, np.bool_), answer.get("id", 0)
        self._mask[answer.get("legal", [0])] = True
        return np.array([mine, theirs, turn, mine + turn], np.float32) / 50


# --- GNU Go on 5×5 at level 1; what is seen of a board is ours

SIZE, LEVEL = 5, 1
GO_FLAGS = ("--mode", "gtp", "--chinese-rules", "--positional-superko", "--never-resign", "--capture-all-dead")


def gnugo() -> tuple[str, ...]:
    """As fasttrain_engines/conf/daemons/gnugo.yaml starts it; empty where it is not installed."""
    from fasttrain_engines.daemon import GAMES

    found = shutil.which("gnugo", path=os.pathsep.join([os.environ.get("PATH", ""), GAMES]))
    return (found, *GO_FLAGS) if found else ()


class GoBoard(Blocking):
    def __init__(self) -> None:
        super().__init__()
        from fasttrain_engines.go import Go

        self._go = Go(size=SIZE, level=LEVEL)
        self.observation_space, self.action_space = self._go.observation_space, self._go.action_space
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(gnugo(), text=True, bufsize=1, **pipes)  # type: ignore[call-overload]
        self._black = False

    def said(self, *commands: str) -> list[str]:
        """One command after another."""
        answers = []
        for one in commands:
            self._process.stdin.write(one + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            answers.append(self._process.stdout.readline()[1:].strip())  # type: ignore[union-attr]
            self._process.stdout.readline()  # type: ignore[union-attr]
        return answers

    def begin(self, seed: int) -> Any:
        from fasttrain_engines.go import KOMI

        self._black = not self._black
        self._mine, self._theirs = ("black", "white") if self._black else ("white", "black")
        self._go._mine = self._mine
        self._moves: list[str] = []
        self.said(f"boardsize {SIZE}", f"komi {KOMI[SIZE]}", f"level {LEVEL}", f"set_random_seed {seed}")
        self.said("clear_board")
        if not self._black:
            self._moves += self.said(f"genmove {self._theirs}")
        return self.look()

    def look(self) -> Any:
        legal, black, white = self.said(f"all_legal {self._mine}", "list_stones black", "list_stones white")
        self._mask = np.zeros(SIZE * SIZE + 1, np.bool_)
        self._mask[[*(self._go._points[name] for name in legal.split()), SIZE * SIZE]] = True
        self._go._moves = self._moves
        return self._go._seen(black, white)

    def answer(self, action: int) -> tuple[Any, float, bool, bool]:
        self._moves.append([*self._go._names, "PASS"][action])
        self.said(f"play {self._mine} {self._moves[-1]}")
        if self._moves[-2:] != ["PASS", "PASS"]:
            self._moves += self.said(f"genmove {self._theirs}")
        seen, over = self.look(), self._moves[-2:] == ["PASS", "PASS"]
        won = over and self.said("final_score")[0][:1] == self._mine[0].upper()
        return seen, float(2 * won - 1) if over else 0.0, over, len(self._moves) >= 3 * SIZE * SIZE


# --- random battles of Pokémon Showdown, generation 1; the messages are ours

BATTLE = {"generation": 1, "opponent": "max_damage"}
SHOWDOWN = Path(os.environ.get("FASTTRAIN_SHOWDOWN") or ROOT / ".engines")  # where npm install was run


def battles() -> tuple[str, ...]:
    """The program, as fasttrain_engines/conf/daemons/showdown.yaml starts it; empty where it cannot run."""
    import fasttrain_engines

    if not shutil.which("node") or not (SHOWDOWN / "node_modules" / "pokemon-showdown").is_dir():
        return ()
    return "node", str(Path(fasttrain_engines.__file__).parent / "node" / "battles.js"), "--port", "{port}"


class Battle(OverSocket):
    def __init__(self) -> None:
        from fasttrain_engines.showdown import Showdown

        super().__init__(battles(), SHOWDOWN)
        self._game = Showdown(**BATTLE)  # type: ignore[arg-type]
        self.observation_space, self.action_space = Showdown.observation_space, Showdown.action_space

    def begin(self, seed: int) -> Any:
        return self.seen(self.said(self._game.new_game(self.begun, seed)))

    def answer(self, action: int) -> tuple[Any, float, bool, bool]:
        answer = self.said({"answer": self._ask, "action": action})
        while "refused" in answer:  # generation 1 refuses nothing
            answer = self.said({"answer": self._ask, "action": answer["legal"][0]})
        return self.seen(answer), float(answer.get("over", 0.0)), "over" in answer, False

    def seen(self, answer: Any) -> Any:
        self._ask, self._mask = answer.get("ask", 0), np.zeros(self.action_space.n, np.bool_)  # type: ignore[attr-defined]
        self._mask[answer.get("legal", [0])] = True
        return np.frombuffer(base64.b64decode(answer["view"]), "<f4")


# --- measurements


def trained(model: Any, env: Any, p95_ms: Callable[[], float], games: Callable[[], int]) -> Sample:
    """`games`: how many were played to their end so far."""
    steps = model.n_steps * env.num_envs
    model.learn(steps)
    updates, played, began = model._n_updates, games(), time.perf_counter()
    model.learn(ROLLOUTS * steps, reset_num_timesteps=False)
    took = time.perf_counter() - began
    found = {
        "rate": ROLLOUTS * steps / took,
        "env_steps": ROLLOUTS * steps,
        "updates": (model._n_updates - updates) * steps // BATCH_SIZE,
        "samples_per_update": BATCH_SIZE,
        "p95_ms": p95_ms(),
        "games_per_s": (games() - played) / took,
    }
    env.close()
    return found


def arguments(games: int, rollout: int) -> dict[str, Any]:
    return {"n_steps": rollout // games, "batch_size": BATCH_SIZE, "n_epochs": EPOCHS, "seed": 0}


def ours(entry: str, kwargs: dict[str, Any], games: int, rollout: int, **daemons: Any) -> Sample:
    """Each game at its own pace."""
    sys.path.insert(0, str(EXAMPLES))
    from fasttrain import MaskablePPO
    from fasttrain.machine import usable_cores
    from fasttrain_engines.settings import DaemonsConfig
    from fasttrain_engines.vec_env import DaemonVecEnv

    if not daemons["command"]:
        return {"skipped": "the engine is not installed (docs/games/go.md, docs/games/showdown.md)"}
    env = DaemonVecEnv(entry, kwargs, games, DaemonsConfig(ports="27000-29999", **daemons), usable_cores())
    model: Any = MaskablePPO("MlpPolicy", env, engine="kernels", **arguments(games, rollout))
    model.collector.schedule = "first_ready"

    def p95_ms() -> float:
        return env.tally(fresh=True).decisions.percentile_ms(0.95) or 0.0

    return trained(model, env, p95_ms, lambda: env.times().games)


def theirs(make: Callable[[], Blocking], games: int, rollout: int, stock: bool = True) -> Sample:
    """The obvious program; with stock's MaskablePPO or with ours, so that the envs alone differ."""
    import sb3_contrib
    from stable_baselines3.common.vec_env import SubprocVecEnv

    import fasttrain

    # fork: forkserver makes the start-up of 64 processes, which nobody measures here, slow and large
    env = SubprocVecEnv([make] * games, start_method="fork")
    kind: Any = sb3_contrib.MaskablePPO if stock else partial(fasttrain.MaskablePPO, engine="kernels")

    def p95_ms() -> float:
        return 1000 * float(np.percentile([one for each in env.get_attr("took") for one in each], 95))

    model = kind("MlpPolicy", env, **arguments(games, rollout))
    return trained(model, env, p95_ms, lambda: sum(env.get_attr("begun")))


def capacity(make: Callable[[], Blocking], games: int, rollout: int) -> Sample:
    """So many engine processes, asked by a thread each."""
    envs, decisions, answered = [make() for _ in range(games)], ROLLOUTS * rollout, [0] * games

    def play(place: int) -> None:
        env, rng = envs[place], np.random.default_rng(place)
        env.reset(seed=place)
        while sum(answered) < decisions:
            _, _, over, cut, _ = env.step(rng.choice(np.flatnonzero(env.action_masks())))
            answered[place] += 1
            if over or cut:
                env.reset()

    threads = [threading.Thread(target=play, args=(place,)) for place in range(games)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = sum(answered) / (time.perf_counter() - began)
    for env in envs:
        env.close()
    return {"rate": rate, "env_steps": decisions}


def work(name: str, text: str, our_side: Callable[[], Sample], make: Callable[[], Blocking], games: int, rollout: int,
         engines: int | None = None) -> Work:  # fmt: skip
    """`engines`: processes of theirs where they are fewer than the games; and what so many can do."""
    sides: dict[str, Callable[..., Sample]] = {OURS: our_side}
    if engines is None:
        sides |= {
            "SubprocVecEnv": partial(theirs, make, games, rollout),
            "SubprocVecEnv, our PPO": partial(theirs, make, games, rollout, False),
        }
    else:
        sides["the engines alone"] = partial(capacity, make, engines, rollout)
    equal = ("env_steps", "updates", "samples_per_update") if engines is None else ("env_steps",)
    return Work(name, text, sides, unit="decisions/s", equal=equal, target="T12" if name.startswith("daemons") else "")


def pig_work(name: str, text: str, games: int, daemons: int, rollout: int, *switches: str, alone: bool = False) -> Work:
    our_side = lambda: ours("pig:Pig", {}, games, rollout, command=pig(*switches), count=daemons)  # noqa: E731
    make = lambda: Pig(pig(*switches))  # noqa: E731
    return work(f"daemons-{name}", text, our_side, make, games, rollout, daemons if alone else None)


def go_side(games: int, rollout: int) -> Sample:
    kwargs = {"size": SIZE, "level": LEVEL}
    return ours("fasttrain_engines.go:Go", kwargs, games, rollout, command=gnugo(), count=games, games_per_daemon=1)


def showdown_side(games: int, rollout: int) -> Sample:
    daemons = {"command": battles(), "cwd": str(SHOWDOWN)}
    return ours("fasttrain_engines.showdown:Showdown", BATTLE, games, rollout, **daemons)


SLEEPS = "An engine that sleeps 5 ms a decision; {} games in flight, four processes of ours."
WORKS = works_of(
    *(
        pig_work(str(games), SLEEPS.format(games), games, min(4, games), rollout)
        for games, rollout in {1: 256, 4: 1024, 16: 2048, 64: 4096}.items()
    ),
    pig_work("64-lognormal", "64 games whose thinking varies (lognormal, variation 0.63).", 64, 4, 4096,
             "--think", "lognormal", "--spread", "0.63"),
    pig_work("computing", "16 games on 2 engines that compute 5 ms, as a share of what they can do.", 16, 2, 1024,
             "--compute", alone=True),
    *(
        work(f"go-{games}{end}", f"GNU Go on 5×5, {games} at once.", partial(go_side, games, rollout), GoBoard, games,
             rollout, engines)
        for games, rollout in {1: 128, 4: 256, 16: 512, 64: 1024}.items()
        for end, engines in (("", None), ("-capacity", games))
    ),
    *(
        work(f"showdown-{games}{end}", f"Pokémon Showdown, {games} at once.", partial(showdown_side, games, rollout),
             Battle, games, rollout, engines)
        for games, rollout in {1: 512, 4: 1024, 16: 2048, 64: 4096}.items()
        for end, engines in (("", None), ("-capacity", min(games, os.cpu_count() or 1)))
    ),
)  # fmt: skip
