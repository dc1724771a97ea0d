"""One worker process from outside: a deadline on every wait, and a word on how it ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from fasttrain.vec.process import START_METHOD, WorkerLostError, WorkerProcess, WorkerTraceback
from fasttrain.vec.worker import pack
from fasttrain.vec.worker_envs import Failure, Packed, Settings
from fasttrain.vec.worker_memory import NO_ROW, ROW, Layout, SharedBlock
from fasttrain.vec.worker_start import Bell
from worker_toys import Chaos, Walker, action_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


class Started:
    """A worker with its memory."""

    def __init__(self, *factories: Callable[[], Any]) -> None:
        context = multiprocessing.get_context(START_METHOD)
        settings = Settings(
            worker=0, first=0, factories=cloudpickle.dumps(list(factories)), info_keys=(), use_masks=True,
            check_finite=True, restart_envs=False, spin_s=0.0,
        )  # fmt: skip
        self.notify = Bell(context)
        self.worker = WorkerProcess(context, self.notify, settings, len(factories))
        self.pid = self.worker.process.pid

    def attach(self) -> WorkerProcess:
        ready = self.worker.ready(30.0)
        layout = Layout(
            num_envs=self.worker.stop, num_workers=1, observation_space=ready.observation_space,
            action_space=ready.action_space, mask_width=ready.mask_width, num_info_keys=0,
        )  # fmt: skip
        self.block = SharedBlock(layout.size_bytes)
        self.arrays, control = layout.views(self.block.memory)
        self.worker.attach(layout, self.block, control[0], 30.0)
        return self.worker


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """Starts workers and kills them in the end: Python itself would wait for ever for one that ignores SIGTERM."""
    all_started: list[Started] = []

    def begin(*factories: Callable[[], Any]) -> Started:
        all_started.append(Started(*factories))
        return all_started[-1]

    yield begin
    for started in all_started:
        started.worker.kill()


@pytest.fixture
def chaos(start: Callable[..., Started]) -> Started:
    started = start(lambda: Chaos(0), lambda: Chaos(1))
    ask(started.attach(), "reset", [1, 2], [{}, {}], 0)
    return started


def ask(worker: WorkerProcess, name: str, *arguments: Any) -> Any:
    worker.call(name, pack((name, arguments)), 10.0)
    return worker.wait(soon())


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_a_whole_life(start: Callable[..., Started], tmp_path: Any):
    started = start(lambda: Walker(0), lambda: Walker(1))
    worker = started.attach()
    infos = ask(worker, "reset", [1, 2], [{}, {}], 0)
    assert all(isinstance(info, Packed) for info in infos)
    worker.post()
    assert worker.pending
    assert worker.wait(soon()) is None
    assert worker.replied()
    assert not worker.pending
    ask(worker, "method", "write_when_closed", (str(tmp_path / "closed"),), {}, [0, 1])
    worker.ask_to_end()
    worker.end(10.0)
    assert (tmp_path / "closed").read_text().split() == ["0", "1"]
    assert not psutil.pid_exists(started.pid)
    worker.kill()  # once more does no harm
    worker.ask_to_end()


def test_failures_come_with_the_place(chaos: Started):
    chaos.arrays.actions[:] = (0, action_of("raise"))
    chaos.worker.post()
    with pytest.raises(WorkerLostError, match="RuntimeError: the board fell") as caught:
        chaos.worker.wait(soon())
    assert caught.value.failure.env_index == 1
    assert isinstance(caught.value.cause, WorkerTraceback)
    assert "in step" in str(caught.value.cause)
    assert not chaos.worker.pending, "it answered and may be asked again"
    assert ask(chaos.worker, "get", "number", [0, 1]) == [0, 1]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), "it was killed by SIGKILL, stepping"),
        (lambda pid: os.kill(pid, signal.SIGSEGV), "it was killed by SIGSEGV, stepping"),
        (None, "it ended with exit code 7, stepping"),
    ],
)
def test_a_death_in_a_step_is_noticed_and_spelt(chaos: Started, end: Any, message: str):
    chaos.arrays.actions[:] = action_of("hang" if end else "os_exit")
    chaos.worker.post()
    if end:
        time.sleep(0.2)
        end(chaos.pid)
    with pytest.raises(WorkerLostError, match=message) as caught:
        chaos.worker.wait(soon())
    assert caught.value.cause is caught.value
    with pytest.raises(WorkerLostError, match="exit code|killed"):
        ask(chaos.worker, "get", "number", [0])


def test_a_hang_is_noticed_at_the_deadline(chaos: Started):
    chaos.arrays.actions[:] = action_of("hang")
    chaos.worker.post()
    with pytest.raises(WorkerLostError, match="it did not answer in time"):
        chaos.worker.wait(soon(0.2))
    assert psutil.pid_exists(chaos.pid)
    chaos.worker.ask_to_end()
    chaos.worker.end(10.0)  # busy: killed without waiting
    assert not psutil.pid_exists(chaos.pid)


def test_a_reply_to_another_request_is_not_taken_for_this_one(start: Callable[..., Started], tmp_path: Path):
    gates = [tmp_path / "first", tmp_path / "second"]

    class Slow(Chaos):
        def step(self, action: Any) -> Any:
            while not gates[self.steps].exists():
                time.sleep(0.001)
            return super().step(action)

    started = start(lambda: Slow(0))
    worker = started.attach()
    ask(worker, "reset", [1], [{}], 0)
    worker.post()
    until = time.monotonic() + 60.0
    while worker.control[ROW] == NO_ROW and time.monotonic() < until:  # it has read the first request
        time.sleep(0.001)
    worker.post()  # gave up on the first
    gates[0].touch()
    with pytest.raises(WorkerLostError, match="it answered out of turn"):
        worker.wait(soon())
    gates[1].touch()


def test_a_worker_that_does_not_read_is_noticed(chaos: Started):
    os.kill(chaos.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="it did not read in time, called for set"):
        chaos.worker.call("set", pack(("set", ("x", b"x" * 5_000_000, [0]))), 0.2)


def test_an_answer_that_cannot_be_read_here_leaves_the_worker_well(start: Callable[..., Started]):
    started = start(lambda: Walker(0))
    worker = started.attach()
    answer = ask(worker, "method", "only_here", (), {}, [0])
    assert isinstance(answer, Failure)
    assert "no such class in the trainer" in answer.text
    assert ask(worker, "get", "number", [0]) == [0]


def test_envs_that_are_not_built_in_time(start: Callable[..., Started]):
    started = start(lambda: time.sleep(3600.0))
    with pytest.raises(WorkerLostError, match=r"it did not answer in 0.5 s, building its envs"):
        started.worker.ready(0.5)
    started.worker.end(5.0)
    assert not psutil.pid_exists(started.pid)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: os._exit(4), "it ended with exit code 4, building"),
    ],
)
def test_envs_that_cannot_be_built(start: Callable[..., Started], factory: Callable[[], Any], message: str):
    started = start(factory)
    with pytest.raises(WorkerLostError, match=message):
        started.worker.ready(30.0)
