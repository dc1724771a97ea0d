"""PPO of async-gym-agents: threads or processes collect whole episodes, so a rollout may exceed its size."""

import json
import sys
import time
from functools import partial
from pathlib import Path

STARTED = time.perf_counter()

from async_gym_agents.agents.async_agent import get_injected_agent  # noqa: E402
from async_gym_agents.envs.multi_env import IndexableMultiEnv  # noqa: E402
from result import tell  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.envs import Computing  # noqa: E402


def make(cost_ns):
    return Monitor(Computing(cost_ns))


def main(work):
    rollout = work["num_envs"] * work["num_steps"]
    env = IndexableMultiEnv([partial(make, work["cost_ns"]) for _ in range(work["num_envs"])])
    sizes = {name: work[name] for name in ("batch_size", "n_epochs")}
    model = get_injected_agent(PPO)(
        "MlpPolicy", env, n_steps=rollout, seed=0, device="cpu", use_mp=work["processes"], **sizes
    )
    updates = 0

    def count(*_):
        nonlocal updates
        updates += 1

    model.learn(rollout)
    model.policy.optimizer.register_step_post_hook(count)
    before, begun = model.num_timesteps, time.perf_counter()
    model.learn(work["rollouts"] * rollout, reset_num_timesteps=False)
    seconds = time.perf_counter() - begun
    tell(work, model.num_timesteps - before, seconds, updates, begun - STARTED)
    model.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
