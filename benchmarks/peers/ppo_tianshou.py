"""PPO of Tianshou on its DummyVectorEnv."""

import json
import sys
import time

STARTED = time.perf_counter()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from result import tell  # noqa: E402
from tianshou.algorithm.modelfree.ppo import PPO  # noqa: E402
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy  # noqa: E402
from tianshou.algorithm.optim import AdamOptimizerFactory  # noqa: E402
from tianshou.data import Collector, VectorReplayBuffer  # noqa: E402
from tianshou.env import DummyVectorEnv  # noqa: E402
from tianshou.trainer import OnPolicyTrainerParams  # noqa: E402
from tianshou.utils.net.common import Net  # noqa: E402
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic  # noqa: E402


def main(work):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    rollout = work["num_envs"] * work["num_steps"]
    env = gym.make("CartPole-v1")
    envs = DummyVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(work["num_envs"])])
    envs.seed(0)

    def net():
        return Net(state_shape=env.observation_space.shape, hidden_sizes=[64, 64], activation=torch.nn.Tanh)

    policy = DiscreteActorPolicy(
        actor=DiscreteActor(preprocess_net=net(), action_shape=2, softmax_output=False),
        action_space=env.action_space,
        observation_space=env.observation_space,
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=net()),
        optim=AdamOptimizerFactory(lr=work["learning_rate"], eps=1e-5),
        eps_clip=work["clip_range"],
        vf_coef=work["vf_coef"],
        ent_coef=0.0,
        max_grad_norm=work["max_grad_norm"],
        gae_lambda=work["gae_lambda"],
        gamma=work["gamma"],
        max_batchsize=rollout,
    )
    collector = Collector(algorithm, envs, VectorReplayBuffer(rollout, work["num_envs"]))
    updates, steps, returns, update = 0, 0, [], algorithm._update_with_batch

    def counted(*args, **kwargs):
        nonlocal updates
        stats = update(*args, **kwargs)
        updates += stats.gradient_steps
        return stats

    algorithm._update_with_batch = counted
    collect = collector.collect

    def noted(*args, **kwargs):
        nonlocal steps
        stats = collect(*args, **kwargs)
        steps += stats.n_collected_steps
        returns.extend(stats.returns.tolist())
        return stats

    collector.collect = noted

    def train(rollouts):
        params = OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=rollouts * rollout,
            collection_step_num_env_steps=rollout,
            batch_size=work["batch_size"],
            update_step_num_repetitions=work["n_epochs"],
            show_progress=False,
            verbose=False,
        )
        return algorithm.run_training(params)

    train(2)  # compiles its numba kernels
    updates, steps = 0, 0
    begun = time.perf_counter()
    train(work["rollouts"])
    seconds = time.perf_counter() - begun
    tell(work, steps, seconds, updates, begun - STARTED, returns)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
