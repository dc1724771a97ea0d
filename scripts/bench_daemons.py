"""Works daemons-*: games with an external engine, against the obvious program (DESIGN's T12).

The obvious program: an env starts an engine's process of its own and waits for it on a socket; SubprocVecEnv steps all
of them together. Ours: few engine processes play many games each, and every game goes at its own pace. Both train
MaskablePPO with the same networks, minibatches and numbers of steps and updates, from after the first rollout on. The
engine is examples/engines/PigEngine.java, its Python twin where there is no JDK; `sleeping` ones wait 5 ms a decision,
as one does that thinks on a machine of its own, `computing` ones keep a core busy that long.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

ENGINES = Path(__file__).resolve().parent.parent / "examples" / "engines"
THINK_MS = 5.0
BATCH_SIZE, EPOCHS = 256, 4
ROLLOUTS = 3  # that are measured, after one
_PORTS = count(21000 + os.getpid() % 5000)


@cache
def engine() -> tuple[str, ...]:
    """The command of the engine, compiled once."""
    if shutil.which("javac") is None:
        return sys.executable, str(ENGINES / "pig_engine.py")
    folder = Path(tempfile.gettempdir()) / f"fasttrain-pig-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    subprocess.run(["javac", "-d", str(folder), str(ENGINES / "PigEngine.java")], check=True)
    return "java", "-XX:+UseSerialGC", "-Xss512k", "-Xmx64m", "-cp", str(folder), "PigEngine"


def command_of(*switches: str) -> tuple[str, ...]:
    """With a think time, and a port to be filled in."""
    return *engine(), "--port", "{port}", "--think-ms", f"{THINK_MS:g}", *switches


class Blocking(gym.Env[Any, Any]):
    """One game, one process, one blocking socket: what people write."""

    observation_space = gym.spaces.Box(0.0, 4.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, port: int, command: tuple[str, ...]) -> None:
        filled = [part.replace("{port}", str(port)) for part in command]
        self._process = subprocess.Popen(filled, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._socket = _connected(port)
        self._reader = self._socket.makefile("r")
        self.begun = 0
        self.took: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.begun += 1
        seen, *_ = self._said({"type": "new", "game": self.begun, "seed": int(self.np_random.integers(1 << 31))})
        return seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        began = time.perf_counter()
        said = self._said({"type": "choose", "game": self.begun, "id": self._id, "action": int(action)})
        self.took.append(time.perf_counter() - began)
        return *said, False, {}  # type: ignore[return-value]

    def _said(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        answer = json.loads(self._reader.readline())
        mine, theirs, turn = answer["state"]
        self._mask, self._id = np.zeros(2, np.bool_), answer.get("id", 0)
        self._mask[answer.get("legal", [0])] = True
        return np.array([mine, theirs, turn, mine + turn], np.float32) / 50, answer["reward"], answer["type"] == "over"

    def action_masks(self) -> Any:
        return self._mask

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _connected(port: int) -> socket.socket:
    found = socket.socket()
    for _ in range(2000):
        if not found.connect_ex(("127.0.0.1", port)):
            found.settimeout(60)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        found.close()
        time.sleep(0.02)
        found = socket.socket()
    raise SystemExit("the engine does not listen")


def _free_ports(number: int) -> list[int]:
    found: list[int] = []
    while len(found) < number:
        port = next(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


def _trained(model: Any, env: Any, p95_ms: Callable[[], float], games: Callable[[], int]) -> dict[str, Any]:
    """`games`: how many were played to their end so far."""
    steps, rollouts = model.n_steps * env.num_envs, ROLLOUTS
    model.learn(steps)
    updates, played = model._n_updates, games()
    began = time.perf_counter()
    model.learn(rollouts * steps, reset_num_timesteps=False)
    took = time.perf_counter() - began
    found = {
        "rate": rollouts * steps / took,
        "unit": "decisions/s",
        "env_steps": rollouts * steps,
        "updates": (model._n_updates - updates) * steps // BATCH_SIZE,
        "samples_per_update": BATCH_SIZE,
        "p95_ms": round(p95_ms(), 2),
        "games_per_s": round((games() - played) / took, 3),
        "engine": Path(engine()[0]).name,
    }
    env.close()
    return found


def _settings(games: int, rollout: int) -> dict[str, Any]:
    """Of MaskablePPO."""
    return {"n_steps": rollout // games, "batch_size": BATCH_SIZE, "n_epochs": EPOCHS, "seed": 0}


def ours(games: int, daemons: int, rollout: int, switches: tuple[str, ...] = ()) -> dict[str, Any]:
    """`daemons` engines, `games` in flight, each at its own pace."""
    sys.path.insert(0, str(ENGINES))
    from fasttrain import MaskablePPO
    from fasttrain.machine import usable_cores
    from fasttrain.spec.daemons import DaemonsConfig
    from fasttrain.vec.games import DaemonVecEnv

    env = DaemonVecEnv(
        "pig:Pig", {}, games, DaemonsConfig(command=command_of(*switches), count=daemons, ports="27000-29999"),
        usable_cores(),
    )  # fmt: skip
    model = MaskablePPO("MlpPolicy", env, engine="kernels", **_settings(games, rollout))
    model.collector.schedule = "first_ready"
    return trained(model, env)


def trained(model: Any, env: Any) -> dict[str, Any]:
    """Ours."""

    def p95_ms() -> float:
        return env.tally(fresh=True).decisions.percentile_ms(0.95) or 0.0

    return _trained(model, env, p95_ms, lambda: env.times().games)


def theirs(games: int, rollout: int, switches: tuple[str, ...] = (), stock: bool = True) -> dict[str, Any]:
    """The obvious program; with stock's MaskablePPO or with ours, so that the envs alone differ."""
    import sb3_contrib
    from stable_baselines3.common.vec_env import SubprocVecEnv

    import fasttrain

    ports = _free_ports(games)
    # fork: it is the start-up of 64 processes, which nobody measures here, that forkserver makes slow and large
    env = SubprocVecEnv([partial(Blocking, port, command_of(*switches)) for port in ports], start_method="fork")
    kind: Any = sb3_contrib.MaskablePPO if stock else partial(fasttrain.MaskablePPO, engine="kernels")
    return trained_blocking(kind("MlpPolicy", env, **_settings(games, rollout)), env)


def trained_blocking(model: Any, env: Any) -> dict[str, Any]:
    """Theirs, whose envs count `took` (seconds of each decision) and `begun` games."""

    def p95_ms() -> float:
        took = [one for each in env.get_attr("took") for one in each]
        return 1000 * float(np.percentile(took, 95))

    return _trained(model, env, p95_ms, lambda: sum(env.get_attr("begun")))


def engines_alone(games: int, daemons: int, rollout: int, switches: tuple[str, ...]) -> dict[str, Any]:
    """What the engines can do: recorded answers in a closed loop, no policy, no learning, one thread."""
    commands = [[part.replace("{port}", str(port)) for part in command_of(*switches)] for port in _free_ports(daemons)]
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        lines = [_connected(ports[game % daemons]) for game in range(games)]
        rate = _closed_loop(lines, ROLLOUTS * rollout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    work = {"env_steps": ROLLOUTS * rollout, "updates": 0, "samples_per_update": 0}
    return {"rate": rate, "unit": "decisions/s", **work}


def _closed_loop(lines: list[socket.socket], decisions: int) -> float:
    """Decisions/s over so many, after a third as many."""
    chosen, games, answered = selectors.DefaultSelector(), count(1), -decisions // 3
    playing: dict[socket.socket, int] = {}

    def begin(line: socket.socket) -> None:
        playing[line] = next(games)
        line.sendall(json.dumps({"type": "new", "game": playing[line], "seed": playing[line]}).encode() + b"\n")

    for line in lines:
        chosen.register(line, selectors.EVENT_READ)
        begin(line)
    began = 0.0
    while answered < decisions:
        for key, _ in chosen.select(1.0):
            line: Any = key.fileobj
            answer = json.loads(line.recv(4096))
            began = time.perf_counter() if answered == 0 else began
            answered += 1
            if answer["type"] == "over":
                begin(line)
                continue
            choose = {"type": "choose", "game": playing[line], "id": answer["id"], "action": answer["legal"][-1]}
            line.sendall(json.dumps(choose).encode() + b"\n")
    return decisions / (time.perf_counter() - began)


def computing() -> dict[str, Any]:
    """Ours, as a share of what the engines can do, who learn nothing: of the work the decisions alone are compared."""
    return {**ours(16, 2, 1024, ("--compute",)), "updates": 0, "samples_per_update": 0}


VARYING = ("--think", "lognormal", "--spread", "0.63")
IN_FLIGHT = {  # games → engines of ours, steps of a rollout, switches
    "daemons-1": (1, 1, 256, ()),
    "daemons-4": (4, 4, 1024, ()),
    "daemons-16": (16, 4, 2048, ()),
    "daemons-64": (64, 4, 4096, ()),
    "daemons-64-lognormal": (64, 4, 4096, VARYING),
}
WORKS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    # equal engine processes: four, of which ours play 16 games each
    "daemons-4-engines": {"fasttrain": partial(ours, 64, 4, 4096), "SubprocVecEnv": partial(theirs, 4, 4096)},
    # equal games in flight
    **{
        name: {
            "fasttrain": partial(ours, games, daemons, rollout, switches),
            "SubprocVecEnv": partial(theirs, games, rollout, switches),
            "SubprocVecEnv, our PPO": partial(theirs, games, rollout, switches, False),
        }
        for name, (games, daemons, rollout, switches) in IN_FLIGHT.items()
    },
    "daemons-computing": {
        "fasttrain": computing,
        "the engines alone": partial(engines_alone, 16, 2, 1024, ("--compute",)),
    },
}
