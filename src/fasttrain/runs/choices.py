"""What a model would choose first, second and third, and how it rates them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from torch import Tensor

from fasttrain.engines.heads import action_dims
from fasttrain.runs.acting import reads_masks


class Choice(NamedTuple):
    """An action and its rating."""

    action: Any  # int for one sub-action, else (K,) int64
    rating: float  # a probability, or a Q-value (of several sub-actions their mean)
    kind: str  # "probability" or "Q-value"

    @property
    def text(self) -> str:
        """The rating for people."""
        if self.kind == "Q-value":
            return f"{self.rating:+.3f}"
        percent = 100 * self.rating
        return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1g} %" if percent >= 0.01 else "under 0.01 %"


def best_choices(
    model: BaseAlgorithm, observations: Any, action_masks: NDArray[np.bool_] | None, count: int = 3
) -> list[Choice]:
    """The `count` best rated legal actions for the first row of `observations`, best first.

    Sub-actions are rated apart, as these policies do: a probability is the product of theirs. Empty for actions that
    are no choices (Box) and for policies that remember.
    """
    policy: Any = model.policy
    policy.set_training_mode(False)
    with torch.no_grad():
        tensors = policy.obs_to_tensor(observations)[0]
        if hasattr(policy, "q_net"):
            kind, scores = "Q-value", _split(policy.q_net(tensors), action_dims(model.action_space))
        elif hasattr(policy, "quantile_net"):
            kind, scores = "Q-value", [policy.quantile_net(tensors).mean(dim=1)]
        else:
            kind, scores = "probability", _log_probabilities(policy, tensors, action_masks)
    if not scores:
        return []
    if action_masks is not None:
        legal = _split(torch.from_numpy(action_masks), [part.shape[1] for part in scores])
        scores = [part.masked_fill(~mask, -torch.inf) for part, mask in zip(scores, legal, strict=True)]
    best = _best_combinations([part[0].tolist() for part in scores], count)
    choices = []
    for places, total in best:
        rating = total / len(scores) if kind == "Q-value" else float(np.exp(total))
        choices.append(Choice(places[0] if len(places) == 1 else np.array(places), rating, kind))
    return choices


def _split(tensor: Tensor, dims: Sequence[int]) -> list[Tensor]:
    return list(torch.split(tensor, list(dims), dim=1))


def _log_probabilities(policy: Any, tensors: Any, action_masks: NDArray[np.bool_] | None) -> list[Tensor]:
    """(1, A) of every sub-action; none where the policy draws no choices or remembers."""
    if hasattr(policy, "lstm_actor") or not hasattr(policy, "get_distribution"):
        return []
    extra = {"action_masks": action_masks} if reads_masks(policy) else {}
    distribution = policy.get_distribution(tensors, **extra)
    inner = getattr(distribution, "distributions", None) or distribution.distribution
    parts = inner if isinstance(inner, list) else [inner]
    if not all(isinstance(part, torch.distributions.Categorical) for part in parts):
        return []
    return [part.logits for part in parts]


def _best_combinations(scores: Sequence[Sequence[float]], count: int) -> list[tuple[tuple[int, ...], float]]:
    """The `count` tuples of one place per list with the highest sums; places of -inf are out."""
    best: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for part in scores:
        order = sorted((place for place, score in enumerate(part) if score > -np.inf), key=lambda it: -part[it])[:count]
        longer = [((*places, place), total + part[place]) for (places, total), place in product(best, order)]
        best = sorted(longer, key=lambda it: -it[1])[:count]
    return best
