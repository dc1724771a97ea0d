"""DQN's update on PyTorch: the TD loss of one replay batch, and what makes its eager path faster.

The loss takes the networks as they stand or under autocast; beside it stand torch.compile, CUDA graphs and page-locked
copies.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage, TensorObservations
from fasttrain.engines.compiling import Compiler, GraphedUpdate, graphed_by_size, num_rows, parameter_addresses
from fasttrain.engines.devices import Precision, as_float32
from fasttrain.engines.heads import action_dims
from fasttrain.engines.losses import td_error_loss, td_target
from fasttrain.engines.q_networks import best_values, chosen_values, greedy
from fasttrain.engines.torch import Acceleration, BaseAccelerator, repeated


class QRule(NamedTuple):
    """What stays the same from batch to batch; compiled code has it fixed."""

    dims: tuple[int, ...]  # sizes of the K sub-actions
    gamma: float
    double: bool  # the online network chooses the next action (van Hasselt et al. 2016)
    loss: str  # huber or mse
    rated: bool  # whether the TD errors are wanted, for prioritized replay


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


class QAccelerator(BaseAccelerator):
    """Of a DQN policy. As made with plain settings it computes what stock computes, by the same operations."""

    def __init__(self, policy: Any, settings: Acceleration, compiler: Compiler | None = None) -> None:
        super().__init__(policy, settings, compiler)
        self.networks = QNetworks(policy, self.precision)
        self._loss: Any = None  # compiled
        self._values: Any = None  # compiled
        self._acting: Any = None  # the same, or graphs of it
        self._rule: QRule | None = None  # of the compiled loss
        self._acting_addresses: tuple[int, ...] = ()  # of the parameters that graphs of acting read

    def values(self, observations: TensorObservations) -> Tensor:  # (N, A)
        """The Q-values to act on, without gradients."""
        with torch.no_grad():
            if self._acting is None or num_rows(observations) != self._sizes[1]:
                return self.networks.values(observations)
            moved = self.graphs and self._acting_addresses != parameter_addresses(self.policy)
            values: Tensor = (self._values if moved else self._acting)(observations)
            return values

    def loss(self, batch: ReplayBatch, rule: QRule) -> QTerms:
        """`td_loss`, compiled where that was asked for and came about for such a batch."""
        if self._loss is None or rule != self._rule or num_rows(batch.observations) != self._sizes[0]:
            return td_loss(self.networks, batch, rule)
        terms: QTerms = self._loss(tensors_of(batch))
        return terms

    def needs_warm_up(self, batch_size: int, num_envs: int) -> bool:
        """Whether something is left to compile, for these numbers of rows."""
        return self.must_compile_for((batch_size, num_envs))

    def warm_up(self, model: Any, batch_size: int, num_envs: int) -> None:
        """Compile everything for the model's shapes, now; if that fails, everything goes the eager way."""
        rule, networks = rule_of(model), self.networks
        batch = tensors_of(example_batch(model, batch_size))
        with self.compiling((batch_size, num_envs)):

            def loss_of_batch(batch: ReplayBatch) -> QTerms:
                return td_loss(networks, batch, rule)

            self._rule = rule
            self._loss, self._values = self.compiler(loss_of_batch), self.compiler(networks.values)
            self.policy.set_training_mode(False)
            observations = repeated(batch.observations, num_envs)
            with torch.no_grad():
                self._values(observations)
            self._acting = self._values
            if self.graphs:
                self._acting = graphed_by_size(self._values, [observations])
                self._acting_addresses = parameter_addresses(self.policy)
            self.policy.set_training_mode(True)
            torch.autograd.backward(self._loss(batch).loss)
        if self.failure:
            self._loss = self._values = self._acting = None

    def graph_of_update(self, step: Any, model: Any, batch_size: int) -> GraphedUpdate | None:
        """The graph of the whole update; see `captured_update`. `step.whole` returns the loss, then the errors."""

        def example() -> ReplayBatch:
            return tensors_of(example_batch(model, batch_size))

        return self.captured_update(step.whole, step.key, "", example)


def rule_of(model: Any) -> QRule:
    """What the model's loss is made by."""
    rated = isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    return QRule(tuple(action_dims(model.action_space)), model.gamma, model.double_q, model.loss, rated)


def tensors_of(batch: ReplayBatch) -> ReplayBatch:
    """The batch without what is only for the host: where it was drawn, and when."""
    return batch._replace(indices=None, generation=None)


def example_batch(model: Any, batch_size: int) -> ReplayBatch:
    """A batch of the shapes, types and place that training will see, whatever lies in the storage; nothing is drawn."""
    storage: ReplayStorage = model.replay_buffer
    first = np.zeros(batch_size, np.int64)
    batch = storage.gather(first, first, model._vec_normalize_env)
    if isinstance(storage, PrioritizedReplayBuffer):
        batch = batch._replace(weights=torch.ones((batch_size, 1), device=storage.device))
    return batch
