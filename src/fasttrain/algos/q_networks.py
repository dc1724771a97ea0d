"""Q-networks and policies of DQN with one head per sub-action or with dueling heads, and the choice of actions.

A policy's Q-values are (B, A), A the sum of the sub-actions' sizes `dims`; a Discrete action is one sub-action. All
policies here take Discrete and MultiDiscrete actions alike.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.dqn.policies import CnnPolicy, DQNPolicy, MultiInputPolicy, QNetwork
from torch import Tensor, nn

from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import BoolArray, draw_choices


def _parts(tensor: Tensor, dims: Sequence[int]) -> tuple[Tensor, ...]:
    """Columns of each sub-action."""
    return tensor.split(list(dims), 1)  # type: ignore[no-untyped-call, no-any-return]


def greedy(q_values: Tensor, action_masks: Tensor | None, dims: Sequence[int]) -> Tensor:
    """The legal choice of the highest value, of every sub-action.

    Args:
        q_values: (B, A), A the sum of `dims`.
        action_masks: (B, A) bool, True = legal; None: all are.
        dims: sizes of the K sub-actions.

    Returns:
        (B,) for one sub-action, else (B, K), int64. The first of equals; 0 where a sub-action has no legal choice.
    """
    chosen = [part.argmax(1) for part in _parts(_legal(q_values, action_masks), dims)]
    return chosen[0] if len(chosen) == 1 else torch.stack(chosen, 1)


def random_actions(
    space: spaces.Space[Any], dims: Sequence[int], count: int, masks: BoolArray | None
) -> NDArray[Any]:  # (count,) or (count, K)
    """Uniform over the (legal) actions of each row, in one draw of the space's stream: of a Discrete space without
    masks the numbers of as many calls of its `sample`."""
    rng, size = space.np_random, (count, len(dims))
    drawn = rng.integers(0, dims, size=size) if masks is None else draw_choices(rng, dims, count, masks)
    return drawn[:, 0] if isinstance(space, spaces.Discrete) else drawn


def best_values(q_values: Tensor, action_masks: Tensor | None, dims: Sequence[int]) -> Tensor:
    """Values (B, K) of the choices of `greedy`; 0 where a sub-action has no legal choice: nothing comes after it."""
    best = torch.stack([part.amax(1) for part in _parts(_legal(q_values, action_masks), dims)], 1)
    if action_masks is None:
        return best
    stuck = torch.stack([~part.any(1) for part in _parts(action_masks, dims)], 1)
    return best.masked_fill(stuck, 0.0)


def chosen_values(q_values: Tensor, actions: Tensor, dims: Sequence[int]) -> Tensor:
    """Values (B, K) of the choices `actions` (B, K), or (B,) for one sub-action."""
    offsets = torch.tensor([0, *dims[:-1]], device=actions.device).cumsum(0)
    return q_values.gather(1, actions.long().reshape(-1, len(dims)) + offsets)


def _legal(q_values: Tensor, action_masks: Tensor | None) -> Tensor:
    return q_values if action_masks is None else q_values.masked_fill(~action_masks, -torch.inf)


def join(advantages: Tensor, values: Tensor, dims: Sequence[int]) -> Tensor:
    """Q-values (B, A) of advantages (B, A) and values (B, 1): v + a - mean(a) over all choices of the sub-action.

    Wang et al. 2016, eq. 9; over sub-actions, which share the value, Tavakoli et al. 2018, eq. 1.
    """
    return values + torch.cat([part - part.mean(1, keepdim=True) for part in _parts(advantages, dims)], 1)


class BranchingQNetwork(QNetwork):
    """A shared trunk with one linear head per sub-action (Tavakoli et al. 2018), outputs side by side (B, A).

    K linear heads on one trunk are one linear layer: `q_net` is SB3's own, for Discrete actions to the letter.
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], **kwargs: Any) -> None:
        dims = action_dims(action_space)
        super().__init__(observation_space, spaces.Discrete(sum(dims)), **kwargs)
        self.action_space = action_space  # type: ignore[assignment]
        self.dims = dims

    def _predict(self, observation: Any, deterministic: bool = True) -> Tensor:
        return greedy(self(observation), None, self.dims)


class DuelingQNetwork(BranchingQNetwork):
    """q = v + a - mean(a): trunk → `advantage_net` Linear(last, A) and `value_net` Linear(last, 1); see `join`.

    The paper gives each stream hidden layers of its own; here they share the trunk, so that `net_arch` means what it
    means for SB3's net and only last + 1 parameters are added.
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], **kwargs: Any) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        *trunk, head = self.q_net.children()
        self.q_net = nn.Sequential(*trunk)
        self.advantage_net = head
        self.value_net = nn.Linear(self.net_arch[-1] if self.net_arch else self.features_dim, 1)

    def forward(self, obs: Any) -> Tensor:
        hidden = self.q_net(self.extract_features(obs, self.features_extractor))
        return join(self.advantage_net(hidden), self.value_net(hidden), self.dims)


class OwnQPolicy(DQNPolicy):
    """SB3's policy with another Q-network, which is `network`."""

    network: type[QNetwork] = QNetwork

    def make_q_net(self) -> QNetwork:
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        return self.network(**arguments).to(self.device)


class BranchingDQNPolicy(OwnQPolicy):
    """One head per sub-action."""

    network = BranchingQNetwork


class BranchingCnnPolicy(OwnQPolicy, CnnPolicy):
    """One head per sub-action, of images."""

    network = BranchingQNetwork


class BranchingMultiInputPolicy(OwnQPolicy, MultiInputPolicy):
    """One head per sub-action, of Dict observations."""

    network = BranchingQNetwork


class DuelingDQNPolicy(OwnQPolicy):
    """Advantages and a value, which sub-actions share."""

    network = DuelingQNetwork


class DuelingCnnPolicy(OwnQPolicy, CnnPolicy):
    """Advantages and a value, of images."""

    network = DuelingQNetwork


class DuelingMultiInputPolicy(OwnQPolicy, MultiInputPolicy):
    """Advantages and a value, of Dict observations."""

    network = DuelingQNetwork


# By the names that SB3's DQN gives its own.
DUELING_POLICIES: dict[str, type[OwnQPolicy]] = {
    "MlpPolicy": DuelingDQNPolicy,
    "CnnPolicy": DuelingCnnPolicy,
    "MultiInputPolicy": DuelingMultiInputPolicy,
}
# By SB3's own, which they replace where there are several sub-actions.
BRANCHING: dict[Any, type[OwnQPolicy]] = {
    DQNPolicy: BranchingDQNPolicy,
    CnnPolicy: BranchingCnnPolicy,
    MultiInputPolicy: BranchingMultiInputPolicy,
}


sys.modules.setdefault("fasttrain.engines.q_networks", sys.modules[__name__])  # where older zips look
