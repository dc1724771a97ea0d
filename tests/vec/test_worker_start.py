"""How a worker begins, what it and its trainer wake each other with, and the line between them.

It has one numeric thread and no torch, is deaf to Ctrl-C, and no call on the line can block for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_vec.worker_start import (
    ONE_THREAD,
    PIECE_BYTES,
    SAFE_PATH,
    Bell,
    Channel,
    DeadlineError,
    NamelessSemaphore,
    acquire,
    child_environment,
    forget_name,
    make_semaphore,
    safe_path,
)
from worker_toys import Engine, echo, signals_rained, walkers

TESTS = Path(__file__).parent.parent
SHM = Path("/dev/shm")
METHODS = sorted(set(multiprocessing.get_all_start_methods()))
linux = pytest.mark.skipif(not SHM.is_dir(), reason="names of semaphores cannot be listed here")
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals, pipes and the C class")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_the_trainers_environment_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv(SAFE_PATH, "1")
    before = dict(os.environ)
    with child_environment(ONE_THREAD):
        assert all(os.environ[name] == "1" for name in ONE_THREAD)
        del os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]  # as an env may
    assert dict(os.environ) == before
    with suppress(KeyError), child_environment(ONE_THREAD):
        raise KeyError
    with safe_path():
        assert dict(os.environ) == before
    assert dict(os.environ) == before


@pytest.mark.parametrize("method", METHODS)
def test_start_methods(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    before, left = dict(os.environ), names()
    env = SharedMemoryVecEnv(walkers(3), num_workers=2, start_method=method)
    assert dict(os.environ) == before
    first, _, last = env.env_method("process")
    for process in (first, last):
        assert {name: process["threads"][name] for name in ONE_THREAD} == ONE_THREAD
        assert process["prints_at_once"], "lines must not wait in a process that may be killed"
        if method != "fork":  # which copies the trainer with all it has loaded
            assert process["loaded"] == []
    assert first["draws"] != last["draws"], "each worker has its own global random streams, seeded or not"
    env.seed(3)
    env.reset()
    env.step([0, 0, 0])
    assert gone(left), "a vector env has no names"
    env.close()
    assert dict(os.environ) == before


def test_a_fork_server_that_was_there_before_us():
    """Started by somebody else with other values, it hands those to every process."""
    script = """
import multiprocessing, os, sys
from worker_toys import walkers
from fasttrain import SharedMemoryVecEnv

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=print)
    process.start(), process.join()
    env = SharedMemoryVecEnv(walkers(1), num_workers=1, start_method="forkserver")
    print(env.env_method("process")[0]["threads"]["OMP_NUM_THREADS"], os.environ["OMP_NUM_THREADS"])
    env.close()
"""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "OMP_NUM_THREADS": "7", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["1", "7"], done.stderr


@posix
def test_signals_leave_the_worker_and_its_trainer_as_they_were_but_reach_what_its_env_started():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals_rained():  # from the first instruction on
        env = SharedMemoryVecEnv([lambda: Engine(0)], num_workers=1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        env.reset()
        env.step([0])
    pid = env.crew.workers[0].process.pid
    assert os.getpgid(pid) == pid, "what its env starts ends with it"
    (engine,) = env.env_method("begin_engine")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
        env.step([0])
    assert env.env_method("end_engine") == [-signal.SIGTERM]
    assert not psutil.pid_exists(engine)
    env.close()


def names() -> set[str]:
    return {path.name for path in SHM.glob("sem.*")} if SHM.is_dir() else set()


def gone(before: set[str]) -> bool:
    """Whether no name is left; those of another test process, which come and go, are waited for."""
    until = time.monotonic() + 20
    while not names() <= before and time.monotonic() < until:
        time.sleep(0.01)
    return names() <= before


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_wake_each_other(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    before = names()
    go, done, bell = make_semaphore(context), make_semaphore(context), Bell(context)
    process = context.Process(target=echo, args=(go, done, bell), daemon=True)
    process.start()
    try:
        for _ in range(3):
            go.release()
            assert done.acquire(True, 30.0)
        assert [bell.acquire(True, 10.0) for _ in range(3)] == [True] * 3
        assert not bell.acquire(True, 0.01)
        assert not done.acquire(False)
        assert gone(before), "the names go when the process has both"
        forget_name(go)
        forget_name(done)
    finally:
        process.kill()
        process.join()
    bell.close()


@linux
def test_a_semaphore_that_nobody_opened_goes_with_its_last_user() -> None:
    before = names()
    semaphore = NamelessSemaphore(multiprocessing.get_context("spawn"))
    assert names() - before
    with pytest.raises(RuntimeError, match="inheritance"):  # only a process that is being started may take it along
        pickle.dumps(semaphore)
    del semaphore
    assert gone(before)


@posix
def test_a_bell_that_nobody_hears_blocks_nobody() -> None:
    bell = Bell(multiprocessing.get_context())
    for _ in range(30_000):
        bell.release()
    assert bell.acquire(False)
    bell.clear()
    assert not bell.acquire(False)
    bell.release()
    assert bell.acquire(False)
    bell.close()


def test_a_bell_counts_and_waits() -> None:
    bell = Bell(multiprocessing.get_context())
    for _ in range(2):
        bell.release()
    assert [bell.acquire(False) for _ in range(3)] == [True, True, False]
    begun = time.monotonic()
    assert not bell.acquire(True, 0.05)
    assert time.monotonic() - begun >= 0.04
    threading.Timer(0.05, bell.release).start()
    assert bell.acquire(True, 10.0)
    bell.close()
    bell.close()


@pytest.mark.parametrize("spin_s", [0.0, 100e-6])
def test_acquire(spin_s: float):
    semaphore = pair()[0].go
    assert not acquire(semaphore, spin_s, 0.01)
    semaphore.release()
    assert acquire(semaphore, spin_s, 0.01)
    assert not acquire(semaphore, spin_s, 0.01), "one token, once"
    threading.Timer(0.05, semaphore.release).start()
    assert acquire(semaphore, spin_s, 10.0)


def test_spinning_yields_the_core(monkeypatch: pytest.MonkeyPatch):
    semaphore = pair()[0].go
    monkeypatch.setattr("fasttrain_vec.worker_start._yield_core", semaphore.release)
    assert acquire(semaphore, 60.0, 0.0)


def pair() -> tuple[Channel, Channel]:
    ours, theirs = multiprocessing.Pipe()
    go, done = multiprocessing.get_context("spawn").Semaphore(0), multiprocessing.get_context("spawn").Semaphore(0)
    return Channel(ours, go, done), Channel(theirs, go, done)


def arrive_whole(payloads: list[bytes]) -> None:
    ours, theirs = pair()
    sender = threading.Thread(target=lambda: [ours.send(payload) for payload in payloads])
    sender.start()
    assert [theirs.receive(10.0) for _ in payloads] == payloads
    sender.join()


def test_messages_of_any_size_come_whole():
    edges = range(PIECE_BYTES - 9, PIECE_BYTES - 6)
    arrive_whole([os.urandom(size) for size in (0, 1, *edges, 3 * PIECE_BYTES, 5_000_000)])


@how(max_examples=30)
@given(st.lists(st.binary(max_size=3 * PIECE_BYTES), max_size=5))
def test_messages_come_in_order_and_apart(payloads: list[bytes]):
    arrive_whole(payloads)


def test_nobody_writes_half_a_message_and_nobody_reads():
    ours, theirs = pair()
    with pytest.raises(DeadlineError):
        ours.receive(0.05)
    theirs.connection.send_bytes((10_000).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(DeadlineError):
        ours.receive(0.05)
    with pytest.raises(DeadlineError):
        ours.send(b"x" * 5_000_000, 0.2)


@pytest.mark.parametrize("after_s", [0.0, 0.1], ids=["before", "in the middle of a message"])
def test_the_other_side_is_gone(after_s: float):
    ours, theirs = pair()
    leaving = threading.Timer(after_s, theirs.connection.close)
    leaving.start()
    if not after_s:
        leaving.join()
        with pytest.raises((EOFError, OSError)):
            ours.receive(5.0)
    with pytest.raises(OSError, match="pipe|reset"):
        ours.send(b"x" * 50_000_000, 20.0)
    leaving.join()
