"""PPO of TorchRL as in its own examples: a collector on SerialEnv, GAE, ClipPPOLoss, a buffer without replacement."""

import json
import sys
import time
import warnings

STARTED = time.perf_counter()
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from result import tell  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributions import Categorical  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer  # noqa: E402
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement  # noqa: E402
from torchrl.envs import RewardSum, SerialEnv, StepCounter, TransformedEnv  # noqa: E402
from torchrl.envs.libs.gym import GymEnv  # noqa: E402
from torchrl.modules import ProbabilisticActor, ValueOperator  # noqa: E402
from torchrl.objectives import ClipPPOLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402


def mlp(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def main(work):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rollout = work["num_envs"] * work["num_steps"]
    envs = SerialEnv(work["num_envs"], lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    env = TransformedEnv(envs, RewardSum())
    env.append_transform(StepCounter())
    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    gae = GAE(gamma=work["gamma"], lmbda=work["gae_lambda"], value_network=critic, average_gae=False)
    names = {"entropy_coeff": 0.0, "critic_coeff": work["vf_coef"]}
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=work["clip_range"], loss_critic_type="l2", normalize_advantage=True, **names
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=work["learning_rate"], eps=1e-5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rollout), sampler=SamplerWithoutReplacement(), batch_size=work["batch_size"]
    )
    warm_up = 2
    collector = Collector(
        env, actor, frames_per_batch=rollout, total_frames=rollout * (work["rollouts"] + warm_up), device="cpu"
    )
    updates, steps, begun, quality = 0, 0, 0.0, []
    for at, data in enumerate(collector):
        steps += data.numel()
        with torch.no_grad():
            gae(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(work["n_epochs"]):
            for _batch in range(rollout // work["batch_size"]):
                losses = loss_module(buffer.sample())
                optimizer.zero_grad()
                sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), work["max_grad_norm"])
                optimizer.step()
                updates += 1
        ended = data["next", "done"]
        quality += data["next", "episode_reward"][ended].tolist()
        if at == warm_up - 1:
            updates, steps, begun = 0, 0, time.perf_counter()
    seconds = time.perf_counter() - begun
    collector.shutdown()
    tell(work, steps, seconds, updates, begun - STARTED, quality)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
