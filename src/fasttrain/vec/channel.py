"""The line between the trainer and one worker: two semaphores for steps, a pipe for everything that is no number.

A step costs two semaphore operations and no message. Messages go in pieces small enough that neither side ever blocks
inside one: a worker that is stopped or killed half-way cannot hang the trainer. A semaphore of multiprocessing has a
name (/dev/shm/sem.mp-…) until its last user ends in order; a process group that is killed, as a container's or a job's
is, leaves it there for ever. Here the name goes as soon as both sides have it open.
"""

from __future__ import annotations

import multiprocessing.context
import os
import secrets
import select
import struct
import sys
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Protocol

if sys.platform != "win32":
    import _multiprocessing  # type: ignore[import-not-found]  # what multiprocessing's own semaphores are made of

_COUNTING = 1  # multiprocessing's own word for "semaphore, no mutex"
_MOST = 2**15 - 1  # the least that POSIX lets a semaphore count


class Semaphore(Protocol):
    """What the two sides use."""

    def acquire(self, block: bool = True, timeout: float | None = None, /) -> bool:
        """Take one; False if there was none in time."""

    def release(self) -> None:
        """Add one."""


class NamelessSemaphore:
    """Of one trainer and one process that it starts; POSIX. `acquire(block, timeout)` and `release()` of the C class.

    The started process takes the name away when it opens it, a forked one needs none.
    """

    def __init__(self, context: Any) -> None:
        name, forked = f"/ft-{secrets.token_hex(8)}", context.get_start_method() == "fork"
        self._lock: Any = _multiprocessing.SemLock(_COUNTING, 0, _MOST, name, forked)
        self._take_methods()
        if not forked:
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


def make_semaphore(context: Any) -> Semaphore:
    """One that counts from 0, to be handed to a process of this start method."""
    return context.Semaphore(0) if sys.platform == "win32" else NamelessSemaphore(context)


def opened(semaphore: Semaphore) -> None:
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
        self._poller: Any = None
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

    def __getstate__(self) -> Any:
        return self._rung

    def __setstate__(self, state: Any) -> None:
        self._heard, self._rung = None, state


PIECE_BYTES = 4096  # written whole or not at all: PIPE_BUF, and one buffer of a local socket
_LENGTH = struct.Struct("<Q")
_POLL_S = 0.1


class DeadlineError(Exception):
    """The other side did not read or write in time."""


class Channel(NamedTuple):
    """One end."""

    connection: Connection
    go: Semaphore  # trainer → worker: a request is posted
    done: Semaphore  # worker → trainer: the reply stands

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


def acquire(semaphore: Semaphore, spin_s: float, timeout_s: float | None = None) -> bool:
    """Take `semaphore`: look for `spin_s` without giving the core away, then sleep. False after `timeout_s`."""
    if semaphore.acquire(False):
        return True
    if spin_s:
        until = time.perf_counter() + spin_s
        while time.perf_counter() < until:
            if semaphore.acquire(False):
                return True
    return semaphore.acquire(True, timeout_s)
