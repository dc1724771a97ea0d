"""How a worker process starts, and how trainer and worker communicate.

This module is the first code of fasttrain that runs in a worker. It imports nothing heavy, because numeric libraries
read their settings on import.

Signals: only the trainer reacts to a signal that is sent to the whole process group or to every process of a job. A
worker inherits a mask that blocks SIGINT and SIGTERM, and unblocks both once its handlers ignore them. A worker and all
processes that its env starts form a process group of their own, which is killed as a whole.

Communication: two semaphores for steps, and a pipe for all other data. A step costs two semaphore operations and no
message. Messages are sent in small pieces, and neither side waits while it writes or reads a piece: a worker that is
stopped or killed in the middle cannot hang the trainer.

A semaphore of multiprocessing has a name (/dev/shm/sem.mp-…) until its last user ends normally. When a process group is
killed, as with a container or a job, the name is never removed. So fasttrain removes the name as soon as
both processes have opened the semaphore.
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

# One numeric thread per worker: on C cores, K workers with C threads each are several times slower than K with one.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
     "NUMBA_NUM_THREADS"),
    "1",
)  # fmt: skip


@contextmanager
def child_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the child processes that are started inside the block.

    They must be set before the start, because a spawned process imports the user's main script before it calls `start`.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # `pop`, because an env may have removed the variable
            os.environ.update({} if value is None else {name: value})


def hold_signals() -> Any:
    """Block SIGINT and SIGTERM in this thread and in processes that it starts from now on. Returns the old mask."""
    if sys.platform == "win32":
        return None
    resource_tracker.ensure_running()  # started first, because its start unblocks the signals
    return signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


SAFE_PATH = "PYTHONSAFEPATH"  # since Python 3.11: files in the working directory cannot hide Python's own modules
OURS = "fasttrain"  # fasttrain's value of PYTHONSAFEPATH; Python accepts any text


def safe_path() -> AbstractContextManager[None]:
    """Processes started inside the block run with PYTHONSAFEPATH."""
    return child_environment({SAFE_PATH: os.environ.get(SAFE_PATH) or OURS})


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started inside the block get no signal until they call `bind_to_trainer`."""
    with safe_path():
        before = hold_signals()
        try:
            yield
        finally:
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(*arguments: object) -> None:
    """Run a worker until it is asked to close, or until the trainer has ended."""
    os.environ.update(ONE_THREAD)  # a fork server that was started earlier may have other values
    if "torch" in sys.modules:  # the user's main script may have imported it
        sys.modules["torch"].set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):  # line by line: else output of an env is lost when the process is killed
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    start_function("fasttrain_vec.worker:serve", *arguments)


def start_function(place: str, *arguments: object) -> None:
    """Call `module:function`. `bind_to_trainer` is called before the import, which takes seconds."""
    bind_to_trainer()
    let_output_end()
    module, _, name = place.partition(":")
    getattr(import_module(module), name)(*arguments)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(0)  # a normal exit would wait for the threads of an env
    skip_shutdown()


def bind_to_trainer() -> None:
    """From now on ignore signals. When the trainer ends, this process and all that it started are killed."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]  # programs that an env starts shall not inherit it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not SIG_IGN: a program that an env starts would inherit it, and `terminate()` would not end it. A handler is not
    # inherited.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    current_process().daemon = False  # an env may have a pool of processes
    if sys.platform != "win32":
        _let_sigterm_end_forks()
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process group may print, even with `stty tostop`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    if not _die_with_the_trainer():
        threading.Thread(target=_end_with_the_trainer, name="fasttrain-parent-watch", daemon=True).start()


def skip_shutdown() -> None:
    """End the process without the interpreter's shutdown, which takes 0.6 s. Close everything before."""
    atexit.register(os._exit, 0)


def _let_sigterm_end_forks() -> None:
    """Let SIGTERM end processes that this process forks: a process pool ends them by `terminate()`.

    SIGTERM is blocked during a fork, so that a SIGTERM right after the fork waits until the child's handler is set.
    """

    def in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_child)


def _die_with_the_trainer() -> bool:
    """Let Linux kill this process group when the trainer's end of the pipe between them closes. False: not Linux.

    The kernel sends the signal, so that it works even if an env holds the interpreter in a long call, or if this
    process is stopped. PR_SET_PDEATHSIG would not do: it reacts to the end of the thread that started the process.
    """
    parent = parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return False
    import fcntl

    pipe = parent.sentinel
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, 10, signal.SIGKILL)  # 10 is F_SETSIG, which Python does not define
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    if wait([pipe], 0):  # the trainer has ended already
        os._exit(1)
    return True


def _end_with_the_trainer() -> None:
    """Wait in a thread for the end of the trainer, then kill this process group, even during a long step."""
    parent = parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# --- communication

_COUNTING = 1  # multiprocessing's number for a counting semaphore
_MOST = 2**15 - 1  # the highest count that POSIX guarantees


class NamelessSemaphore:
    """A semaphore of the trainer and one process that it starts, on POSIX systems.

    `acquire(block, timeout)` and `release()` are those of multiprocessing's C class. The started process removes the
    name when it opens the semaphore. A forked process needs no name.
    """

    def __init__(self, context: multiprocessing.context.BaseContext) -> None:
        name, forked = f"/ft-{secrets.token_hex(8)}", context.get_start_method() == "fork"
        self._lock: Any = _multiprocessing.SemLock(_COUNTING, 0, _MOST, name, forked)
        self._bind_methods()
        if not forked:
            with safe_path():  # this may start the resource tracker
                resource_tracker.register(name, "semaphore")  # the tracker removes the name if the trainer is killed
        self.forget_name: Any = (lambda: None) if forked else Finalize(self, _forget, (name,), exitpriority=0)

    def _bind_methods(self) -> None:
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __getstate__(self) -> tuple[Any, ...]:
        multiprocessing.context.assert_spawning(self)
        return self._lock.handle, self._lock.kind, self._lock.maxvalue, self._lock.name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._lock = _multiprocessing.SemLock._rebuild(*state)
        _unlink(state[3])
        self._bind_methods()


def make_semaphore(context: multiprocessing.context.BaseContext) -> Any:
    """A semaphore with count 0, for a process that `context` starts."""
    return context.Semaphore(0) if sys.platform == "win32" else NamelessSemaphore(context)


def forget_name(semaphore: Any) -> None:
    """Stop tracking the semaphore's name. To be called once the started process has opened the semaphore."""
    if isinstance(semaphore, NamelessSemaphore):
        semaphore.forget_name()


def _unlink(name: str) -> None:
    with suppress(FileNotFoundError):
        _multiprocessing.sem_unlink(name)


def _forget(name: str) -> None:
    _unlink(name)
    resource_tracker.unregister(name, "semaphore")


class Bell:
    """A semaphore that several processes release and the process that made it acquires.

    It is a pipe, because a pipe can also be sent to processes that start later. A semaphore without a name cannot.
    `release` takes 2 µs, `acquire` 3 µs.
    """

    def __init__(self, context: Any) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)
        self._poller: select.poll | None = None
        if sys.platform != "win32":
            self._poller = select.poll()  # Connection.poll makes one in each call, which takes 10 µs
            self._poller.register(self._reader.fileno(), select.POLLIN)
            # Non-blocking mode belongs to the pipe: so writes of the other processes do not block either.
            os.set_blocking(self._writer.fileno(), False)

    def release(self) -> None:
        """Add one to the count. Has no effect if the pipe is full, which happens at counts in the thousands."""
        with suppress(BlockingIOError):
            self._writer.send_bytes(b"\0")

    def acquire(self, block: bool = True, timeout_s: float = 0.0) -> bool:
        """Subtract one. Returns False if the count is 0; with `block` it first waits up to `timeout_s`."""
        wait_s = timeout_s if block else 0.0
        if not (self._reader.poll(wait_s) if self._poller is None else self._poller.poll(1000 * wait_s)):
            return False
        self._reader.recv_bytes()
        return True

    def clear(self) -> None:
        while self.acquire(block=False):
            pass

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._writer.close()

    def __getstate__(self) -> object:
        return self._writer

    def __setstate__(self, state: object) -> None:
        self._reader, self._writer = None, state


_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0.0))  # Windows has no sched_yield
PIECE_BYTES = 4096  # a write of up to this size is never partial (PIPE_BUF; on a local socket: one buffer)
_LENGTH = struct.Struct("<Q")
_POLL_S = 0.1


class DeadlineError(Exception):
    """The other side did not read or write in time."""


class Channel(NamedTuple):
    """One end of the communication between trainer and worker."""

    connection: Connection
    go: Any  # the trainer releases this semaphore when it has posted a request
    done: Any  # the worker releases this semaphore when it has written the reply

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Send `payload`.

        Raises:
            DeadlineError: the other side does not read.
            OSError: the other side has ended.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        whole = _LENGTH.pack(len(payload)) + payload
        for begin in range(0, len(whole), PIECE_BYTES):
            self._until_writable(deadline)
            self.connection.send_bytes(whole[begin : begin + PIECE_BYTES])

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next payload.

        Raises:
            DeadlineError: no payload came in time.
            EOFError, OSError: the other side has ended.
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
        if deadline is None or sys.platform == "win32":  # on Windows a pipe cannot be polled for writing
            return
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLOUT)
        while not poller.poll(1000 * _POLL_S):
            if time.monotonic() > deadline:
                raise DeadlineError


SPIN_S = 100e-6  # about the time that a process takes to fall asleep and to wake up


def acquire(semaphore: Any, spin_s: float, timeout_s: float | None = None) -> bool:
    """Take `semaphore`: spin for `spin_s`, then sleep. Returns False after `timeout_s`."""
    until = time.perf_counter() + spin_s
    while not semaphore.acquire(False):
        if time.perf_counter() >= until:
            return bool(semaphore.acquire(True, timeout_s))
        _yield_core()  # a worker that spins after its reply must not hold the core that the trainer needs
    return True
