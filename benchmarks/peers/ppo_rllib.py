"""PPO of RLlib on its new API stack, with the settings of the work: env runners collect, the driver learns."""

import sys
import time
import warnings
from pathlib import Path

STARTED = time.perf_counter()
warnings.filterwarnings("ignore")
REPOSITORY = str(Path(__file__).resolve().parents[2])
sys.path.insert(1, REPOSITORY)

import json  # noqa: E402
import logging  # noqa: E402

import ray  # noqa: E402
import torch  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.tune.registry import register_env  # noqa: E402
from result import tell  # noqa: E402

from benchmarks.envs import Lander  # noqa: E402


def main(work):
    torch.set_num_threads(1)
    quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    ray.init(num_cpus=work["actors"] + 1, runtime_env={"env_vars": {"PYTHONPATH": REPOSITORY}}, **quiet)
    register_env("lander", lambda _: Lander(**work["env_kwargs"]))
    rollout = work["num_envs"] * work["num_steps"]
    config = (
        PPOConfig()
        .environment("lander")
        .env_runners(
            num_env_runners=work["actors"],
            num_envs_per_env_runner=work["num_envs"] // work["actors"],
            gym_env_vectorize_mode=work["mode"],
            rollout_fragment_length=work["num_steps"],
            batch_mode="truncate_episodes",
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False})
        .training(
            train_batch_size_per_learner=rollout, minibatch_size=work["batch_size"], num_epochs=work["n_epochs"],
            lr=work["learning_rate"], gamma=work["gamma"], lambda_=work["gae_lambda"], clip_param=work["clip_range"],
            vf_loss_coeff=work["vf_coef"], vf_clip_param=float("inf"), entropy_coeff=0.0, use_kl_loss=False,
            grad_clip=work["max_grad_norm"], grad_clip_by="global_norm",
        )
        .learners(num_learners=0)
        .debugging(log_level="ERROR", seed=0)
    )  # fmt: skip
    algorithm = config.build_algo()
    warm_up = 2
    for _ in range(warm_up):
        algorithm.train()
    startup_s, begun, steps, returns = time.perf_counter() - STARTED, time.perf_counter(), 0, []
    for _ in range(work["rollouts"]):
        results = algorithm.train()["env_runners"]
        steps += int(results["num_env_steps_sampled"])
        returns.append(results.get("episode_return_mean", float("nan")))
    seconds = time.perf_counter() - begun
    per_rollout = work["n_epochs"] * (rollout // work["batch_size"])
    algorithm.stop()
    ray.shutdown()
    tell(work, steps, seconds, per_rollout * work["rollouts"], startup_s, returns[-1:])


main(json.loads(sys.argv[1]))
