"""Envs that fork in their workers, lived through many times: what is learned from stays right, nobody is left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from campaigns import FOREVER, QUIET, Result, Say
from forking import KINDS, Forking
from group_signals import kill_a_worker
from injector import Nursery, Training, wait_until_empty
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.vec.shared import SharedMemoryVecEnv
from resume_cases import SHARED

STEPS = 25
ENVS, WORKERS = 4, 2
TRAINED = (*QUIET, "env.entry_point=forking:Forking", "algo=ppo", *SHARED, "num_envs=4", "env.on_env_error=restart",
           "fused_update=off", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", "checkpoint_every=64",
           FOREVER)  # fmt: skip
ENDS: dict[str, int] = {  # → exit code
    "SIGKILL": -signal.SIGKILL,
    "SIGKILL to the group": -signal.SIGKILL,
    "SIGTERM to the group": 4,
    "SIGINT": 4,
    "a worker is killed, then SIGTERM": 4,
}


def forks(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """`count` lives of a vector env and as many trainings, all of envs that fork; counted are steps that forked."""
    rng = random.Random(seed)
    result: Result = {"lives": 0, "forks": 0, "wrong": 0, "replaced": 0, "trainings": 0, "beside": 0, "processes": 0,
                      "kinds": {}, "ends": {}, "bad": []}  # fmt: skip
    with Nursery.lent(lent) as nursery:
        for number in range(count):
            live(rng, number, result)
            end(nursery, folder / f"end{number}", list(ENDS)[number % len(ENDS)], rng, result)
            say(f"{number + 1} of {count} lives, {result['forks']} forks, {result['wrong']} wrong steps")
    return result


def live(rng: random.Random, number: int, result: Result) -> None:
    """One vector env beside one that forks nothing; every other time a worker is killed half way."""
    names, plain = list(KINDS), DummyVecEnv([Forking] * ENVS)
    env = SharedMemoryVecEnv([Forking] * ENVS, WORKERS, on_env_error="restart")
    whole = np.ones(ENVS, np.bool_)  # envs of workers that were not replaced
    gone: list[int] = []
    for each in (env, plain):
        each.seed(number)
        each.reset()
    for step in range(STEPS):
        actions = np.array([rng.randrange(len(names)) for _ in range(ENVS)])
        if number % 2 and step == STEPS // 2:
            worker = rng.choice(env.crew.workers)
            gone.append(int(worker.process.pid))
            os.kill(gone[0], signal.SIGKILL)
            whole[worker.first : worker.stop] = False
            result["replaced"] += 1
        found, expected = env.step(actions)[:3], plain.step(np.full(ENVS, names.index("nothing")))[:3]
        result["wrong"] += any(not np.array_equal(a[whole], b[whole]) for a, b in zip(found, expected, strict=True))  # type: ignore[index]
        for name in (names[action] for action in actions):
            result["kinds"][name] = result["kinds"].get(name, 0) + 1
            result["forks"] += name != "nothing"
    result["lives"] += 1
    if env.restarts != len(gone):
        result["bad"].append(f"life {number}: {env.restarts} restarts, {len(gone)} workers were killed")
    gone += [int(worker.process.pid) for worker in env.crew.workers]
    env.close()
    left = [pid for group in gone for pid in wait_until_empty(group)]
    result["processes"] += len(left)
    if result["wrong"] or left:
        result["bad"].append(f"life {number}: {result['wrong']} wrong steps so far, {len(left)} processes left")


def end(nursery: Nursery, place: Path, kind: str, rng: random.Random, result: Result) -> None:
    """A training ends; `beside` is how many processes were beside it then, workers and what their envs forked."""
    place.mkdir(parents=True)
    training = Training(nursery, place, TRAINED)
    if not training.until("write a checkpoint", lambda: (training.run / "checkpoints").is_dir(), pause_s=0.01):
        result["bad"].append(f"{kind}: it ended by itself: {training.said()[-2000:]}")
        return
    time.sleep(rng.random())
    result["beside"] += len(training.others())
    strike(training, kind, rng)
    code, left = training.end(), training.litter()
    result["trainings"] += 1
    result["ends"][kind] = result["ends"].get(kind, 0) + 1
    result["processes"] += left.processes
    if any(left) or code != ENDS[kind]:
        result["bad"].append(f"{kind}: exit code {code}, {left} left: {training.said()[-1500:]}")
        for pid in training.others():
            os.kill(pid, signal.SIGKILL)
    else:
        shutil.rmtree(place)


def strike(training: Training, kind: str, rng: random.Random) -> None:
    """Bring about one of `ENDS`."""
    if kind.startswith("a worker"):
        kill_a_worker(training, rng)
        time.sleep(rng.random())
        training.send(signal.SIGTERM)
    else:
        number: Any = getattr(signal, kind.split()[0])
        training.send(number, group=kind.endswith("group"))
