"""PPO with LSTMs as one lean loop of PyTorch and Gymnasium, in the manner of CleanRL: no framework around it.

The networks are sb3-contrib's: an LSTM of the actor and one of the critic, behind each two layers of 64. Minibatches
are whole envs' rollouts, through which an LSTM goes from one start of an episode to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GAMMA, GAE_LAMBDA, CLIP_RANGE, VF_COEF, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.5, 0.5


class Net(nn.Module):
    """One LSTM and what is behind it."""

    def __init__(self, inputs: int, units: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units)
        layers = [nn.Linear(units, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
        for layer in layers[::2]:
            nn.init.orthogonal_(layer.weight, 2**0.5)  # type: ignore[arg-type]
        nn.init.orthogonal_(layers[-1].weight, gain)  # type: ignore[arg-type]
        self.behind = nn.Sequential(*layers)

    def forward(self, seen: Tensor, states: Any, starts: Tensor) -> tuple[Tensor, Any]:
        """(T, N, O), (h, c) and where episodes start (T, N) → (T, N, A), (h, c)."""
        found = []
        cuts = [0, *(1 + np.flatnonzero(starts[1:].any(dim=1).numpy())).tolist(), len(seen)]
        for begin, end in pairwise(cuts):
            kept = 1.0 - starts[begin, :, None]
            output, states = self.lstm(seen[begin:end], (states[0] * kept, states[1] * kept))
            found.append(output)
        return self.behind(torch.cat(found)), states


class Loop:
    """Envs, networks and the rollout of T steps of N envs."""

    def __init__(
        self, make: Callable[[], Any], num_envs: int, num_steps: int, units: int, learning_rate: float
    ) -> None:
        torch.manual_seed(0)
        self.envs = [make() for _ in range(num_envs)]
        first = [env.reset(seed=seed)[0] for seed, env in enumerate(self.envs)]
        self.seen = torch.from_numpy(np.stack(first).astype(np.float32))
        shape = (num_steps, num_envs)
        width = self.seen.shape[1]
        self.nets = Net(width, units, 2, 0.01), Net(width, units, 1, 1.0)
        self.parameters = [each for net in self.nets for each in net.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate, eps=1e-5, fused=True)
        self.states = [(torch.zeros(1, num_envs, units), torch.zeros(1, num_envs, units)) for _ in self.nets]
        self.begun, self.starts_now = self.states, torch.ones(num_envs)
        self.observations, self.starts = torch.zeros(*shape, width), torch.zeros(shape)
        self.actions, self.log_probs, self.values = torch.zeros(shape, dtype=torch.int64), *torch.zeros(2, *shape)
        self.rewards = np.zeros(shape, np.float32)
        self.lengths, self.finished, self.updates = np.zeros(num_envs), [], 0  # type: ignore[var-annotated]

    @torch.no_grad()
    def collect(self) -> Tensor:
        """A rollout; its advantages (T, N)."""
        self.begun = self.states
        for t in range(len(self.rewards)):
            self.observations[t], self.starts[t] = self.seen, self.starts_now
            logits, value = self._outputs(self.seen)
            log_probs = torch.log_softmax(logits, 1)
            action = torch.multinomial(log_probs.exp(), 1)
            self.actions[t], self.log_probs[t], self.values[t] = action[:, 0], log_probs.gather(1, action)[:, 0], value
            self._step(t, action[:, 0].tolist())
        before = self.states
        _, last_value = self._outputs(self.seen)
        self.states = before
        values, starts, last = self.values.numpy(), self.starts.numpy(), np.zeros(len(self.envs), np.float32)
        advantages = np.zeros_like(self.rewards)
        for t in reversed(range(len(values))):
            at_end = t == len(values) - 1
            following, over = (
                (last_value.numpy(), self.starts_now.numpy()) if at_end else (values[t + 1], starts[t + 1])
            )
            delta = self.rewards[t] + GAMMA * following * (1 - over) - values[t]
            advantages[t] = last = delta + GAMMA * GAE_LAMBDA * (1 - over) * last
        return torch.from_numpy(advantages)

    def _outputs(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [
            net(seen[None], states, self.starts_now[None]) for net, states in zip(self.nets, self.states, strict=True)
        ]
        self.states = [states for _, states in outputs]
        return outputs[0][0][0], outputs[1][0][0, :, 0]

    def _step(self, t: int, actions: list[int]) -> None:
        self.starts_now = torch.zeros(len(self.envs))
        self.seen = torch.empty_like(self.seen)
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            seen, reward, terminated, truncated, _ = env.step(action)
            self.lengths[i] += 1
            if terminated or truncated:
                self.finished.append(self.lengths[i])
                self.lengths[i], self.starts_now[i] = 0, 1.0
                if truncated and not terminated:
                    h, c = self.states[1]
                    there = torch.from_numpy(seen)[None, None], (h[:, i : i + 1], c[:, i : i + 1]), torch.zeros(1, 1)
                    reward += GAMMA * self.nets[1](*there)[0].item()
                seen, _ = env.reset()
            self.seen[i], self.rewards[t, i] = torch.from_numpy(seen), reward

    def learn(self, advantages: Tensor, epochs: int, batch_size: int) -> None:
        """Update, some envs' rollouts at a time."""
        returns, num_envs = advantages + self.values, len(self.envs)
        for _ in range(epochs):
            for envs in torch.randperm(num_envs).split(batch_size // len(self.rewards)):
                outputs = [
                    net(self.observations[:, envs], [part[:, envs] for part in states], self.starts[:, envs])[0]
                    for net, states in zip(self.nets, self.begun, strict=True)
                ]
                log_probs = torch.log_softmax(outputs[0], 2).gather(2, self.actions[:, envs, None])[..., 0]
                ratio = (log_probs - self.log_probs[:, envs]).exp()
                advantage = advantages[:, envs]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
                policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
                value_loss = (outputs[1][..., 0] - returns[:, envs]).square().mean()
                self.optimizer.zero_grad()
                (policy_loss + VF_COEF * value_loss).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
                self.optimizer.step()
                self.updates += 1


def run(
    make: Callable[[], Any], num_envs: int, num_steps: int, units: int, learning_rate: float, epochs: int,
    batch_size: int, rollouts: int,
) -> dict[str, Any]:  # fmt: skip
    """Train; what was done and how fast."""
    begun = time.perf_counter()
    torch.set_num_threads(1)  # the nets are small: more threads cost more than they bring
    loop = Loop(make, num_envs, num_steps, units, learning_rate)
    started = time.perf_counter()
    for _ in range(rollouts):
        loop.learn(loop.collect(), epochs, batch_size)
    seconds = time.perf_counter() - started
    steps = rollouts * num_envs * num_steps
    return {
        "rate": steps / seconds,
        "env_steps": steps,
        "updates": loop.updates,
        "samples_per_update": batch_size,
        "quality": float(np.mean(loop.finished[-500:])),
        "startup_s": started - begun,
    }
