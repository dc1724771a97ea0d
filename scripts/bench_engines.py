"""Works go-*: GNU Go on 5×5 at level 1, against the obvious program and against what the engines can do.

The obvious program: an env starts a GNU Go of its own and waits on its pipes, one command after another; SubprocVecEnv
steps all of them together. Both train MaskablePPO with the same networks, minibatches and numbers of steps and updates,
from after the first rollout on. What the engines can do: the commands of recorded games, sent to as many processes in a
closed loop by one thread, with no policy and no learning.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import gymnasium as gym
import numpy as np

from bench_daemons import ROLLOUTS, _settings, trained, trained_blocking
from fasttrain.daemons.daemon import GAMES
from fasttrain.daemons.go import KOMI, Go

SIZE, LEVEL = 5, 1
RECORDED = 40  # games
Write = tuple[bytes, int, bool]  # what is sent, how many replies come, whether it is a decision


GNUGO = shutil.which("gnugo", path=os.pathsep.join([os.environ.get("PATH", ""), GAMES]))


def command() -> list[str]:
    """GNU Go, as conf/daemons/gnugo.yaml starts it."""
    flags = ("--chinese-rules", "--positional-superko", "--never-resign", "--capture-all-dead")
    return [str(GNUGO), "--mode", "gtp", *flags]


class Blocking(gym.Env[Any, Any]):
    """One board, one process, one pipe: what people write. What is seen of a board is ours."""

    def __init__(self) -> None:
        self._go = Go(size=SIZE, level=LEVEL)
        self.observation_space, self.action_space = self._go.observation_space, self._go.action_space
        self._process = subprocess.Popen(command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._black, self.begun = False, 0
        self.took: list[float] = []

    def _said(self, *commands: str) -> list[str]:
        """One after another."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answers = []
        for one in commands:
            self._process.stdin.write(one + "\n")
            self._process.stdin.flush()
            answers.append(self._process.stdout.readline()[1:].strip())
            self._process.stdout.readline()
        return answers

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._black, self.begun = not self._black, self.begun + 1
        self._mine, self._theirs = ("black", "white") if self._black else ("white", "black")
        self._go._mine = self._mine
        self._moves: list[str] = []
        drawn = int(self.np_random.integers(1 << 31))
        self._said(f"boardsize {SIZE}", f"komi {KOMI[SIZE]}", f"level {LEVEL}", f"set_random_seed {drawn}")
        self._said("clear_board")
        if not self._black:
            self._moves += self._said(f"genmove {self._theirs}")
        return self._look(), {}

    def _look(self) -> Any:
        legal, black, white = self._said(f"all_legal {self._mine}", "list_stones black", "list_stones white")
        self._mask = np.zeros(SIZE * SIZE + 1, np.bool_)
        self._mask[[*(self._go._points[name] for name in legal.split()), SIZE * SIZE]] = True
        self._go._moves = self._moves
        return self._go._seen(black, white)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        began = time.perf_counter()
        move = [*self._go._names, "PASS"][int(action)]
        self._moves.append(move)
        self._said(f"play {self._mine} {move}")
        if self._moves[-2:] != ["PASS", "PASS"]:
            self._moves += self._said(f"genmove {self._theirs}")
        seen = self._look()
        over = self._moves[-2:] == ["PASS", "PASS"]
        won = over and self._said("final_score")[0][:1] == self._mine[0].upper()
        self.took.append(time.perf_counter() - began)
        return seen, float(2 * won - 1) if over else 0.0, over, len(self._moves) >= 3 * SIZE * SIZE, {}

    def action_masks(self) -> Any:
        return self._mask

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def ours(games: int, rollout: int) -> dict[str, Any]:
    """As many processes as games, each at its own pace."""
    from fasttrain import MaskablePPO
    from fasttrain.machine import usable_cores
    from fasttrain.spec.daemons import DaemonsConfig
    from fasttrain.vec.games import DaemonVecEnv

    settings = DaemonsConfig(command=tuple(command()), count=games, games_per_daemon=1)
    env = DaemonVecEnv("fasttrain.daemons.go:Go", {"size": SIZE, "level": LEVEL}, games, settings, usable_cores())
    model = MaskablePPO("MlpPolicy", env, engine="kernels", **_settings(games, rollout))
    model.collector.schedule = "first_ready"
    return {**trained(model, env), "engine": "gnugo"}


def theirs(games: int, rollout: int, stock: bool = True) -> dict[str, Any]:
    """The obvious program; with stock's MaskablePPO or with ours, so that the envs alone differ."""
    import sb3_contrib
    from stable_baselines3.common.vec_env import SubprocVecEnv

    import fasttrain

    env = SubprocVecEnv([Blocking] * games, start_method="fork")
    kind: Any = sb3_contrib.MaskablePPO if stock else partial(fasttrain.MaskablePPO, engine="kernels")
    return {**trained_blocking(kind("MlpPolicy", env, **_settings(games, rollout)), env), "engine": "gnugo"}


def recorded() -> list[Write]:
    """What ours writes in whole games against random legal moves."""

    class Noting(Blocking):
        writes: list[Write] = []  # noqa: RUF012
        held: list[str] = []  # noqa: RUF012

        def _said(self, *commands: str) -> list[str]:
            self.held += commands
            if commands[-1] in ("list_stones white", "final_score"):  # all of one decision in one write
                text = "\n".join(f"{place} {one}" for place, one in enumerate(self.held)) + "\n"
                self.writes.append((text.encode(), len(self.held), any("play" in one for one in self.held)))
                self.held.clear()
            return super()._said(*commands)

    env, rng = Noting(), np.random.default_rng(0)
    for game in range(RECORDED):
        env.reset(seed=game)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(rng.choice(np.flatnonzero(env.action_masks())))
            over = terminated or truncated
    env.close()
    return env.writes


def engines_alone(games: int, rollout: int) -> dict[str, Any]:
    """What so many processes can do: recorded commands in a closed loop, no policy, no learning, one thread."""
    writes, chosen = recorded(), selectors.DefaultSelector()
    processes = [subprocess.Popen(command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(games)]
    begins = [place for place, (text, *_) in enumerate(writes) if b"boardsize" in text]
    todo: dict[Any, Iterator[Write]] = {}
    left: dict[Any, list[Any]] = {}  # replies that are to come, whether it is a decision, what came

    def send(process: Any) -> None:
        text, replies, decides = next(todo[process])
        left[process] = [replies, decides, b""]
        process.stdin.write(text)
        process.stdin.flush()

    decisions, answered, began = ROLLOUTS * rollout, -rollout, 0.0
    for number, process in enumerate(processes):
        first = begins[number * 7 % len(begins)]
        todo[process] = islice(cycle(writes), first, None)
        chosen.register(process.stdout, selectors.EVENT_READ, process)  # type: ignore[arg-type]
        send(process)
    for _ in count():
        for key, _ in chosen.select(1.0):
            waits = left[key.data]
            waits[2] += os.read(key.fd, 1 << 16)
            if waits[2].count(b"\n\n") < waits[0]:
                continue
            if waits[1]:
                began = time.perf_counter() if answered == 0 else began
                answered += 1
            send(key.data)
        if answered >= decisions:
            break
    rate = answered / (time.perf_counter() - began)
    for process in processes:
        process.kill()
        process.wait()
    work = {"env_steps": decisions, "updates": 0, "samples_per_update": 0}
    return {"rate": rate, "unit": "decisions/s", **work}


def alone(games: int, rollout: int) -> dict[str, Any]:
    """Ours, as a share of what the engines can do, who learn nothing: of the work the decisions alone are compared."""
    return {**ours(games, rollout), "updates": 0, "samples_per_update": 0}


def measured(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Or why it was not."""
    return work(*arguments) if GNUGO else {"skipped": "gnugo is not installed: apt install gnugo"}


AT_ONCE = {1: 128, 4: 256, 16: 512, 64: 1024}  # games → steps of a rollout
WORKS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    **{
        f"go-{games}": {
            "fasttrain": partial(measured, ours, games, rollout),
            "SubprocVecEnv": partial(measured, theirs, games, rollout),
            "SubprocVecEnv, our PPO": partial(measured, theirs, games, rollout, False),
        }
        for games, rollout in AT_ONCE.items()
    },
    **{
        f"go-{games}-capacity": {
            "fasttrain": partial(measured, alone, games, rollout),
            "the engines alone": partial(measured, engines_alone, games, rollout),
        }
        for games, rollout in AT_ONCE.items()
    },
}
