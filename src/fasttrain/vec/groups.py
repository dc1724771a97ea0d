"""WorkerGroups: the workers of a SharedMemoryVecEnv, each stepping its envs on its own.

Whichever is ready first is served first, so that nobody waits for the slowest (first-ready collecting).
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import FinishedEpisode, Int64Array, select_rows
from fasttrain.vec.process import LOOK_EVERY_S
from fasttrain.vec.worker_envs import Record
from fasttrain.vec.worker_memory import STEP_NS


class GroupStep(NamedTuple):
    """What a step of some rows brought. Rewards, ends and masks are in the env's slots, rows `rows`."""

    rows: slice | Int64Array
    finished: list[FinishedEpisode]
    records: list[Record]
    observations: Any  # (n, ...) of these rows; a view that the next step but one may overwrite


class Groups(Protocol):
    """Rows of a vector env that step apart from each other."""

    env: Any
    rows: list[slice]  # of each group

    def rows_of(self, groups: list[int]) -> Int64Array:
        """The rows (n,) of these groups, one's after the other's."""

    def send_all(self, groups: list[int], actions: object) -> None:
        """Let the envs of some groups step, with actions (n, ...), one group's after the other's."""

    def first_ready(self, groups: list[int]) -> list[int]:
        """Those of `groups`, all under way, that have stepped, or have the same decision asked again; waits for the
        first."""

    def take(self, groups: list[int]) -> list[GroupStep]:
        """What the steps of these groups brought, once all of them are there. Who is asked again is in none."""

    def finish(self) -> None:
        """Make the env usable as a whole again; no group is under way."""


class WorkerGroups:
    """A group is a worker. While one steps, the env itself must not be used.

    `env.wait_ns` counts the time in `take` and `first_ready`, `env.slowest_ns` that of the workers' steps.
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
        return [self._taken(group) for group in groups]

    def _taken(self, group: int) -> GroupStep:
        """Wait until that worker has stepped. Raises EnvError: an env or a worker failed."""
        env, crew = self.env, self.env.crew
        began = time.perf_counter_ns()
        deadline = time.monotonic() + crew.options.step_timeout_s
        records = crew.wait_worker(crew.workers[group], deadline)
        env.wait_ns += time.perf_counter_ns() - began
        env.slowest_ns += int(crew.control[group, STEP_NS])
        rows, seen = self.rows[group], crew.arrays.observations[crew.buffers[group]]
        return GroupStep(rows, env.close_episodes(rows, records), records, select_rows(seen, rows))

    def first_ready(self, groups: list[int]) -> list[int]:
        """Those of `groups`, all under way, that have stepped; waits for the first. Who is gone counts as ready."""
        crew = self.env.crew
        began = time.perf_counter_ns()
        deadline = time.monotonic() + crew.options.step_timeout_s
        while True:
            crew.notify.hush()
            ready = [group for group in groups if crew.workers[group].replied()]
            if ready or time.monotonic() > deadline:
                break
            # A token says that somebody may be ready; the control words say who.
            if not crew.notify.acquire(True, LOOK_EVERY_S):
                ready = [group for group in groups if not crew.workers[group].process.is_alive()]
                if ready:
                    break
        self.env.wait_ns += time.perf_counter_ns() - began
        return ready or groups[:1]  # after the deadline: `take` says who hangs

    def finish(self) -> None:
        """Make the env usable as a whole again; no group is under way."""
        crew = self.env.crew
        crew.align()
        crew.notify.hush()
        self.env.slots.observations = crew.arrays.observations[crew.buffers[0]]
