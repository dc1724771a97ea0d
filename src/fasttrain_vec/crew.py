"""Crew: all worker processes of one vector env. It starts, steps, calls, replaces and closes them.

It does not depend on SB3. Its errors name the env, the worker, the seed, the last action and the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.util import Finalize
from typing import Any, Literal

import cloudpickle
import gymnasium as gym
import numpy as np

from fasttrain.batch import each_array, select_rows
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.machine import usable_cores
from fasttrain_vec.process import CLOSE_TIMEOUT_S, START_METHOD, Scout, WorkerLostError, WorkerProcess
from fasttrain_vec.replacing import ALL, ASKED, FAILED, Replacements, successor_seed
from fasttrain_vec.worker import HOLD, STEP, Ready, pack
from fasttrain_vec.worker_envs import Failure, Packed, Record, Settings
from fasttrain_vec.worker_memory import (
    ABSENT,
    BUFFER,
    COMMAND,
    NO_ROW,
    NOTIFY,
    ROW,
    Arrays,
    Layout,
    SharedBlock,
    check_spaces,
)
from fasttrain_vec.worker_start import SPIN_S, Bell

EnvFn = Callable[[], gym.Env[Any, Any]]
OnEnvError = Literal["raise", "restart"]
WORKER_SPIN_S = 2e-3  # of a worker with a core of its own: the trainer acts and stores in 0.3 to 1 ms


@dataclass(frozen=True, kw_only=True)
class CrewOptions:
    """Options of a crew, described in `SharedMemoryVecEnv`."""

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
    reward_dtype: str = "float32"
    restart_hint: str = 'on_env_error="restart"'  # what errors advise

    def __post_init__(self) -> None:
        if self.on_env_error not in ("raise", "restart"):
            raise EnvSpecError(f"on_env_error={self.on_env_error!r}: expected 'raise' or 'restart'")
        if self.num_workers is not None and self.num_workers < 1:
            raise EnvSpecError(f"num_workers={self.num_workers}: give at least 1, or None for one per core")


class Crew:
    """K workers for N envs. The envs are split evenly, in order."""

    def __init__(self, env_fns: Sequence[EnvFn], options: CrewOptions, scout: Scout | None = None) -> None:
        self.options, self.num_envs = options, len(env_fns)
        cores = usable_cores()
        self.num_workers = min(self.num_envs, cores if options.num_workers is None else options.num_workers)
        # The trainer spins only if it has a core of its own. A worker always spins after its reply, because the next
        # request usually comes at once: 64 CartPoles on 2 cores step 1.2 to 1.6 times as fast if workers spin.
        self.spin_s = SPIN_S if cores > self.num_workers else 0.0
        self._worker_spin_s = WORKER_SPIN_S if cores >= self.num_workers else SPIN_S
        self.replacements = Replacements(options.max_restarts, options.restart_window_s)
        self.close_failed = ""  # the error of an env's `close()`, as text
        self.seeds: list[int | None] = [None] * self.num_envs  # each env's last seed, from a reset or after a failure
        self.stepping: set[int] = set()  # workers whose step was started and not yet collected
        self._collected: dict[int, list[Record]] = {}  # worker → records of its step, collected early
        # Worker → first observations and masks after the worker was replaced. The worker's next step reports them.
        self._unreported: dict[int, tuple[Any, Any]] = {}
        self.buffers = [0] * self.num_workers  # by worker: which of the two observation arrays its last step wrote
        self.context = scout.context if scout else get_context(options.start_method or START_METHOD)
        self.notify = scout.notify if scout else Bell(self.context)  # released by workers, for `Groups.first_ready`
        self.workers: list[WorkerProcess] = []
        # Runs before multiprocessing's own exit handler, which would wait for ever, because workers ignore SIGTERM.
        self._finalizer = Finalize(self, _close_workers, (self.workers,), exitpriority=100)
        try:
            self._start(env_fns, scout)
        except BaseException:
            self.close()
            raise

    def _start(self, env_fns: Sequence[EnvFn], scout: Scout | None) -> None:
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
                spin_s=self._worker_spin_s,
            )
            if scout is not None and index == 0:
                self.workers.append(scout.hand_over(settings, stop - first))
            else:
                self.workers.append(WorkerProcess(self.context, self.notify, settings, stop - first))
        ready = [self._ready(worker) for worker in self.workers]
        for worker, other in zip(self.workers, ready, strict=True):
            if other != ready[0]:
                raise EnvSpecError(
                    f"the envs differ: env 0 has {_describe(ready[0])}, env {worker.first} has {_describe(other)}; "
                    "a vector env needs the same spaces in all, and masks in all or in none"
                )
        check_spaces(ready[0].observation_space, ready[0].action_space)
        self.layout = Layout(
            num_envs=self.num_envs,
            num_workers=self.num_workers,
            observation_space=ready[0].observation_space,
            action_space=ready[0].action_space,
            mask_width=ready[0].mask_width,
            num_info_keys=len(self.options.info_keys or ()),
            reward_dtype=self.options.reward_dtype,
        )
        self._block = SharedBlock(self.layout.size_bytes)
        self.arrays, self.control = self.layout.views(self._block.memory)
        for worker in self.workers:
            self._attach(worker)

    def _ready(self, worker: WorkerProcess) -> Ready:
        try:
            return worker.ready(self.options.start_timeout_s)
        except WorkerLostError as error:
            failure = error.failure
            text = failure.text if failure else f"worker {worker.settings.worker} did not start: {error}"
            raise EnvSpecError(text) from error.cause

    def _attach(self, worker: WorkerProcess) -> None:
        control = self.control[worker.settings.worker]
        worker.attach(self.layout, self._block, control, self.options.start_timeout_s)

    def post_step(self) -> None:
        """Start a step of all workers with `arrays.actions`. The steps fill the two observation arrays in turn."""
        self.align()
        buffer = 1 - self.buffers[0]
        self.buffers = [buffer] * self.num_workers
        self.control[:, BUFFER] = buffer
        self.stepping.update(range(self.num_workers))
        for index in range(self.num_workers):
            self._post(index)

    def post_worker(self, index: int) -> None:
        """Start a step of one worker, which will also release `notify`."""
        self.buffers[index] = 1 - self.buffers[index]
        self.control[index, BUFFER] = self.buffers[index]
        self.control[index, NOTIFY] = True
        self.stepping.add(index)
        self._post(index)

    def _post(self, index: int) -> None:
        # A replaced worker does not step: the action was chosen for the old state, not for the new episode.
        self.workers[index].post(HOLD if index in self._unreported else STEP)

    def align(self) -> None:
        """Copy observations, so that one of the two arrays holds the last observations of all workers.

        A worker that steps is left out: it still writes the array that its step was started with.
        """
        buffer = self.buffers[0]
        for index, worker in enumerate(self.workers):
            if self.buffers[index] != buffer and index not in self.stepping:
                observations = self._rows(worker).observations
                each_array(np.copyto, observations[buffer], observations[1 - buffer])
                self.buffers[index] = buffer

    def wait_step(self) -> list[Record]:
        """Wait until every worker has stepped. Returns the records of all envs.

        Raises EnvError if an env or a worker failed, and `on_env_error` is "raise", or there were too many restarts.
        """
        deadline = time.monotonic() + self.options.step_timeout_s
        records: list[Record] = []
        first_error: EnvError | None = None
        for worker in self.workers:
            try:
                records += self.wait_worker(worker, deadline)
            except EnvError as error:  # noqa: PERF203 - the other workers have stepped: collect their replies too
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return records

    def wait_worker(self, worker: WorkerProcess, deadline: float) -> list[Record]:
        """Wait for the step of one worker. Returns and raises as `wait_step`."""
        index = worker.settings.worker
        self.stepping.discard(index)
        if index in self._collected:
            return self._collected.pop(index)
        unreported = self._unreported.pop(index, None)
        try:
            records: list[Record] = worker.wait(deadline, self.spin_s) or []
        except WorkerLostError as error:
            self.replace(worker, error)
            return []
        if unreported is not None:
            self._truncate_episodes(worker)
            self._write_state(index, unreported)
        for record in records:
            if record.failure is not None:
                self.seeds[record.env_index] = successor_seed(record.failure.seed)
                self._count_restart(worker, WorkerLostError(record.failure.text, record.failure))
        return records

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> list[Packed]:
        """Reset every env and return the reset infos. Waits for a step that has begun, and drops its results."""
        self._collect_steps()
        self.stepping.clear()
        self._collected.clear()
        if any(seed is not None for seed in seeds):
            self.seeds = list(seeds)
        self.buffers = [0] * self.num_workers
        self.control[:, NOTIFY] = False
        arguments = {i: (seeds[w.first : w.stop], options[w.first : w.stop], 0) for i, w in enumerate(self.workers)}
        self._unreported.clear()
        infos: list[Packed] = []
        for part in self.call("reset", arguments):
            if isinstance(part, Failure):  # the worker cannot unpickle the options
                raise EnvError(f"reset() failed: {part.text}")
            infos += part
        for index, state in self._unreported.items():  # workers that were replaced during this call
            self._write_state(index, state)
        self._unreported.clear()
        return infos

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Call `name` in these workers at the same time, and return their answers in order.

        Waits for steps that have begun, and stores their results for `wait_step`. A worker that fails is replaced and
        called again.

        Raises EnvError if a worker failed, as in `wait_step`.
        """
        payloads = {index: pack((name, args)) for index, args in arguments.items()}
        self._collect_steps()
        deadline = time.monotonic() + self.options.step_timeout_s
        errors: dict[int, WorkerLostError] = {}
        answers: dict[int, Any] = {}
        for index, payload in payloads.items():
            try:
                self.workers[index].call(name, payload, self.options.step_timeout_s)
            except WorkerLostError as error:  # noqa: PERF203 - the other workers must be called all the same
                errors[index] = error
        for index in arguments:
            try:
                if index not in errors:
                    answers[index] = self.workers[index].wait(deadline, self.spin_s)
            except WorkerLostError as error:  # noqa: PERF203
                errors[index] = error
        for index, lost in errors.items():
            answers[index] = self.replace(self.workers[index], lost, stepping=False)
            if name != "reset":  # `replace` has already reset the envs
                answers[index] = self._call_again(index, name, payloads[index])
        return [answers[index] for index in arguments]

    def _collect_steps(self) -> None:
        """Wait for the steps that have begun, and store their records for `wait_worker`."""
        for index in sorted(self.stepping - set(self._collected)):
            deadline = time.monotonic() + self.options.step_timeout_s
            self._collected[index] = self.wait_worker(self.workers[index], deadline)
            self.stepping.add(index)

    def _call_again(self, index: int, name: str, payload: bytes) -> Any:
        worker = self.workers[index]
        try:
            worker.call(name, payload, self.options.step_timeout_s)
            return worker.wait(time.monotonic() + self.options.step_timeout_s)
        except WorkerLostError as error:
            raise self._env_error(worker, error) from error.cause

    def replace(self, worker: WorkerProcess, error: WorkerLostError, stepping: bool = True) -> list[Packed]:
        """Replace a worker that failed. Its episodes end as truncated and lost, in the state before the step.

        If it fails between two steps (`stepping=False`), the arrays do not change. The next step reports the ends of
        these episodes instead of stepping these envs. Returns the infos of the resets.

        Raises EnvError if `on_env_error` is "raise", or there were too many restarts.
        """
        index = worker.settings.worker
        rows = self._rows(worker)
        before = None if stepping else each_array(np.copy, rows)
        while True:
            if self.options.on_env_error == "raise":
                worker.pending = False
                if error.failure is None:  # the worker died or hangs: a late reply could pass for the next one
                    worker.process.kill()
                raise self._env_error(worker, error) from error.cause
            self._count_restart(worker, error)
            worker.kill()
            num_envs = worker.stop - worker.first
            self.workers[index] = worker = WorkerProcess(self.context, self.notify, worker.settings, num_envs)
            try:
                worker.ready(self.options.start_timeout_s)
                self._attach(worker)
                worker.call("reset", self._reset_payload(worker), self.options.step_timeout_s)
                infos: list[Packed] = worker.wait(time.monotonic() + self.options.step_timeout_s)
                break
            except WorkerLostError as next_error:
                error = next_error
        if before is None:
            self._truncate_episodes(worker)
        else:
            self._unreported[index] = each_array(np.copy, (rows.observations[self.buffers[index]], rows.action_masks))
            each_array(np.copyto, rows, before)
        return infos

    def _rows(self, worker: WorkerProcess) -> Arrays:
        rows: Arrays = select_rows(self.arrays, slice(worker.first, worker.stop))
        return rows

    def _write_state(self, index: int, state: tuple[Any, Any]) -> None:
        rows = self._rows(self.workers[index])
        each_array(np.copyto, (rows.observations[self.buffers[index]], rows.action_masks), state)

    def _truncate_episodes(self, worker: WorkerProcess) -> None:
        """Truncate the worker's episodes at the state before the last step, and mark them as `lost`."""
        rows = self._rows(worker)
        rows.rewards[:] = 0.0
        rows.terminations[:] = False
        rows.truncations[:] = rows.lost[:] = True
        rows.info_kinds[:] = ABSENT
        each_array(np.copyto, rows.final_observations, rows.observations[1 - self.buffers[worker.settings.worker]])

    def _reset_payload(self, worker: WorkerProcess) -> bytes:
        """The call that resets a new worker's envs, with other seeds than those of the lost episodes."""
        mine = slice(worker.first, worker.stop)
        self.seeds[mine] = seeds = [successor_seed(seed, failures=31) for seed in self.seeds[mine]]
        return pack(("reset", (seeds, [{}] * len(seeds), self.buffers[worker.settings.worker])))

    def _count_restart(self, worker: WorkerProcess, error: WorkerLostError) -> None:
        asked = error.failure is not None and error.failure.asked
        env = error.failure.env_index if error.failure is not None and asked else ALL
        if too_many := self.replacements.add(ASKED if asked else FAILED, env):
            raise EnvError(f"{too_many}; the last: {self._env_error(worker, error)}") from error.cause

    def _env_error(self, worker: WorkerProcess, error: WorkerLostError) -> EnvError:
        failure, index = error.failure, worker.settings.worker
        row = int(worker.control[ROW]) if failure is None and hasattr(worker, "control") else NO_ROW
        lost = f"failed: {error}; {self.options.restart_hint} goes on without it"
        if row != NO_ROW:  # the worker hung or died in the code of one env
            env = worker.first + row
            seed = "" if self.seeds[env] is None else f", seed {self.seeds[env]}"
            action = f", last action {self.arrays.actions[env]}" if worker.control[COMMAND] == STEP else ""
            return EnvError(f"env {env} (worker {index}{seed}{action}) {lost}")
        if failure is None:
            one, last = worker.stop == worker.first + 1, worker.stop - 1
            return EnvError(f"worker {index} ({f'env {last}' if one else f'envs {worker.first}-{last}'}) {lost}")
        seed = "" if failure.seed is None else f", seed {failure.seed}"
        action = f", last action {failure.action}" if failure.action else ""
        kind = EnvSpecError if failure.is_spec_error else EnvError
        return kind(
            f"env {failure.env_index} (worker {index}{seed}{action}) failed at its step {failure.step}: {failure.text}"
        )

    def close(self) -> None:
        """End all workers within `CLOSE_TIMEOUT_S`, even if they hang."""
        self.close_failed = self._finalizer() or self.close_failed
        self.notify.close()
        if hasattr(self, "_block"):
            self._block.close()


def _close_workers(workers: list[WorkerProcess]) -> str:
    """Close all workers. Returns the error of an env's `close()` as text, or an empty string."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for worker in workers:
        worker.ask_to_end()
    failures = [worker.end(max(0.0, deadline - time.monotonic())) for worker in workers]
    workers.clear()
    return next(filter(None, failures), "")


def _describe(ready: Ready) -> str:
    masks = f"masks of {ready.mask_width}" if ready.mask_width else "no masks"
    return f"({ready.observation_space}, {ready.action_space}, {masks})"
