"""Starts the runs of a study as processes that need no imports: they are forked from one that has imported everything.

Imports take 2.2 s of a run's start. The process that forks (the server) imports fasttrain, PyTorch and Hydra, starts no
thread and runs no user code. It ends with the process that uses it, or after a minute without a run. Where the system
is not Linux, each run is started by `python -m fasttrain` instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import IO, Any, Protocol

import numpy as np

IDLE_S = 60.0  # the server ends after this time without a run
IMPORTED = ("fasttrain.cli.compose", "fasttrain.runs.resume", "fasttrain.accelerators.eligible", "numba.np.arraymath",
            "hydra.core.override_parser.overrides_parser", "hydra.core.plugins", "gymnasium.envs")  # fmt: skip
NUMBER = struct.Struct("=i")
# The working directory comes last in sys.path, so that no file there hides a module of Python.
PROGRAM = """
import os, sys
sys.path[:] = [*(path for path in sys.path if path != ""), os.getcwd()]
from fasttrain.runs.warm import serve
serve(int(sys.argv[1]))
"""


class Process(Protocol):
    """A started run; `subprocess.Popen` has these methods too."""

    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A run that the server has forked. `wait` returns the exit code, negative after a signal, as Popen's does.

    Raises:
        OSError: the server ended before it forked the run.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status, self._code = status, list[int]()
        data = status.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) < NUMBER.size:
            status.close()
            raise OSError("the process that forks runs has ended")
        self._pid = int(NUMBER.unpack(data)[0])

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if not self._code:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fasttrain", timeout or 0.0)
            data = self._status.recv(NUMBER.size, socket.MSG_WAITALL)  # nothing comes if the server was killed
            self._code.append(int(NUMBER.unpack(data)[0]) if len(data) == NUMBER.size else -signal.SIGKILL)
            self._status.close()
        return self._code[0]

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if not self._code:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)


class Server:
    """The client of a server: starts the server process, and asks it for runs."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        nowhere = subprocess.DEVNULL
        with theirs:
            line = [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno())]
            # Its own output is dropped: if it fails, for example in a deleted folder, runs are started without it.
            self.process = subprocess.Popen(line, pass_fds=[theirs.fileno()], stdout=nowhere, stderr=nowhere)

    def start(
        self, arguments: Sequence[str], log: IO[Any], environment: Mapping[str, str], cores: Iterable[int]
    ) -> Forked:
        """Fork `fasttrain arguments…` in this process's folder. Raises OSError if the server has ended."""
        told = {"arguments": [*arguments], "environment": {**environment}, "folder": os.getcwd(), "cores": [*cores]}
        message = json.dumps(told).encode()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [NUMBER.pack(len(message))], [log.fileno(), theirs.fileno()])
                self._socket.sendall(message)
        except OSError:
            ours.close()
            raise
        return Forked(ours)

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


_lock, _servers = threading.Lock(), list[Server]()  # at most one server


@atexit.register
def _close() -> None:
    while _servers:
        _servers.pop().close()


def prepare() -> None:
    """Start the server, so that it has imported everything when the first run begins."""
    with _lock, suppress(OSError):  # there is no memory for a process
        if sys.platform == "linux" and not _servers:
            _servers.append(Server())


def start(
    arguments: Sequence[str], log: IO[Any], environment: Mapping[str, str], parent: str,
    cores: Iterable[int] | None = None,
) -> Process:  # fmt: skip
    """Start `fasttrain arguments…`, with its output in `log`.

    Args:
        environment: all environment variables of the run.
        parent: environment variable of the run for the id of a process. The run ends when that process ends.
        cores: numbers of the cores on which the run may compute (Linux); None: those of this process.
    """
    with _lock:
        for _ in range(2 if sys.platform == "linux" else 0):  # the second time with a new server
            with suppress(OSError):
                if not _servers:
                    _servers.append(Server())
                server = _servers[0]
                own = {**environment, parent: str(server.process.pid)}
                return server.start(arguments, log, own, os.sched_getaffinity(0) if cores is None else cores)
            _close()
    line = [sys.executable, "-u", "-m", "fasttrain", *arguments]
    alone = {**environment, parent: str(os.getpid())}
    return subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=alone)


@contextmanager
def passing_on_signals(processes: Sequence[Process]) -> Iterator[list[int]]:
    """Catch SIGINT and SIGTERM inside the block and yield a list of received signals. After the first the cells save
    and stop, after the second they are killed. Ctrl-C at a terminal also reaches them, so only SIGTERM is passed on.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)
        for process in [*processes]:
            if len(received) > 1:
                process.kill()
            elif number == signal.SIGTERM:
                process.terminate()

    previous = [(number, signal.signal(number, receive)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield received
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


# --- the server's process

FREE = (signal.SIGINT, signal.SIGTERM, *(getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")
                                         if hasattr(signal, name)))  # fmt: skip


def serve(number: int) -> None:
    """Fork runs for the process at the other end of the socket with the file descriptor `number`."""
    gc.disable()
    before = {each: signal.signal(each, signal.SIG_IGN) for each in FREE}  # the runs get and handle these signals
    for module in IMPORTED:
        import_module(module)
    gc.freeze()
    asked, running = socket.socket(fileno=number), dict[int, socket.socket]()
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([asked.fileno(), ended], [], [], None if running else IDLE_S)
        if not ready:
            os._exit(0)
        if ended in ready:
            os.read(ended, 4096)
            _tell_ended(running)
        if asked.fileno() in ready:
            length, handles, _, _ = socket.recv_fds(asked, NUMBER.size, 2)
            if len(handles) < 2:
                os._exit(0)  # the process that uses this server has ended
            told = json.loads(asked.recv(NUMBER.unpack(length)[0], socket.MSG_WAITALL))
            status = socket.socket(fileno=handles[1])
            if not (pid := os.fork()):
                for each in (asked, status, *running.values()):
                    each.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each, handler in before.items():
                    signal.signal(each, handler)
                _run(told, handles[0])
            status.send(NUMBER.pack(pid))
            os.close(handles[0])
            running[pid] = status


def _tell_ended(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of the runs that have ended."""
    for pid in [*running]:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            with running.pop(pid) as told, suppress(OSError):  # the process that uses this server may have ended
                told.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _run(told: Mapping[str, Any], log: int) -> None:
    """Become the run: `python -m fasttrain arguments…`."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    os.sched_setaffinity(0, told["cores"])
    sys.path.insert(0, told["folder"])
    sys.argv = ["fasttrain", *told["arguments"]]
    np.random.seed()  # otherwise all runs would draw the same numbers until they set a seed
    runpy.run_module("fasttrain", run_name="__main__", alter_sys=True)
