"""The TD loss of one replay batch: what it is made of, with the networks as they stand or under autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.algos.losses import td_error_loss, td_target
from fasttrain.algos.precision import Precision, as_float32
from fasttrain.algos.q_networks import best_values, chosen_values, greedy
from fasttrain.buffers.replay_storage import ReplayBatch, TensorObservations


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
