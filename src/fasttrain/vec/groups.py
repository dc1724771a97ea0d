"""Groups: rows of a vector env that step independently. The first group that is ready gets its next actions first.

So no group waits for the slowest group. A group of a SharedMemoryVecEnv is one worker.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import FinishedEpisode, Int64Array, select_rows
from fasttrain_vec.process import POLL_EVERY_S
from fasttrain_vec.worker_envs import Record
from fasttrain_vec.worker_memory import STEP_NS


class GroupStep(NamedTuple):
    """The result of one step of some rows. Their rewards, ends and masks are in these rows of the env's slots."""

    rows: slice | Int64Array
    finished: list[FinishedEpisode]
    records: list[Record]
    observations: Any  # (n, ...) of these rows; a view that is overwritten two steps later


class Groups(Protocol):
    """Groups of rows of a vector env. While a group steps, do not use the env itself."""

    env: Any
    rows: list[slice]  # rows of each group

    def rows_of(self, groups: list[int]) -> Int64Array:
        """The rows (n,) of these groups, in the order of `groups`."""

    def send_all(self, groups: list[int], actions: object) -> None:
        """Start a step of these groups. `actions` (n, ...) belong to `rows_of(groups)`."""

    def first_ready(self, groups: list[int]) -> list[int]:
        """Wait until a group is ready. Returns all groups that have stepped, or whose game refused the action.

        Every group of `groups` must be stepping.
        """

    def take(self, groups: list[int]) -> list[GroupStep]:
        """Wait for the steps of these groups and return the steps. Rows whose action was refused are left out."""

    def finish(self) -> None:
        """Make the env usable as a whole again. To be called when no group is stepping."""


class WorkerGroups:
    """One group per worker.

    `env.wait_ns` sums the time in `take` and `first_ready`. `env.slowest_ns` sums the time of the workers' steps.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.rows = [slice(worker.first, worker.stop) for worker in env.crew.workers]
        env.crew.align()

    def rows_of(self, groups: list[int]) -> Int64Array:
        return np.concatenate([np.arange(self.rows[group].start, self.rows[group].stop) for group in groups])

    def send_all(self, groups: list[int], actions: NDArray[Any]) -> None:
        begin = 0
        for group in groups:
            rows = self.rows[group]
            end = begin + rows.stop - rows.start
            self.env.slots.actions[rows] = actions[begin:end]
            self.env.crew.post_worker(group)
            begin = end

    def take(self, groups: list[int]) -> list[GroupStep]:
        env, crew, steps = self.env, self.env.crew, list[GroupStep]()
        for group in groups:
            began = time.perf_counter_ns()
            deadline = time.monotonic() + crew.options.step_timeout_s
            records = crew.wait_worker(crew.workers[group], deadline)
            env.wait_ns += time.perf_counter_ns() - began
            env.slowest_ns += int(crew.control[group, STEP_NS])
            rows, observations = self.rows[group], crew.arrays.observations[crew.buffers[group]]
            steps.append(GroupStep(rows, env.close_episodes(rows, records), records, select_rows(observations, rows)))
        return steps

    def first_ready(self, groups: list[int]) -> list[int]:
        """Wait until the first of `groups` has stepped. A dead worker counts as ready: `take` reports it."""
        crew = self.env.crew
        began = time.perf_counter_ns()
        deadline = time.monotonic() + crew.options.step_timeout_s
        while True:
            crew.notify.clear()
            ready = [group for group in groups if crew.workers[group].has_replied()]
            if ready or time.monotonic() > deadline:
                break
            # `crew.notify` says that some worker may be ready. The control words say which worker it is.
            if not crew.notify.acquire(True, POLL_EVERY_S):
                ready = [group for group in groups if not crew.workers[group].process.is_alive()]
                if ready:
                    break
        self.env.wait_ns += time.perf_counter_ns() - began
        return ready or groups[:1]  # empty after the deadline: `take` reports the worker that hangs

    def finish(self) -> None:
        crew = self.env.crew
        crew.align()
        crew.notify.clear()
        self.env.slots.observations = crew.arrays.observations[crew.buffers[0]]
