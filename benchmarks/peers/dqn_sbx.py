"""DQN of SBX (JAX). What is timed begins after the first updates: they compile. Its updates are counted by itself."""

import json
import sys
import time

STARTED = time.perf_counter()

from result import tell  # noqa: E402
from sbx import DQN  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402


def main(work):
    algo = dict(work["algo"])
    algo.pop("max_grad_norm")  # SBX does not clip gradients, which is less work
    model = DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=work["num_envs"], seed=0),
        batch_size=work["batch_size"],
        learning_starts=work["warm_up"],
        train_freq=1,
        gradient_steps=work["updates_per_step"],
        policy_kwargs={"net_arch": work["net"]},
        seed=0,
        **algo,
    )
    model.learn(2 * work["warm_up"])
    updates, begun = model._n_updates, time.perf_counter()
    model.learn(work["steps"])  # warms up again
    seconds = time.perf_counter() - begun
    returns = [episode["r"] for episode in model.ep_info_buffer]
    tell(work, work["steps"], seconds, model._n_updates - updates, begun - STARTED, returns)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
