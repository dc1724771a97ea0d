"""Semaphores without names, and the bell."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain.vec.worker_start import Bell, NamelessSemaphore, make_semaphore, opened

SHM = Path("/dev/shm")
METHODS = [name for name in ("fork", "forkserver", "spawn") if name in multiprocessing.get_all_start_methods()]
linux = pytest.mark.skipif(not SHM.is_dir(), reason="names of semaphores cannot be listed here")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork\\(\\) may lead to deadlocks:DeprecationWarning"),
]


def names() -> set[str]:
    return {path.name for path in SHM.glob("sem.*")}


def echo(go: Any, done: Any, bell: Bell) -> None:
    while go.acquire(True, 20.0):
        done.release()
        bell.release()


def gone(before: set[str]) -> bool:
    """Whether no name is left; those of another test process, which come and go, are waited for."""
    until = time.monotonic() + 20
    while not names() <= before and time.monotonic() < until:
        time.sleep(0.01)
    return names() <= before


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_wake_each_other(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    before = names() if SHM.is_dir() else set()
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
        if SHM.is_dir():
            assert gone(before), "the names go when the process has both"
        opened(go)
        opened(done)
    finally:
        process.kill()
        process.join()
    bell.close()


@linux
def test_a_semaphore_that_nobody_opened_goes_with_its_last_user() -> None:
    before = names()
    semaphore = NamelessSemaphore(multiprocessing.get_context("spawn"))
    assert names() - before
    del semaphore
    assert gone(before)


@linux
def test_a_vector_env_has_no_names() -> None:
    before = names()
    env = SharedMemoryVecEnv([lambda: gym.make("CartPole-v1")] * 2, num_workers=2)
    try:
        env.reset()
        assert gone(before)
    finally:
        env.close()


@pytest.mark.skipif(sys.platform == "win32", reason="the C class of POSIX")
def test_only_a_process_that_is_being_started_may_take_it_along() -> None:
    import pickle

    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(NamelessSemaphore(multiprocessing.get_context("spawn")))


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there hold more")
def test_a_bell_that_nobody_hears_blocks_nobody() -> None:
    bell = Bell(multiprocessing.get_context())
    for _ in range(30_000):
        bell.release()
    assert bell.acquire(False)
    bell.hush()
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
