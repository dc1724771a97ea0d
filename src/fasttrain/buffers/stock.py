"""The storages of a rollout and of replay as callbacks and users' own code know them: instances of SB3's buffers.

`RolloutStorage` and `ReplayStorage` do the work; here are only the names, dtypes and samples that stock has, over the
same memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape, is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecFrameStack, VecTransposeImage
from torch import Tensor

from fasttrain.batch import BoolArray, Observations
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.recurrent import RecurrentStorage
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.errors import ConfigError, EnvSpecError

STOCK_ROLLOUTS = (RolloutBuffer, DictRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer)
_SHARED = (
    "buffer_size", "observation_space", "action_space", "obs_shape", "action_dim", "pos", "full", "device", "n_envs",
    "gae_lambda", "gamma", "generator_ready", "observations", "actions", "rewards", "returns", "episode_starts",
    "values", "log_probs", "advantages",
)  # fmt: skip

_STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


def _assignable(name: str) -> Any:
    """A scalar array (T, N) of the storage; what is assigned is copied into it."""
    read: Any = getattr(RolloutStorage, name).fget

    def write(self: StockRollout, given: Any) -> None:
        _assign(getattr(self, f"_{name}"), given)

    return property(read, write, doc=getattr(RolloutStorage, name).__doc__)


def _assign(stored: Tensor, given: Any) -> None:
    stored.copy_(torch.as_tensor(np.asarray(given)).reshape(stored.shape))


class StockRollout(RolloutStorage):
    """A storage with the interface of SB3's rollout buffers.

    Unlike there, the arrays keep their shape (T, N, ...) after `get`, so that `generator_ready` stays False, and
    `reset` clears nothing. Off the CPU `values`, `returns`, `advantages`, `log_probs`, `actions` and `observations`
    are copies: assign them as a whole to change them.

    Args:
        as `RolloutStorage`.
    """

    stock: ClassVar[type[RolloutBuffer]]  # whose instance it is
    shared: ClassVar[tuple[str, ...]] = _SHARED  # what an instance of it has

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        **settings: Any,
    ) -> None:
        super().__init__(num_steps, num_envs, observation_space, action_space, **settings)
        self.buffer_size, self.n_envs = num_steps, num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape, self.action_dim = get_obs_shape(observation_space), get_action_dim(action_space)
        self.generator_ready = False
        if self.masks is not None:
            self.mask_dims = self.masks.shape[-1]

    values = _assignable("values")
    returns = _assignable("returns")
    advantages = _assignable("advantages")
    log_probs = _assignable("log_probs")

    @property
    def actions(self) -> NDArray[Any]:
        """Actions (T, N, K) in the space's dtype, before any clipping."""
        return super().actions.astype(self.action_space.dtype, copy=False)

    @actions.setter
    def actions(self, given: NDArray[Any]) -> None:
        _assign(self._actions, given)

    @property
    def observations(self) -> Observations:
        """Observations (T, N, ...) in the space's dtype."""
        space: Any = self.observation_space
        found = super().observations
        if isinstance(found, dict):
            return {key: part.astype(space[key].dtype, copy=False) for key, part in found.items()}
        return found.astype(space.dtype, copy=False)

    @observations.setter
    def observations(self, given: Observations) -> None:
        parts = given if isinstance(given, dict) else {"": given}
        for key, stored in self._observations.items():
            _assign(stored, parts[key])

    def add(
        self,
        obs: Any,  # (N, ...) as arrays or tensors
        action: Any,  # (N,) or (N, K)
        reward: NDArray[Any],  # (N,)
        episode_start: NDArray[Any],  # (N,)
        value: Tensor,  # (N, 1) or (N,)
        log_prob: Tensor,  # (N,)
        action_masks: Any = None,  # (N, A); None: everything is legal
        lstm_states: Any = None,  # before the step, of a policy that remembers
    ) -> None:
        """Store one vector step, as SB3's loops hand it over."""
        keyed = isinstance(obs, dict)
        seen = {key: torch.as_tensor(part) for key, part in obs.items()} if keyed else torch.as_tensor(obs)
        legal = None if action_masks is None else torch.as_tensor(np.asarray(action_masks) != 0)
        super().add(seen, torch.as_tensor(action), reward, episode_start, value, log_prob, legal, lstm_states)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: BoolArray) -> None:
        """Fill `advantages` and `returns` once all steps are stored; last_values (N, 1) or (N,), dones (N,)."""
        self.compute_returns_and_advantages(last_values.detach().cpu().numpy(), dones)

    def as_stock(self) -> RolloutBuffer:
        """SB3's own buffer over these arrays; it shares their memory."""
        buffer = object.__new__(self.stock)
        buffer.__dict__.update({name: getattr(self, name) for name in self.shared})
        return buffer

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Samples of one epoch: SB3's own, in SB3's order."""
        yield from self.as_stock().get(batch_size)


class _Maskable(StockRollout):
    """With the masks as stock has them."""

    shared = (*_SHARED, "action_masks", "mask_dims")

    @property
    def action_masks(self) -> NDArray[Any]:
        """Masks (T, N, A) as float32, a copy; 1.0 where an action is legal."""
        masks: Any = self.masks
        return masks.astype(np.float32)  # type: ignore[no-any-return]

    @action_masks.setter
    def action_masks(self, given: NDArray[Any]) -> None:
        stored: Any = self._action_masks
        _assign(stored, np.asarray(given) != 0)


# The storage stands before stock's class, of which nothing but `size`, `extend` and helpers is left.
class PlainRollout(StockRollout, RolloutBuffer):  # type: ignore[misc]
    """Of PPO."""

    stock = RolloutBuffer


class DictRollout(StockRollout, DictRolloutBuffer):  # type: ignore[misc]
    """Of PPO with Dict observations."""

    stock = DictRolloutBuffer


class MaskableRollout(_Maskable, MaskableRolloutBuffer):  # type: ignore[misc]
    """Of MaskablePPO."""

    stock = MaskableRolloutBuffer


class MaskableDictRollout(_Maskable, MaskableDictRolloutBuffer):  # type: ignore[misc]
    """Of MaskablePPO with Dict observations."""

    stock = MaskableDictRolloutBuffer


def _stored_state(place: int) -> Any:
    def read(self: _Recurrent) -> NDArray[Any]:
        stored: NDArray[Any] = self._states[place % len(self._states)].transpose(1, 2).cpu().numpy()
        return stored

    return property(read)


class _Recurrent(StockRollout, RecurrentStorage):
    """With the states as stock has them: (T, L, N, H) each."""

    shared = (*_SHARED, "hidden_state_shape", *_STATES)

    def __init__(
        self, num_steps: int, num_envs: int, *spaces: Any, state_shape: tuple[int, int], **further: Any
    ) -> None:
        super().__init__(num_steps, num_envs, *spaces, state_shape=state_shape, **further)
        layers, units = state_shape
        self.hidden_state_shape = (num_steps, layers, num_envs, units)

    hidden_states_pi, cell_states_pi = _stored_state(0), _stored_state(1)
    hidden_states_vf, cell_states_vf = _stored_state(2), _stored_state(3)


class RecurrentRollout(_Recurrent, RecurrentRolloutBuffer):  # type: ignore[misc]
    """Of RecurrentPPO, and with masks of MaskableRecurrentPPO."""

    stock = RecurrentRolloutBuffer


class RecurrentDictRollout(_Recurrent, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """The same with Dict observations."""

    stock = RecurrentDictRolloutBuffer


def rollout_class(observation_space: spaces.Space[Any], masked: bool, recurrent: bool = False) -> type[StockRollout]:
    """That which stock's algorithm would take."""
    keyed = isinstance(observation_space, spaces.Dict)
    if recurrent:
        return RecurrentDictRollout if keyed else RecurrentRollout
    if keyed:
        return MaskableDictRollout if masked else DictRollout
    return MaskableRollout if masked else PlainRollout


STOCK_REPLAYS = (None, ReplayBuffer, DictReplayBuffer, NStepReplayBuffer)


class NStepStorage(ReplayStorage, NStepReplayBuffer):  # type: ignore[misc]
    """In place of `NStepReplayBuffer`: as there every batch has discounts, those of one step too."""


class DictStorage(ReplayStorage, DictReplayBuffer):  # type: ignore[misc]
    """In place of `DictReplayBuffer`."""


def replay_class(
    observation_space: spaces.Space[Any], n_steps: int, asked: type[ReplayBuffer] | None
) -> type[ReplayStorage]:
    """That of ours which stands for the class that was asked for, or that stock takes by itself (None)."""
    if isinstance(observation_space, spaces.Dict):
        return DictStorage
    return NStepStorage if asked is NStepReplayBuffer or (asked is None and n_steps > 1) else ReplayStorage


def replay_of(model: Any, mask_width: int | None) -> ReplayStorage:
    """A new storage in place of the buffer that stock DQN would make of the model's settings."""
    asked = model.replay_buffer_class
    kind = replay_class(model.observation_space, model.n_steps, asked)
    if model.prioritized is not None:
        kind = PrioritizedReplayBuffer
    window = window_of(model.n_steps, model.gamma, asked)
    return kind(
        model.buffer_size,
        model.observation_space,
        model.action_space,
        device=model.device,
        n_envs=model.n_envs,
        optimize_memory_usage=model.optimize_memory_usage,
        mask_width=mask_width,
        frame_stack=None if model.optimize_memory_usage or asked not in STOCK_REPLAYS else frames_in(model.env),
        **{**window, **model.replay_buffer_kwargs, **(model.prioritized or {})},
    )


def storage_of(model: Any, mask_width: int | None) -> ReplayStorage | None:
    """The model's replay buffer, made anew while it is empty if the env turns out to have masks; None: none of ours.

    Raises:
        EnvSpecError: the env has masks and the buffer has no room for them.
    """
    buffer = model.replay_buffer
    ours = isinstance(buffer, ReplayStorage)
    if mask_width is None:
        return buffer if ours else None
    if ours and buffer.mask_width is None and buffer.size() == 0 and model.replay_buffer_class in STOCK_REPLAYS:
        model.replay_buffer = buffer = replay_of(model, mask_width)
    if ours and buffer.mask_width is not None:
        return buffer  # type: ignore[no-any-return]
    raise EnvSpecError(
        f"the env has action masks, and {type(buffer).__name__} does not store them: leave replay_buffer_class out, "
        "give it mask_width=…, or take use_masking=False"
    )


def refuse_foreign_buffer(buffer: Any, asked: Mapping[str, bool]) -> None:
    """Raise where a buffer that is none of ours would pass by what was asked for: SB3's own loops serve it.

    Raises:
        ConfigError: something that SB3's update cannot do was asked for.
    """
    names = ", ".join(name for name, given in asked.items() if given)
    if names and not isinstance(buffer, ReplayStorage):
        raise ConfigError(
            f"{names} with replay_buffer_class={type(buffer).__name__}: SB3's own update, which serves such a buffer, "
            "cannot do that; leave replay_buffer_class out, or derive it from fasttrain's ReplayStorage"
        )


def frames_in(env: VecEnv | None) -> int | None:
    """How many frames an image that `env` shows has, one behind the other; None where it shows no images.

    Only frames of VecFrameStack along the first axis count as such; an image otherwise stacked is one frame.
    """
    if env is None or not is_image_space(env.observation_space):
        return None
    stacks, first = 1, False
    while isinstance(env, VecEnvWrapper):
        first |= isinstance(env, VecTransposeImage)
        if isinstance(env, VecFrameStack):
            stacked: Any = env.stacked_obs
            stacks, first = stacked.n_stack, first or stacked.channels_first
        env = env.venv
    return stacks if first else 1


def window_of(n_steps: int, gamma: float, asked: type[ReplayBuffer] | None) -> dict[str, Any]:
    """`n_steps` and `gamma` of the buffer where its own arguments do not name them.

    The algorithm's, unless a buffer class was asked for: stock then leaves `n_steps` to that (and warns of it).
    """
    if asked is None:
        return {"n_steps": n_steps, "gamma": gamma}
    if asked is NStepReplayBuffer:
        defaults = inspect.signature(NStepReplayBuffer.__init__).parameters
        return {name: defaults[name].default for name in ("n_steps", "gamma")}
    return {"n_steps": 1, "gamma": gamma}
