"""Works showdown-*: random battles of Pokémon Showdown, generation 1, against the obvious program and against what the
engines can do.

The obvious program: an env starts a Node process of its own and waits for it on a socket; SubprocVecEnv steps all of
them together. Both play the same program of ours and train MaskablePPO with the same networks, minibatches and numbers
of steps and updates, from after the first rollout on. What the engines can do: the messages of recorded battles, sent
to one process per core in a closed loop by one thread, with no policy and no learning.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from bench_daemons import ROLLOUTS, _connected, _free_ports, _settings, trained, trained_blocking
from fasttrain import daemons
from fasttrain.daemons.showdown import Showdown

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("FASTTRAIN_SHOWDOWN") or ROOT / ".engines")  # where npm install was run; .ci/run does
INSTALL = "npm install --omit=optional --ignore-scripts pokemon-showdown@0.11.11"
KWARGS: dict[str, Any] = {"generation": 1, "opponent": "max_damage"}
RECORDED = 40  # battles
Write = tuple[bytes, bool]  # what is sent, whether it answers a decision


def missing() -> str:
    """Why nothing can be played here; empty where it can."""
    if shutil.which("node") is None:
        return "node is not installed: apt install nodejs npm"
    there = (FOLDER / "node_modules" / "pokemon-showdown").is_dir()
    return "" if there else f"pokemon-showdown is not in {FOLDER} (FASTTRAIN_SHOWDOWN): {INSTALL}"


def command() -> tuple[str, ...]:
    """The program, as conf/daemons/showdown.yaml starts it; its port is to be filled in."""
    return "node", str(Path(daemons.__file__).parent / "node" / "battles.js"), "--port", "{port}"


def started(port: int) -> subprocess.Popen[bytes]:
    """A process of its own; it listens once the simulator is loaded."""
    return subprocess.Popen([part.replace("{port}", str(port)) for part in command()], cwd=FOLDER)


class Blocking(gym.Env[Any, Any]):
    """One battle, one process, one socket: what people write. The messages are ours."""

    observation_space, action_space = Showdown.observation_space, Showdown.action_space

    def __init__(self, port: int) -> None:
        self._game, self._process = Showdown(**KWARGS), started(port)
        self._socket = _connected(port)
        self._reader = self._socket.makefile("rb")
        self.begun = 0
        self.took: list[float] = []

    def _said(self, message: Any) -> Any:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        return json.loads(self._reader.readline())

    def _seen(self, answer: Any) -> Any:
        self._ask = answer.get("ask", 0)
        self._mask = np.zeros(Showdown.action_space.n, np.bool_)
        self._mask[answer.get("legal", [0])] = True
        return np.frombuffer(base64.b64decode(answer["view"]), "<f4")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.begun += 1
        return self._seen(self._said(self._game.new_game(self.begun, int(self.np_random.integers(1 << 31))))), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        began = time.perf_counter()
        answer = self._said({"answer": self._ask, "action": int(action)})
        while "refused" in answer:  # generation 1 refuses nothing
            answer = self._said({"answer": self._ask, "action": answer["legal"][0]})
        self.took.append(time.perf_counter() - began)
        return self._seen(answer), float(answer.get("over", 0.0)), "over" in answer, False, {}

    def action_masks(self) -> Any:
        return self._mask

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def ours(games: int, rollout: int) -> dict[str, Any]:
    """One process per core, each battle at its own pace."""
    from fasttrain import MaskablePPO
    from fasttrain.machine import usable_cores
    from fasttrain.spec.daemons import DaemonsConfig
    from fasttrain.vec.games import DaemonVecEnv

    settings = DaemonsConfig(command=command(), cwd=str(FOLDER), ports="27000-29999", max_wait_ms=4.0)
    env = DaemonVecEnv("fasttrain.daemons.showdown:Showdown", KWARGS, games, settings, usable_cores())
    model = MaskablePPO("MlpPolicy", env, engine="kernels", **_settings(games, rollout))
    model.collector.schedule = "first_ready"
    return {**trained(model, env), "engine": "pokemon-showdown"}


def theirs(games: int, rollout: int, stock: bool = True) -> dict[str, Any]:
    """The obvious program; with stock's MaskablePPO or with ours, so that the envs alone differ."""
    import sb3_contrib
    from stable_baselines3.common.vec_env import SubprocVecEnv

    import fasttrain

    env = SubprocVecEnv([partial(Blocking, port) for port in _free_ports(games)], start_method="fork")
    kind: Any = sb3_contrib.MaskablePPO if stock else partial(fasttrain.MaskablePPO, engine="kernels")
    model = kind("MlpPolicy", env, **_settings(games, rollout))
    return {**trained_blocking(model, env), "engine": "pokemon-showdown"}


def recorded() -> list[Write]:
    """What ours writes in whole battles with random legal actions. The same messages make the same battles."""
    writes: list[Write] = []

    class Noting(Blocking):
        def _said(self, message: Any) -> Any:
            writes.append((json.dumps(message).encode() + b"\n", "answer" in message))
            return super()._said(message)

    (port,) = _free_ports(1)
    env, rng = Noting(port), np.random.default_rng(0)
    for battle in range(RECORDED):
        env.reset(seed=battle)
        over = False
        while not over:
            over = env.step(rng.choice(np.flatnonzero(env.action_masks())))[2]
    env.close()
    return writes


def engines_alone(games: int, rollout: int) -> dict[str, Any]:
    """What a process per core can do: recorded battles in a closed loop, no policy, no learning, one thread."""
    from fasttrain.machine import usable_cores

    writes, chosen = recorded(), selectors.DefaultSelector()
    ports = _free_ports(min(games, usable_cores()))
    processes = [started(port) for port in ports]
    begins = [place for place, (text, _) in enumerate(writes) if b'"new"' in text]
    todo: dict[socket.socket, Iterator[Write]] = {}
    decides, left = dict[socket.socket, bool](), dict[socket.socket, bytes]()

    def send(one: socket.socket) -> None:
        text, decides[one] = next(todo[one])
        left[one] = b""
        one.sendall(text)

    decisions, answered, began = ROLLOUTS * rollout, -rollout, 0.0
    for number in range(games):
        one = _connected(ports[number % len(ports)])
        todo[one] = islice(cycle(writes), begins[number * 7 % len(begins)], None)
        chosen.register(one, selectors.EVENT_READ)
        send(one)
    for _ in count():
        for key, _ in chosen.select(1.0):
            one = key.fileobj  # type: ignore[assignment]
            left[one] += one.recv(1 << 16)
            if not left[one].endswith(b"\n"):
                continue
            if decides[one]:
                began = time.perf_counter() if answered == 0 else began
                answered += 1
            send(one)
        if answered >= decisions:
            break
    rate = answered / (time.perf_counter() - began)
    for process in processes:
        process.kill()
        process.wait()
    return {"rate": rate, "unit": "decisions/s", "env_steps": decisions, "updates": 0, "samples_per_update": 0}


def alone(games: int, rollout: int) -> dict[str, Any]:
    """Ours, as a share of what the engines can do, who learn nothing: of the work the decisions alone are compared."""
    return {**ours(games, rollout), "updates": 0, "samples_per_update": 0}


def measured(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Or why it was not."""
    why = missing()
    return {"skipped": why} if why else work(*arguments)


AT_ONCE = {1: 512, 4: 1024, 16: 2048, 64: 4096}  # battles → steps of a rollout
WORKS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    **{
        f"showdown-{games}": {
            "fasttrain": partial(measured, ours, games, rollout),
            "SubprocVecEnv": partial(measured, theirs, games, rollout),
            "SubprocVecEnv, our PPO": partial(measured, theirs, games, rollout, False),
        }
        for games, rollout in AT_ONCE.items()
    },
    **{
        f"showdown-{games}-capacity": {
            "fasttrain": partial(measured, alone, games, rollout),
            "the engines alone": partial(measured, engines_alone, games, rollout),
        }
        for games, rollout in AT_ONCE.items()
    },
}
