"""The process before the crew: errands, deaths that name themselves, and the way into a crew."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from fasttrain.errors import EnvSpecError
from fasttrain.vec.process import Scout, ScoutLostError, WorkerLostError
from fasttrain.vec.shared import SharedMemoryVecEnv
from worker_toys import Walker, processes_left

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def note(memory: Any, kept: list[Any]) -> int:
    memory[0] += 1
    return os.getpid()


def build(memory: Any, kept: list[Any]) -> None:
    env = Walker(0)
    env.played = 7  # type: ignore[attr-defined]
    kept.append(env)


def wrong(memory: Any, kept: list[Any]) -> None:
    raise EnvSpecError("it cannot be")


def broken(memory: Any, kept: list[Any]) -> None:
    raise KeyError("of ours")


def leave(memory: Any, kept: list[Any]) -> None:
    os._exit(3)


def sleep(memory: Any, kept: list[Any]) -> None:
    time.sleep(600)


class Factory:
    """As ours: it can wrap an env that was built before."""

    def __call__(self) -> gym.Env[Any, Any]:
        return Walker(1)

    def around(self, core: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        return gym.wrappers.TimeLimit(core, 5)


def never() -> None:
    """Nobody looks."""


@pytest.fixture
def scout() -> Iterator[Scout]:
    before, made = processes_left(), Scout()
    yield made
    made.close()
    assert [process for process in processes_left() if process not in before] == []


def test_errands_are_done_by_one_process_that_shares_memory(scout: Scout):
    assert scout.ask(note, never) == scout.ask(note, never) == scout.pid
    assert scout.memory[0] == 2


@pytest.mark.parametrize(("errand", "said", "spec"), [(wrong, "it cannot be", True), (broken, "of ours", False)])
def test_an_error_comes_back_with_its_kind_and_the_process_goes_on(
    scout: Scout, errand: Callable[..., None], said: str, spec: bool
):
    with pytest.raises(WorkerLostError, match=said) as caught:
        scout.ask(errand, never)
    assert caught.value.failure is not None
    assert caught.value.failure.spec is spec
    assert scout.ask(note, never) == scout.pid


def test_the_end_of_the_process_is_told_with_its_code(scout: Scout):
    with pytest.raises(ScoutLostError) as caught:
        scout.ask(leave, never)
    assert caught.value.exit_code == 3


def test_who_looks_can_end_it(scout: Scout):
    looks: list[int] = []
    pid = scout.pid

    def look() -> None:
        looks.append(pid)
        if len(looks) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        scout.ask(sleep, look)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_crew_takes_it_as_its_first_worker(scout: Scout, keeps: bool):
    pid = scout.pid
    scout.ask(build, never)
    scout.keeps = keeps
    env = SharedMemoryVecEnv([Factory()] * 4, 2, scout=scout)
    try:
        assert env.crew.workers[0].process.pid == pid
        assert [env.has_attr("played"), env.env_is_wrapped(gym.wrappers.TimeLimit)] == [False, [keeps] + 3 * [False]]
        if keeps:
            assert env.get_attr("played", [0]) == [7]
        scout.close()  # which is no longer its own
        env.seed(3)
        env.reset()
        env.step(np.zeros(4, np.int64))
        assert env.crew.workers[0].process.is_alive()
    finally:
        env.close()
