"""Frozen copies of a policy that only act: opponents in self-play, in batches, by the kernels where these serve."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.algos import fused_policy, fused_q_policy
from fasttrain.algos.dqn import DQN
from fasttrain.algos.fused_policy import FusedPolicy
from fasttrain.algos.fused_q_policy import FusedQ
from fasttrain.algos.heads import action_dims, head_of
from fasttrain.algos.q_networks import greedy
from fasttrain.batch import BoolArray, draw_choices

Weights = dict[str, Tensor]


class Player(Protocol):
    """Acts with weights that change only by `load`."""

    def act(self, observations: Any, action_masks: BoolArray | None) -> NDArray[Any]:
        """Actions (M,) or (M, K) for observations (M, ...) and masks (M, A) bool, None for all legal."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Act with these from now on; copied."""


def weights_of(model: Any) -> Weights:
    """A copy of the weights that the model acts with: of DQN those of the online network."""
    acting = model.policy.q_net if isinstance(model, DQN) else model.policy
    return {name: value.detach().clone() for name, value in acting.state_dict().items()}


def player_for(model: Any) -> Player:
    """A player with the model's present weights."""
    policy = copy.deepcopy(model.policy)
    policy.set_training_mode(False)
    fused = model._fast.fused
    return QPlayer(model, policy, fused) if isinstance(model, DQN) else ActorPlayer(model, policy, fused)


class ActorPlayer:
    """Draws from the policy's distribution, from torch's global stream."""

    def __init__(self, model: Any, policy: Any, fused: bool) -> None:
        self.policy = policy
        serves = fused and not fused_policy.why_not_fused(policy, model.observation_space)
        self._kernels = FusedPolicy(policy) if serves else None
        self._head = self._kernels or head_of(policy, model.action_space)
        self._pack()

    def act(self, observations: Any, action_masks: BoolArray | None) -> NDArray[Any]:
        masks = None if action_masks is None else torch.from_numpy(action_masks).to(self.policy.device)
        with torch.no_grad():
            drawn = self._head.act(obs_as_tensor(observations, self.policy.device), masks)[0]
        actions: NDArray[Any] = drawn.cpu().numpy()
        return actions

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.load_state_dict(weights)
        self._pack()

    def _pack(self) -> None:
        if self._kernels is not None:
            self._kernels.begin_rollout(None)


class QPlayer:
    """The best action, and one in twenty at random: an opponent that never errs teaches little."""

    exploration = 0.05

    def __init__(self, model: Any, policy: Any, fused: bool) -> None:
        self.policy, self.dims = policy, action_dims(model.action_space)
        self._shape = model.action_space.shape or ()
        serves = fused and not fused_q_policy.why_not_fused(policy, model.observation_space, model.action_space)
        self._kernels = FusedQ(policy) if serves else None

    def act(self, observations: Any, action_masks: BoolArray | None) -> NDArray[Any]:
        best = self._best(observations, action_masks)
        drawn = draw_choices(np.random, self.dims, len(best), action_masks)
        errs = np.random.random(len(best)) < self.exploration
        best[errs] = drawn[errs].reshape(-1, *self._shape)
        return best

    def _best(self, observations: Any, action_masks: BoolArray | None) -> NDArray[Any]:
        if self._kernels is not None:
            return np.array(self._kernels.act(observations, action_masks)).reshape(-1, *self._shape)
        masks = None if action_masks is None else torch.from_numpy(action_masks).to(self.policy.device)
        with torch.no_grad():
            values = self.policy.q_net(obs_as_tensor(observations, self.policy.device))
        actions: NDArray[Any] = greedy(values, masks, self.dims).cpu().numpy()
        return actions.reshape(-1, *self._shape)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.policy.q_net.load_state_dict(weights)  # in place: the kernels' views stay
