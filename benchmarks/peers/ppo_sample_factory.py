"""PPO of Sample Factory, synchronous and in one process: on two cores faster than its own worker processes.

Work with `units` is recurrent: one LSTM of so many units behind the layers, CartPole without its velocities.
"""

import json
import sys
import tempfile
import time

STARTED = time.perf_counter()

import gymnasium as gym  # noqa: E402
import torch  # noqa: E402
from result import tell  # noqa: E402
from sample_factory.algo.learning.learner import Learner  # noqa: E402
from sample_factory.algo.utils.misc import ExperimentStatus  # noqa: E402
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # noqa: E402
from sample_factory.envs.env_utils import register_env  # noqa: E402
from sample_factory.train import make_runner  # noqa: E402

WARM_UP = 2  # rollouts that are not counted


def arguments(work, folder):
    rollout = work["num_envs"] * work["num_steps"]
    settings = {
        "env": "CartPole-v1",
        "train_dir": folder,
        "device": "cpu",
        "serial_mode": True,
        "async_rl": False,
        "num_workers": 1,
        "worker_num_splits": 1,
        "num_envs_per_worker": work["num_envs"],
        "decorrelate_envs_on_one_worker": False,
        "rollout": work["num_steps"],
        "batch_size": work["batch_size"],
        "num_batches_per_epoch": rollout // work["batch_size"],
        "num_epochs": work["n_epochs"],
        "recurrence": work["num_steps"] if "units" in work else 1,
        "use_rnn": "units" in work,
        "rnn_type": "lstm",
        "rnn_size": work.get("units", 64),
        "with_vtrace": False,
        "actor_critic_share_weights": "units" in work,  # with two LSTMs Sample Factory 2.1.1 ends in an error
        "nonlinearity": "tanh",
        "normalize_input": False,
        "normalize_returns": False,
        "learning_rate": work["learning_rate"],
        "gamma": work["gamma"],
        "gae_lambda": work["gae_lambda"],
        "ppo_clip_ratio": work["clip_range"],
        "value_loss_coeff": work["vf_coef"],
        "exploration_loss_coeff": 0.0,
        "max_grad_norm": work["max_grad_norm"],
        "train_for_env_steps": rollout * (work["rollouts"] + WARM_UP + 1),
        "seed": 0,
    }
    return [*(f"--{key}={value}" for key, value in settings.items()), "--encoder_mlp_layers", "64", "64"]


class Blind(gym.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        low, high = env.observation_space.low[::2], env.observation_space.high[::2]
        self.observation_space = gym.spaces.Box(low, high, dtype=low.dtype)

    def observation(self, observation):
        return observation[::2]


def make_env(name, cfg=None, env_config=None, render_mode=None):
    return gym.make(name)


def make_blind(name, cfg=None, env_config=None, render_mode=None):
    return Blind(gym.make(name))


def main(work):
    torch.set_num_threads(1)
    register_env("CartPole-v1", make_blind if "units" in work else make_env)
    with tempfile.TemporaryDirectory() as folder:
        argv = arguments(work, folder)
        parser, _ = parse_sf_args(argv=argv)
        _, runner = make_runner(parse_full_cfg(parser, argv))
        if runner.init() != ExperimentStatus.SUCCESS:
            raise SystemExit("Sample Factory did not start")
        marks = watch_training()
        runner.run()
    begun, steps_then, updates_then = marks[WARM_UP - 1]
    ended, steps_now, updates_now = marks[WARM_UP - 1 + work["rollouts"]]
    tell(work, steps_now - steps_then, ended - begun, updates_now - updates_then, begun - STARTED)


def watch_training():
    """After each rollout's update: when it was, env steps and updates so far."""
    marks, train = [], Learner.train

    def marked(self, *args, **kwargs):
        stats = train(self, *args, **kwargs)
        marks.append((time.perf_counter(), self.env_steps, self.train_step))
        return stats

    Learner.train = marked
    return marks


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
