"""Vector environments: ours, SB3's and Gymnasium's, on envs of known cost. Start-up is left out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.envs import Computing, Waiting, Working, cartpole
from benchmarks.machine import ROOT
from benchmarks.work import OURS, Sample, Work, works_of

DUMMY, SUBPROC, ASYNC = "DummyVecEnv", "SubprocVecEnv", "AsyncVectorEnv"


def make(kind: str, env_fn: Callable[[], Any], num_envs: int) -> Any:
    """One of the vector envs, ready to step."""
    import gymnasium as gym
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from fasttrain import SharedMemoryVecEnv

    envs = [env_fn] * num_envs
    if kind == OURS:
        return SharedMemoryVecEnv(envs)
    if kind == ASYNC:
        return gym.vector.AsyncVectorEnv(envs, shared_memory=True, context="fork")
    # fork: the default start method imports torch in every one of up to 256 workers
    return DummyVecEnv(envs) if kind == DUMMY else SubprocVecEnv(envs, start_method="fork")


def rate_of(env: Any, num_envs: int, steps: int, masked: bool) -> float:
    """Steps per second with random, where masked legal, actions. Masks are asked for as sb3-contrib does."""
    import numpy as np

    rng, begun, warm_up = np.random.default_rng(0), 0.0, max(5, steps // 10)
    slots = hasattr(env, "step_slots") and masked  # our algorithms read the slots; a drop-in is stepped as stock is
    env.reset()
    for step in range(steps + warm_up):
        if step == warm_up:
            begun = time.perf_counter()
        if masked:
            masks = env.read_masks() if slots else np.stack(env.env_method("action_masks"))
            actions = np.argmax(rng.random(masks.shape) * masks, axis=1)
        else:
            actions = rng.integers(0, 2, num_envs)
        env.step_slots(actions) if slots else env.step(actions)
    rate = steps * num_envs / (time.perf_counter() - begun)
    env.close()
    return rate


def wargame() -> Any:
    """Skirmish by its plain Python rules: a slow env as users have them, most of it the opponent's turn."""
    sys.path.insert(0, str(ROOT / "tests"))
    from reference.skirmish_python.env import SkirmishPythonEnv

    return SkirmishPythonEnv(action_mode="units", opponent="greedy")


def collect(kind: str, env_fn: Callable[[], Any], num_envs: int, steps: int) -> Sample:
    """Envs that compute, with masks, and the share of what the cores could do."""
    import numpy as np

    from fasttrain.machine import usable_cores

    rate = rate_of(make(kind, env_fn, num_envs), num_envs, steps if kind != SUBPROC else steps // 3, masked=True)
    env, rng, alone = env_fn(), np.random.default_rng(0), 300
    env.reset(seed=0)
    begun = time.perf_counter()
    for _ in range(alone):
        masks = np.asarray(env.action_masks())
        if any(env.step(int(np.argmax(rng.random(masks.shape) * masks)))[2:4]):
            env.reset()
    return {"rate": rate, "share_of_ideal": rate * (time.perf_counter() - begun) / alone / usable_cores()}


def stepping(kind: str, num_envs: int) -> Sample:
    """CartPole, nothing but step()."""
    steps = max(20, 40_000 // num_envs // (1 if kind in (OURS, DUMMY) else 4))
    return {"rate": rate_of(make(kind, cartpole, num_envs), num_envs, steps, masked=False)}


def grouped(first_ready: bool, rollouts: int = 3) -> Sample:
    """Rollouts of MaskablePPO [256, 256] with 64 envs that wait, two in each of 32 workers; no updates."""
    import torch

    from fasttrain import MaskablePPO, SharedMemoryVecEnv
    from fasttrain.perf.clock import PhaseClock

    torch.set_num_threads(1)
    steps = 64 * 64
    env = SharedMemoryVecEnv([partial(Waiting, 0.63)] * 64, num_workers=32)
    kwargs = {"net_arch": [256, 256]}
    model = MaskablePPO("MlpPolicy", env, n_steps=64, n_epochs=1, batch_size=steps, seed=0, policy_kwargs=kwargs)
    clock = PhaseClock()
    model.time_with(clock)
    model.collector.schedule = "first_ready" if first_ready else "lockstep"
    model.learn(steps)
    clock.reset()
    model.learn(steps * rollouts)
    spent = clock.snapshot()
    env.close()
    seconds = sum(spent[phase] for phase in ("action", "env_step", "buffer", "log")) / 1e9
    return {"rate": steps * rollouts / seconds, "env_steps": steps * rollouts}


# --- the vectorizer alone, beside those of others

COSTS = {"10us": 10_000, "100us": 100_000, "1ms": 1_000_000, "10ms": 10_000_000}
CELLS = {f"{name}-{num_envs}": (cost, num_envs) for name, cost in COSTS.items() for num_envs in (8, 64, 256)}
CELL_S, PUFFER = 2.0, "pufferlib"  # seconds that a cell takes on one core


def cell_of(name: str, workers: int = 2) -> dict[str, int]:
    """What a cell asks of each side."""
    cost, num_envs = CELLS[name]
    steps = max(4, int(CELL_S * 1e9 / ((cost + 3_000) * num_envs)))
    return {"cost_ns": cost, "num_envs": num_envs, "steps": steps, "warm_up": 1 + steps // 10, "workers": workers}


def gymnasium_face(name: str, ours: bool) -> Sample:
    """Steps per second of `fasttrain_vec.VectorEnv` or Gymnasium's AsyncVectorEnv, each with its defaults."""
    import gymnasium as gym
    import numpy as np

    from fasttrain_vec import VectorEnv

    work = cell_of(name)
    num_envs, steps, env_fns = work["num_envs"], work["steps"], [partial(Computing, work["cost_ns"])] * work["num_envs"]
    envs: Any = VectorEnv(env_fns) if ours else gym.vector.AsyncVectorEnv(env_fns, context="fork")
    if not ours:
        steps = max(4, steps // 4)
    actions = np.random.default_rng(0).integers(0, 16, (50, num_envs))
    envs.reset(seed=0)
    begun = 0.0
    for step in range(steps + work["warm_up"]):
        if step == work["warm_up"]:
            begun = time.perf_counter()
        envs.step(actions[step % 50])
    rate = steps * num_envs / (time.perf_counter() - begun)
    envs.close()
    return {"rate": rate, "share_of_ideal": rate * work["cost_ns"] * 1e-9 / 2}


WORKS = works_of(
    *(
        Work(
            f"vectorizer-{name}",
            f"Stepping {num_envs} envs that compute {name.partition('-')[0]}, two workers.",
            {
                OURS: partial(gymnasium_face, name, True),
                ASYNC: partial(gymnasium_face, name, False),
                PUFFER: partial(peers.run, PUFFER, cell_of(name)),
                f"{PUFFER}, 1 worker": partial(peers.run, PUFFER, cell_of(name, 1)),
            },
            peers=frozenset({PUFFER, f"{PUFFER}, 1 worker"}),
            equal=(),
        )
        for name, (_, num_envs) in CELLS.items()
    ),
    Work(
        "vecenv-collect",
        "Collecting from 64 Python envs of 100 µs with masks.",
        {kind: partial(collect, kind, Working, 64, 150) for kind in (OURS, DUMMY, SUBPROC)},
        equal=(),
        target="T2",
    ),
    Work(
        "vecenv-wargame",
        "Collecting from 16 Skirmish envs in plain Python, one unit at a time.",
        {kind: partial(collect, kind, wargame, 16, 150) for kind in (OURS, DUMMY, SUBPROC)},
        equal=(),
    ),
    *(
        Work(
            f"vecenv-step-{n}",
            f"Stepping {n} CartPoles, nothing else.",
            {kind: partial(stepping, kind, n) for kind in (OURS, ASYNC, SUBPROC)},
            equal=(),
        )
        for n in (8, 64, 256)
    ),
    Work(
        "vecenv-first-ready",
        "Rollouts from 64 envs that wait 2 ms a step (variation 0.63), first-ready against in step.",
        {OURS: partial(grouped, True), "fasttrain, in step": partial(grouped, False)},
        equal=("env_steps",),
    ),
)
