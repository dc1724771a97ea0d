"""The line between the trainer and one worker: two semaphores for steps, a pipe for everything that is no number.

A step costs two semaphore operations and no message. Messages go in pieces small enough that neither side ever blocks
inside one: a worker that is stopped or killed half-way cannot hang the trainer.
"""

from __future__ import annotations

import select
import struct
import sys
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from fasttrain.vec.semaphore import Semaphore

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
