"""Q-networks and policies of DQN with one head per sub-action or with dueling heads, and their engine on PyTorch.

Q-values are (B, A), where A is the sum of the sub-actions' sizes `dims`. A Discrete action is one sub-action. All
policies here take Discrete and MultiDiscrete actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.dqn.policies import CnnPolicy, DQNPolicy, MultiInputPolicy, QNetwork
from torch import Tensor, nn

from fasttrain.algos.causes import why_no_action
from fasttrain.algos.devices import EngineSettings, Precision, as_float32
from fasttrain.algos.engine import Engine, PolicyStep, to_device
from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import BoolArray, draw_choices
from fasttrain.buffers.rollout import TensorObservations
from fasttrain.errors import EnvError


def _parts(tensor: Tensor, dims: Sequence[int]) -> tuple[Tensor, ...]:
    """For each sub-action its columns (B, choices)."""
    return tensor.split(list(dims), 1)  # type: ignore[no-untyped-call, no-any-return]


def greedy(q_values: Tensor, action_masks: Tensor | None, dims: Sequence[int]) -> Tensor:
    """The legal choice with the highest value in each sub-action.

    Args:
        q_values: (B, A), where A is the sum of `dims`.
        action_masks: (B, A) bool, True = legal; None: all choices are legal.
        dims: sizes of the K sub-actions.

    Returns:
        (B,) for one sub-action, else (B, K), int64. Of equal values the first is chosen; 0 if no choice is legal.
    """
    chosen = [part.argmax(1) for part in _parts(_legal(q_values, action_masks), dims)]
    return chosen[0] if len(chosen) == 1 else torch.stack(chosen, 1)


def random_actions(
    space: spaces.Space[Any], dims: Sequence[int], count: int, masks: BoolArray | None
) -> NDArray[Any]:  # (count,) or (count, K)
    """Random legal actions, uniform in each row, in one draw from the space's generator. For a Discrete space
    without masks they equal the results of `count` calls of `space.sample`."""
    rng, size = space.np_random, (count, len(dims))
    drawn = rng.integers(0, dims, size=size) if masks is None else draw_choices(rng, dims, count, masks)
    return drawn[:, 0] if isinstance(space, spaces.Discrete) else drawn


def best_values(q_values: Tensor, action_masks: Tensor | None, dims: Sequence[int]) -> Tensor:
    """Values (B, K) of the choices that `greedy` makes; 0 for a sub-action without a legal choice."""
    best = torch.stack([part.amax(1) for part in _parts(_legal(q_values, action_masks), dims)], 1)
    if action_masks is None:
        return best
    no_choice = torch.stack([~part.any(1) for part in _parts(action_masks, dims)], 1)
    return best.masked_fill(no_choice, 0.0)


def chosen_values(q_values: Tensor, actions: Tensor, dims: Sequence[int]) -> Tensor:
    """Values (B, K) of the choices in `actions`, which are (B, K), or (B,) for one sub-action."""
    offsets = torch.tensor([0, *dims[:-1]], device=actions.device).cumsum(0)
    return q_values.gather(1, actions.long().reshape(-1, len(dims)) + offsets)


def _legal(q_values: Tensor, action_masks: Tensor | None) -> Tensor:
    return q_values if action_masks is None else q_values.masked_fill(~action_masks, -torch.inf)


def join(advantages: Tensor, values: Tensor, dims: Sequence[int]) -> Tensor:
    """Q-values (B, A) from advantages a (B, A) and values v (B, 1): v + a - mean(a), per sub-action.

    Wang et al. 2016, eq. 9; several sub-actions share the value (Tavakoli et al. 2018, eq. 1).
    """
    return values + torch.cat([part - part.mean(1, keepdim=True) for part in _parts(advantages, dims)], 1)


class BranchingQNetwork(QNetwork):
    """A shared trunk with one linear head per sub-action (Tavakoli et al. 2018). Outputs are side by side (B, A).

    K linear heads on one trunk are one linear layer, so that `q_net` is SB3's own.
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

    In the paper value and advantages have separate hidden layers. Here they share the trunk, so that `net_arch`
    means the same as for SB3's network.
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
    """SB3's policy with a Q-network of the class `network`."""

    network: type[QNetwork] = QNetwork

    def make_q_net(self) -> QNetwork:
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        return self.network(**arguments).to(self.device)


class BranchingDQNPolicy(OwnQPolicy):
    network = BranchingQNetwork


class BranchingCnnPolicy(OwnQPolicy, CnnPolicy):
    network = BranchingQNetwork


class BranchingMultiInputPolicy(OwnQPolicy, MultiInputPolicy):
    network = BranchingQNetwork


class DuelingDQNPolicy(OwnQPolicy):
    network = DuelingQNetwork


class DuelingCnnPolicy(OwnQPolicy, CnnPolicy):
    network = DuelingQNetwork


class DuelingMultiInputPolicy(OwnQPolicy, MultiInputPolicy):
    network = DuelingQNetwork


# SB3's name of a policy → the policy with dueling heads.
DUELING_POLICIES: dict[str, type[OwnQPolicy]] = {
    "MlpPolicy": DuelingDQNPolicy,
    "CnnPolicy": DuelingCnnPolicy,
    "MultiInputPolicy": DuelingMultiInputPolicy,
}
# SB3's policy → the policy that replaces it if there are several sub-actions.
BRANCHING: dict[Any, type[OwnQPolicy]] = {
    DQNPolicy: BranchingDQNPolicy,
    CnnPolicy: BranchingCnnPolicy,
    MultiInputPolicy: BranchingMultiInputPolicy,
}


class TorchQEngine(Engine):
    """A DQN policy on PyTorch."""

    kind: ClassVar[str] = "torch"

    def __init__(self, policy: Any, settings: EngineSettings, previous: Engine | None = None) -> None:
        super().__init__(policy, settings, previous)
        self._dims, self._shape = action_dims(policy.action_space), policy.action_space.shape or ()

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        seen, legal = to_device(observations, action_masks, self.device, self.pinned)
        values = self.q_values(seen)
        best = greedy(values, legal, self._dims)
        actions: NDArray[Any] = (best if self.guard is None else mark_not_finite(best, values)).cpu().numpy()
        if self.guard is not None and actions.flat[0] < 0:
            raise EnvError(why_no_action(self.policy, observations, "a Q-value") or "a Q-value is not finite")
        return PolicyStep(actions.reshape(-1, *self._shape))

    @torch.no_grad()
    def q_values(self, observations: TensorObservations) -> Tensor:  # (N, A)
        """Q-values of all actions, without gradients."""
        compiled = None if self.compiled is None else self.compiled.values_of(observations)
        return network_values(self.policy.q_net, observations, self.precision) if compiled is None else compiled


def network_values(network: Any, observations: TensorObservations, precision: Precision | None) -> Tensor:  # (B, A)
    """A network's Q-values in float32, also if the network computes in a lower `precision`."""
    if precision is None:
        return network(observations)  # type: ignore[no-any-return]
    with precision.autocast():
        return as_float32(network(observations))  # type: ignore[no-any-return]


def mark_not_finite(chosen: Tensor, values: Tensor) -> Tensor:
    """`chosen`, or -1 everywhere if one of the values (N, A) is not finite. argmax would hide this.

    On the CPU the host checks the values (2.5 µs). On other devices -1 comes with the actions: the host need not wait.
    """
    if values.device.type == "cpu":
        return chosen if math.isfinite(values.sum().item()) else torch.full_like(chosen, -1)
    return torch.where(torch.isfinite(values.sum()), chosen, -1)
