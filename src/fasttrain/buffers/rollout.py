"""RolloutStorage: the (T, N) transitions of one PPO rollout, preallocated on the model's device.

It replaces SB3's rollout buffers, with the same numbers bit for bit. Advantages come from the same float32 operations
in the same order. Minibatches have the same rows in the same order. tests/buffers/test_rollout.py checks this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from torch import Tensor

from fasttrain.batch import BoolArray, Float32Array, Int64Array, Observations, each_array

TensorObservations = Tensor | dict[str, Tensor]

_TORCH_DTYPES = {np.dtype(np.uint16): torch.int32, np.dtype(np.uint32): torch.int64, np.dtype(np.uint64): torch.int64}


class RolloutRow(NamedTuple):
    """Inputs and outputs of a policy in one vector step, for n of the N envs. Tensors are on the networks' device."""

    observations: TensorObservations  # (n, ...) before the actions
    actions: Tensor  # (n,) or (n, K), before any clipping
    values: Tensor  # (n, 1) or (n,)
    log_probs: Tensor  # (n,)
    action_masks: Tensor | None = None  # (n, A) bool; None: all actions are legal
    lstm_states: RNNStates | None = None  # states before the step; None for a policy without an LSTM


class RolloutBatch(NamedTuple):
    """One minibatch. Every tensor is on the storage's device."""

    observations: TensorObservations  # (B, ...)
    actions: Tensor  # (B,) for Discrete, else (B, K)
    old_values: Tensor  # (B,)
    old_log_probs: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)
    action_masks: Tensor | None  # (B, A) bool
    sequences: Any = None  # `Padded` or `Grouped`: which rows form a sequence; None: no recurrent policy


def advantages_of(
    rewards: Float32Array,  # (T, N)
    values: Float32Array,  # (T, N)
    episode_starts: Float32Array,  # (T, N) 1.0 where an episode begins with this step
    last_values: Float32Array,  # (N,) values of the observations after the last step
    last_dones: BoolArray,  # (N,)
    gamma: float | Float32Array,  # one number, or (T, N)
    gae_lambda: float,
    left_out: BoolArray | None = None,  # (T, N) in and out: True where a step is no transition of this policy
    rests: BoolArray | None = None,  # (N,) True where the policy does not act in the env's next step
    cut: BoolArray | None = None,  # (T, N) True where an episode ends with an action of a different policy
    traces: Float32Array | None = None,  # (T, N) factor on what a step's advantage adds to earlier advantages; None: 1
) -> Float32Array:  # (T, N)
    """Generalised advantage estimation (Schulman et al. 2016), in float32 by SB3's operations in SB3's order.

    Only the sum over time is a loop; the other terms are computed for all steps at once (64 × 256 envs: 0.1 ms).

    A step that is left out adds its reward and its end to the env's previous transition. Two kinds of transitions
    become left out too: an env's last transition if `rests` is True, because its reward and end are not known yet; and
    an episode's last transition if `cut` is True at the end of the episode.
    """
    one = np.float32(1.0)
    next_values = np.concatenate([values[1:], last_values[None]])
    non_terminal = one - np.concatenate([episode_starts[1:], np.asarray(last_dones, np.float32)[None]])
    if left_out is not None:
        rewards, unknown = rewards.copy(), np.zeros_like(left_out) if cut is None else cut.copy()
        unknown[-1] |= rests is not None and rests & ~np.asarray(last_dones, np.bool_)
        chained = (left_out[1:] & left_out[:-1]).any()  # if not, one operation does for all steps
        pairs = [(step, step - 1) for step in range(len(rewards) - 1, 0, -1)]
        for step, before in pairs if chained else [(slice(1, None), slice(-1))]:
            over, within = left_out[step], left_out[step] & (episode_starts[step] == 0)
            np.add(rewards[before], rewards[step], out=rewards[before], where=within)
            np.copyto(unknown[before], unknown[step], where=within)
            np.copyto(next_values[before], next_values[step], where=over)
            np.multiply(non_terminal[before], non_terminal[step], out=non_terminal[before], where=over)
    advantages: Float32Array = rewards + np.float32(gamma) * next_values * non_terminal - values
    decay = np.float32(gamma * gae_lambda) * non_terminal  # as in SB3: the float64 product is rounded once
    if left_out is not None:
        decay[unknown], decay[left_out] = 0.0, 1.0
        left_out |= unknown
        advantages[left_out] = 0.0
    if traces is not None:
        decay[:-1] *= traces[1:]
    carried = np.zeros_like(last_values)
    for decayed, advantage in zip(decay[::-1], advantages[::-1], strict=True):
        advantage += decayed * carried
        carried = advantage
    return advantages


def _torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype for values of `dtype`. Wide unsigned integers, with which torch cannot compute, become signed."""
    numpy_dtype = np.dtype(dtype)
    return _TORCH_DTYPES.get(numpy_dtype) or torch.from_numpy(np.empty(0, numpy_dtype)).dtype


def _shape(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Shape of one stored observation, as in SB3's buffers: (1,) for a Discrete space."""
    shape = get_obs_shape(space)
    if isinstance(shape, dict):
        raise TypeError("a Dict space inside a Dict space cannot be stored: flatten it")
    return shape


def _host(tensor: Tensor) -> NDArray[Any]:
    """The tensor as a numpy array: a view if the tensor is on the CPU, else a copy."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def _stored(name: str, doc: str) -> Any:
    """A property that returns the storage's tensor `_<name>` as a numpy array."""
    return property(lambda storage: _host(getattr(storage, f"_{name}")), doc=doc)


class StepViews(NamedTuple):
    """Where one step of N envs is stored on the CPU: as tensors, and the same memory as arrays to write into."""

    row: RolloutRow
    observations: Observations
    masks: BoolArray | None  # (N, A)
    actions: NDArray[Any]  # (N, K)
    values: Float32Array  # (N,)
    log_probs: Float32Array  # (N,)

    @property
    def seen(self) -> tuple[TensorObservations, Tensor | None]:
        """What a policy sees: observations and masks, as tensors."""
        return self.row.observations, self.row.action_masks


class RolloutStorage:
    """T steps of N envs.

    Args:
        num_steps: T.
        num_envs: N.
        observation_space: sets shape and dtype; a Dict space is stored as one tensor per key.
        action_space: integers are stored as int64, the index type of torch; Box actions as float32.
        device: device of the tensors. On the CPU the numpy arrays (`values`, `returns`, …) are views of them.
        gamma: discount factor.
        gae_lambda: GAE's trade-off between bias and variance.
        mask_width: A, or None for an algorithm without masks.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        device: torch.device,
        gamma: float,
        gae_lambda: float,
        mask_width: int | None = None,
    ) -> None:
        self.num_steps, self.num_envs, self.device = num_steps, num_envs, device
        self.observation_space, self.action_space, self.mask_width = observation_space, action_space, mask_width
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.settings = num_steps, num_envs, gamma, gae_lambda
        self.pos, self.full = 0, False
        self._views: list[StepViews | None] = []  # see `step_views`
        self._arrays: list[NDArray[Any] | None] = []  # the parts of a row on the CPU: so `add` takes 2/3 of the time
        self.left_out: BoolArray | None = None  # (T, N) True: no minibatch contains this row; None: all rows are used
        self._discrete = isinstance(action_space, spaces.Discrete)
        rows = (num_steps, num_envs)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Observations that are no Dict have the key "".
        self._keyed = isinstance(observation_space, spaces.Dict)
        parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
        self._observations = {
            key: zeros(*rows, *_shape(space), dtype=_torch_dtype(space.dtype)) for key, space in parts.items()
        }
        self._as_given = device.type == "cpu" and all(
            space.shape == _shape(space) and np.dtype(space.dtype) not in _TORCH_DTYPES for space in parts.values()
        )
        action_dtype = torch.float32 if isinstance(action_space, spaces.Box) else torch.int64
        self._actions = zeros(*rows, get_action_dim(action_space), dtype=action_dtype)
        self._masks = None if mask_width is None else zeros(*rows, mask_width, dtype=torch.bool)
        self._values, self._log_probs = zeros(*rows), zeros(*rows)
        self._advantages, self._returns = zeros(*rows), zeros(*rows)
        self.rewards: Float32Array = np.zeros(rows, np.float32)  # in host memory, for `advantages_of`
        self.episode_starts: Float32Array = np.zeros(rows, np.float32)
        # For each index in SB3's env-major order: the index in the stored (T, N) order.
        self._env_major = np.arange(num_steps * num_envs).reshape(rows).T.reshape(-1)

    values = _stored("values", "Values (T, N) of the visited states.")
    returns = _stored("returns", "TD(lambda) returns (T, N).")
    advantages = _stored("advantages", "Advantages (T, N), not normalised.")
    log_probs = _stored("log_probs", "Log-probabilities (T, N) of the actions when they were taken.")
    actions = _stored("actions", "Actions (T, N, K), before any clipping.")

    def row(self, name: Literal["actions", "values", "log_probs"], step: int) -> NDArray[Any]:
        """One step of the property `name`, (N, ...). Only this row is copied from the device."""
        return _host(getattr(self, f"_{name}")[step])

    def assign(self, name: str, given: Any) -> None:
        """Set the attribute `name` to an array (T, N, ...) or a number. A stored tensor is overwritten in place."""
        parts = {"": getattr(self, f"_{name}", None)} if name != "observations" else self._observations
        for key, stored in parts.items():
            if stored is None:
                setattr(self, name, given)
            else:
                part = np.asarray(given[key] if isinstance(given, dict) else given)
                stored.copy_(torch.as_tensor(part).reshape(stored.shape))

    @property
    def masks(self) -> BoolArray | None:
        """Masks (T, N, A)."""
        return None if self._masks is None else _host(self._masks)

    @property
    def observations(self) -> Observations:
        """Observations (T, N, ...) for which the actions were chosen."""
        stored = {key: _host(tensor) for key, tensor in self._observations.items()}
        return stored if self._keyed else stored[""]

    def scalars(self) -> tuple[NDArray[Any], ...]:
        """Actions (T × N, K), then values, log-probabilities, advantages and returns (T × N,), in stored order."""
        rows = (self._values, self._log_probs, self._advantages, self._returns)
        return _host(self._actions.flatten(0, 1)), *(_host(stored.flatten()) for stored in rows)

    def finite(self, last: Observations) -> bool:
        """Whether all rewards, all observations and `last` (N, ...), the observations after the last step, are finite.

        Called once per rollout, because a check at every step of 12 CartPoles took 2.3 % of PPO's time.
        """
        checked: list[Any] = [self.rewards, *(last.values() if isinstance(last, dict) else (last,))]
        for stored in self._observations.values():
            if stored.is_floating_point() and stored.device.type != "cpu":
                checked.append(torch.isfinite(stored).all().item())  # only one number is copied from the device
            elif stored.is_floating_point():  # for a small array numpy takes a third of torch's time
                checked.append(stored.numpy())
        return all(bool(np.isfinite(part).all()) for part in checked)

    def reset(self) -> None:
        """Start again at the first step. Arrays are not cleared, because every row will be overwritten."""
        self.pos, self.full = 0, False
        self.left_out = None

    def step_views(self, use_masking: bool) -> list[StepViews | None]:
        """T + 1 entries: the views of each step, then None. Envs and engines can write into them.

        All are None if the storage is on a GPU, if it stores observations with another shape or dtype than the
        observation space has, or if it stores masks and `use_masking` is False.
        """
        if not self._as_given or use_masking != (self._masks is not None):
            return [None] * (self.num_steps + 1)
        self._views = self._views or [*map(self._view, range(self.num_steps)), None]
        return self._views

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_views": [], "_arrays": []}  # of a copy they would not be where the copy is stored

    def _view(self, step: int) -> StepViews:
        parts = {key: stored[step] for key, stored in self._observations.items()}
        seen = parts if self._keyed else parts[""]
        masks = None if self._masks is None else self._masks[step]
        actions, values, log_probs = self._actions[step], self._values[step], self._log_probs[step]
        row = RolloutRow(seen, actions[:, 0] if self._discrete else actions, values[:, None], log_probs, masks)
        return StepViews(row, *(each_array(Tensor.numpy, each) for each in (seen, masks, actions, values, log_probs)))

    def add(self, row: RolloutRow, rewards: Float32Array, episode_starts: BoolArray) -> None:
        """Store the next vector step of all envs. `rewards` (N,); `episode_starts` (N,)."""
        if self.full:
            raise RuntimeError(f"the rollout storage holds {self.num_steps} steps already: call reset() first")
        views = self._views[self.pos] if self._views else None
        if views is None or row is not views.row:
            written = set() if views is None else {id(each) for _, each in RolloutStorage._parts(self, views.row)}
            self._arrays = self._arrays or [each.numpy() if each.is_cpu else None for each, _ in self._parts(row)]
            for array, (stored, values) in zip(self._arrays, self._parts(row), strict=True):
                if array is None:
                    stored[self.pos].copy_(values.reshape(stored.shape[1:]))
                elif id(values) not in written:
                    array[self.pos] = values.numpy(force=True).reshape(array.shape[1:])
        self.rewards[self.pos], self.episode_starts[self.pos] = rewards, episode_starts
        self.pos += 1
        self.full = self.pos == self.num_steps

    def put(self, steps: Int64Array, envs: Int64Array, row: RolloutRow) -> None:
        """Store `row` of n envs; env envs[i] at step steps[i]. The caller sets `rewards` and `episode_starts`."""
        for stored, values in self._parts(row):
            _scatter(stored, steps, envs, values)

    def rows_at(self, steps: Int64Array, envs: Int64Array) -> RolloutRow:
        """The stored values of n envs, without LSTM states; env envs[i] at step steps[i]."""
        at = torch.as_tensor(steps), torch.as_tensor(envs)
        seen: Any = {key: stored[at] for key, stored in self._observations.items()}
        masks = None if self._masks is None else self._masks[at]
        return RolloutRow(
            seen if self._keyed else seen[""], self._actions[at], self._values[at], self._log_probs[at], masks
        )

    def _parts(self, row: RolloutRow) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a stored tensor (T, N, ...) and the values (n, ...) to write into it."""
        for key, stored in self._observations.items():
            yield stored, row.observations[key] if isinstance(row.observations, dict) else row.observations
        yield from ((self._actions, row.actions), (self._values, row.values), (self._log_probs, row.log_probs))
        if self._masks is not None:
            masks, width = row.action_masks, self._masks.shape[2]
            yield self._masks, self._masks.new_ones(len(row.log_probs), width) if masks is None else masks

    def leave_out(self, step: int | slice, envs: BoolArray | list[int]) -> None:
        """Exclude rows from all minibatches. `envs`: a mask (N,) or indices; for a slice of steps a mask (steps, N)."""
        if self.left_out is None:
            self.left_out = np.zeros((self.num_steps, self.num_envs), np.bool_)
        self.left_out[step][envs] = True

    @property
    def rows(self) -> Int64Array:
        """Indices (step × N + env) of all transitions, in SB3's env-major order."""
        every: Int64Array = self._env_major
        return every if self.left_out is None else every[~self.left_out.reshape(-1)[every]]

    def complete(self) -> None:
        """Mark the storage as full, after `put` has stored every step of every env."""
        self.pos, self.full = self.num_steps, True

    def compute_returns_and_advantages(
        self, last_values: Float32Array, last_dones: BoolArray, rests: BoolArray | None = None
    ) -> None:
        """Fill `advantages` and `returns` of a full storage; see `advantages_of`. last_values: (N, 1) or (N,)."""
        if not self.full:
            raise RuntimeError(f"only {self.pos} of {self.num_steps} steps are stored")
        last, values = last_values.reshape(-1), self.values
        with np.errstate(over="ignore", invalid="ignore"):  # the setting `nan_guard` handles values that are not finite
            given = self.rewards, values, self.episode_starts, last, last_dones, self.gamma, self.gae_lambda
            advantages = advantages_of(*given, self.left_out, rests)
            returns = advantages + values
        self._advantages.copy_(torch.from_numpy(advantages))
        self._returns.copy_(torch.from_numpy(returns))

    def draw_order(self) -> Int64Array:
        """The `rows`, shuffled as in SB3 by one permutation from numpy's global stream."""
        if not self.full:
            raise RuntimeError(f"only {self.pos} of {self.num_steps} steps are stored")
        order: Int64Array = self.rows[np.random.permutation(len(self.rows))]
        return order

    def minibatches(self, batch_size: int | None = None, layout: str = "") -> Iterator[RolloutBatch]:
        """One epoch over all `rows`, in the order that SB3 draws from numpy's global random state.

        Values, advantages and so on are gathered once per epoch. Observations and masks are gathered per minibatch:
        2,048 of 16,384 rows of 250 floats take 53 µs. Gathered once per epoch they would take 134 µs per minibatch,
        because 16 MB do not fit into the cache. Only `RecurrentStorage` uses `layout`.
        """
        total = self.num_steps * self.num_envs
        size = total if batch_size is None else batch_size
        order = torch.from_numpy(self.draw_order()).to(self.device)
        scalars = (self._values, self._log_probs, self._advantages, self._returns)
        parts = [torch.split(tensor.view(total).index_select(0, order), size) for tensor in scalars]
        actions = self._actions.view(total, -1)
        actions = actions.view(total) if self._discrete else actions
        masks = None if self._masks is None else self._masks.view(total, -1)
        for rows, values, log_probs, advantages, returns in zip(torch.split(order, size), *parts, strict=True):
            yield RolloutBatch(
                observations=self._gather_observations(rows),
                actions=actions.index_select(0, rows),
                old_values=values,
                old_log_probs=log_probs,
                advantages=advantages,
                returns=returns,
                action_masks=None if masks is None else masks.index_select(0, rows),
            )

    def _gather_observations(self, rows: Tensor) -> TensorObservations:
        gathered = {key: stored.flatten(0, 1).index_select(0, rows) for key, stored in self._observations.items()}
        return gathered if self._keyed else gathered[""]


def _scatter(stored: Tensor, steps: Int64Array, envs: Int64Array, values: Tensor) -> None:
    """stored[steps[i], envs[i]] = values[i]."""
    shape = (len(steps), *stored.shape[2:])
    if stored.device.type != "cpu":
        stored[torch.as_tensor(steps), torch.as_tensor(envs)] = values.reshape(shape)
    else:
        stored.numpy()[steps, envs] = values.detach().numpy().reshape(shape)
