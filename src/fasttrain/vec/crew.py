"""Crew: the worker processes of one vector env, together. Starting, one step of all, calls, replacing, closing.

Knows nothing of SB3. Who fails is named: env, worker, seed, last action, step.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.util import Finalize
from typing import Any, Literal

import cloudpickle
import gymnasium as gym
import numpy as np

from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.machine import usable_cores
from fasttrain.vec.process import WorkerLostError, WorkerProcess
from fasttrain.vec.worker import Ready
from fasttrain.vec.worker_envs import SEED_STRIDE, Failure, Record, Settings
from fasttrain.vec.worker_memory import ABSENT, BUFFER, NOTIFY, Layout, SharedBlock, check_spaces

EnvFn = Callable[[], gym.Env[Any, Any]]
OnEnvError = Literal["raise", "restart"]
CLOSE_TIMEOUT_S = 5.0
SPIN_S = 100e-6  # about what falling asleep and being woken cost together


class WorkerTraceback(Exception):  # noqa: N818 - shown as the cause, as concurrent.futures does with its own
    """The traceback in the worker process, as text."""


@dataclass(frozen=True, kw_only=True)
class CrewOptions:
    """How a crew works; see `SharedMemoryVecEnv`."""

    num_workers: int | None
    start_method: str | None
    info_keys: tuple[str, ...] | None
    on_env_error: OnEnvError
    step_timeout_s: float
    start_timeout_s: float
    use_masks: bool
    check_finite: bool
    max_restarts: int
    restart_window_s: float


class Crew:
    """K workers for N envs. Envs are split evenly, in order."""

    def __init__(self, env_fns: Sequence[EnvFn], options: CrewOptions) -> None:
        self.options = options
        self.num_envs = len(env_fns)
        cores = usable_cores()
        self.num_workers = min(self.num_envs, options.num_workers or cores)
        self.spin_s = SPIN_S if cores > self.num_workers else 0.0
        self.restarts = 0
        self._restart_times: deque[float] = deque()
        self._generations = [0] * self.num_workers
        self.seeds: list[int | None] = [None] * self.num_envs  # of the last seeded reset
        self.under_way: set[int] = set()  # workers whose step was posted and not yet collected
        self._early: dict[int, list[Record]] = {}  # what some of those brought already, because a call came between
        self._untold: dict[int, Any] = {}  # worker → last observations of episodes that a replacement cut silently
        self.buffers = [0] * self.num_workers  # which of the two observation arrays each worker's last step wrote
        self.context = multiprocessing.get_context(options.start_method or default_start_method())
        self.notify = self.context.Semaphore(0)  # any worker → a trainer that waits for whoever is first
        self.workers: list[WorkerProcess] = []
        # Runs before multiprocessing's own exit handler, which would wait for daemons that ignore SIGTERM.
        self._finalizer = Finalize(self, _close_workers, (self.workers,), exitpriority=100)
        try:
            self._start(env_fns)
        except BaseException:
            self.close()
            raise

    def _start(self, env_fns: Sequence[EnvFn]) -> None:
        bounds = np.linspace(0, self.num_envs, self.num_workers + 1).round().astype(int).tolist()
        for index, (first, stop) in enumerate(pairwise(bounds)):
            settings = Settings(
                worker=index,
                first=first,
                factories=cloudpickle.dumps(list(env_fns[first:stop])),
                info_keys=self.options.info_keys,
                use_masks=self.options.use_masks,
                check_finite=self.options.check_finite,
                restart_envs=self.options.on_env_error == "restart",
                spin_s=self.spin_s,
            )
            self.workers.append(self._process(settings, stop - first))
        ready = [self._ready(worker) for worker in self.workers]
        for worker, other in zip(self.workers, ready, strict=True):
            if other != ready[0]:
                raise EnvSpecError(
                    f"the envs differ: env 0 has {_spell(ready[0])}, env {worker.first} has {_spell(other)}; a vector "
                    "env needs the same spaces in all, and masks in all or in none"
                )
        check_spaces(ready[0].observation_space, ready[0].action_space)
        self.layout = Layout(
            num_envs=self.num_envs,
            num_workers=self.num_workers,
            observation_space=ready[0].observation_space,
            action_space=ready[0].action_space,
            mask_width=ready[0].mask_width,
            num_info_keys=len(self.options.info_keys or ()),
        )
        self._block = SharedBlock(self.layout.size_bytes)
        self.arrays, self.control = self.layout.views(self._block.memory)
        for worker in self.workers:
            self._attach(worker)

    def _process(self, settings: Settings, num_envs: int) -> WorkerProcess:
        return WorkerProcess(self.context, self.notify, settings, num_envs)

    def _ready(self, worker: WorkerProcess) -> Ready:
        try:
            return worker.ready(self.options.start_timeout_s)
        except WorkerLostError as error:
            failure = error.failure
            text = failure.text if failure else f"worker {worker.settings.worker} did not start: {error}"
            raise EnvSpecError(text) from _cause(failure, error)

    def _attach(self, worker: WorkerProcess) -> None:
        control = self.control[worker.settings.worker]
        worker.attach(self.layout, self._block, control, self.options.start_timeout_s)

    # --- steps

    def post_step(self) -> None:
        """Let every worker step with the actions in the arrays, into the other observation array."""
        self.align()
        buffer = 1 - self.buffers[0]
        self.buffers = [buffer] * self.num_workers
        self.control[:, BUFFER] = buffer
        self.under_way.update(range(self.num_workers))
        for worker in self.workers:
            worker.post()

    def post_worker(self, index: int, notify: bool) -> None:
        """Let one worker step; with `notify` it also says so to whoever waits for the first of several."""
        self.buffers[index] = 1 - self.buffers[index]
        self.control[index, BUFFER] = self.buffers[index]
        self.control[index, NOTIFY] = notify
        self.under_way.add(index)
        self.workers[index].post()

    def align(self) -> None:
        """Workers that stepped more often than others may have written the other array: bring all into one."""
        arrays, buffer = self.arrays.observations, self.buffers[0]
        for index, worker in enumerate(self.workers):
            if self.buffers[index] != buffer:
                rows = slice(worker.first, worker.stop)
                _put_rows(arrays[buffer], rows, _copy_of_rows(arrays[1 - buffer], rows))
                self.buffers[index] = buffer

    def wait_step(self) -> list[Record]:
        """Until every worker has stepped; the news of its envs.

        Raises:
            EnvError: an env or a worker failed, and `on_env_error` is "raise" or too many did.
        """
        deadline = time.monotonic() + self.options.step_timeout_s
        news: list[Record] = []
        for worker in self.workers:
            news += self.wait_worker(worker, deadline)
        return news

    def wait_worker(self, worker: WorkerProcess, deadline: float) -> list[Record]:
        """The same for one of them."""
        index = worker.settings.worker
        self.under_way.discard(index)
        if index in self._early:
            return self._early.pop(index)
        try:
            news: list[Record] = worker.wait(deadline, self.spin_s) or []
        except WorkerLostError as error:
            self.replace(worker, error)
            return []
        if index in self._untold:
            self._cut(slice(worker.first, worker.stop), self._untold.pop(index))
            news = []
        for record in news:
            if record.failure is not None:
                self._count_restart(worker, WorkerLostError(record.failure.text, record.failure))
        return news

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> list[bytes]:
        """Reset every env; the reset infos, pickled. Waits for a step that is under way and drops it."""
        self.settle()
        self.under_way.clear()
        self._early.clear()
        if any(seed is not None for seed in seeds):
            self.seeds = list(seeds)
        self.buffers = [0] * self.num_workers
        self.control[:, NOTIFY] = False
        asked = {index: (seeds[w.first : w.stop], options[w.first : w.stop], 0) for index, w in enumerate(self.workers)}
        infos = [info for part in self.call("reset", asked) for info in part]
        self._untold.clear()
        return infos

    # --- calls

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Call `name` in the workers listed, all at once; their answers in order. A replaced worker is asked again.

        Steps that are under way are waited for first; who waits for them later finds them done.

        Raises:
            EnvError: a worker failed, as for steps.
        """
        self.settle()
        deadline = time.monotonic() + self.options.step_timeout_s
        broken: dict[int, WorkerLostError] = {}
        answers: dict[int, Any] = {}
        for index, args in arguments.items():
            try:
                self.workers[index].call(name, args, self.options.step_timeout_s)
            except WorkerLostError as error:  # noqa: PERF203 - a broken worker must not keep the others
                broken[index] = error
        for index in arguments:
            try:
                if index not in broken:
                    answers[index] = self.workers[index].wait(deadline, self.spin_s)
            except WorkerLostError as error:  # noqa: PERF203
                broken[index] = error
        for index, lost in broken.items():
            self.replace(self.workers[index], lost, stepping=False)
            answers[index] = self._again(index, name, arguments[index])
        return [answers[index] for index in arguments]

    def settle(self) -> None:
        """Wait for the steps under way and keep what they brought."""
        for index in sorted(self.under_way - set(self._early)):
            self._early[index] = self.wait_worker(self.workers[index], time.monotonic() + self.options.step_timeout_s)
            self.under_way.add(index)

    def _again(self, index: int, name: str, args: tuple[Any, ...]) -> Any:
        worker = self.workers[index]
        try:
            worker.call(name, args, self.options.step_timeout_s)
            return worker.wait(time.monotonic() + self.options.step_timeout_s)
        except WorkerLostError as error:
            raise self._env_error(worker, error) from _cause(error.failure, error)

    # --- failures

    def replace(self, lost: WorkerProcess, why: WorkerLostError, stepping: bool = True) -> None:
        """A fresh worker in the place of `lost`: its episodes end as truncated and lost, at the state before.

        Between steps (`stepping=False`) nobody could be told of that: the step that follows then says so.

        Raises:
            EnvError: failures are to be raised, or there were too many.
        """
        index, rows = lost.settings.worker, slice(lost.first, lost.stop)
        if not stepping:
            self._untold[index] = _copy_of_rows(self.arrays.observations[self.buffers[index]], rows)
        while True:
            if self.options.on_env_error == "raise":
                lost.pending = False
                raise self._env_error(lost, why) from _cause(why.failure, why)
            self._count_restart(lost, why)
            lost.kill()
            self._generations[index] += 1
            self.workers[index] = lost = self._process(lost.settings, lost.stop - lost.first)
            try:
                lost.ready(self.options.start_timeout_s)
                self._attach(lost)
                lost.call("reset", self._fresh_reset(lost), self.options.step_timeout_s)
                lost.wait(time.monotonic() + self.options.step_timeout_s)
                break
            except WorkerLostError as again:
                why = again
        if stepping:
            self._cut(rows, _copy_of_rows(self.arrays.observations[1 - self.buffers[index]], rows))

    def _cut(self, rows: slice, last_observations: Any) -> None:
        """End the episodes of `rows` as lost."""
        arrays = self.arrays
        arrays.rewards[rows] = 0.0
        arrays.terminations[rows] = False
        arrays.truncations[rows] = arrays.lost[rows] = True
        arrays.info_kinds[rows] = ABSENT
        _put_rows(arrays.final_observations, rows, last_observations)

    def _fresh_reset(self, worker: WorkerProcess) -> tuple[Any, ...]:
        """Other seeds than the episodes that were lost had: the fault might be in them."""
        stride = self._generations[worker.settings.worker] * SEED_STRIDE * 31
        seeds = [None if seed is None else (seed + stride) % 2**31 for seed in self.seeds[worker.first : worker.stop]]
        return seeds, [{}] * len(seeds), self.buffers[worker.settings.worker]

    def _count_restart(self, worker: WorkerProcess, error: WorkerLostError) -> None:
        self.restarts += 1
        now = time.monotonic()
        self._restart_times.append(now)
        while self._restart_times[0] < now - self.options.restart_window_s:
            self._restart_times.popleft()
        if len(self._restart_times) > self.options.max_restarts:
            last = self._env_error(worker, error)
            raise EnvError(
                f"{len(self._restart_times)} restarts within {self.options.restart_window_s / 60:g} minutes, "
                f"{self.options.max_restarts} allowed; the last: {last}"
            ) from _cause(error.failure, error)

    def _env_error(self, worker: WorkerProcess, error: WorkerLostError) -> EnvError:
        failure, index = error.failure, worker.settings.worker
        if failure is None:
            envs = (
                f"env {worker.first}" if worker.stop - worker.first == 1 else f"envs {worker.first}-{worker.stop - 1}"
            )
            return EnvError(f"worker {index} ({envs}) failed: {error}; env.on_env_error=restart goes on without it")
        seed = "" if failure.seed is None else f", seed {failure.seed}"
        action = f", last action {failure.action}" if failure.action else ""
        return EnvError(
            f"env {failure.env_index} (worker {index}{seed}{action}) failed at its step {failure.step}: {failure.text}"
        )

    # --- the end

    def close(self) -> None:
        """End all workers within `CLOSE_TIMEOUT_S`, whatever state they are in."""
        self._finalizer()
        if hasattr(self, "_block"):
            self._block.close()


def default_start_method() -> str:
    """`forkserver`, or `spawn` where there is none: forking a process with threads (torch, CUDA) can deadlock."""
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _close_workers(workers: list[WorkerProcess]) -> None:
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for worker in workers:
        worker.ask_to_end()
    for worker in workers:
        worker.end(max(0.0, deadline - time.monotonic()))
    workers.clear()


def _cause(failure: Failure | None, error: WorkerLostError) -> Exception:
    return WorkerTraceback(f"\n{failure.traceback}") if failure else error


def _spell(ready: Ready) -> str:
    masks = f"masks of {ready.mask_width}" if ready.mask_width else "no masks"
    return f"({ready.observation_space}, {ready.action_space}, {masks})"


def _copy_of_rows(observations: Any, rows: slice) -> Any:
    if isinstance(observations, dict):
        return {key: part[rows].copy() for key, part in observations.items()}
    return observations[rows].copy()


def _put_rows(into: Any, rows: slice, values: Any) -> None:
    if isinstance(into, dict):
        for key, part in into.items():
            part[rows] = values[key]
    else:
        into[rows] = values
