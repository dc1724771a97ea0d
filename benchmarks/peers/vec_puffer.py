"""pufferlib's Multiprocessing on envs of known cost; it runs in an environment that has pufferlib, not fasttrain."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pufferlib.emulation
import pufferlib.vector

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.envs import Computing


def make(cost_ns, buf=None, seed=0):
    return pufferlib.emulation.GymnasiumPufferEnv(env=Computing(cost_ns), buf=buf, seed=seed)


def rate_of(work, workers):
    """Env steps per second with so many worker processes."""
    num_envs = work["num_envs"]
    envs = pufferlib.vector.make(
        make, env_kwargs={"cost_ns": work["cost_ns"]}, num_envs=num_envs, num_workers=workers,
        backend=pufferlib.vector.Multiprocessing,
    )  # fmt: skip
    actions = np.random.default_rng(0).integers(0, 16, (50, num_envs))
    envs.reset(seed=0)
    for step in range(work["steps"] + work["warm_up"]):
        if step == work["warm_up"]:
            begun = time.perf_counter()
        envs.step(actions[step % 50])
    rate = work["steps"] * num_envs / (time.perf_counter() - begun)
    envs.close()
    return rate


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"rate": rate_of(asked, asked["workers"]), "env_steps": asked["steps"] * asked["num_envs"]}))
