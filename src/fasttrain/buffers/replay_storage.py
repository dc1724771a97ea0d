"""ReplayStorage: the ring of transitions of an off-policy algorithm, in place of SB3's replay buffers.

This one class replaces SB3's ReplayBuffer, DictReplayBuffer and NStepReplayBuffer (2.9.2), with the same arrays, the
same draws from numpy's global stream and the same numbers bit for bit (tests/buffers/test_replay_storage.py). It adds
action masks of the next observations, and n steps together with Dict observations or `optimize_memory_usage`. It
refuses a size that does not fit into memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import BaseBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from fasttrain.batch import BoolArray, Float32Array, Int64Array, Observations
from fasttrain.buffers.frames import Frames, Place
from fasttrain.buffers.n_step import MAX_N_STEPS, NONE, Envs, FlatViews, bytes_of_ring, leave_out, powers_of, windows_of
from fasttrain.buffers.rollout import TensorObservations
from fasttrain.errors import ConfigError

Layout = dict[tuple[str, str], tuple[tuple[int, ...], Any]]  # (array, Dict key or "") → shape and dtype per transition

PACK_ABOVE = 32  # wider masks are stored as bits (1/8 of the memory); unpacking 256 rows of 200 takes 5 µs


class ReplayBatch(NamedTuple):
    """One minibatch on the buffer's device. The first six fields are as in SB3's ReplayBufferSamples."""

    observations: TensorObservations  # (B, ...)
    actions: Tensor  # (B, K)
    next_observations: TensorObservations  # (B, ...) after the last step of the n-step window
    dones: Tensor  # (B, 1) float32, 1 where the episode terminated (not truncated)
    rewards: Tensor  # (B, 1) float32, discounted sum of the window's rewards
    discounts: Tensor | None = None  # (B, 1) float32, gamma ** window length; None: one step, as in SB3's ReplayBuffer
    next_action_masks: Tensor | None = None  # (B, A) bool, legal in next_observations
    weights: Tensor | None = None  # (B, 1) float32, importance weights of prioritized replay
    indices: Int64Array | None = None  # (B,) row * num_envs + env; only prioritized replay
    generation: int | None = None  # rows written before this draw; only prioritized replay


class ReplayStorage(ReplayBuffer):
    """A ring of `buffer_size // n_envs` rows with one transition per env. The next row is written at `pos`.

    Any thread may call `put` and `sample`, which hold `lock` (0.1 µs). A reader of `flat_views` must hold `lock` too.

    Args:
        buffer_size: number of transitions.
        observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or a flat Dict of these. Dtypes are kept.
        action_space: any space that SB3 supports; float64 is stored as float32, as in SB3.
        device: device of the batches; the ring is in host memory.
        n_envs: N.
        optimize_memory_usage: store no next observations, because they are the observations of the next row.
        handle_timeout_termination: bootstrap truncated episodes. Not possible with `optimize_memory_usage`, because
            that does not store the observation after a truncation.
        n_steps: length of the windows, 1 to 128.
        gamma: discount within a window; must equal the algorithm's gamma. No effect if n_steps is 1.
        frame_stack: store images (k × c, H, W) of k stacked frames as `Frames`, each frame once; None: whole images.
        mask_width: A, or None for an algorithm without masks.

    Attributes:
        generation: rows written so far. `reset` adds more than the ring's size, so that earlier draws become invalid.

    Raises:
        ConfigError: a value is out of range, two values exclude each other, or there is too little free memory.
    """

    observations: Any  # (size, N, ...), or one array per key
    next_observations: Any  # as `observations`; does not exist with optimize_memory_usage
    overhead_bytes = 0  # bytes per transition for further data of a subclass

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        mask_width: int | None = None,
        frame_stack: int | None = None,
    ) -> None:
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma, self.mask_width = n_steps, gamma, mask_width
        self._keyed, self.frame_stack = isinstance(observation_space, spaces.Dict), frame_stack
        self._check_settings()
        layout = self._layout()
        sizes = {"overhead": self.overhead_bytes}
        shape_of_image: Any = self.obs_shape
        if frame_stack:
            sizes["frames"] = Frames.bytes_of(shape_of_image, observation_space.dtype, frame_stack)
        for (name, _), (shape, dtype) in layout.items():
            sizes[name] = sizes.get(name, 0) + int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.memory_bytes = bytes_of_ring(sizes, self.buffer_size, n_envs)
        arrays = {name: np.zeros((self.buffer_size, n_envs, *shape), dtype) for name, (shape, dtype) in layout.items()}
        self._arrays = arrays
        # Observations that are no Dict have the key "".
        self._stored = {name[1]: array for name, array in arrays.items() if name[0] == "observations"}
        self._stored_next = {name[1]: array for name, array in arrays.items() if name[0] == "next_observations"}
        self.frames: Frames | None = None
        if frame_stack:
            self.frames = Frames(self.buffer_size, n_envs, shape_of_image, observation_space.dtype, frame_stack)
        else:
            self.observations = self._stored if self._keyed else self._stored[""]
            if not optimize_memory_usage:
                self.next_observations = self._stored_next if self._keyed else self._stored_next[""]
        self.actions = arrays["actions", ""]
        self.rewards, self.dones, self.timeouts = (arrays[name, ""] for name in ("rewards", "dones", "timeouts"))
        self.next_masks: NDArray[Any] | None = arrays.get(("next_masks", ""))
        self._powers = powers_of(gamma, n_steps)
        self.lock, self.generation = threading.RLock(), 0
        self.void: BoolArray | None = None  # (size, N) True: this slot must not be drawn; None: all may be drawn
        self.under_way: Int64Array = np.full(n_envs, NONE)  # (N,) row of the last action of envs that rest; else NONE

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling: without the lock, which cannot be pickled."""
        with self.lock:
            return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    def reset(self) -> None:
        """Empty the buffer. The next row is row 0, so `generation` becomes a multiple of the ring's size."""
        with self.lock:
            super().reset()
            if self.frames:
                self.frames.clear()
            self.void = None
            self.generation += 2 * self.buffer_size - self.generation % self.buffer_size

    def _check_settings(self) -> None:
        if not 1 <= self.n_steps <= MAX_N_STEPS:
            raise ConfigError(f"n_steps={self.n_steps} must be from 1 to {MAX_N_STEPS}")
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma={self.gamma} must be from 0 to 1")
        if self.mask_width is not None and self.mask_width < 1:
            raise ConfigError(f"mask_width={self.mask_width} must be at least 1, or None without masks")
        if self.frame_stack and (self.optimize_memory_usage or self._keyed or self.obs_shape[0] % self.frame_stack):
            raise ConfigError(f"frame_stack={self.frame_stack} needs images of {self.frame_stack} stacked frames")
        if not self.optimize_memory_usage:
            return
        if self.handle_timeout_termination:
            raise ConfigError(
                "optimize_memory_usage=True and handle_timeout_termination=True exclude each other (the observation "
                "after a truncation is not kept): set one of the two to False"
            )
        if self.buffer_size < 2:
            raise ConfigError(f"optimize_memory_usage=True needs a buffer_size of at least 2 × n_envs={self.n_envs}")

    def _layout(self) -> Layout:
        space: Any = self.observation_space
        spaces_of = space.spaces if self._keyed else {"": space}
        shapes: Any = self.obs_shape if self._keyed else {"": self.obs_shape}
        layout: Layout = {}
        names = ("observations",) if self.optimize_memory_usage else ("observations", "next_observations")
        for name in () if self.frame_stack else names:
            for key, space in spaces_of.items():
                if isinstance(shapes[key], dict):
                    raise ConfigError(f"observation {key!r} is a Dict inside a Dict and cannot be stored: flatten it")
                layout[name, key] = shapes[key], space.dtype
        self._columns = {key for key, space in spaces_of.items() if isinstance(space, spaces.Discrete)}
        layout["actions", ""] = (self.action_dim,), self._maybe_cast_dtype(self.action_space.dtype)
        layout.update({(name, ""): ((), np.float32) for name in ("rewards", "dones", "timeouts")})
        if self.mask_width is not None:
            packed = self.mask_width > PACK_ABOVE
            layout["next_masks", ""] = ((-(-self.mask_width // 8),), np.uint8) if packed else ((self.mask_width,), bool)
        return layout

    def flat_views(self) -> FlatViews:
        """Views of all arrays, for a kernel that gathers transitions. The next `put` writes into these arrays."""
        seen = {key: _flat(array) for key, array in self._stored.items()}
        following = {key: _flat(array) for key, array in self._stored_next.items()}
        return FlatViews(
            observations=seen if self._keyed else seen[""],
            next_observations=(following if self._keyed else following[""]) if following else None,
            actions=_flat(self.actions),
            rewards=_flat(self.rewards),
            dones=_flat(self.dones),
            timeouts=_flat(self.timeouts),
            next_masks=None if self.next_masks is None else _flat(self.next_masks),
        )

    def add(
        self,
        obs: Observations,  # (N, ...)
        next_obs: Observations,  # (N, ...) before any autoreset
        action: NDArray[Any],  # (N,) or (N, K)
        reward: NDArray[Any],  # (N,)
        done: NDArray[Any],  # (N,)
        infos: Sequence[dict[str, Any]],
        next_masks: BoolArray | None = None,  # (N, A)
    ) -> None:
        """Store one vector step, with the arguments of SB3's replay buffers."""
        told = (info.get("TimeLimit.truncated", False) for info in infos)
        timeouts = np.fromiter(told, np.float32) if self.handle_timeout_termination else None
        self.put(obs, next_obs, action, reward, done, timeouts, next_masks)

    def put(
        self,
        observations: Observations,  # (N, ...) on which the actions were taken
        next_observations: Observations,  # (N, ...) before any autoreset
        actions: NDArray[Any],  # (N,) or (N, K)
        rewards: NDArray[Any],  # (N,)
        dones: NDArray[Any],  # (N,) terminated or truncated
        timeouts: NDArray[Any] | None = None,  # (N,) truncated and not terminated; None: no env was truncated
        next_masks: BoolArray | None = None,  # (N, A) legal in next_observations; None: all actions are legal
    ) -> None:
        """Store a copy of one vector step. Raises ValueError for arrays of a wrong shape.

        If an episode ends in a state without a legal action, all actions are stored as legal: the maximum over no
        action is -inf, and 0 × -inf in the target would be NaN.
        """
        with self.lock:
            row = self.pos
            self._fill(self._stored, row, observations)
            if self.frames is not None:
                self.frames.put(*map(np.asarray, (observations, next_observations, dones)))
            elif self.optimize_memory_usage:
                self._fill(self._stored, (row + 1) % self.buffer_size, next_observations)
            else:
                self._fill(self._stored_next, row, next_observations)
            self.actions[row] = np.asarray(actions).reshape(self.n_envs, self.action_dim)
            self.rewards[row] = rewards
            self.dones[row] = dones
            self.timeouts[row] = 0 if timeouts is None or not self.handle_timeout_termination else timeouts
            if self.next_masks is not None:
                self.next_masks[row] = self._mask_row(next_masks, dones)
            self.pos += 1
            if self.pos == self.buffer_size:
                self.full, self.pos = True, 0
            self.generation += 1
            if self.void is not None:
                self.void[row] = False
            self._row_stored(row)

    def _row_stored(self, row: int) -> None:
        """For subclasses: called after a row was stored."""

    def discard(self, lost: Envs, resting: Envs = (), waiting: Envs = ()) -> list[Place]:
        """Exclude from drawing the newest row of envs that are `lost`, `resting` or `waiting`; see `leave_out`."""
        with self.lock:
            return leave_out(self, lost, resting, waiting)

    def _fill(self, stored: dict[str, NDArray[Any]], row: int, values: Observations) -> None:
        for key, array in stored.items():
            part = values[key] if isinstance(values, dict) else values
            # A Discrete space is stored as (N, 1), to which (N,) does not broadcast.
            array[row] = part.reshape(self.n_envs, 1) if key in self._columns else part

    def _mask_row(self, masks: BoolArray | None, dones: NDArray[Any]) -> NDArray[Any] | int:
        packed = self.next_masks is not None and self.next_masks.dtype == np.uint8
        if masks is None:
            return 0xFF if packed else True
        masks = np.asarray(masks, np.bool_)
        if masks.shape != (self.n_envs, self.mask_width):
            raise ValueError(f"next_masks must have the shape {(self.n_envs, self.mask_width)}, not {masks.shape}")
        if np.any(dones):
            masks = masks | (np.asarray(dones, np.bool_) & ~masks.any(axis=1))[:, None]
        return np.packbits(masks, axis=1) if packed else masks

    def draw(self, batch_size: int, rng: np.random.Generator | None = None) -> tuple[Int64Array, Int64Array]:
        """Draw rows (B,) and envs (B,), int64, with `rng`; None: numpy's global stream, in the same order as SB3.

        Raises:
            ValueError: nothing is stored yet.
        """
        if not self.size():
            raise ValueError("cannot sample: the replay buffer is empty")
        integers: Any = np.random.randint if rng is None else rng.integers
        rows, envs = self._anywhere(batch_size, integers)
        while self.void is not None and (again := self.void.take(rows * self.n_envs + envs).nonzero()[0]).size:
            rows[again], envs[again] = self._anywhere(len(again), integers)
        return rows, envs

    def _anywhere(self, count: int, integers: Any) -> tuple[Int64Array, Int64Array]:
        if self._margin():  # row `pos` already has the next observation of the newest row
            rows = (integers(1, self.buffer_size, size=count) + self.pos) % self.buffer_size
        else:
            rows = integers(0, self.size(), size=count)
        return rows, integers(0, self.n_envs, size=count)

    def _margin(self) -> int:
        return int(self.optimize_memory_usage and self.full)

    def sample(  # type: ignore[override]
        self,
        batch_size: int,
        env: VecNormalize | None = None,
        rng: np.random.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> ReplayBatch:
        """Draw a batch. As in SB3 a subclass may override `_get_samples`, which then gets the drawn rows."""
        with self.lock:
            if getattr(self._get_samples, "__func__", None) is not ReplayStorage._get_samples:
                return self._get_samples(self.draw(batch_size)[0], env)
            return self.gather(*self.draw(batch_size, rng), env, device)

    def _get_samples(self, batch_inds: NDArray[Any], env: VecNormalize | None = None) -> ReplayBatch:  # type: ignore[override]
        envs = np.random.randint(0, high=self.n_envs, size=len(batch_inds))
        for again in () if self.void is None else np.flatnonzero(self.void[batch_inds, envs]):
            envs[again] = np.random.choice(np.flatnonzero(~self.void[batch_inds[again]]))  # type: ignore[index]
        return self.gather(batch_inds, envs, env)

    def gather(
        self,
        rows: Int64Array,
        envs: Int64Array,
        env: VecNormalize | None = None,
        device: torch.device | str | None = None,  # None: the buffer's device
    ) -> ReplayBatch:
        """The transitions (B,) that begin at these rows of these envs, normalised by `env` as in SB3.

        Raises:
            IndexError: a row or an env is out of range.
        """
        rows, envs = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(envs, np.int64)
        last_rows, returns, discounts, ends = self.windows(rows, envs, env)
        flat, last = rows * self.n_envs + envs, last_rows * self.n_envs + envs
        masks, discounted = self.masks_of(last), self.n_steps > 1 or isinstance(self, NStepReplayBuffer)
        if self.frames is not None:
            seen: TensorObservations = self._tensor(self.frames.take(rows, envs, False), device)
            following: TensorObservations = self._tensor(self.frames.take(last_rows, envs, True), device)
        else:
            stored_next = self._stored_next
            if self.optimize_memory_usage:
                last, stored_next = (last_rows + 1) % self.buffer_size * self.n_envs + envs, self._stored
            seen = self._take(self._stored, flat, env, device)
            following = self._take(stored_next, last, env, device)
        return ReplayBatch(
            observations=seen,
            actions=self._tensor(_take(self.actions, flat), device),
            next_observations=following,
            dones=self._tensor(ends[:, None], device),
            rewards=self._tensor(returns[:, None], device),
            discounts=self._tensor(discounts[:, None], device) if discounted else None,
            next_action_masks=None if masks is None else self._tensor(masks, device),
        )

    def windows(
        self, rows: Int64Array, envs: Int64Array, env: VecNormalize | None = None
    ) -> tuple[Int64Array, Float32Array, Float32Array, Float32Array]:
        """Last row, return, discount and done flag (B,) of windows that begin at `rows` of `envs`; see `windows_of`."""
        newest = (self.pos - 1) % self.buffer_size
        arrays = self.rewards, self.dones, self.timeouts
        last_rows, returns, discounts, ends = windows_of(rows, envs, *arrays, newest, self._powers)
        if env is not None and env.norm_reward:  # rewards are normalised before they are summed
            steps = np.arange(self.n_steps)
            spread = self.rewards[(rows[:, None] + steps) % self.buffer_size, envs[:, None]]
            within = steps <= ((last_rows - rows) % self.buffer_size)[:, None]
            returns = (self._normalize_reward(spread, env) * self._powers[:-1] * within).sum(axis=1)
        return last_rows, returns, discounts, ends

    def _take(
        self,
        stored: dict[str, NDArray[Any]],
        flat: Int64Array,
        env: VecNormalize | None,
        device: torch.device | str | None,
    ) -> TensorObservations:
        taken: Any = {key: _take(array, flat) for key, array in stored.items()}
        taken = self._normalize_obs(taken if self._keyed else taken[""], env)
        if not self._keyed:
            return self._tensor(taken, device)
        return {key: self._tensor(value, device) for key, value in taken.items()}

    def masks_of(self, flat: Int64Array) -> BoolArray | None:  # (B,) row × N + env → (B, A)
        """Masks of the next observations of the transitions `flat`; None without masks."""
        if self.next_masks is None:
            return None
        masks = _take(self.next_masks, flat)
        return masks if masks.dtype == bool else np.unpackbits(masks, axis=1, count=self.mask_width).view(np.bool_)

    def _tensor(self, array: NDArray[Any], device: torch.device | str | None) -> Tensor:
        """The array as a tensor on the device. On the CPU the tensor shares the array's memory."""
        return torch.from_numpy(array).to(self.device if device is None else device)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1, *array.shape[2:])


def _take(array: NDArray[Any], flat: Int64Array) -> NDArray[Any]:
    """Rows of a stored array (size, N, ...). 256 rows of 4 floats take 0.6 µs; with `array[rows, envs]` 4.2 µs."""
    return _flat(array).take(flat, axis=0)
