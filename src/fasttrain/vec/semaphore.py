"""What wakes processes up, and leaves no name behind however they end.

A semaphore of multiprocessing has a name (/dev/shm/sem.mp-…) until its last user ends in order; a process group that is
killed, as a container's or a job's is, leaves it there for ever. Here the name goes as soon as both sides have it open.
"""

from __future__ import annotations

import multiprocessing.context
import os
import secrets
import select
import sys
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any, Protocol

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
