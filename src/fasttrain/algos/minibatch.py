"""One minibatch: the loss and its statistics, and its division into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.algos import losses
from fasttrain.algos.heads import Head
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations


class Coefficients(NamedTuple):
    """What the loss is made with. Numbers; in compiled code scalars (), so that a schedule compiles nothing anew."""

    clip_range: Any
    clip_range_vf: Any  # None: values are not clipped
    ent_coef: Any
    vf_coef: Any


class Terms(NamedTuple):
    """The loss () with its graph, and its parts without."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy_loss: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor

    def weighted(self, weight: float) -> Tensor:  # (6,)
        """Share of a whole minibatch, without the graph."""
        return torch.stack([self.loss.detach(), *self[1:]]) * weight


LossOf = Callable[[RolloutBatch, Coefficients], Terms]  # `advantages` of the batch are normalised already


def loss_terms(head: Head, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
    """PPO's loss in SB3's order of operations; `batch.advantages` are used as they are."""
    values, log_probs, entropy = head.evaluate(
        batch.observations, batch.actions, batch.action_masks, entropy_gradient=entropy_gradient
    )
    log_ratio = log_probs - batch.old_log_probs
    ratio = torch.exp(log_ratio)
    policy_loss = losses.policy_loss(batch.advantages, ratio, coefficients.clip_range)
    value_loss = losses.value_loss(values, batch.returns, batch.old_values, coefficients.clip_range_vf)
    entropy_loss = losses.entropy_loss(entropy, log_probs)
    return Terms(
        loss=policy_loss + coefficients.ent_coef * entropy_loss + coefficients.vf_coef * value_loss,
        policy_loss=policy_loss.detach(),
        value_loss=value_loss.detach(),
        entropy_loss=entropy_loss.detach(),
        clip_fraction=losses.clip_fraction(ratio, coefficients.clip_range),
        approx_kl=losses.approx_kl(ratio, log_ratio),
    )


def normalized(batch: RolloutBatch, normalize: bool) -> RolloutBatch:
    """The batch with the advantages that the loss uses: normalised over the whole minibatch."""
    return batch._replace(advantages=losses.normalize(batch.advantages)) if normalize else batch


def micro_sizes(size: int, parts: int) -> list[int]:
    """Rows of each of at most `parts` micro-batches, as even as can be."""
    parts = min(parts, size)
    return [size // parts + (index < size % parts) for index in range(parts)]


def micro_batches(batch: RolloutBatch, parts: int) -> Iterator[tuple[RolloutBatch, float]]:
    """The batch in consecutive parts, each with its share of the rows: a mean over all is the weighted sum of means."""
    total, start = len(batch.returns), 0
    for size in micro_sizes(total, parts):
        rows = slice(start, start + size)
        yield RolloutBatch(*(rows_of(part, rows) for part in batch)), size / total
        start += size


def rows_of(part: TensorObservations | None, rows: slice) -> Any:
    """Some rows of one part of a batch: a tensor, a dict of tensors or None."""
    if isinstance(part, dict):
        return {key: tensor[rows] for key, tensor in part.items()}
    return None if part is None else part[rows]
