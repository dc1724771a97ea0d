"""PPO as one lean loop of PyTorch and Gymnasium, in the manner of CleanRL: what overhead-free Python can do.

With `backend: envpool` the envs are EnvPool's. The step after an episode's end only resets, and counts as a transition.
"""

import json
import sys
import time

STARTED = time.perf_counter()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from result import tell  # noqa: E402
from torch import nn  # noqa: E402


def mlp(outputs, gain):
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, gain)
    return nn.Sequential(*layers)


def main(work):
    num_envs, num_steps, batch_size = work["num_envs"], work["num_steps"], work["batch_size"]
    torch.set_num_threads(1)  # the nets are small: more threads cost more than they bring
    torch.manual_seed(0)
    pool = None
    if work.get("backend") == "envpool":
        import envpool

        pool = envpool.make("CartPole-v1", "gymnasium", num_envs=num_envs, seed=0, num_threads=work["pool_threads"])
        obs = pool.reset()[0].astype(np.float32)
    else:
        envs = [gym.make("CartPole-v1") for _ in range(num_envs)]
        obs = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)]).astype(np.float32)
    actor, critic = mlp(2, 0.01), mlp(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=work["learning_rate"], eps=1e-5, fused=True)
    size = num_envs * num_steps
    b_obs, b_actions = torch.zeros(num_steps, num_envs, 4), torch.zeros(num_steps, num_envs, dtype=torch.int64)
    b_logprobs, b_values = torch.zeros(num_steps, num_envs), torch.zeros(num_steps, num_envs)
    b_rewards, b_ends = np.zeros((num_steps, num_envs), np.float32), np.zeros((num_steps, num_envs), np.float32)
    returns, running, updates = [], np.zeros(num_envs), 0
    ready = time.perf_counter()
    for _ in range(work["rollouts"]):
        with torch.no_grad():
            for t in range(num_steps):
                x = torch.from_numpy(obs)
                logits, value = actor(x), critic(x)
                logprobs = torch.log_softmax(logits, 1)
                action = torch.multinomial(logprobs.exp(), 1)
                b_obs[t], b_actions[t], b_values[t] = x, action[:, 0], value[:, 0]
                b_logprobs[t] = logprobs.gather(1, action)[:, 0]
                if pool is not None:
                    obs, b_rewards[t], terminated, truncated, _ = pool.step(action[:, 0].numpy())
                    b_ends[t] = ends = terminated | truncated
                    running += b_rewards[t]
                    returns.extend(running[ends])
                    running[ends] = 0.0
                    continue
                obs = np.empty_like(obs)
                for i, (env, a) in enumerate(zip(envs, action[:, 0].tolist(), strict=True)):
                    o, reward, terminated, truncated, _ = env.step(a)
                    running[i] += reward
                    if terminated or truncated:
                        returns.append(running[i])
                        running[i] = 0.0
                        if truncated and not terminated:
                            reward += work["gamma"] * critic(torch.from_numpy(o)[None]).item()
                        o, _ = env.reset()
                    obs[i], b_rewards[t, i], b_ends[t, i] = o, reward, terminated or truncated
            value = critic(torch.from_numpy(obs))[:, 0].numpy()
            values, advantages, last = b_values.numpy(), np.zeros_like(b_rewards), 0.0
            for t in reversed(range(num_steps)):
                following = value if t == num_steps - 1 else values[t + 1]
                going = 1.0 - b_ends[t]
                delta = b_rewards[t] + work["gamma"] * following * going - values[t]
                advantages[t] = last = delta + work["gamma"] * work["gae_lambda"] * going * last
        f_obs, f_actions, f_logprobs = b_obs.view(size, 4), b_actions.view(size, 1), b_logprobs.view(size)
        f_advantages = torch.from_numpy(advantages).view(size)
        f_returns = f_advantages + b_values.view(size)
        for _ in range(work["n_epochs"]):
            for rows in torch.randperm(size).split(batch_size):
                logprobs = torch.log_softmax(actor(f_obs[rows]), 1)
                ratio = (logprobs.gather(1, f_actions[rows])[:, 0] - f_logprobs[rows]).exp()
                advantage = f_advantages[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                clipped = ratio.clamp(1 - work["clip_range"], 1 + work["clip_range"])
                policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
                value_loss = (critic(f_obs[rows])[:, 0] - f_returns[rows]).square().mean()
                optimizer.zero_grad()
                (policy_loss + work["vf_coef"] * value_loss).backward()
                nn.utils.clip_grad_norm_(parameters, work["max_grad_norm"])
                optimizer.step()
                updates += 1
    seconds = time.perf_counter() - ready
    tell(work, work["rollouts"] * size, seconds, updates, ready - STARTED, returns)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
