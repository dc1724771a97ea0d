"""Daemon: one process of an engine, started from the user's command, reached over TCP, a unix socket or its pipes.

It lives in the process group of the worker that started it, which the system kills when the trainer ends, however that
happens; it inherits the pipe whose closing does that, so that this holds after the worker's own death too.
"""

from __future__ import annotations

import asyncio
import errno
import functools
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
from fasttrain_engines.channel import Channel, connected
from fasttrain_engines.game import EngineGame, greeted
from fasttrain_engines.jvm import QUIET_STDOUT, is_java, refused_flags, with_flags
from fasttrain_engines.settings import DaemonsConfig
from fasttrain_engines.wire import GameLostError

HOST = "127.0.0.1"
GAMES = "/usr/games"  # where Debian puts programs like gnugo, often not on PATH
LOOK_S = 0.02  # whether it listens by now
CLOSE_S = 3.0  # from SIGTERM to SIGKILL: a JVM writes its recording
LOG_MB, KEPT_LOGS = 16.0, 3  # of each process: the size after which its log is rotated, and how many older ones stay
SAID_LINES = 8  # of the log, in messages
SAID_OF_BUILD = 4000  # characters
PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY)  # why a program does not start now
# Debian's and Ubuntu's packages of programs that engines are often started with.
PACKAGES = {
    "java": "default-jre-headless",
    "javac": "default-jdk-headless",
    "node": "nodejs",
    "npm": "npm",
    "gnugo": "gnugo",
}


class Daemon:
    """One engine process; started again and again.

    Args:
        ports: to be tried one after another, for ever.
        folder: for logs, recordings and unix sockets.
        threads: how many cores it may count on.
    """

    def __init__(self, settings: DaemonsConfig, index: int, ports: Iterator[int], folder: Path, threads: int) -> None:
        self.settings, self.index, self._ports, self.folder, self._threads = settings, index, ports, folder, threads
        self.log = folder / f"daemon-{index:02d}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address: str | tuple[str, int] | None = None  # None: its pipes
        self.ready = False
        self.draining = False  # it gets no new games, and is not started again
        self.over: asyncio.Future[str] | None = None  # why it has to be started again
        self.seats = self.games = self.won = 0  # taken now; begun since the start; ended by their rules
        self.served: dict[Channel, int] = {}  # games begun on each connection that is open
        self.turned_away = 0  # connections that came to no game, one after another
        self.memory_bytes = self.cpu_s = 0.0
        self.heard_ns = 0  # when it last said anything
        self._waiting, self._since_ns, self.busy_ns = 0, 0, 0
        self._cpu_before_s = 0.0  # of the processes before this one
        self._family: list[psutil.Process] = []  # what it had started when it was last looked at
        self._piped: Channel | None = None  # greeted at the start: there is no second connection to a process's pipes

    @property
    def name(self) -> str:
        return f"daemon {self.index}"

    def end(self, why: str) -> None:
        """Let it be started again; nobody gets a seat until then."""
        self.ready = False
        if self.over is not None and not self.over.done():
            self.over.set_result(why)

    async def start(self, game: EngineGame) -> None:
        """Start the process and wait until it answers the greeting of `game`.

        Raises:
            EnvSpecError: there is no such program: another try would not help.
            GameLostError: it did not come up.
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
                raise GameLostError("start", "another program answered at its address")
            except GameLostError as error:
                if self.address is None and error.cause == "closed":
                    await self.leaves(1.0)  # its pipes close a moment before it is gone
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
            channel = await connected(game.channel, self.address, timeout_s)
        try:
            await greeted(game, channel, timeout_s)
        except BaseException:
            channel.close()
            raise
        if self.address is not None:
            channel.close()
        elif channel.failure is not None:
            raise channel.failure

    def _command(self) -> list[str]:
        """The command with what it asks for put in; an address is chosen where it names one."""
        given = [str(part) for part in self.settings.command]
        if is_java(given):
            flags = list(self.settings.jvm_flags)
            wants_pipes = not any("{port}" in part or "{socket}" in part for part in given)
            given = with_flags(given, [*flags, *(QUIET_STDOUT if wants_pipes else ())])
        values = {"{index}": str(self.index), "{threads}": str(self._threads), "{folder}": str(self.folder)}
        values["{daemons}"] = str(Path(__file__).parent)
        self.address = None
        if any("{port}" in part for part in given):
            self.address = (HOST, free_port(self._ports))
            values["{port}"] = str(self.address[1])
        elif any("{socket}" in part for part in given):
            self.address = os.path.join(tempfile.mkdtemp(prefix="fasttrain-"), "engine")  # a path may have 100 letters
            values["{socket}"] = self.address
        return [filled(part, values) for part in given]

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads))
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), GAMES])
        given = {name: str(value) for name, value in self.settings.env.items()}
        return {**os.environ, "PATH": path, **threads, **given}

    async def connect(self, make: Callable[[], Channel]) -> Channel:
        """A new connection, or the pipes.

        Raises:
            GameLostError: there is none to be had.
        """
        if self.address is not None:
            return await connected(make, self.address, self.settings.timeouts_s.request)
        if self._piped is None or self._piped.failure is not None:
            raise GameLostError("no connection", f"the pipes of {self.name} are closed")
        return self._piped  # kept: whoever plays is told when the process is ended

    async def _pipes(self, make: Callable[[], Channel]) -> Channel:
        process, loop = self.process, asyncio.get_running_loop()
        if process is None:
            raise GameLostError("no connection", f"{self.name} has ended")
        _, channel = await loop.connect_read_pipe(make, process.stdout)
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        channel.writes_to(writer)
        return channel

    def begins_waiting(self) -> None:
        """A request goes to it."""
        if not self._waiting:
            self._since_ns = time.perf_counter_ns()
        self._waiting += 1

    def ends_waiting(self) -> None:
        """A request is answered, or lost."""
        now = time.perf_counter_ns()
        self._waiting, self.busy_ns, self._since_ns = self._waiting - 1, self.busy_ns + now - self._since_ns, now

    def look(self, below: Mapping[int, Sequence[psutil.Process]]) -> None:
        """Whether it lives; how much it takes, with all that it has started (`below` each process). Its log is kept
        short."""
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
            for one in family:  # which grows
                family += below.get(one.pid, ())
            for one in (top, *family):
                with suppress(psutil.Error):
                    times = one.cpu_times()
                    self.memory_bytes += one.memory_info().rss
                    self.cpu_s += times.user + times.system
        rotate(self.log)

    def ended(self) -> str:
        """ "ended with exit code 1", "was killed by signal 9"."""
        code = None if self.process is None else self.process.poll()
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def said(self) -> str:
        """The last lines of its log, for a message."""
        with suppress(OSError):
            lines = self.log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()[-SAID_LINES:]
            if lines:
                return "; it said:\n  " + "\n  ".join(line[:300] for line in lines) + f"\n  (all in {self.log})"
        return f" and said nothing ({self.log})"

    def terminate(self) -> None:
        """Ask it to end."""
        if self.process is not None:
            with suppress(OSError):
                self.process.terminate()

    async def leaves(self, within_s: float) -> None:
        """Wait for the end that it was asked for; games with others go on meanwhile."""
        until = time.monotonic() + within_s
        while self.process is not None and self.process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    def takes_over(self, other: Daemon) -> None:
        """Count what another one took as its own."""
        self.busy_ns += other.busy_ns
        self._cpu_before_s += other.cpu_s
        self.cpu_s += other.cpu_s

    def stop(self, grace_s: float = 0.0) -> None:
        """End it, and all that it has started, `grace_s` after it was asked to at the latest."""
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
        EnvSpecError: there is none of that name, or it cannot be run; the package that has it is named where known.
        GameLostError: the system has no room for it now.
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
        if error.errno in PASSING:
            raise GameLostError("start", f"{command[0]}: {error.strerror}") from error
        raise EnvSpecError(f"daemons: {command[0]!r} {_why_not(command[0], error)}") from error


def prepare(settings: DaemonsConfig) -> None:
    """Before engines start: see that a JVM takes its flags, and run `daemons.build`, once in the life of this process.

    Raises:
        EnvSpecError: names the flag, or says what the build said.
    """
    java = str(settings.command[0])
    if is_java([java]) and shutil.which(java):
        flags = [
            filled(flag, {"{threads}": "1", "{index}": "0", "{folder}": tempfile.gettempdir()})
            for flag in settings.jvm_flags
        ]
        for flag, why in refused_flags(java, flags).items():
            raise EnvSpecError(f"daemons.jvm_flags: {java} does not start with {flag}: {why}; remove it")
    if settings.build:
        _build(
            tuple(map(str, settings.build)),
            settings.cwd,
            tuple((name, str(value)) for name, value in settings.env.items()),
        )


@functools.cache  # an evaluation starts engines too: classes must not change under those that run
def _build(command: tuple[str, ...], cwd: str | None, environment: tuple[tuple[str, str], ...]) -> None:
    with tempfile.TemporaryFile() as log:
        process = spawn(command, DaemonsConfig(cwd=cwd), log, {**os.environ, **dict(environment)})
        if code := process.wait():
            log.seek(0)
            said = log.read().decode(errors="replace").strip()[-SAID_OF_BUILD:]
            raise EnvSpecError(f"daemons.build={' '.join(command)} ended with exit code {code}; it said:\n{said}")


def _why_not(program: str, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be started: {error.strerror}"
    package = PACKAGES.get(program)
    if package is None:
        return "was not found, as a file or on PATH; correct daemons.command or daemons.build, or give its full path"
    also = " (a Java runtime without its compiler)" if program == "javac" and shutil.which("java") else ""
    return f"is not installed{also}: it comes with the package {package} (Debian, Ubuntu: apt install {package})"


def kill_tree(process: subprocess.Popen[bytes], known: Sequence[psutil.Process] = ()) -> None:
    """End a process at once, with all that descends from it; `known` did before it ended by itself."""
    found = list(known)
    with suppress(psutil.Error):
        found += psutil.Process(process.pid).children(recursive=True)
    for one in found:
        with suppress(psutil.Error):
            one.kill()
    with suppress(OSError):
        process.kill()
    process.wait()


def filled(part: str, values: dict[str, str]) -> str:
    """The names in braces that are known, replaced; other braces stay."""
    for name, value in values.items():
        part = part.replace(name, value)
    return part


def free_port(ports: Iterator[int]) -> int:
    """The next port that nobody listens on; who comes between is met when the engine starts.

    Raises:
        GameLostError: all of them are taken.
    """
    first = None
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else those of engines just gone look taken
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
    """Move what a log holds aside where it has grown too long; the engine goes on writing at its new begin."""
    with suppress(OSError):
        if log.stat().st_size < most_mb * 2**20:
            return
        for age in range(KEPT_LOGS - 1, 0, -1):
            older = log.with_suffix(f".{age}.log")
            if older.exists():
                older.replace(log.with_suffix(f".{age + 1}.log"))
        shutil.copyfile(log, log.with_suffix(".1.log"))
        os.truncate(log, 0)
