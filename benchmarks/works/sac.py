"""SAC: Pendulum and HalfCheetah end to end, one env, an update of 256 after every step.

All sides are the classes as a script makes them, with the same arguments; fasttrain's computes its updates without
autograd. What is timed begins after the first 300 updates: SBX compiles there.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import peers, trainings
from benchmarks.work import OURS, Sample, Work, works_of

WORK: dict[str, Any] = {"warm_up": 600, "steps": 3_000, "learning_starts": 300, "batch_size": 256}
SBX: dict[str, Any] = {
    **WORK, "algo": "SAC", "num_envs": 1, "from_start": False, "arguments": {
        "policy_kwargs": {"net_arch": [256, 256]}, **{name: WORK[name] for name in ("learning_starts", "batch_size")},
    },
}  # fmt: skip
ENVS = {"sac-pendulum": ("Pendulum-v1", "gymnasium"), "sac-halfcheetah": ("HalfCheetah-v5", "mujoco")}


def learn(env: str, package: str, ours: bool, threads: int | None = None) -> Sample:
    """Steps per second."""
    if find_spec(package) is None:
        return {"skipped": f"{env} needs the package {package}"}
    begun = time.perf_counter()
    import stable_baselines3
    import torch

    trainings.threads(threads)
    sizes = {name: WORK[name] for name in ("learning_starts", "batch_size")}
    kwargs = {"policy_kwargs": {"net_arch": [256, 256]}, "seed": 0, "device": "cpu", **sizes}
    model: Any
    if ours:
        from fasttrain import SAC
        from fasttrain.algos.engine import EngineSettings

        engine = EngineSettings(kind="kernels", threads=torch.get_num_threads())
        model = SAC("MlpPolicy", env, engine=engine, **kwargs)
    else:
        model = stable_baselines3.SAC("MlpPolicy", env, **kwargs)
    model.learn(WORK["warm_up"])
    updates, started = model._n_updates, time.perf_counter()
    model.learn(WORK["steps"], reset_num_timesteps=False)
    return {
        "rate": WORK["steps"] / (time.perf_counter() - started),
        "env_steps": WORK["steps"],
        "updates": model._n_updates - updates,
        "samples_per_update": WORK["batch_size"],
        "startup_s": started - begun,
    }


WORKS = works_of(
    *(
        Work(
            name,
            f"Training {env}, SAC [256, 256] in float32, one env, an update of 256 a step.",
            {
                OURS: partial(learn, env, package, True),
                "stock SAC": partial(learn, env, package, False),
                "stock SAC, 1 thread": partial(learn, env, package, False, 1),
                "SBX": partial(peers.run, "SBX, off-policy", {**SBX, "env": env}),
            },
            peers=frozenset({"SBX"}),
            target="T15",
        )
        for name, (env, package) in ENVS.items()
    )
)
