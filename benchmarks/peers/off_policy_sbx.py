"""SAC and DQN of SBX (JAX). What is timed begins after the first updates: they compile."""

import json
import sys
import time

STARTED = time.perf_counter()

import sbx  # noqa: E402
from result import tell  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402


def main(work):
    env = make_vec_env(work["env"], n_envs=work["num_envs"], seed=0)
    model = getattr(sbx, work["algo"])("MlpPolicy", env, seed=0, **work["arguments"])
    model.learn(work["warm_up"])
    updates, begun = model._n_updates, time.perf_counter()
    model.learn(work["steps"], reset_num_timesteps=work["from_start"])
    seconds = time.perf_counter() - begun
    tell(work, work["steps"], seconds, model._n_updates - updates, begun - STARTED)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
