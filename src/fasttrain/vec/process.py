"""Worker processes as the trainer sees them: started, spoken to with a deadline, ended, whatever their envs do.

A `Scout` is one before there is a crew. It tries an env for the trainer, and may then be the first worker: what an env
does to its process (it hangs, ends it, dies, eats the memory) ends no trainer, which can say what it was.
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
from fasttrain.vec.worker import CALL, CLOSE, FAILED, NO_MAIL, RESULT, STEP, Ready, TakeOn, pack
from fasttrain.vec.worker_envs import Failure, Settings
from fasttrain.vec.worker_memory import COMMAND, MAIL, NO_ROW, REPLY, REQUEST, ROW, STEP_NS, Layout, SharedBlock
from fasttrain.vec.worker_start import (
    ONE_THREAD,
    Bell,
    Channel,
    DeadlineError,
    acquire,
    inherited,
    make_semaphore,
    opened,
    signals_held,
    start,
    start_function,
)

# Forking a process with threads (torch, CUDA) can deadlock, and a fork server is one process more that a signal to the
# group ends: with it every worker looks dead. What it would save is 20 ms of 1 s; the imports are each worker's own.
START_METHOD = "spawn"
LOOK_EVERY_S = 0.1  # whether a worker that is waited for still lives
T = TypeVar("T")


class WorkerTraceback(Exception):  # noqa: N818 - shown as the cause, as concurrent.futures does with its own
    """The traceback in the worker process, as text."""


class WorkerLostError(Exception):
    """A worker died, hangs, or reported a failure that it cannot mend. `failure` says where, if that is known."""

    def __init__(self, reason: str, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.failure = failure

    @property
    def cause(self) -> Exception:
        """What to raise an error from."""
        return WorkerTraceback(f"\n{self.failure.traceback}") if self.failure else self


class UnreadableError(WorkerLostError):
    """Its message came whole, but its classes cannot be loaded here."""


class WorkerProcess:
    """Envs `first` to `stop` of the vector env. One request at a time: `post` or `call`, then `wait`.

    Without settings it runs errands until it is `take_on`.
    """

    settings: Settings
    first: int
    stop: int

    def __init__(self, context: Any, notify: Bell, settings: Settings | None, num_envs: int) -> None:
        if settings is not None:
            self._has(settings, num_envs)
        self.pending = False
        ours, theirs = context.Pipe(duplex=True)
        go, done = make_semaphore(context), make_semaphore(context)
        self.channel = Channel(ours, go, done)
        self.process = context.Process(
            target=start, args=(Channel(theirs, go, done), notify, settings), daemon=True,
            name=f"fasttrain-worker-{0 if settings is None else settings.worker}",
        )  # fmt: skip
        with inherited(ONE_THREAD), signals_held():
            self.process.start()
        theirs.close()
        # A worker ignores SIGTERM, and multiprocessing's own exit handler would wait for it for ever: kill it before.
        self._at_exit = Finalize(self, kill_group, (self.process,), exitpriority=50)

    def _has(self, settings: Settings, num_envs: int) -> None:
        self.settings = settings
        self.first, self.stop = settings.first, settings.first + num_envs

    def take_on(self, settings: Settings, num_envs: int, keeps: bool, timeout_s: float) -> None:
        """Give it its envs, after errands; with `keeps` it continues the one that it has."""
        self._has(settings, num_envs)
        with suppress(DeadlineError, OSError):  # `ready` says what became of it
            self.channel.send(pack(TakeOn(settings, keeps)), timeout_s)

    def ready(self, timeout_s: float) -> Ready:
        """The spaces of its envs, once they are built. Raises WorkerLostError: they could not be, or not in time."""
        answer = self.receive(timeout_s, "building its envs")
        opened(self.channel.go)
        opened(self.channel.done)
        if isinstance(answer, Failure):
            raise WorkerLostError(answer.text, answer)
        return answer  # type: ignore[no-any-return]

    def attach(self, layout: Layout, block: SharedBlock, control: Int64Array, timeout_s: float) -> None:
        """Give it the memory. `control` is the worker's row of control words."""
        control[:STEP_NS] = 0  # what a worker before this one spent stays counted
        control[ROW] = NO_ROW
        self.control = control
        try:
            self.channel.send(pack(layout), timeout_s)
            block.send(self.channel.connection)
        except DeadlineError as error:
            raise WorkerLostError("it did not read in time, mapping its memory") from error
        except OSError as error:
            raise WorkerLostError(self._state("mapping its memory")) from error
        self.receive(timeout_s, "mapping its memory")

    def post(self, command: int = STEP) -> None:
        """Start a step (or close). Costs one semaphore."""
        self.control[REQUEST] += 1
        self.control[COMMAND] = command
        self.pending = True
        self.channel.go.release()

    def call(self, name: str, payload: bytes, timeout_s: float) -> None:
        """Start a call of the worker's `_call_NAME`; `wait` has the answer. `payload` is `pack((name, arguments))`."""
        self.post(CALL)
        try:
            self.channel.send(payload, timeout_s)
        except DeadlineError as error:
            raise WorkerLostError(f"it did not read in time, called for {name}") from error
        except OSError as error:
            raise WorkerLostError(self._state(f"called for {name}")) from error

    def replied(self) -> bool:
        """Whether the reply to the last request stands; does not wait."""
        return bool(self.control[REPLY] == self.control[REQUEST])

    def wait(self, deadline: float, spin_s: float = 0.0) -> Any:
        """The mail of a step (None if none came), or the result of a call; `deadline` by `time.monotonic`.

        Raises:
            WorkerLostError: it died, missed the deadline, or reported a failure.
        """
        done = self.channel.done
        if not acquire(done, spin_s, LOOK_EVERY_S):
            while not done.acquire(True, LOOK_EVERY_S):
                if not self.process.is_alive() and not done.acquire(False):
                    raise WorkerLostError(self._state())
                if time.monotonic() > deadline:
                    raise WorkerLostError("it did not answer in time")
        self.pending = False
        if not self.replied():
            raise WorkerLostError("it answered out of turn")
        kind = self.control[MAIL]
        if kind == NO_MAIL:
            return None
        try:
            answer = self.receive(max(1.0, deadline - time.monotonic()), "answering")
        except UnreadableError as error:
            if kind == RESULT:  # of a class that only exists over there: the worker goes on
                return Failure(0, str(error), "")
            raise WorkerLostError(str(error)) from error
        if kind == FAILED:
            raise WorkerLostError(answer.text, answer)
        return answer

    def ask_to_end(self) -> None:
        """Let it close its envs, if it listens."""
        with suppress(OSError, ValueError):
            if hasattr(self, "control") and not self.pending and self.process.is_alive():
                self.post(CLOSE)

    def end(self, timeout_s: float) -> str:
        """Wait for its end; kill it when that does not come. One that is busy with a request is killed at once.

        What an env's `close()` raised there, in words.
        """
        failed = ""
        with suppress(ValueError, WorkerLostError):
            if hasattr(self, "control") and self.pending and self.control[COMMAND] == CLOSE:
                failed = str(self.receive(timeout_s, "closing its envs"))
                ended(self.process, timeout_s)
        self.kill()
        return failed

    def kill(self) -> None:
        """End it at once, and all that its envs started."""
        self._at_exit()
        self.channel.connection.close()

    def receive(self, timeout_s: float, doing: str) -> Any:
        """Its next message. Raises WorkerLostError: it died, or sent none in time."""
        try:
            payload = self.channel.receive(timeout_s)
        except DeadlineError:
            raise WorkerLostError(f"it did not answer in {timeout_s:.3g} s, {doing}") from None
        except (EOFError, OSError) as error:
            ended(self.process, 1.0)
            raise WorkerLostError(self._state(doing)) from error
        try:
            return pickle.loads(payload)
        except Exception as error:
            raise UnreadableError(f"what it sent cannot be read in the trainer: {error}") from error

    def _state(self, doing: str = "stepping") -> str:
        """ "it was killed by SIGKILL, stepping"."""
        ended(self.process, 0.1)
        code = self.process.exitcode
        if code is None:
            return f"its pipe broke, {doing}"
        if code >= 0:
            return f"it ended with exit code {code}, {doing}"
        with suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}, {doing}"
        return f"it was killed by signal {-code}, {doing}"


class PipedProcess:
    """One that plays for the trainer: `place`, module:function, is called there with an end of a pipe and `arguments`.
    `environment` is added to the trainer's."""

    _context: Any = multiprocessing.get_context(START_METHOD)
    _lost: Callable[[str], Exception] = WorkerLostError

    def __init__(self, name: str, place: str, *arguments: object, environment: Mapping[str, str] = ONE_THREAD) -> None:
        self.name = name
        self.connection, theirs = self._context.Pipe(duplex=True)
        self.process = self._context.Process(target=start_function, args=(place, theirs, *arguments), daemon=True)
        with inherited(environment), signals_held():
            self.process.start()
        theirs.close()
        self._at_exit = Finalize(self, kill_group, (self.process,), exitpriority=50)

    def said(self, speak: Callable[[], T]) -> T:
        """What came of speaking over the connection.

        Raises:
            WorkerLostError: it is gone (an EnvError where it plays for a training).
        """
        try:
            return speak()
        except (EOFError, OSError) as error:
            ended(self.process, 1.0)
            raise self._lost(f"{self.name} ended with exit code {self.process.exitcode}: {error!r}") from error

    def end(self, timeout_s: float) -> None:
        """Close its pipe, at which it ends by itself, and kill it with all that it started after `timeout_s`."""
        self.connection.close()
        if self._at_exit.still_active():
            ended(self.process, timeout_s)
            self._at_exit()


def ended(process: BaseProcess, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for the process to end; whether it did. `join` would wait for its envs' children too."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while process.is_alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


def kill_group(process: Any) -> None:
    """End a process that `belong_to_the_trainer` was said in, dead or alive, and all that it started."""
    with suppress(ValueError, AttributeError):  # closed already
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):  # nobody is left, or it had not come so far
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        ended(process, 5.0)
        process.close()


SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
MEMORY_BYTES = 4096


class ScoutLostError(WorkerLostError):
    """The process is gone. `exit_code` as of multiprocessing: -11 for signal 11, None if it is not known."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process ended with exit code {exit_code}")
        self.exit_code = exit_code


class Scout:
    """One process with one env at most, and memory that it and the trainer share."""

    def __init__(self, start_method: str | None = None) -> None:
        self.context = multiprocessing.get_context(start_method or START_METHOD)
        self.notify = Bell(self.context)
        self.keeps = False  # whether its env is to be the crew's first
        self._block = SharedBlock(MEMORY_BYTES)
        self.memory = self._block.memory
        self._worker: WorkerProcess | None = WorkerProcess(self.context, self.notify, None, 0)
        with suppress(OSError):  # it is gone already: the first errand says so
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

    def ask(self, errand: Callable[[Any, list[Any]], Any], look: Callable[[], None]) -> Any:
        """Let it do `errand(memory, kept)`; the answer. `look` is called ten times a second until that comes.

        Raises:
            ScoutLostError: it died.
            WorkerLostError: the errand raised; `failure` says what. Or what came cannot be read here.
            anything that `look` raises: the process is killed then.
        """
        worker, self._idle = self._ours, False
        try:
            with suppress(DeadlineError, OSError):
                worker.channel.send(pack(errand), SEND_TIMEOUT_S)
            while not worker.channel.connection.poll(LOOK_EVERY_S):
                look()
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
        """The process, as the worker of `settings`: it belongs to the crew from here on."""
        worker, self._worker = self._ours, None
        self._block.close()
        worker.take_on(settings, num_envs, self.keeps, SEND_TIMEOUT_S)
        return worker

    def close(self) -> None:
        """Let it close its env and end; a busy one is killed. Nothing happens to one that was handed over."""
        if self._worker is None:
            return
        worker = self._worker
        if self._idle:
            with suppress(DeadlineError, OSError, ValueError):
                worker.channel.send(pack(None), SEND_TIMEOUT_S)
                worker.process.join(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            self.notify.close()
            self._block.close()
