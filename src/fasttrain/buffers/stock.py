"""The storages as instances of SB3's buffer classes, because callbacks and users' code expect these.

A `RolloutView` shows the memory of a `RolloutStorage` with the names, dtypes and samples of SB3's rollout buffers. A
`ReplayStorage` is itself a subclass of SB3's replay buffer, because users can set and derive replay buffer classes.
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
from stable_baselines3 import HerReplayBuffer
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

from fasttrain.batch import BoolArray, Observations, each_array
from fasttrain.buffers.hindsight import HindsightStorage, PrioritizedHindsightStorage
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.recurrent import RecurrentStorage
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.rollout import RolloutRow, RolloutStorage
from fasttrain.errors import ConfigError, EnvSpecError

# --- rollout buffers

_LIVE = (  # attributes of SB3's buffers that a view reads from the storage
    "pos", "full", "gamma", "gae_lambda", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns",
    "observations", "actions", "action_masks",
    "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf",
)  # fmt: skip


def _live(name: str) -> Any:
    """A property that reads and writes the storage's attribute `name`."""

    def read(self: RolloutView) -> Any:
        return getattr(self.storage, name)

    def write(self: RolloutView, value: Any) -> None:
        self.storage.assign(name, value)

    return property(read, write, doc=f"`{name}` of the storage.")


def _state(place: int) -> Any:
    def read(self: RolloutView) -> NDArray[Any]:
        states: Any = self.storage.states  # type: ignore[attr-defined]  # missing without an LSTM
        return states[place % len(states)]  # type: ignore[no-any-return]

    return property(read, doc="LSTM states before each step, (T, L, N, H).")


class RolloutView:
    """A `RolloutStorage` with the interface of SB3's rollout buffers; `as_stock` makes it an instance of SB3's class.

    Unlike in SB3 the arrays keep their shape (T, N, ...) after `get`. So `generator_ready` is always False, and `reset`
    clears nothing. Masks are copies. On a GPU `values`, `returns`, `advantages`, `log_probs`, `actions` and
    `observations` are also copies. To change a copied array in the storage, assign the whole array.
    """

    stock: ClassVar[type[RolloutBuffer]]  # SB3's class from which the view is derived

    def __init__(self, storage: RolloutStorage) -> None:
        self.storage = storage
        self.buffer_size, self.n_envs, self.device = storage.num_steps, storage.num_envs, storage.device
        self.observation_space, self.action_space = storage.observation_space, storage.action_space
        self.obs_shape, self.action_dim = get_obs_shape(self.observation_space), get_action_dim(self.action_space)
        self.generator_ready = False
        if storage.mask_width is not None:
            self.mask_dims = storage.mask_width
        if isinstance(storage, RecurrentStorage):
            self.hidden_state_shape = self.hidden_states_pi.shape

    def __reduce__(self) -> tuple[Any, ...]:
        return as_stock, (self.storage,)

    pos, full, gamma, gae_lambda = map(_live, ("pos", "full", "gamma", "gae_lambda"))
    rewards, episode_starts, values = map(_live, ("rewards", "episode_starts", "values"))
    log_probs, advantages, returns = map(_live, ("log_probs", "advantages", "returns"))
    hidden_states_pi, cell_states_pi, hidden_states_vf, cell_states_vf = map(_state, range(4))

    @property
    def actions(self) -> NDArray[Any]:
        """Actions (T, N, K) in the space's dtype, before any clipping."""
        return self.storage.actions.astype(self.action_space.dtype, copy=False)  # type: ignore[no-any-return]

    @actions.setter
    def actions(self, value: NDArray[Any]) -> None:
        self.storage.assign("actions", value)

    @property
    def observations(self) -> Observations:
        """Observations (T, N, ...) in the space's dtype."""
        space: Any = self.observation_space
        stored = self.storage.observations
        if isinstance(stored, dict):
            return {key: part.astype(space[key].dtype, copy=False) for key, part in stored.items()}
        return stored.astype(space.dtype, copy=False)

    @observations.setter
    def observations(self, value: Observations) -> None:
        self.storage.assign("observations", value)

    @property
    def action_masks(self) -> NDArray[Any]:
        """Masks (T, N, A) as float32; 1.0 where an action is legal."""
        if self.storage.masks is None:
            raise AttributeError("action_masks: the algorithm uses no masks")
        return self.storage.masks.astype(np.float32)

    @action_masks.setter
    def action_masks(self, value: NDArray[Any]) -> None:
        self.storage.assign("masks", np.asarray(value) != 0)

    def reset(self) -> None:
        self.storage.reset()

    def add(
        self,
        obs: Any,  # (N, ...) as arrays or tensors
        action: Any,  # (N,) or (N, K)
        reward: NDArray[Any],  # (N,)
        episode_start: NDArray[Any],  # (N,)
        value: Tensor,  # (N, 1) or (N,)
        log_prob: Tensor,  # (N,)
        action_masks: Any = None,  # (N, A); None: all actions are legal
        lstm_states: Any = None,  # states of a recurrent policy before the step
    ) -> None:
        """Store one vector step, with the arguments of SB3's rollout buffers."""
        seen = each_array(torch.as_tensor, obs)
        legal = None if action_masks is None else torch.as_tensor(np.asarray(action_masks) != 0)
        row = RolloutRow(seen, torch.as_tensor(action), value, log_prob, legal, lstm_states)
        self.storage.add(row, reward, episode_start)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: BoolArray) -> None:
        """Fill `advantages` and `returns` once all steps are stored; last_values (N, 1) or (N,), dones (N,)."""
        self.storage.compute_returns_and_advantages(last_values.detach().cpu().numpy(), dones)

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Samples of one epoch, from an instance of SB3's buffer that uses the same arrays."""
        buffer = object.__new__(self.stock)
        values = {name: getattr(self, name, self) for name in (*vars(self), *_LIVE)}  # `self` means: no such attribute
        vars(buffer).update({name: value for name, value in values.items() if value is not self})
        yield from buffer.get(batch_size)


STOCK_ROLLOUTS: tuple[type[RolloutBuffer], ...] = (
    RolloutBuffer, DictRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer, RecurrentRolloutBuffer,
    RecurrentDictRolloutBuffer,
)  # fmt: skip
_VIEWS: list[Any] = [
    type(f"{each.__name__}View", (RolloutView, each), {"stock": each, "__module__": __name__})
    for each in STOCK_ROLLOUTS
]


def as_stock(storage: RolloutStorage) -> Any:
    """A view of the storage, as an instance of the buffer class that SB3's algorithm would use."""
    kind = 2 if isinstance(storage, RecurrentStorage) else int(storage.mask_width is not None)
    return _VIEWS[2 * kind + isinstance(storage.observation_space, spaces.Dict)](storage)


# --- replay buffers

STOCK_REPLAYS = (None, ReplayBuffer, DictReplayBuffer, NStepReplayBuffer, HerReplayBuffer)


class NStepStorage(ReplayStorage, NStepReplayBuffer):  # type: ignore[misc]
    """Replaces SB3's `NStepReplayBuffer`. As in SB3's class, a batch has discounts even if n_steps is 1."""


class DictStorage(ReplayStorage, DictReplayBuffer):  # type: ignore[misc]
    """Replaces SB3's `DictReplayBuffer`."""


def replay_class(
    observation_space: spaces.Space[Any], n_steps: int, asked: type[ReplayBuffer] | None
) -> type[ReplayStorage]:
    """The storage class that replaces `asked`, or replaces SB3's default class if `asked` is None."""
    if isinstance(observation_space, spaces.Dict):
        return DictStorage
    return NStepStorage if asked is NStepReplayBuffer or (asked is None and n_steps > 1) else ReplayStorage


def replay_of(model: Any, mask_width: int | None) -> ReplayStorage:
    """A new storage that replaces the buffer which SB3 would create for the model's settings."""
    asked = model.replay_buffer_class
    kind = replay_class(model.observation_space, model.n_steps, asked)
    by_priority, hindsight, options = model.prioritized is not None, asked is HerReplayBuffer, {}
    if hindsight:
        kind, options["env"] = PrioritizedHindsightStorage if by_priority else HindsightStorage, model.env
    elif by_priority:
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
        **{**window, **options, **model.replay_buffer_kwargs, **(model.prioritized or {})},
    )


def storage_of(model: Any, mask_width: int | None) -> ReplayStorage | None:
    """The model's replay buffer; None if it is no `ReplayStorage`. An empty buffer without masks is replaced by a new
    buffer with `mask_width`.

    Raises:
        EnvSpecError: the env has masks, but the buffer does not store masks.
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
        f"the env has action masks, and {type(buffer).__name__} does not store them: remove replay_buffer_class, "
        "give it mask_width=…, or set use_masking=False"
    )


def refuse_foreign_buffer(buffer: Any, asked: Mapping[str, bool]) -> None:
    """Check that a buffer supports the settings that are True in `asked`. Only a `ReplayStorage` supports any.

    Raises:
        ConfigError: one of the settings would have no effect.
    """
    names = ", ".join(name for name, is_asked in asked.items() if is_asked)
    if (
        asked.get("prioritized")
        and isinstance(buffer, ReplayStorage)
        and not isinstance(buffer, PrioritizedReplayBuffer)
    ):
        raise ConfigError(
            f"prioritized with a {type(buffer).__name__}, which draws transitions in its own way: derive it from "
            "fasttrain.buffers.prioritized.PrioritizedReplayBuffer, or remove prioritized"
        )
    if names and not isinstance(buffer, ReplayStorage):
        raise ConfigError(
            f"{names} with replay_buffer_class={type(buffer).__name__}: SB3's own update reads such a buffer, and "
            "ignores options and methods of fasttrain; remove replay_buffer_class, or derive the class from "
            "fasttrain.buffers.replay_storage.ReplayStorage"
        )


def frames_in(env: VecEnv | None) -> int | None:
    """How many frames VecFrameStack has stacked along the first axis of the env's images; None without images.

    The result is 1 if frames were stacked along a different axis, or not by VecFrameStack.
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
    """Defaults of a buffer's `n_steps` and `gamma`: the algorithm's values if the user set no buffer class (`asked`).

    NStepReplayBuffer has its own defaults. For any other class SB3 ignores the algorithm's `n_steps`, and warns.
    """
    if asked is None:
        return {"n_steps": n_steps, "gamma": gamma}
    if asked is NStepReplayBuffer:
        defaults = inspect.signature(NStepReplayBuffer.__init__).parameters
        return {name: defaults[name].default for name in ("n_steps", "gamma")}
    return {"n_steps": 1, "gamma": gamma}
