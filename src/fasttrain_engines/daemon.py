"""Daemon: one process of an engine. It is started by the user's command and reached over TCP, a unix socket or pipes.

A daemon belongs to the process group of its worker. Linux kills this group when the trainer's end of a pipe closes. The
daemon inherits the worker's end of the pipe, so that it is killed even if the worker has died before the trainer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import IO

import psutil

from fasttrain.errors import EnvSpecError
from fasttrain_engines.channel import Channel, connect
from fasttrain_engines.game import EngineGame, greet
from fasttrain_engines.settings import DaemonsConfig
from fasttrain_engines.wire import GameLostError

HOST = "127.0.0.1"
GAMES = "/usr/games"  # Debian's folder for programs like gnugo; it is often not on PATH
LOOK_S = 0.02  # seconds between two checks whether a process listens or has ended
CLOSE_S = 3.0  # seconds from SIGTERM to SIGKILL; in this time a JVM may write a flight recording
LOG_MB, KEPT_LOGS = 16.0, 3  # size at which a log is rotated, and number of older logs that are kept
SAID_LINES = 8  # number of last log lines in error messages
PROBE_TIMEOUT_S = 30.0  # timeout of a JVM that is started to try its flags
# A JVM logs to stdout. If an engine is connected by pipes, only its messages may go there.
QUIET_STDOUT = ("-Xlog:disable", "-Xlog:all=warning:stderr")
TEMPORARY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY)  # another try may succeed
# Program → its package in Debian and Ubuntu.
PACKAGES = {"java": "default-jre-headless", "node": "nodejs", "npm": "npm", "gnugo": "gnugo"}


class Daemon:
    """One engine process, which can be restarted.

    Args:
        ports: an endless iterator over the ports to try.
        folder: the folder for logs and recordings.
        threads: number of cores that the process may use.
    """

    def __init__(self, settings: DaemonsConfig, index: int, ports: Iterator[int], folder: Path, threads: int) -> None:
        self.settings, self.index, self._ports, self.folder, self._threads = settings, index, ports, folder, threads
        self.log = folder / f"daemon-{index:02d}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address: str | tuple[str, int] | None = None  # None: connected by pipes
        self.ready = False
        self.draining = False  # True: it gets no new games and is not restarted
        self.over: asyncio.Future[str] | None = None  # done when the process must be restarted; result: the reason
        self.seats = self.games = self.finished = 0  # seats in use; games begun since the start; finished games
        self.served: dict[Channel, int] = {}  # open connection → games begun on it
        self.turned_away = 0  # number of refused connections in a row
        self.memory_bytes = self.cpu_s = 0.0
        self.heard_ns = 0  # time of the process's last message
        self._waiting, self._since_ns, self.busy_ns = 0, 0, 0
        self._cpu_before_s = 0.0  # CPU time of earlier processes of this daemon
        self._family: list[psutil.Process] = []  # its child processes at the last call of `look`
        self._piped: Channel | None = None  # the only connection of a process with pipes

    @property
    def name(self) -> str:
        return f"daemon {self.index}"

    def end(self, why: str) -> None:
        """Request a restart of the process. Until then it gets no new game."""
        self.ready = False
        if self.over is not None and not self.over.done():
            self.over.set_result(why)

    async def start(self, game: EngineGame) -> None:
        """Start the process and wait until it answers the greeting of `game`.

        Raises:
            EnvSpecError: the program cannot be started, and another try would not help.
            GameLostError: the process did not answer.
        """
        self.stop()
        self.over = asyncio.get_running_loop().create_future()
        self.games, self.turned_away, self.memory_bytes = 0, 0, 0.0
        command = self._command()
        rotate(self.log)
        with open(self.log, "ab") as log:
            pipes = self.address is None
            parent = parent_process()
            self.process = spawn(
                command, self.settings, log, self._environment(), pipes, (parent.sentinel,) if parent else ()
            )
        deadline = time.monotonic() + self.settings.timeouts_s.start
        while True:
            try:
                await self._answers(game, max(LOOK_S, deadline - time.monotonic()))
                if self.process.poll() is None:
                    break
                raise GameLostError("start", "another program answered at the daemon's address")
            except GameLostError as error:
                if self.address is None and error.cause == "closed":
                    await self.wait_for_end(1.0)  # the pipes of a process close shortly before it ends
                if self.process.poll() is not None:
                    raise GameLostError("start", f"{self.name} {self.ended()}{self.said()}") from error
                if self.address is None or time.monotonic() > deadline:
                    after = f"within {self.settings.timeouts_s.start:g} s (daemons.timeouts_s.start)"
                    why = f"{self.name} does not answer {after}: {error}{self.said()}"
                    raise GameLostError("start", why) from error
                await asyncio.sleep(LOOK_S)
        self.ready, self.heard_ns = True, time.perf_counter_ns()

    async def _answers(self, game: EngineGame, timeout_s: float) -> None:
        if self.address is None:
            channel = self._piped = await self._pipes(game.channel)
        else:
            channel = await connect(game.channel, self.address, timeout_s)
        try:
            await greet(game, channel, timeout_s)
        except BaseException:
            channel.close()
            raise
        if self.address is not None:
            channel.close()
        elif channel.failure is not None:
            raise channel.failure

    def _command(self) -> list[str]:
        """The command with its placeholders filled in. This also chooses the address."""
        command = [str(part) for part in self.settings.command]
        if java := place_after_java(command):
            uses_pipes = not any("{port}" in part or "{socket}" in part for part in command)
            flags = [*self.settings.jvm_flags, *(QUIET_STDOUT if uses_pipes else ())]
            command[java:java] = flags  # before the command's own flags, because later flags win
        values = {"{index}": str(self.index), "{threads}": str(self._threads), "{folder}": str(self.folder)}
        values["{daemons}"] = str(Path(__file__).parent)
        self.address = None
        if any("{port}" in part for part in command):
            self.address = (HOST, free_port(self._ports))
            values["{port}"] = str(self.address[1])
        elif any("{socket}" in part for part in command):
            # The path of a unix socket is limited to about 100 characters, so it is not in the run's folder.
            self.address = os.path.join(tempfile.mkdtemp(prefix="fasttrain-"), "engine")
            values["{socket}"] = self.address
        return [fill_in(part, values) for part in command]

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads))
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), GAMES])
        return {**os.environ, "PATH": path, **threads}

    async def connect(self, make: Callable[[], Channel]) -> Channel:
        """A new connection, or the pipes. Raises GameLostError if the process cannot be reached."""
        if self.address is not None:
            return await connect(make, self.address, self.settings.timeouts_s.request)
        if self._piped is None or self._piped.failure is not None:
            raise GameLostError("no connection", f"the pipes of {self.name} are closed")
        return self._piped

    async def _pipes(self, make: Callable[[], Channel]) -> Channel:
        process, loop = self.process, asyncio.get_running_loop()
        if process is None:
            raise GameLostError("no connection", f"{self.name} has ended")
        _, channel = await loop.connect_read_pipe(make, process.stdout)
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        channel.writes_to(writer)
        return channel

    def begins_waiting(self) -> None:
        """A request was sent: the process is busy."""
        if not self._waiting:
            self._since_ns = time.perf_counter_ns()
        self._waiting += 1

    def ends_waiting(self) -> None:
        """A request was answered or failed."""
        now = time.perf_counter_ns()
        self._waiting, self.busy_ns, self._since_ns = self._waiting - 1, self.busy_ns + now - self._since_ns, now

    def look(self, below: Mapping[int, Sequence[psutil.Process]]) -> None:
        """Check whether the process lives, measure memory and CPU time of it and its descendants, and rotate its log.
        `below`: process id → child processes.
        """
        if self.process is None or not self.ready:
            return
        if self.process.poll() is not None:
            self.end(self.ended())
            return
        self.memory_bytes, self.cpu_s = 0.0, self._cpu_before_s
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            if top.status() == psutil.STATUS_STOPPED:
                self.end("was stopped by a signal")
            self._family = family = [*below.get(top.pid, ())]
            for one in family:  # the list may grow in the loop
                family += below.get(one.pid, ())
            for one in (top, *family):
                with suppress(psutil.Error):
                    times = one.cpu_times()
                    self.memory_bytes += one.memory_info().rss
                    self.cpu_s += times.user + times.system
        rotate(self.log)

    def ended(self) -> str:
        """How the process ended: "ended with exit code 1", "was killed by signal 9"."""
        code = None if self.process is None else self.process.poll()
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def said(self) -> str:
        """The last lines of the process's log, for an error message."""
        with suppress(OSError):
            lines = self.log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()[-SAID_LINES:]
            if lines:
                return "; it said:\n  " + "\n  ".join(line[:300] for line in lines) + f"\n  (all in {self.log})"
        return f" and said nothing ({self.log})"

    def terminate(self) -> None:
        if self.process is not None:
            with suppress(OSError):
                self.process.terminate()

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the end of the process, while other games continue."""
        until = time.monotonic() + timeout_s
        while self.process is not None and self.process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    def add_times(self, other: Daemon) -> None:
        """Add the times of the daemon that this one replaces."""
        self.busy_ns += other.busy_ns
        self._cpu_before_s += other.cpu_s
        self.cpu_s += other.cpu_s

    def stop(self, grace_s: float = 0.0) -> None:
        """End the process and its descendants. `grace_s`: time after SIGTERM before they are killed."""
        process, self.process = self.process, None
        self.ready = False
        if isinstance(self.address, str):
            shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s) if grace_s else None
        kill_tree(process, self._family)
        self._family, self._cpu_before_s = [], self.cpu_s
        if self._piped is not None:
            self._piped.close()
            self._piped = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def spawn(
    command: Sequence[str],
    settings: DaemonsConfig,
    log: int | IO[bytes],
    environment: dict[str, str] | None = None,
    pipes: bool = False,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program.

    Raises:
        EnvSpecError: the program does not exist or cannot be run. The message names its package if that is known.
        GameLostError: the system has no memory or file descriptors left now.
    """
    folder = settings.cwd
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else log,
            stderr=log,
            pass_fds=inherited,
        )
    except OSError as error:
        if folder is not None and not os.path.isdir(folder):
            raise EnvSpecError(f"daemons.cwd={folder}: there is no such folder") from error
        if error.errno in TEMPORARY:
            raise GameLostError("start", f"{command[0]}: {error.strerror}") from error
        raise EnvSpecError(f"daemons: {command[0]!r} {_start_problem(command[0], error)}") from error


def place_after_java(command: Sequence[str]) -> int:
    """The index for flags in a command that starts a JVM, perhaps by `env NAME=VALUE java`. 0 if it starts no JVM."""
    program = next((place for place, part in enumerate(command) if part != "env" and "=" not in part), 0)
    return program + 1 if Path(command[program]).name in ("java", "java.exe") else 0


def check_jvm_flags(settings: DaemonsConfig) -> None:
    """Raises EnvSpecError for a flag in `daemons.jvm_flags` with which the JVM does not start."""
    java = str(settings.command[0])
    if place_after_java([java]) and shutil.which(java):
        values = {"{threads}": "1", "{index}": "0", "{folder}": tempfile.gettempdir()}
        for flag, why in refused_flags(java, [fill_in(flag, values) for flag in settings.jvm_flags]).items():
            raise EnvSpecError(f"daemons.jvm_flags: {java} does not start with {flag}: {why}; remove it")


def refused_flags(java: str, flags: Sequence[str]) -> dict[str, str]:
    """Flag that this JVM refuses → error message. If the JVM refuses only all flags together: all flags → message."""
    if not flags or not _jvm_error(java, flags):
        return {}
    each = {flag: _jvm_error(java, [flag]) for flag in flags}
    return {flag: why for flag, why in each.items() if why} or {" ".join(flags): _jvm_error(java, flags)}


def _jvm_error(java: str, flags: Sequence[str]) -> str:
    """The JVM's error message; empty if it starts."""
    try:
        done = subprocess.run([java, *flags, "-version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:g} s"
    said = (done.stdout + done.stderr).strip().splitlines()
    return (said or [f"exit code {done.returncode}"])[0] if done.returncode else ""


def _start_problem(program: str, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be started: {error.strerror}"
    package = PACKAGES.get(program)
    if package is None:
        return "was not found, as a file or on PATH; correct daemons.command, or give its full path"
    return f"is not installed: it comes with the package {package} (Debian, Ubuntu: apt install {package})"


def kill_tree(process: subprocess.Popen[bytes], known: Sequence[psutil.Process] = ()) -> None:
    """Kill a process and its descendants. `known`: its descendants so far, in case the process has ended already."""
    descendants = list(known)
    with suppress(psutil.Error):
        descendants += psutil.Process(process.pid).children(recursive=True)
    for one in descendants:
        with suppress(psutil.Error):
            one.kill()
    with suppress(OSError):
        process.kill()
    process.wait()


def fill_in(part: str, values: dict[str, str]) -> str:
    """Replace the known placeholders; other braces are not changed."""
    for name, value in values.items():
        part = part.replace(name, value)
    return part


def free_port(ports: Iterator[int]) -> int:
    """The next port that no program uses. Raises GameLostError if all are used."""
    first = None
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else ports of ended engines seem to be in use
            try:
                probe.bind((HOST, port))
                return port
            except OSError:
                pass
        if port == first:
            break
        first = port if first is None else first
    raise GameLostError("start", f"all ports of daemons.ports are taken, from {first} on; name others")


def rotate(log: Path, most_mb: float = LOG_MB) -> None:
    """Copy a long log to a backup file and empty the log; the engine continues to write into the log."""
    with suppress(OSError):
        if log.stat().st_size < most_mb * 2**20:
            return
        for age in range(KEPT_LOGS - 1, 0, -1):
            older = log.with_suffix(f".{age}.log")
            if older.exists():
                older.replace(log.with_suffix(f".{age + 1}.log"))
        shutil.copyfile(log, log.with_suffix(".1.log"))
        os.truncate(log, 0)
