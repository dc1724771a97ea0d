"""Frames: the images of a replay buffer, each stored once, from which stacked observations are assembled.

The next observation of a transition is the observation of the following transition. Of its k stacked frames, k - 1 are
also in the observation before. So only 84 × 84 of the 2 × 84 × 84 × 4 bytes of an Atari transition are new. The
last frame of an episode is stored separately. An observation that is not the previous one with a new frame is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import BoolArray, Int64Array
from fasttrain.errors import EnvError

Images = NDArray[Any]  # (N or B, k × c, H, W)
Place = tuple[int, int]  # row of the ring, env


class Frames:
    """Observations of a ring of `rows` vector steps of N envs.

    Args:
        rows: number of rows of the ring of transitions, which is written and cleared together with this object.
        num_envs: N.
        shape: (k × c, H, W) of a stacked observation.
        dtype: dtype of the observations.
        stack: k, number of frames in an observation. The newest frame is the last.
    """

    def __init__(self, rows: int, num_envs: int, shape: tuple[int, ...], dtype: Any, stack: int) -> None:
        self.rows, self.num_envs, self.shape, self.stack = rows, num_envs, shape, stack
        self._frame = (shape[0] // stack, *shape[1:])
        self._size = rows + stack  # also k - 1 frames before the oldest row, and one after the newest row
        self.frames = np.zeros((self._size, num_envs, *self._frame), dtype)
        self.ages = np.zeros((rows, num_envs), np.uint8)  # frames of an observation from earlier steps, ≤ k - 1
        self.clear()

    def clear(self) -> None:
        """Forget everything that is stored."""
        self.written = 0  # steps written so far; step s is in row s % rows of the ring
        self.last: dict[Place, NDArray[Any]] = {}  # newest frame of a row's next observation, if the next row lacks it
        self.others: dict[Place, Images] = {}  # (2, k × c, H, W) observation and next observation, if stored whole

    @staticmethod
    def bytes_of(shape: tuple[int, ...], dtype: Any, stack: int) -> int:
        """Bytes of a transition, without the separate frames at ends of episodes."""
        return int(np.prod(shape)) // stack * int(np.dtype(dtype).itemsize) + 1

    def put(self, observations: Images, next_observations: Images, dones: NDArray[Any]) -> None:
        """Store a row: observations (N, …), next observations before any autoreset, and dones (N,).

        Raises:
            EnvError: an observation is not the previous observation with one new frame, nor the first of an episode.
        """
        step, k = self.written, self.stack
        row, seen = step % self.rows, observations.reshape(self.num_envs, k, *self._frame)
        for env in range(self.num_envs) if self.last or self.others else ():
            self.last.pop((row, env), None)
            self.others.pop((row, env), None)
        if not step:  # the first row: also store the earlier frames of the observations
            for back in range(1, k):
                self.frames[-back] = seen[:, k - 1 - back]
            ages = np.full(self.num_envs, k - 1, np.uint8)
        else:
            ages = self._ages_after((step - 1) % self.rows)
            for env in np.flatnonzero(~self._fits(step, ages, seen)).tolist():
                self._begin_anew(step, env, seen[env])
                ages[env] = 0
        self.frames[step % self._size] = seen[:, -1]
        self.ages[row] = ages
        newest = next_observations.reshape(self.num_envs, k, *self._frame)[:, -1]
        self.frames[(step + 1) % self._size] = newest
        for env in np.flatnonzero(dones).tolist():
            self.last[row, env] = newest[env].copy()
        self.written += 1

    def _ages_after(self, row: int) -> NDArray[np.uint8]:
        """`ages` of the next observations of `row`; 0 where an episode ended in `row`."""
        ages: NDArray[np.uint8] = np.minimum(self.ages[row] + 1, self.stack - 1).astype(np.uint8)
        ages[[env for env in range(self.num_envs) if (row, env) in self.last]] = 0
        return ages

    def _fits(self, step: int, ages: NDArray[np.uint8], seen: Images) -> BoolArray:
        """(N,) True where all frames of `seen` equal the stored frames."""
        first = np.array([((step - 1) % self.rows, env) in self.last for env in range(self.num_envs)])
        fits: BoolArray = first | _equal(self.frames[step % self._size], seen[:, -1])
        for back in range(1, self.stack):
            there = np.where((ages >= back)[:, None, None, None], self.frames[(step - back) % self._size], 0)
            fits &= _equal(there, seen[:, self.stack - 1 - back])
        return fits

    def _begin_anew(self, step: int, env: int, seen: Images) -> None:
        """An env was reset between two rows: the stored next frame moves to `last`, for the previous row alone."""
        if seen[:-1].any():
            raise EnvError(
                f"env {env}: an observation is not the previous one with one new frame; a wrapper around the stacked "
                "frames must not change them"
            )
        self.last.setdefault(((step - 1) % self.rows, env), self.frames[step % self._size, env].copy())

    def extend(self, env: int, row: int) -> None:
        """Set the next observation of `row` to the next observation of the row that was written last."""
        newest, envs = np.array([(self.written - 1) % self.rows]), np.array([env])
        both = self.take(np.array([row]), envs, False), self.take(newest, envs, True)
        self.others[row, env] = np.concatenate(both)

    def take(self, rows: Int64Array, envs: Int64Array, following: bool) -> Images:
        """Observations (B, k × c, H, W) of these rows of the ring; if `following`, the next observations."""
        steps = self.written - 1 - (self.written - 1 - rows) % self.rows
        ages = self.ages[rows, envs].astype(np.int64) + following
        out = np.zeros((len(steps), self.stack, *self._frame), self.frames.dtype)
        for back in range(self.stack):
            there = ages >= back
            out[there, self.stack - 1 - back] = self.frames[(steps[there] + following - back) % self._size, envs[there]]
        images = out.reshape(len(steps), *self.shape)
        for at, place in enumerate(zip(rows.tolist(), envs.tolist(), strict=True)) if self.last or self.others else ():
            if place in self.others:
                images[at] = self.others[place][int(following)]
            elif following and place in self.last:
                out[at, -1] = self.last[place]
        return images

    def state(self) -> dict[str, NDArray[Any]]:
        """Name → array, for a checkpoint. Large arrays are views."""
        size = min(self.written + 1, self._size)
        frames, others = (np.array([*each.values()], self.frames.dtype) for each in (self.last, self.others))
        return {
            "written": np.array(self.written),
            "frames": self.frames[:size],
            "before": self.frames[max(size, self._size - self.stack) :],  # frames before the ring's first row
            "ages": self.ages[: min(self.written, self.rows)],
            "last_places": np.array([*self.last], np.int64).reshape(-1, 2),
            "last_frames": frames.reshape(-1, *self._frame),
            "other_places": np.array([*self.others], np.int64).reshape(-1, 2),
            "others": others.reshape(-1, 2, *self.shape),
        }

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load a result of `state`. Raises ValueError or KeyError if a different buffer wrote it."""
        self.clear()
        self.frames[: len(arrays["frames"])] = arrays["frames"]
        if len(before := arrays["before"]):
            self.frames[-len(before) :] = before
        self.ages[: len(arrays["ages"])] = arrays["ages"]
        stored = (self.last, "last_places", "last_frames"), (self.others, "other_places", "others")
        for frames, places, values in stored:
            pairs = zip(arrays[places].tolist(), arrays[values], strict=True)
            frames.update({(row, env): np.array(value) for (row, env), value in pairs})
        self.written = int(arrays["written"])


def _equal(one: Images, other: Images) -> Any:
    """(N,) True where the images of an env are equal."""
    return (one == other).reshape(len(one), -1).all(axis=1)
