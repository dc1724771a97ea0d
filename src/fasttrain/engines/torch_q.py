"""TorchQEngine: a Q-network acts and learns on PyTorch; the TD loss of one replay batch.

As made with plain settings it computes what stock DQN computes, by the same operations. Settings add mixed precision,
torch.compile and page-locked copies.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fasttrain.batch import BoolArray, Float64Array
from fasttrain.buffers.prefetch import Replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, TensorObservations
from fasttrain.engines.causes import why_no_action
from fasttrain.engines.compiling import Compiler, num_rows
from fasttrain.engines.devices import Precision, as_float32
from fasttrain.engines.engine import Acted, Engine, EngineSettings, QRule, QWork, Statistics
from fasttrain.engines.heads import action_dims
from fasttrain.engines.q_networks import best_values, chosen_values, greedy
from fasttrain.engines.torch import TorchStep, Transfer
from fasttrain.engines.tuned import TorchBase, repeated
from fasttrain.errors import EnvError


class QTerms(NamedTuple):
    """The loss () with its graph, and the mean |TD error| over sub-actions (B,) without, where it is wanted."""

    loss: Tensor
    errors: Tensor | None


class QNetworks:
    """Online and target network of a DQN policy; values (B, A) leave as float32 whatever the networks compute in."""

    def __init__(self, policy: Any, precision: Precision | None = None) -> None:
        self.policy, self.precision = policy, precision

    def values(self, observations: TensorObservations) -> Tensor:
        """Of the network that learns."""
        return self._call(self.policy.q_net, observations)

    def target_values(self, observations: TensorObservations) -> Tensor:
        """Of the network that follows it."""
        return self._call(self.policy.q_net_target, observations)

    def _call(self, network: Any, observations: TensorObservations) -> Tensor:
        with nullcontext() if self.precision is None else self.precision.autocast():
            values = network(observations)
        return as_float32(values)  # type: ignore[no-any-return]


def td_target(
    rewards: Tensor,  # (B, 1) of one step, or of n summed and discounted
    dones: Tensor,  # (B, 1) 1 where the episode terminated
    discounts: Tensor | float,  # gamma to the power of the steps, (B, 1) or one for all
    next_values: Tensor,  # (B, 1)
) -> Tensor:  # (B, 1)
    """What a value should be by the Bellman equation."""
    return rewards + (1 - dones) * discounts * next_values


def td_error_loss(current: Tensor, target: Tensor, kind: str, weights: Tensor | None = None) -> Tensor:
    """Mean over B rows and K sub-actions of the Huber loss (delta 1, SB3's) or the squared error.

    current (B, K), target (B, 1), weights (B, 1): how much a row counts, to make up for how often it is drawn.
    """
    target = target.expand_as(current)
    if weights is None:
        return functional.smooth_l1_loss(current, target) if kind == "huber" else functional.mse_loss(current, target)
    loss = functional.smooth_l1_loss if kind == "huber" else functional.mse_loss
    return (weights * loss(current, target, reduction="none")).mean()


@torch.no_grad()
def targets(networks: QNetworks, batch: ReplayBatch, rule: QRule) -> Tensor:  # (B, 1)
    """What the values of the actions taken should be: r + discount × V(next), V by the target network.

    The next action is the target network's best, or with `double` the online network's. Of several sub-actions V is
    the mean of their maxima (Tavakoli et al. 2018).
    """
    masks = batch.next_action_masks
    values = networks.target_values(batch.next_observations)
    if rule.double:
        chosen = greedy(networks.values(batch.next_observations), masks, rule.dims)
        best = chosen_values(values, chosen, rule.dims)
    else:
        best = best_values(values, masks, rule.dims)
    discounts = rule.gamma if batch.discounts is None else batch.discounts
    return td_target(batch.rewards, batch.dones, discounts, best.mean(dim=1, keepdim=True))


def td_loss(networks: QNetworks, batch: ReplayBatch, rule: QRule) -> QTerms:
    """SB3's loss of one batch (dqn.py, 2.9.2), in its order of operations."""
    target = targets(networks, batch, rule)
    current = chosen_values(networks.values(batch.observations), batch.actions, rule.dims)
    loss = td_error_loss(current, target, rule.loss, batch.weights)
    return QTerms(loss, (current.detach() - target).abs().mean(dim=1) if rule.rated else None)


class TorchQEngine(TorchBase):
    """Of a DQN policy."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before, compiler)
        self.transfer = Transfer(self.device, settings.pin_memory)
        self.networks = QNetworks(policy, self.precision)
        self._dims = action_dims(policy.action_space)
        self._shape = policy.action_space.shape or ()
        self._loss: Any = None  # compiled
        self._values: Any = None  # compiled
        self._rule: QRule | None = None  # of the compiled loss

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Any = None) -> Acted:
        values = self.q_values(self.transfer.observations(observations))
        legal = None if action_masks is None else self.transfer.masks(action_masks)
        best = greedy(values, legal, self._dims)
        chosen = self.transfer.actions(best if self.guard is None else marked(best, values))
        if self.guard is not None and chosen.flat[0] < 0:
            raise EnvError(why_no_action(self.policy, observations, "a Q-value") or "a Q-value is not finite")
        return Acted(chosen.reshape(-1, *self._shape), memory=memory)  # one sub-action has a column of its own

    def q_values(self, observations: TensorObservations) -> Tensor:  # (N, A)
        """Of all actions, without gradients."""
        with torch.no_grad():
            if self._values is None or num_rows(observations) != self._sizes[1]:
                return self.networks.values(observations)
            values: Tensor = self._values(observations)
            return values

    def loss(self, batch: ReplayBatch, rule: QRule) -> QTerms:
        """`td_loss`, compiled where that was asked for and came about for such a batch."""
        if self._loss is None or rule != self._rule or num_rows(batch.observations) != self._sizes[0]:
            return td_loss(self.networks, batch, rule)
        terms: QTerms = self._loss(tensors_of(batch))
        return terms

    def prepare(self, data: Replay, work: QWork, acting_sizes: list[int]) -> str:
        sizes = (work.batch_size, *acting_sizes)
        if not self.must_compile_for(sizes):
            return ""
        rule, networks = work.rule, self.networks
        batch = example_batch(data, work.batch_size)
        with self.compiling(sizes):

            def loss_of_batch(batch: ReplayBatch) -> QTerms:
                return td_loss(networks, batch, rule)

            self._rule = rule
            self._loss, self._values = self.compiler(loss_of_batch), self.compiler(networks.values)
            self.policy.set_training_mode(False)
            observations = repeated(batch.observations, acting_sizes[0])
            with torch.no_grad():
                self._values(observations)
            self.policy.set_training_mode(True)
            torch.autograd.backward(self._loss(batch).loss)
        if self.failure:
            self._loss = self._values = None
        return self.failure

    def learn(self, step: TorchStep, batch: ReplayBatch, rule: QRule) -> QTerms:
        """Gradient and optimizer step of one batch."""
        self.clock.enter("train_fwd")
        terms = self.loss(batch, rule)
        step.loss = terms.loss
        self.clock.enter("train_bwd")
        self.policy.optimizer.zero_grad()
        step.backward(terms.loss)
        self.clock.enter("optim")
        step.watch(step.apply())
        return terms

    def update(self, data: Replay, work: QWork) -> Statistics:
        """One batch after the other, each with the priorities that the one before it has set."""
        self.clock.enter("other")
        step, losses = TorchStep(self, work.max_grad_norm), list[Tensor]()
        with step.stepping():
            batches = data.batches(work.gradient_steps, work.batch_size)
            for _ in range(work.gradient_steps):
                self.clock.enter("replay_sample")
                batch = next(batches)
                terms = self.learn(step, batch, work.rule)
                losses.append(terms.loss.detach())
                if terms.errors is not None and batch.indices is not None:
                    self.clock.enter("replay_sample")
                    data.rate(batch.indices, terms.errors.cpu().numpy(), batch.generation, self.guard is not None)
        self.clock.enter("log")
        norms, found_losses = _read(step.norms), _read(losses)
        skipped = int(np.count_nonzero(~np.isfinite(norms)))
        return self.counted(
            Statistics(
                {"loss": found_losses}, norms, work.gradient_steps - skipped, work.gradient_steps,
                blamed=step.blamed, expected_skips=self.scaler is not None,
            )
        )  # fmt: skip


def _read(scalars: list[Tensor]) -> Float64Array:
    numbers: NDArray[Any] = torch.stack(scalars).cpu().numpy() if scalars else np.zeros(0)
    return numbers.astype(np.float64)


def tensors_of(batch: ReplayBatch) -> ReplayBatch:
    """The batch without what is only for the host: where it was drawn, and when."""
    return batch._replace(indices=None, generation=None)


def example_batch(data: Replay, batch_size: int) -> ReplayBatch:
    """A batch of the shapes, types and place that training will see, whatever lies in the storage; nothing is drawn."""
    storage, first = data.storage, np.zeros(batch_size, np.int64)
    batch = storage.gather(first, first, data.normalizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        batch = batch._replace(weights=torch.ones((batch_size, 1), device=storage.device))
    return tensors_of(batch)


def marked(chosen: Tensor, values: Tensor) -> Tensor:
    """`chosen`, or -1 everywhere where one of the values (N, A) is not finite, which nothing else would show.

    On the CPU the host looks (2.5 µs); elsewhere nothing waits for the device, the mark travels with the actions.
    """
    if values.device.type == "cpu":
        return chosen if math.isfinite(values.sum().item()) else torch.full_like(chosen, -1)
    return torch.where(torch.isfinite(values.sum()), chosen, -1)
