"""Q-networks and policies for DQN with action masks: SB3's plain one, dueling heads, one head per sub-action.

A policy's Q-values are (B, A), A the sum of the sub-actions' sizes `dims`; a Discrete action is one sub-action.
`DuelingDQNPolicy` and `BranchingDQNPolicy` take Discrete and MultiDiscrete actions alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.dqn.policies import CnnPolicy, DQNPolicy, MultiInputPolicy, QNetwork
from torch import Tensor, nn

from fasttrain.batch import opened
from fasttrain.engines.heads import action_dims


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


class MaskedQPolicy(DQNPolicy):
    """What the policies here share: `predict` takes masks, and `network` says which net they build.

    Their state is that of SB3's policy with that net; the plain ones load in stock DQN.
    """

    network: type[QNetwork] = QNetwork

    def make_q_net(self) -> QNetwork:
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        return self.network(**arguments).to(self.device)

    def _predict(self, obs: Any, deterministic: bool = True, action_masks: Tensor | None = None) -> Tensor:
        """Actions (B,) or (B, K); DQN's own randomness is in the algorithm, so `deterministic` changes nothing."""
        return greedy(self.q_net(obs), action_masks, action_dims(self.action_space))

    def predict(
        self,
        observation: NDArray[Any] | dict[str, NDArray[Any]],
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
        action_masks: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """As SB3's `BasePolicy.predict`, of legal actions alone.

        Args:
            action_masks: (N, A) bool, or (A,) for a single observation; True = legal. None: all are.
        """
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        self.set_training_mode(False)
        seen, is_batch = self.obs_to_tensor(observation)
        dims = action_dims(self.action_space)
        masks = opened(np.asarray(action_masks, np.bool_).reshape(-1, sum(dims)), dims)
        with torch.no_grad():
            chosen = self._predict(seen, deterministic, torch.as_tensor(masks, device=self.device)).cpu().numpy()
        actions = chosen.reshape(-1, *(self.action_space.shape or ()))
        return (actions if is_batch else actions.squeeze(0)), state


class MaskedDQNPolicy(MaskedQPolicy):
    """SB3's DQNPolicy, masks understood."""


class MaskedCnnPolicy(MaskedQPolicy, CnnPolicy):
    """SB3's CnnPolicy, masks understood."""


class MaskedMultiInputPolicy(MaskedQPolicy, MultiInputPolicy):
    """SB3's MultiInputPolicy, masks understood."""


class BranchingDQNPolicy(MaskedQPolicy):
    """One head per sub-action."""

    network = BranchingQNetwork


class BranchingCnnPolicy(MaskedQPolicy, CnnPolicy):
    """One head per sub-action, of images."""

    network = BranchingQNetwork


class BranchingMultiInputPolicy(MaskedQPolicy, MultiInputPolicy):
    """One head per sub-action, of Dict observations."""

    network = BranchingQNetwork


class DuelingDQNPolicy(MaskedQPolicy):
    """Advantages and a value, which sub-actions share."""

    network = DuelingQNetwork


class DuelingCnnPolicy(MaskedQPolicy, CnnPolicy):
    """Advantages and a value, of images."""

    network = DuelingQNetwork


class DuelingMultiInputPolicy(MaskedQPolicy, MultiInputPolicy):
    """Advantages and a value, of Dict observations."""

    network = DuelingQNetwork


# By the names that SB3's DQN gives its own.
DUELING_POLICIES: dict[str, type[MaskedQPolicy]] = {
    "MlpPolicy": DuelingDQNPolicy,
    "CnnPolicy": DuelingCnnPolicy,
    "MultiInputPolicy": DuelingMultiInputPolicy,
}
BRANCHING_POLICIES: dict[Any, type[MaskedQPolicy]] = {
    "MlpPolicy": BranchingDQNPolicy,
    "CnnPolicy": BranchingCnnPolicy,
    "MultiInputPolicy": BranchingMultiInputPolicy,
}
