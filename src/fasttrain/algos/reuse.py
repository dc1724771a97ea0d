"""`algo.reuse`: PPO learns from its last few rollouts, not only from the newest (Queeney et al. 2021, GePPO).

The rollouts lie side by side in one storage, as if there were more envs, so that every engine updates on them as usual.
Before an update, the present policy evaluates the older rollouts:

- ρ is the probability of the action now ÷ its probability when it was taken.
- Values and advantages are computed anew, with traces cut at min(1, ρ) as in V-trace (Espeholt et al. 2018).
- The update is that of decoupled PPO (Hilton et al. 2022): the ratio is clipped around the policy before the update,
  and ρ weighs the advantage. With ρ = 1 this is PPO. GePPO clips ρ × ratio around ρ.

`algo.target_tv`: how far one update of PPO may move the policy, by total variation (GePPO, too). After each epoch the
total variation between the policies before and after is measured over all transitions that the update learns from: the
mean of ρ |r - 1| ÷ 2. r is an action's probability now divided by its probability before the update; ρ is 1 without
`algo.reuse`. The update ends once it is above `algo.target_tv`. The learning rate then falls by 3 % for the following
updates. It rises by 3 % after an update that stayed below half of the target, up to `algo.learning_rate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.algos.engine import Statistics
from fasttrain.batch import BoolArray, each_array, load_into, with_prefix
from fasttrain.buffers.rollout import RolloutStorage, advantages_of

CHUNK = 4_096  # rows that the policy evaluates in one call


class Reuse:
    """The last `count` rollouts of a model in one storage, where each rollout has N columns.

    Attributes:
        stored: rollouts stored so far.
        storage: (T, count × N) transitions; None before the first rollout.
    """

    def __init__(self, count: int) -> None:
        self.count, self.stored = count, 0
        self.storage: RolloutStorage | None = None

    def merged(self, model: Any) -> RolloutStorage:
        """Store the model's newest rollout in place of the oldest. Returns the storage, ready for an update."""
        newest: RolloutStorage = model.rollout_buffer.storage
        if self.storage is None or self.settings != newest.settings:
            self._begin(model, newest)
        storage: Any = self.storage
        block = self.stored % self.count
        here = self._columns(block)
        for name in ("_actions", "_masks", "_values", "_log_probs", "_advantages", "_returns"):
            if getattr(storage, name) is not None:
                getattr(storage, name)[:, here].copy_(getattr(newest, name))
        for key, part in newest._observations.items():
            storage._observations[key][:, here].copy_(part)
        storage.rewards[:, here], storage.episode_starts[:, here] = newest.rewards, newest.episode_starts
        self.absent[:, here] = False if newest.left_out is None else newest.left_out
        continuous = model.collector.continuous if model.collector.schedule == "continuous" else None
        dropped = None if continuous is None else continuous.dropped
        self.dropped[:, here] = False if dropped is None else dropped
        self.behaviour[:, here], self.weights[:, here] = newest.log_probs, 1.0
        self._keep_last(model, here)
        self.stored += 1
        for older in range(min(self.stored, self.count)):
            if older != block or dropped is not None:
                self._rate(model, self._columns(older))
        storage.left_out[...] = self.absent | self.dropped
        self._weigh(model.normalize_advantage)
        return storage  # type: ignore[no-any-return]

    def _begin(self, model: Any, newest: RolloutStorage) -> None:
        self.settings, self.num_envs, self.stored = newest.settings, newest.num_envs, 0
        self.storage = storage = RolloutStorage(
            newest.num_steps, newest.num_envs * self.count, newest.observation_space, newest.action_space,
            device=newest.device, gamma=newest.gamma, gae_lambda=newest.gae_lambda, mask_width=newest.mask_width,
        )  # fmt: skip
        storage.complete()
        storage.left_out = np.ones(storage.rewards.shape, np.bool_)
        self.absent, self.dropped = np.ones((2, *storage.rewards.shape), np.bool_)
        self.behaviour, self.weights = np.zeros((2, *storage.rewards.shape), np.float32)
        self.last_dones, self.rests = np.zeros((2, storage.num_envs), np.bool_)
        repeated = lambda part: np.repeat(np.asarray(part)[:1], storage.num_envs, axis=0)  # noqa: E731
        self.last_observations = each_array(repeated, model._last_obs)

    def _columns(self, block: int) -> slice:
        return slice(block * self.num_envs, (block + 1) * self.num_envs)

    def _keep_last(self, model: Any, here: slice) -> None:
        """Store the observations and dones after the newest rollout's last step: its advantages need them."""
        each_array(lambda kept, part: kept.__setitem__(here, part), self.last_observations, model._last_obs)
        self.last_dones[here] = model._last_episode_starts
        rests = model.collector.source.slots.rests
        self.rests[here] = False if rests is None else rests

    @torch.no_grad()
    def _rate(self, model: Any, here: slice) -> None:
        """Compute values, log-probabilities, advantages and weights ρ of the columns `here` by the present policy."""
        storage: Any = self.storage
        present = ~self.absent[:, here]
        kept = torch.as_tensor(present).to(storage.device)
        storage._values[:, here][kept], storage._log_probs[:, here][kept] = rate(model, storage, here, present)
        now, log_ratio = storage.values[:, here], storage.log_probs[:, here] - self.behaviour[:, here]
        left_out: BoolArray = self.absent[:, here].copy()
        log_ratio[left_out] = 0.0
        ratio = np.exp(log_ratio)
        last, _ = model.policy.obs_to_tensor(each_array(lambda part: part[here], self.last_observations))
        last_values = model.policy.predict_values(last).reshape(-1).cpu().numpy()
        traces = np.minimum(ratio, np.float32(1.0))
        advantages = advantages_of(
            storage.rewards[:, here], now, storage.episode_starts[:, here], last_values, self.last_dones[here],
            storage.gamma, storage.gae_lambda, left_out, self.rests[here], traces=traces,
        )  # fmt: skip
        self.weights[:, here] = ratio
        storage._advantages[:, here] = torch.from_numpy(advantages).to(storage.device)
        storage._returns[:, here] = torch.from_numpy(now + traces * advantages).to(storage.device)

    def _weigh(self, normalize: bool) -> None:
        """Multiply advantages by weights; if `normalize`, first normalise by weighted moments over all rollouts."""
        storage: Any = self.storage
        advantages, kept = storage.advantages, ~storage.left_out
        if normalize:
            each, weight = advantages[kept].astype(np.float64), self.weights[kept].astype(np.float64)
            mean = np.average(each, weights=weight)
            spread = np.sqrt(np.average((each - mean) ** 2, weights=weight))
            advantages = (advantages - np.float32(mean)) / np.float32(spread + 1e-8)
        storage._advantages.copy_(torch.from_numpy(advantages * self.weights))

    # --- checkpoints

    def state(self) -> tuple[int, dict[str, NDArray[Any]]]:
        """Number of rollouts stored so far, and all arrays that the next update needs; 0 and {} if `count` is 1."""
        if self.count == 1:
            return 0, {}
        tensors = {name: tensor.cpu().numpy() for name, tensor in self._tensors().items()}
        return self.stored, self._arrays() | tensors

    def load(self, model: Any, stored: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue with a result of `state`. Raises ConfigError: names or shapes do not fit the model."""
        if not stored:
            return
        self._begin(model, model.rollout_buffer.storage)
        self.stored = stored
        for name, array in self._arrays().items():
            load_into(array, arrays, name)
        for name, tensor in self._tensors().items():
            host = tensor.cpu().numpy()
            load_into(host, arrays, name)
            tensor.copy_(torch.from_numpy(host))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        storage: Any = self.storage
        if storage is None:
            return {}
        last = self.last_observations if isinstance(self.last_observations, dict) else {"": self.last_observations}
        return {
            "rewards": storage.rewards, "episode_starts": storage.episode_starts, "behaviour": self.behaviour,
            "left_out": self.absent, "dropped": self.dropped, "last_dones": self.last_dones, "rests": self.rests,
            **with_prefix("last", last),
        }  # fmt: skip

    def _tensors(self) -> dict[str, Tensor]:
        storage: Any = self.storage
        if storage is None:
            return {}
        seen = {f"observations/{key}": part for key, part in storage._observations.items()}
        return {**seen, "actions": storage._actions, **({} if storage._masks is None else {"masks": storage._masks})}


@torch.no_grad()
def rate(model: Any, storage: Any, here: slice, kept: BoolArray) -> tuple[Tensor, Tensor]:
    """Values and log-probabilities (K,) of the transitions by the present policy.

    Args:
        here: columns of the storage.
        kept: (T, columns) which of their transitions; K are True.
    """
    at = torch.as_tensor(kept).to(storage.device)
    seen = {key: part[:, here][at] for key, part in storage._observations.items()}
    actions = storage._actions[:, here][at]
    actions = actions[:, 0] if storage._discrete else actions
    masks = None if storage._masks is None else storage._masks[:, here][at]
    training, values, log_probs = model.policy.training, [], []
    model.policy.set_training_mode(False)  # the mode in which the rollouts were collected
    for rows in torch.split(torch.arange(len(actions), device=storage.device), CHUNK):
        given = {key: part[rows] for key, part in seen.items()}
        more = {} if masks is None else {"action_masks": masks[rows]}
        rated = model.policy.evaluate_actions(given if storage._keyed else given[""], actions[rows], **more)
        values.append(rated[0].reshape(-1))
        log_probs.append(rated[1])
    model.policy.set_training_mode(training)
    return torch.cat(values), torch.cat(log_probs)


FACTOR = 1.03  # of the learning rate, per update


def update_within(model: Any, rollout: RolloutStorage, target: float) -> Statistics:
    """All epochs over the rollout; fewer if the total variation is above `target`. Sets the model's next rate scale."""
    for group in model.policy.optimizer.param_groups:
        group["lr"] *= model.learning_rate_scale
    done = list[Statistics]()
    variation = 0.0
    while len(done) < model.n_epochs and variation <= target and not any(each.stopped for each in done):
        done.append(model.update(rollout, model.work()._replace(n_epochs=1)))
        variation = total_variation(model, rollout)
    if variation > target:
        model.learning_rate_scale /= FACTOR
    elif variation < target / 2:
        model.learning_rate_scale = min(1.0, model.learning_rate_scale * FACTOR)
    model.logger.record("train/total_variation", variation)
    model.logger.record("train/learning_rate", model.policy.optimizer.param_groups[0]["lr"])
    return _joined(done)


def total_variation(model: Any, rollout: RolloutStorage) -> float:
    """The total variation between the present policy and the one before the update, over the rollout's transitions."""
    kept = np.ones(rollout.rewards.shape, np.bool_) if rollout.left_out is None else ~rollout.left_out
    _, log_probs = rate(model, rollout, slice(None), kept)
    before = rollout.log_probs[kept]
    weights = 1.0 if model.reuse is None else model.reuse.weights[kept]
    with np.errstate(over="ignore"):
        return float(np.mean(weights * np.abs(np.expm1(log_probs.cpu().numpy() - before))) / 2)


def _joined(done: list[Statistics]) -> Statistics:
    """The statistics of several epochs as those of one update."""
    last = done[-1]
    terms = {name: np.concatenate([each.terms[name] for each in done]) for name in last.terms}
    return replace(
        last,
        terms={**terms, "approx_kl": last.terms["approx_kl"], "explained_variance": last.terms["explained_variance"]},
        norms=np.concatenate([each.norms for each in done]),
        steps=sum(each.steps for each in done),
        epochs=sum(each.epochs for each in done),
        blamed=next((each.blamed for each in done if each.blamed), ""),
    )
