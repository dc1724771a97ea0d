from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_vec import process
from fasttrain_vec.process import Scout, ScoutLostError, WorkerLostError, WorkerProcess
from fasttrain_vec.worker import CALL, pack
from fasttrain_vec.worker_envs import Packed
from fasttrain_vec.worker_memory import NO_ROW, ROW, SharedBlock
from fasttrain_vec.worker_start import Bell
from worker_toys import (
    Chaos,
    Factory,
    Walker,
    action_of,
    broken,
    build,
    layout_of,
    leave,
    note,
    processes_left,
    settings,
    sleep,
    wrong,
)

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
    pytest.mark.usefixtures("forked_workers"),
]


@pytest.fixture
def start() -> Iterator[Callable[..., WorkerProcess]]:
    """Starts workers with their memory and kills them in the end."""
    started: list[WorkerProcess] = []

    def begin(*factories: Callable[[], Any]) -> WorkerProcess:
        context = multiprocessing.get_context(process.START_METHOD)
        worker = WorkerProcess(context, Bell(context), settings(list(factories)), len(factories))
        started.append(worker)
        ready = worker.ready(30.0)
        layout = layout_of(ready, len(factories), ready.mask_width)
        block = SharedBlock(layout.size_bytes)
        worker.arrays, control = layout.views(block.memory)  # type: ignore[attr-defined]
        worker.attach(layout, block, control[0], 30.0)
        ask(worker, "reset", [1] * len(factories), [{}] * len(factories), 0)
        return worker

    yield begin
    for worker in started:
        worker.kill()


def ask(worker: WorkerProcess, name: str, *arguments: Any) -> Any:
    worker.call(name, pack((name, arguments)), 10.0)
    return worker.wait(time.monotonic() + 20.0)


def test_a_whole_life(start: Callable[..., WorkerProcess], tmp_path: Path):
    worker = start(lambda: Walker(0), lambda: Walker(1))
    assert all(isinstance(info, Packed) for info in ask(worker, "reset", [1, 2], [{}, {}], 0))
    worker.post()
    assert worker.pending
    assert worker.wait(time.monotonic() + 20.0) is None
    assert worker.has_replied()
    assert not worker.pending
    ask(worker, "method", "write_when_closed", (str(tmp_path / "closed"),), {}, [0, 1])
    worker.ask_to_end()
    pid = worker.process.pid
    worker.end(10.0)
    assert (tmp_path / "closed").read_text().split() == ["0", "1"]
    assert not psutil.pid_exists(pid)
    worker.kill()  # once more does no harm
    worker.ask_to_end()


def test_a_death_in_a_step_is_noticed_and_spelt(start: Callable[..., WorkerProcess]):
    worker: Any = start(lambda: Chaos(0))
    worker.arrays.actions[:] = action_of("hang")
    worker.post()
    time.sleep(0.1)
    os.kill(worker.process.pid, signal.SIGSEGV)
    with pytest.raises(WorkerLostError, match="it was killed by SIGSEGV, stepping") as caught:
        worker.wait(time.monotonic() + 20.0)
    assert caught.value.cause is caught.value
    with pytest.raises(WorkerLostError, match="killed"):
        ask(worker, "get", "number", [0])


def test_a_trainer_that_goes_leaves_closed_envs(start: Callable[..., WorkerProcess], tmp_path: Path):
    worker = start(lambda: Walker(0), lambda: Walker(1))
    ask(worker, "method", "write_when_closed", (str(tmp_path / "closed"),), {}, [0, 1])
    worker.channel.connection.close()
    worker.post(CALL)
    worker.process.join(10.0)
    assert (tmp_path / "closed").read_text().split() == ["0", "1"]


def test_a_reply_to_another_request_is_not_taken_for_this_one(start: Callable[..., WorkerProcess], tmp_path: Path):
    gates = [tmp_path / "first", tmp_path / "second"]

    class Slow(Chaos):
        def step(self, action: Any) -> Any:
            while not gates[self.steps].exists():
                time.sleep(0.001)
            return super().step(action)

    worker = start(lambda: Slow(0))
    worker.post()
    until = time.monotonic() + 60.0
    while worker.control[ROW] == NO_ROW and time.monotonic() < until:  # it has read the first request
        time.sleep(0.001)
    worker.post()  # gave up on the first
    gates[0].touch()
    with pytest.raises(WorkerLostError, match="it answered another request"):
        worker.wait(time.monotonic() + 20.0)
    gates[1].touch()


def test_a_worker_that_does_not_read_is_noticed(start: Callable[..., WorkerProcess]):
    worker = start(lambda: Chaos(0))
    os.kill(worker.process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    with pytest.raises(WorkerLostError, match="it did not read the call of set in time"):
        worker.call("set", pack(("set", ("x", b"x" * 5_000_000, [0]))), 0.2)


def never() -> None:
    """Nobody looks."""


@pytest.fixture
def scout() -> Iterator[Scout]:
    before, made = processes_left(), Scout()
    yield made
    made.close()
    assert [process for process in processes_left() if process not in before] == []


def test_tasks_are_run_by_one_process_that_shares_memory(scout: Scout):
    assert scout.run(note, never) == scout.run(note, never) == scout.pid
    assert scout.memory[0] == 2
    for task, said, spec in ((wrong, "it cannot be", True), (broken, "of ours", False)):
        with pytest.raises(WorkerLostError, match=said) as caught:
            scout.run(task, never)
        assert caught.value.failure is not None
        assert caught.value.failure.is_spec_error is spec
    assert scout.run(note, never) == scout.pid, "the process goes on"


def test_the_end_of_the_process_is_told_with_its_code(scout: Scout):
    with pytest.raises(ScoutLostError) as caught:
        scout.run(leave, never)
    assert caught.value.exit_code == 3


def test_who_looks_can_end_it(scout: Scout):
    looks: list[int] = []
    pid = scout.pid

    def look() -> None:
        looks.append(pid)
        if len(looks) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        scout.run(sleep, look)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_crew_takes_it_as_its_first_worker(scout: Scout, keeps: bool):
    pid = scout.pid
    scout.run(build, never)
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
