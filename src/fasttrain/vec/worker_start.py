"""A process that a trainer starts: how it begins, and the line between the two.

Its module is the first of ours that runs there, so it imports nothing heavy: number libraries read their settings on
import.

A signal to the whole group, or to every process of a job, is the trainer's business. A process is deaf to it from its
first instruction on: it inherits a mask that holds SIGINT and SIGTERM back, and lets them through when they do nothing.
With all that its env starts it is a process group of its own, which ends as one.

The line is two semaphores for steps, and a pipe for everything that is no number. A step costs two semaphore operations
and no message. Messages go in pieces small enough that neither side ever blocks inside one: a worker that is stopped or
killed half-way cannot hang the trainer. A semaphore of multiprocessing has a name (/dev/shm/sem.mp-…) until its last
user ends in order; a process group that is killed, as a container's or a job's is, leaves it there for ever. Here the
name goes as soon as both sides have it open.
"""

from __future__ import annotations

import atexit
import multiprocessing.context
import os
import secrets
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from multiprocessing import current_process, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from fasttrain.terminal import let_output_end

if sys.platform != "win32":
    import _multiprocessing  # type: ignore[import-not-found]  # what multiprocessing's own semaphores are made of

# One numeric thread per worker: K workers with C threads each on C cores are several times slower than one thread each.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
     "NUMBA_NUM_THREADS"),
    "1",
)  # fmt: skip


@contextmanager
def inherited(values: Mapping[str, str]) -> Iterator[None]:
    """Child processes started inside inherit these values: a spawned one imports the main script before `start`."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # an env may have cleared them all
            os.environ.update({} if value is None else {name: value})


def hold_signals() -> Any:
    """Hold back SIGINT and SIGTERM from this thread and the processes that it starts from now on; the mask before."""
    if sys.platform == "win32":
        return None
    resource_tracker.ensure_running()  # where it starts later, it lets them through again
    return signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


SAFE_PATH = "PYTHONSAFEPATH"  # from Python 3.11 on: the working directory hides no module of Python's own
OURS = "fasttrain"  # its value, where the user has set none: any text will do


def safe_path() -> AbstractContextManager[None]:
    """Of the processes that are started inside."""
    return inherited({SAFE_PATH: os.environ.get(SAFE_PATH) or OURS})


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started inside must say `belong_to_the_trainer` before a signal can reach them."""
    with safe_path():
        before = hold_signals()
        try:
            yield
        finally:
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(*arguments: object) -> None:
    """Run a worker until it is told to close or the trainer is gone."""
    os.environ.update(ONE_THREAD)  # under start_method=forkserver, one that was there before us has other values
    if "torch" in sys.modules:  # the user's main script imports it
        sys.modules["torch"].set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):  # what an env prints must not wait in a process that may be killed
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    start_function("fasttrain.vec.worker:serve", *arguments)


def start_function(place: str, *arguments: object) -> None:
    """Call `module:function`, imported here: that takes seconds, within which the trainer may be killed."""
    belong_to_the_trainer()
    let_output_end()
    module, _, name = place.partition(":")
    getattr(import_module(module), name)(*arguments)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(0)  # an env's threads, which the interpreter would wait for
    end_at_once()


def belong_to_the_trainer() -> None:
    """From here on signals do nothing, and the trainer's end is the end of this process and of all that it starts."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]  # what an env starts begins as everywhere
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A program that an env starts inherits what is ignored, but not a handler: its `terminate()` must work.
    signal.signal(signal.SIGTERM, _do_nothing)
    current_process().daemon = False  # an env may have a pool of processes
    if sys.platform != "win32":
        _let_sigterm_end_forks()
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a group in the background may print, whatever `stty` says
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    if not _die_with_the_trainer():
        threading.Thread(target=_end_with_the_trainer, name="fasttrain-parent-watch", daemon=True).start()


def end_at_once() -> None:
    """When all has been closed: taking the interpreter's modules down is 0.6 s of waiting for nothing."""
    atexit.register(os._exit, 0)


def _do_nothing(number: int, frame: object) -> None:
    """A handler, where SIG_IGN would be inherited."""


def _let_sigterm_end_forks() -> None:
    """`terminate()` is how a pool ends a process that it has forked, be it a moment ago: until then it waits."""

    def obey() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hear()

    def hear() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    os.register_at_fork(before=wait, after_in_parent=hear, after_in_child=obey)


def _die_with_the_trainer() -> bool:
    """Let Linux kill this process's group when the trainer's end of the pipe between them closes; False elsewhere.

    It need not run for that: an env may hold the interpreter in a long call, the process may be stopped, or have ended
    and left others behind. PR_SET_PDEATHSIG would not do: it tells of the end of the thread that started it.
    """
    parent = parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return False
    import fcntl

    pipe = parent.sentinel
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, 10, signal.SIGKILL)  # F_SETSIG, which Python does not name
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    if wait([pipe], 0):  # it ended before
        os._exit(1)
    return True


def _end_with_the_trainer() -> None:
    """Wait for the end of the trainer's process, in a thread that costs nothing: a worker in a long step ends too."""
    parent = parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# --- the line

_COUNTING = 1  # multiprocessing's own word for "semaphore, no mutex"
_MOST = 2**15 - 1  # the least that POSIX lets a semaphore count


class NamelessSemaphore:
    """Of one trainer and one process that it starts; POSIX. `acquire(block, timeout)` and `release()` of the C class.

    The started process takes the name away when it opens it, a forked one needs none.
    """

    def __init__(self, context: multiprocessing.context.BaseContext) -> None:
        name, forked = f"/ft-{secrets.token_hex(8)}", context.get_start_method() == "fork"
        self._lock: Any = _multiprocessing.SemLock(_COUNTING, 0, _MOST, name, forked)
        self._take_methods()
        if not forked:
            with safe_path():  # the tracker may begin here
                resource_tracker.register(name, "semaphore")  # for a trainer that is killed before the other opens it
        self.name_gone: Any = (lambda: None) if forked else Finalize(self, _forget, (name,), exitpriority=0)

    def _take_methods(self) -> None:
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __getstate__(self) -> tuple[Any, ...]:
        multiprocessing.context.assert_spawning(self)
        return self._lock.handle, self._lock.kind, self._lock.maxvalue, self._lock.name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._lock = _multiprocessing.SemLock._rebuild(*state)
        _unlink(state[3])
        self._take_methods()


def make_semaphore(context: multiprocessing.context.BaseContext) -> Any:
    """One that counts from 0, to be handed to a process of this start method."""
    return context.Semaphore(0) if sys.platform == "win32" else NamelessSemaphore(context)


def opened(semaphore: Any) -> None:
    """The started process has it: nothing is left to be taken away."""
    if isinstance(semaphore, NamelessSemaphore):
        semaphore.name_gone()


def _unlink(name: str) -> None:
    with suppress(FileNotFoundError):
        _multiprocessing.sem_unlink(name)


def _forget(name: str) -> None:
    _unlink(name)
    resource_tracker.unregister(name, "semaphore")


class Bell:
    """Rung by any of several processes, heard by the one that made it; those started later may ring it too.

    A pipe, because a semaphore that has no name can be handed to nobody any more. Ringing takes 2 µs, hearing 3.
    """

    def __init__(self, context: Any) -> None:
        self._heard, self._rung = context.Pipe(duplex=False)
        self._poller: select.poll | None = None
        if sys.platform != "win32":
            self._poller = select.poll()  # Connection.poll makes one every time, 10 µs
            self._poller.register(self._heard.fileno(), select.POLLIN)
            os.set_blocking(self._rung.fileno(), False)  # for all who have this end

    def release(self) -> None:
        """Ring. One more is not heard where thousands wait to be."""
        with suppress(BlockingIOError):
            self._rung.send_bytes(b"\0")

    def acquire(self, block: bool = True, timeout_s: float = 0.0) -> bool:
        """Whether it was rung once more than heard; with `block` waits for that, `timeout_s` at most."""
        wait_s = timeout_s if block else 0.0
        if not (self._heard.poll(wait_s) if self._poller is None else self._poller.poll(1000 * wait_s)):
            return False
        self._heard.recv_bytes()
        return True

    def hush(self) -> None:
        """Forget what was rung so far."""
        while self.acquire(block=False):
            pass

    def close(self) -> None:
        """Give both ends back."""
        if self._heard is not None:
            self._heard.close()
        self._rung.close()

    def __getstate__(self) -> object:
        return self._rung

    def __setstate__(self, state: object) -> None:
        self._heard, self._rung = None, state


PIECE_BYTES = 4096  # written whole or not at all: PIPE_BUF, and one buffer of a local socket
_LENGTH = struct.Struct("<Q")
_POLL_S = 0.1


class DeadlineError(Exception):
    """The other side did not read or write in time."""


class Channel(NamedTuple):
    """One end."""

    connection: Connection
    go: Any  # a semaphore, trainer → worker: a request is posted
    done: Any  # a semaphore, worker → trainer: the reply stands

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Send `payload`.

        Raises:
            DeadlineError: the other side does not read.
            OSError: it is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        whole = _LENGTH.pack(len(payload)) + payload
        for begin in range(0, len(whole), PIECE_BYTES):
            self._until_writable(deadline)
            self.connection.send_bytes(whole[begin : begin + PIECE_BYTES])

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next payload.

        Raises:
            DeadlineError: it did not come in time.
            EOFError, OSError: the other side is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        first = self._piece(deadline)
        (length,) = _LENGTH.unpack_from(first)
        pieces, missing = [first[_LENGTH.size :]], length + _LENGTH.size - len(first)
        while missing > 0:
            pieces.append(self._piece(deadline))
            missing -= len(pieces[-1])
        return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    def _piece(self, deadline: float | None) -> bytes:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self.connection.poll(left):
            raise DeadlineError
        return self.connection.recv_bytes(PIECE_BYTES)

    def _until_writable(self, deadline: float | None) -> None:
        if deadline is None or sys.platform == "win32":  # Windows: pipes cannot be polled for writing
            return
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLOUT)
        while not poller.poll(1000 * _POLL_S):
            if time.monotonic() > deadline:
                raise DeadlineError


def acquire(semaphore: Any, spin_s: float, timeout_s: float | None = None) -> bool:
    """Take `semaphore`: look for `spin_s` without giving the core away, then sleep. False after `timeout_s`."""
    if semaphore.acquire(False):
        return True
    until = time.perf_counter() + spin_s
    while time.perf_counter() < until:
        if semaphore.acquire(False):
            return True
    return bool(semaphore.acquire(True, timeout_s))
