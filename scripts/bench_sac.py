"""Works of benchmark.py about SAC: Pendulum and HalfCheetah end to end, one env, an update of 256 after every step.

All sides are the classes as a script makes them, with the same arguments; fasttrain's computes its updates without
autograd. What is timed begins after the first 300 updates: SBX compiles there. This file is also what SBX's environment
runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Measurement = Callable[[], dict[str, Any]]

WORK: dict[str, Any] = {"warmup": 600, "steps": 3_000, "learning_starts": 300, "batch_size": 256}
ENVS = {"sac-pendulum": ("Pendulum-v1", "gymnasium"), "sac-halfcheetah": ("HalfCheetah-v5", "mujoco")}
SBX_PACKAGES = ("sbx-rl==0.28.0", "jax==0.10.2")


def learn(side: str, env: str, threads: int | None = None) -> dict[str, Any]:
    """Steps per second. `threads` of torch; None is its own choice."""
    begun = time.perf_counter()
    if side == "SBX":
        from sbx import SAC

        further: dict[str, Any] = {}
    else:
        import torch

        torch.set_num_threads(threads or torch.get_num_threads())
        from stable_baselines3 import SAC

        further = {"device": "cpu"}
    if side == "fasttrain":
        from fasttrain import SAC
        from fasttrain.algos.engine import EngineSettings

        further["engine"] = EngineSettings(kind="kernels", threads=torch.get_num_threads())
    sizes = {name: WORK[name] for name in ("learning_starts", "batch_size")}
    model: Any = SAC("MlpPolicy", env, policy_kwargs={"net_arch": [256, 256]}, seed=0, **sizes, **further)
    model.learn(WORK["warmup"])
    updates, started = model._n_updates, time.perf_counter()
    model.learn(WORK["steps"], reset_num_timesteps=False)
    seconds = time.perf_counter() - started
    return {
        "rate": WORK["steps"] / seconds,
        "env_steps": WORK["steps"],
        "updates": model._n_updates - updates,
        "samples_per_update": WORK["batch_size"],
        "startup_s": started - begun,
    }


def measured(side: str, work: str, threads: int | None = None) -> dict[str, Any]:
    """One side of a work; `{"skipped": reason}` where what it needs is not there."""
    env, package = ENVS[work]
    if find_spec(package) is None:
        return {"skipped": f"{env} needs the package {package}"}
    if side != "SBX":
        return learn(side, env, threads)
    import bench_peers

    peer = bench_peers.Peer("", (*SBX_PACKAGES, *([package] if package != "gymnasium" else [])))
    return bench_peers.run_script(side, peer, [str(Path(__file__)), env])


WORKS: dict[str, dict[str, Measurement]] = {
    work: {
        "fasttrain": lambda work=work: measured("fasttrain", work),
        "stock SAC": lambda work=work: measured("stock", work),
        "stock SAC, 1 thread": lambda work=work: measured("stock", work, 1),
        "SBX": lambda work=work: measured("SBX", work),
    }
    for work in ENVS
}
PEERS_ONLY = {"SBX"}

if __name__ == "__main__":
    print(json.dumps(learn("SBX", sys.argv[1])))
