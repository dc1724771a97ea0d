"""The trainer's side of a worker process: start it, send requests with a deadline, and end it in any case.

A `Scout` is a worker process that tries an env before training begins, and may become the first worker. An env may
hang, crash or fill the memory in the scout's process: the trainer goes on and reports it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from fasttrain.batch import Int64Array
from fasttrain_vec.worker import CALL, CLOSE, FAILED, NO_MAIL, RESULT, STEP, Assignment, Ready, pack
from fasttrain_vec.worker_envs import Failure, Settings
from fasttrain_vec.worker_memory import COMMAND, MAIL, NO_ROW, REPLY, REQUEST, ROW, STEP_NS, Layout, SharedBlock
from fasttrain_vec.worker_start import (
    ONE_THREAD,
    Bell,
    Channel,
    DeadlineError,
    acquire,
    child_environment,
    forget_name,
    make_semaphore,
    signals_held,
    start,
    start_function,
)

# "fork" can deadlock in a process with threads (torch, CUDA). "forkserver" would save only 20 ms of the 1 s that a
# start takes. Its server ends if the process group gets a signal, and then every worker looks dead.
START_METHOD = "spawn"
POLL_EVERY_S = 0.1  # how often to check whether a worker is alive while waiting for it
T = TypeVar("T")


class WorkerTraceback(Exception):  # noqa: N818 - shown as the cause, like concurrent.futures' class of this kind
    """The traceback in the worker process, as text."""


class WorkerLostError(Exception):
    """A worker died, hangs, or reported a failure that it cannot repair itself.

    Attributes:
        failure: the worker's report, if it sent one.
    """

    def __init__(self, reason: str, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.failure = failure

    @property
    def cause(self) -> Exception:
        return WorkerTraceback(f"\n{self.failure.traceback}") if self.failure else self


class UnreadableError(WorkerLostError):
    """A worker's message arrived, but a class in it cannot be imported here."""


class WorkerProcess:
    """The process with the envs `first` to `stop` (exclusive) of the vector env.

    It serves one request at a time: `post` or `call`, then `wait`. Without settings it runs tasks until `assign`.
    """

    settings: Settings
    first: int
    stop: int

    def __init__(self, context: Any, notify: Bell, settings: Settings | None, num_envs: int) -> None:
        if settings is not None:
            self._set_envs(settings, num_envs)
        self.pending = False
        ours, theirs = context.Pipe(duplex=True)
        go, done = make_semaphore(context), make_semaphore(context)
        self.channel = Channel(ours, go, done)
        self.process = context.Process(
            target=start, args=(Channel(theirs, go, done), notify, settings), daemon=True,
            name=f"fasttrain-worker-{0 if settings is None else settings.worker}",
        )  # fmt: skip
        with child_environment(ONE_THREAD), signals_held():
            self.process.start()
        theirs.close()
        # Workers ignore SIGTERM: multiprocessing's own exit handler would wait for ever. So kill the worker first.
        self._at_exit = Finalize(self, kill_group, (self.process,), exitpriority=50)

    def _set_envs(self, settings: Settings, num_envs: int) -> None:
        self.settings = settings
        self.first, self.stop = settings.first, settings.first + num_envs

    def assign(self, settings: Settings, num_envs: int, keeps: bool, timeout_s: float) -> None:
        """Assign envs to a process that ran tasks. `keeps`: the env that the tasks built becomes the first env."""
        self._set_envs(settings, num_envs)
        with suppress(DeadlineError, OSError):  # the method `ready` raises this error later
            self.channel.send(pack(Assignment(settings, keeps)), timeout_s)

    def ready(self, timeout_s: float) -> Ready:
        """Wait until the worker's envs are built. Raises WorkerLostError if building failed, or took too long."""
        answer = self.receive(timeout_s, "building its envs")
        forget_name(self.channel.go)
        forget_name(self.channel.done)
        if isinstance(answer, Failure):
            raise WorkerLostError(answer.text, answer)
        return answer  # type: ignore[no-any-return]

    def attach(self, layout: Layout, block: SharedBlock, control: Int64Array, timeout_s: float) -> None:
        """Send the shared memory to the worker. `control` is the worker's row of control words."""
        control[:STEP_NS] = 0  # words from STEP_NS on are sums, which go on after a worker was replaced
        control[ROW] = NO_ROW
        self.control = control
        try:
            self.channel.send(pack(layout), timeout_s)
            block.send(self.channel.connection)
        except DeadlineError as error:
            raise WorkerLostError("it did not read the layout of its memory in time") from error
        except OSError as error:
            raise WorkerLostError(self._state("mapping its memory")) from error
        self.receive(timeout_s, "mapping its memory")

    def post(self, command: int = STEP) -> None:
        """Start a request without arguments. It costs one semaphore operation."""
        self.control[REQUEST] += 1
        self.control[COMMAND] = command
        self.pending = True
        self.channel.go.release()

    def call(self, name: str, payload: bytes, timeout_s: float) -> None:
        """Start a call of the worker's `_call_NAME`. `wait` returns the answer. `payload` is `pack((name, args))`."""
        self.post(CALL)
        try:
            self.channel.send(payload, timeout_s)
        except DeadlineError as error:
            raise WorkerLostError(f"it did not read the call of {name} in time") from error
        except OSError as error:
            raise WorkerLostError(self._state(f"calling {name}")) from error

    def has_replied(self) -> bool:
        """Whether the last request has been answered. Does not wait."""
        return bool(self.control[REPLY] == self.control[REQUEST])

    def wait(self, deadline: float, spin_s: float = 0.0) -> Any:
        """Wait for the answer: the records of a step (None if there are none), or the result of a call.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            WorkerLostError: the worker died, missed the deadline, or reported a failure.
        """
        done = self.channel.done
        if not acquire(done, spin_s, POLL_EVERY_S):
            while not done.acquire(True, POLL_EVERY_S):
                if not self.process.is_alive() and not done.acquire(False):
                    raise WorkerLostError(self._state())
                if time.monotonic() > deadline:
                    raise WorkerLostError("it did not answer in time")
        self.pending = False
        if not self.has_replied():
            raise WorkerLostError("it answered another request")
        kind = self.control[MAIL]
        if kind == NO_MAIL:
            return None
        try:
            answer = self.receive(max(1.0, deadline - time.monotonic()), "answering")
        except UnreadableError as error:
            if kind == RESULT:  # the result has a class that only the worker can import; the worker goes on
                return Failure(0, str(error), "")
            raise WorkerLostError(str(error)) from error
        if kind == FAILED:
            raise WorkerLostError(answer.text, answer)
        return answer

    def ask_to_end(self) -> None:
        """Ask the worker to close its envs, unless it is busy or dead."""
        with suppress(OSError, ValueError):
            if hasattr(self, "control") and not self.pending and self.process.is_alive():
                self.post(CLOSE)

    def end(self, timeout_s: float) -> str:
        """After `ask_to_end`: wait up to `timeout_s` for the worker's end, then kill it. Kill a busy worker at once.

        Returns the error of an env's `close()` as text, or an empty string.
        """
        failure = ""
        with suppress(ValueError, WorkerLostError):
            if hasattr(self, "control") and self.pending and self.control[COMMAND] == CLOSE:
                failure = str(self.receive(timeout_s, "closing its envs"))
                wait_for_end(self.process, timeout_s)
        self.kill()
        return failure

    def kill(self) -> None:
        """Kill the worker, and all processes that its envs started."""
        self._at_exit()
        self.channel.connection.close()

    def receive(self, timeout_s: float, doing: str) -> Any:
        """The worker's next message. Raises WorkerLostError if the worker died, or sent no message in time."""
        try:
            payload = self.channel.receive(timeout_s)
        except DeadlineError:
            raise WorkerLostError(f"it did not answer in {timeout_s:.3g} s, {doing}") from None
        except (EOFError, OSError) as error:
            wait_for_end(self.process, 1.0)
            raise WorkerLostError(self._state(doing)) from error
        try:
            return pickle.loads(payload)
        except Exception as error:
            raise UnreadableError(f"what it sent cannot be read in the trainer: {error}") from error

    def _state(self, doing: str = "stepping") -> str:
        """How the process ended, as text: "it was killed by SIGKILL, stepping"."""
        wait_for_end(self.process, 0.1)
        code = self.process.exitcode
        if code is None:
            return f"its pipe broke, {doing}"
        if code >= 0:
            return f"it ended with exit code {code}, {doing}"
        with suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}, {doing}"
        return f"it was killed by signal {-code}, {doing}"


class PipedProcess:
    """A process with a pipe to the trainer, for evaluations and for games with engines.

    Args:
        name: for messages.
        place: `module:function`. The process calls it with the process's end of the pipe and `arguments`.
        environment: environment variables to set besides those of the trainer.
    """

    _context: Any = multiprocessing.get_context(START_METHOD)
    _lost: Callable[[str], Exception] = WorkerLostError

    def __init__(self, name: str, place: str, *arguments: object, environment: Mapping[str, str] = ONE_THREAD) -> None:
        self.name = name
        self.connection, theirs = self._context.Pipe(duplex=True)
        self.process = self._context.Process(target=start_function, args=(place, theirs, *arguments), daemon=True)
        with child_environment(environment), signals_held():
            self.process.start()
        theirs.close()
        self._at_exit = Finalize(self, kill_group, (self.process,), exitpriority=50)

    def use_pipe(self, action: Callable[[], T]) -> T:
        """Run `action`, which uses the connection, and return its result.

        Raises WorkerLostError if the process has ended. `GamesProcess` raises an EnvError instead.
        """
        try:
            return action()
        except (EOFError, OSError) as error:
            wait_for_end(self.process, 1.0)
            raise self._lost(f"{self.name} ended with exit code {self.process.exitcode}: {error!r}") from error

    def end(self, timeout_s: float) -> None:
        """Close the pipe, so that the process ends. After `timeout_s` kill it and all that it started."""
        self.connection.close()
        if self._at_exit.still_active():
            wait_for_end(self.process, timeout_s)
            self._at_exit()


def wait_for_end(process: BaseProcess, timeout_s: float) -> bool:
    """Wait for the process to end. Returns False after `timeout_s`.

    Unlike `join`, it does not wait for child processes of the envs, which inherit the process's pipe.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while process.is_alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


def kill_group(process: Any) -> None:
    """Kill a process that has called `bind_to_trainer`, and all that it started, even if the process has ended."""
    with suppress(ValueError, AttributeError):  # the process object is closed already
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):  # the group has ended or does not exist yet
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        wait_for_end(process, 5.0)
        process.close()


SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
MEMORY_BYTES = 4096


class ScoutLostError(WorkerLostError):
    """The scout's process has ended.

    Attributes:
        exit_code: as in multiprocessing: -11 for signal 11, None if it is unknown.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process ended with exit code {exit_code}")
        self.exit_code = exit_code


class Scout:
    """A worker process that tries one env. It shares `memory` with the trainer."""

    def __init__(self, start_method: str | None = None) -> None:
        self.context = multiprocessing.get_context(start_method or START_METHOD)
        self.notify = Bell(self.context)
        self.keeps = False  # whether the scout's env becomes the first env of the vector env
        self._block = SharedBlock(MEMORY_BYTES)
        self.memory = self._block.memory
        self._worker: WorkerProcess | None = WorkerProcess(self.context, self.notify, None, 0)
        with suppress(OSError):  # if the process has ended already, the first task reports this
            self._block.send(self._worker.channel.connection)
        self._idle = True

    @property
    def pid(self) -> int:
        return int(self._ours.process.pid)

    @property
    def _ours(self) -> WorkerProcess:
        if self._worker is None:
            raise RuntimeError("this scout belongs to a crew, or is closed")
        return self._worker

    def run(self, task: Callable[[Any, list[Any]], Any], watch: Callable[[], None]) -> Any:
        """Run `task(memory, envs)` in the process, and return its result. `watch` is called ten times a second.

        Raises:
            ScoutLostError: the process died.
            WorkerLostError: the task raised (see `failure`), or its result cannot be unpickled here.
            Exception: any that `watch` raises; the process is killed then.
        """
        worker, self._idle = self._ours, False
        try:
            with suppress(DeadlineError, OSError):
                worker.channel.send(pack(task), SEND_TIMEOUT_S)
            while not worker.channel.connection.poll(POLL_EVERY_S):
                watch()
                if not worker.process.is_alive() and not worker.channel.connection.poll(0):
                    raise self._lost()
            answer = worker.receive(SEND_TIMEOUT_S, "answering")
        except WorkerLostError as error:
            if not worker.process.is_alive():
                raise self._lost() from error
            raise
        except BaseException:
            self.kill()
            raise
        self._idle = True
        if isinstance(answer, Failure):
            raise WorkerLostError(answer.text, answer)
        return answer

    def _lost(self) -> ScoutLostError:
        self._ours.process.join(1.0)
        lost = ScoutLostError(self._ours.process.exitcode)
        self.kill()
        return lost

    def hand_over(self, settings: Settings, num_envs: int) -> WorkerProcess:
        """Turn the process into a worker. The caller must end this worker."""
        worker, self._worker = self._ours, None
        self._block.close()
        worker.assign(settings, num_envs, self.keeps, SEND_TIMEOUT_S)
        return worker

    def close(self) -> None:
        """Close the env and end the process. A busy process is killed. Has no effect after `hand_over`."""
        if self._worker is None:
            return
        worker = self._worker
        if self._idle:
            with suppress(DeadlineError, OSError, ValueError):
                worker.channel.send(pack(None), SEND_TIMEOUT_S)
                worker.process.join(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            self.notify.close()
            self._block.close()
