"""Whole PPO trainings on Python envs that compute: 64 of 100 µs with masks, 8 of 1 ms beside async-gym-agents."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks import peers, trainings
from benchmarks.envs import Computing, Working
from benchmarks.work import OURS, Sample, Work, works_of

MASKED: dict[str, Any] = {"num_envs": 64, "num_steps": 128, "batch_size": 2048, "n_epochs": 4, "rollouts": 12}
SLOW: dict[str, Any] = {"num_envs": 8, "num_steps": 128, "batch_size": 256, "n_epochs": 4, "rollouts": 12}
THREADS, PROCESSES, SLOW_NS = "async-gym-agents, threads", "async-gym-agents, processes", 1_000_000


def ours(work: dict[str, Any], env: tuple[str, ...]) -> Sample:
    rollout = work["num_envs"] * work["num_steps"]
    settings = {
        "num_envs": work["num_envs"], "batch_size": work["batch_size"], "algo.rollout_size": rollout,
        "algo.n_epochs": work["n_epochs"], "algo.learning_rate": 3e-4, "algo.net_arch": [64, 64],
        "total_timesteps": rollout * work["rollouts"], "eval.episodes": 8, "checkup": "off",
    }  # fmt: skip
    return trainings.command(["+profile=speed", *env, *trainings.typed(settings)], work["batch_size"])


def stock(work: dict[str, Any], masked: bool, subproc: bool) -> Sample:
    """What an SB3 user writes."""
    begun = time.perf_counter()
    import sb3_contrib
    import stable_baselines3

    kind: Any = sb3_contrib.MaskablePPO if masked else stable_baselines3.PPO
    env = trainings.stock_envs(Working if masked else partial(Computing, SLOW_NS), work["num_envs"], subproc)
    same = {name: work[name] for name in ("batch_size", "n_epochs")}
    model = kind("MlpPolicy", env, n_steps=work["num_steps"], seed=0, device="cpu", **same)
    return trainings.stock_learn(model, work["num_envs"] * work["num_steps"] * work["rollouts"], begun)


def sides(work: dict[str, Any], masked: bool, env: tuple[str, ...]) -> dict[str, Any]:
    library = "sb3-contrib" if masked else "SB3"
    return {
        OURS: partial(ours, work, env),
        f"{library}, DummyVecEnv": partial(stock, work, masked, False),
        f"{library}, SubprocVecEnv": partial(stock, work, masked, True),
    }


ASKED = {**SLOW, "cost_ns": SLOW_NS}
SLOW_ENV = ("algo=ppo", "env.entry_point=benchmarks.envs:Computing", f"env.kwargs.cost_ns={SLOW_NS}")
WORKS = works_of(
    Work("slow-masked-100us", "Training MaskablePPO [64, 64] on 64 Python envs of 100 µs, minibatch 2048, 4 epochs.",
         sides(MASKED, True, ("algo=maskable_ppo", "env.entry_point=benchmarks.envs:Working"))),
    Work("slow-1ms", "Training PPO [64, 64] on 8 Python envs of 1 ms, minibatch 256, 4 epochs.",
         {**sides(SLOW, False, SLOW_ENV),
          THREADS: partial(peers.run, "async-gym-agents", {**ASKED, "processes": False}),
          PROCESSES: partial(peers.run, "async-gym-agents", {**ASKED, "processes": True})},
         peers=frozenset({THREADS, PROCESSES}),
         equal=("samples_per_update",)),  # async-gym-agents' rollouts end with an episode: a few more updates
)  # fmt: skip
