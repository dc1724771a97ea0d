"""PPO of SBX (JAX) on SB3's DummyVecEnv, which is faster than SubprocVecEnv on such envs."""

import json
import sys
import time

STARTED = time.perf_counter()

import flax.linen as nn  # noqa: E402
from result import tell  # noqa: E402
from sbx import PPO  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402


def main(work):
    rollout = work["num_envs"] * work["num_steps"]
    model = PPO(
        "MlpPolicy",
        make_vec_env(
            work.get("env_id", "CartPole-v1"), n_envs=work["num_envs"], seed=0, env_kwargs=work.get("env_kwargs")
        ),
        n_steps=work["num_steps"],
        batch_size=work["batch_size"],
        n_epochs=work["n_epochs"],
        learning_rate=work["learning_rate"],
        gamma=work["gamma"],
        gae_lambda=work["gae_lambda"],
        clip_range=work["clip_range"],
        vf_coef=work["vf_coef"],
        ent_coef=0.0,
        max_grad_norm=work["max_grad_norm"],
        policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.tanh},
        seed=0,
    )
    updates, one_update = 0, model._one_update

    def counted(*args, **kwargs):
        nonlocal updates
        updates += 1
        return one_update(*args, **kwargs)

    model._one_update = counted
    model.learn(2 * rollout)  # compiles
    model.num_timesteps, updates = 0, 0
    begun = time.perf_counter()
    model.learn(work["rollouts"] * rollout)
    seconds = time.perf_counter() - begun
    returns = [episode["r"] for episode in model.ep_info_buffer]
    tell(work, model.num_timesteps, seconds, updates, begun - STARTED, returns)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
