from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fasttrain.errors import EnvSpecError
from fasttrain_engines.daemon import Daemon, free_port, rotate, spawn
from fasttrain_engines.settings import DaemonsConfig, Timeouts
from fasttrain_engines.wire import GameLostError
from pig_games import Pig, ports, said, settings, until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and unix sockets")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Daemons that are stopped whatever comes."""
    all_of_them: list[Daemon] = []

    def one(given: DaemonsConfig, index: int = 3, threads: int = 2) -> Daemon:
        first, _, last = given.ports.partition("-")
        numbers = itertools.cycle(range(int(first), int(last or first) + 1))
        all_of_them.append(Daemon(given, index, numbers, tmp_path, threads))
        return all_of_them[-1]

    yield one
    for one_made in all_of_them:
        one_made.stop()


def plain(*command: str, **changed: Any) -> DaemonsConfig:
    return DaemonsConfig(command=command, ports=ports(), **{"timeouts_s": Timeouts(start=5.0), **changed})


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *arguments)


def test_the_command_is_filled_in(made: Any, tmp_path: Path):
    def filled(*command: str, **changed: Any) -> list[str]:
        daemon = made(plain(*command, **changed))
        texts = daemon._command()
        return (
            [text.replace(f"port={daemon.address[1]}", "port=its own") for text in texts] if daemon.address else texts
        )

    command = filled("engine", "--port={port}", "{index}", "{threads}", "{folder}/x", "{other}", "{}")
    assert command == ["engine", "--port=its own", "3", "2", f"{tmp_path}/x", "{other}", "{}"]
    assert filled("engine") == ["engine"]
    assert made(plain("engine"))._environment()["PATH"].endswith(f"{os.pathsep}/usr/games"), "where Debian has games"
    java = filled("java", "-Xmx1g", "Engine", jvm_flags=("-XX:ActiveProcessorCount={threads}",))
    assert java[:2] == ["java", "-XX:ActiveProcessorCount=2"]
    assert java[-4:] == ["-Xlog:disable", "-Xlog:all=warning:stderr", "-Xmx1g", "Engine"], "a clean stdout under pipes"
    assert "-Xlog:disable" not in filled("java", "Engine", "{port}")


def test_ports_that_are_taken_are_passed_over():
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
            one.listen()
        taken, also = first.getsockname()[1], second.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        numbers = itertools.cycle([taken, free, also])
        assert [free_port(numbers), free_port(numbers)] == [free, free]
        with pytest.raises(GameLostError, match="all ports of daemons.ports are taken"):
            free_port(itertools.cycle([taken, also]))


@pytest.mark.parametrize("arguments", [(), ("--socket", "{socket}"), ("--stdio",)])
def test_it_starts_answers_and_ends_with_all_it_had(made: Any, arguments: tuple[str, ...]):
    async def run() -> None:
        daemon, game = made(settings(*arguments)), Pig()
        for _ in range(2):  # started again as at first
            await daemon.start(game)
            assert daemon.ready
            pid = daemon.process.pid
            channel = await daemon.connect(game.channel)
            await game.hello(channel)
            daemon.look({})
            assert daemon.memory_bytes > 2**20
            channel.close()
            await asyncio.sleep(0.02)
        address = daemon.address
        daemon.stop()
        assert not psutil.pid_exists(pid)
        assert not isinstance(address, str) or not os.path.exists(os.path.dirname(address))
        with pytest.raises(GameLostError) as lost:
            await daemon.connect(game.channel)
        assert lost.value.cause == "no connection"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("gnugo", "it comes with the package gnugo (Debian, Ubuntu: apt install gnugo)"),
        ("java", "it comes with the package default-jre-headless"),
        ("no-such-engine", "was not found, as a file or on PATH"),
        (__file__, "cannot be started: Permission denied"),
    ],
)
def test_a_program_that_is_not_there(program: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvSpecError) as found:
        spawn([program], plain(program), None)
    assert says in str(found.value)


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(EnvSpecError, match="daemons.cwd=.*nowhere: there is no such folder"):
        spawn([sys.executable], plain(cwd=str(tmp_path / "nowhere")), None)


def test_no_room_for_a_process_now_is_no_wrong_command(monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any, **named: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", full)
    with pytest.raises(GameLostError, match="temporarily unavailable"):
        spawn(["engine"], plain("engine"), None)


def test_environment_and_folder_are_the_engines(made: Any, tmp_path: Path):
    code = "import os; print(os.environ['FLAG'], os.environ['OMP_NUM_THREADS'], os.getcwd(), flush=True); 1/0"
    daemon = made(plain("env", "FLAG=7", *python(code, "{port}"), cwd=str(tmp_path)))
    with pytest.raises(GameLostError, match="(?s)ended with exit code 1; it said:.*7 2 .*ZeroDivisionError"):
        asyncio.run(daemon.start(Pig()))


@pytest.mark.parametrize("where", [("{port}",), ()])
def test_the_start_has_a_deadline_and_the_message_the_logs_last_lines(made: Any, where: tuple[str, ...]):
    code = "import sys, time; [print('line', n, file=sys.stderr, flush=True) for n in range(20)]; time.sleep(60)"
    daemon = made(plain(*python(code, *where), timeouts_s=Timeouts(start=1.5)))
    with pytest.raises(GameLostError) as lost:
        asyncio.run(daemon.start(Pig()))
    assert "within 1.5 s (daemons.timeouts_s.start)" in str(lost.value)
    assert "line 19" in str(lost.value)
    assert "line 11" not in str(lost.value)


def test_a_log_is_moved_aside_and_goes_on(tmp_path: Path):
    log = tmp_path / "daemon-00.log"
    with open(log, "ab", buffering=0) as writer:
        for number in range(5):
            writer.write(f"{number}".encode() * 2**20)
            rotate(log, 1.0)
            assert log.stat().st_size == 0
        writer.write(b"new")
        rotate(log, 1.0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["daemon-00.1.log", "daemon-00.2.log", "daemon-00.3.log", "daemon-00.log"]
    assert [path.read_bytes()[:1] for path in sorted(tmp_path.iterdir())] == [b"4", b"3", b"2", b"n"]
    rotate(tmp_path / "none.log", 1.0)


CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(99)']); "


@pytest.mark.parametrize("dies", [False, True])
def test_what_an_engine_started_ends_with_it(made: Any, dies: bool):
    daemon = made(plain(*python(CHILD + "time.sleep(99)")))
    daemon.process = spawn(daemon.settings.command, daemon.settings, None)
    daemon.ready = True
    top = psutil.Process(daemon.process.pid)
    assert until(lambda: [one for one in top.children() if "time.sleep(99)" in said(one)])
    (child,) = top.children()
    if dies:  # its child is nobody's then
        daemon.look({top.pid: [child]})
        top.kill()
        assert until(lambda: daemon.process.poll() is not None)
    daemon.stop()
    assert until(lambda: not said(child))


def test_how_it_ended_is_told(tmp_path: Path):
    daemon: Any = Daemon(plain("engine"), 0, itertools.count(1), tmp_path, 1)
    for code, says in ((7, "ended with exit code 7"), (0, "ended with exit code 0"), (-9, "was killed by signal 9")):
        daemon.process = SimpleNamespace(poll=lambda code=code: code)
        assert daemon.ended() == says


def test_an_end_is_waited_for_but_not_for_ever(made: Any):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    daemon = made(plain(*python(code)))
    daemon.process = process = spawn(daemon.settings.command, daemon.settings, None, pipes=True)
    process.stdout.readline()
    daemon.terminate()
    began = time.monotonic()
    asyncio.run(daemon.wait_for_end(0.1))
    assert process.poll() is None
    assert time.monotonic() - began > 0.05
    daemon.stop()
    assert process.poll() == -9


def test_time_with_open_requests_is_counted_once(made: Any):
    daemon = made(plain("engine"))
    began = time.perf_counter_ns()
    daemon.begins_waiting()
    for _ in range(3):  # never idle
        daemon.begins_waiting()
        time.sleep(0.01)
        before = daemon.busy_ns
        daemon.ends_waiting()
        assert daemon.busy_ns >= before + 10_000_000
    daemon.ends_waiting()
    assert daemon.busy_ns <= time.perf_counter_ns() - began
