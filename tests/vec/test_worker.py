"""The worker's side of the protocol, served by a thread of this process."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.envs.user_code import preserve_random_state
from fasttrain_vec.worker import CALL, CLOSE, HOLD, NO_MAIL, RESULT, STEP, Worker, _same, pack
from fasttrain_vec.worker_memory import (
    BUFFER,
    BUSY_NS,
    COMMAND,
    MAIL,
    NO_ROW,
    NOTIFY,
    REPLY,
    REQUEST,
    ROW,
    STEP_NS,
    SharedBlock,
)
from fasttrain_vec.worker_start import Bell, Channel
from worker_toys import Walker, layout_of, settings


class Trainer:
    """The other side, by hand. Its envs begin with number 3."""

    def __init__(self, *factories: Any, attached: bool = True) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        go, done = context.Semaphore(0), context.Semaphore(0)
        self.notify, self.channel = Bell(context), Channel(ours, go, done)
        worker = Worker(Channel(theirs, go, done), self.notify, settings(list(factories), first=3))
        self.thread = threading.Thread(target=worker.serve, daemon=True)
        self.thread.start()
        if not attached:
            return
        ready = pickle.loads(self.channel.receive(10.0))
        layout = layout_of(ready, 3 + len(factories), ready.mask_width)
        self.block = SharedBlock(layout.size_bytes)
        self.arrays, control = layout.views(self.block.memory)
        self.control = control[0]
        self.control[ROW] = NO_ROW
        self.channel.send(pack(layout), 10.0)
        self.block.send(self.channel.connection)
        assert pickle.loads(self.channel.receive(10.0)) is None
        self.call("reset", [1, 2][: len(factories)], [{}, {}][: len(factories)], 0)

    def post(self, command: int) -> None:
        self.control[REQUEST] += 1
        self.control[COMMAND] = command
        self.channel.go.release()

    def wait(self) -> Any:
        assert self.channel.done.acquire(True, 10.0)
        return pickle.loads(self.channel.receive(10.0)) if self.control[MAIL] else None

    def step(self) -> Any:
        self.control[BUFFER] = 1 - self.control[BUFFER]
        self.post(STEP)
        return self.wait()

    def call(self, name: str, *arguments: Any) -> Any:
        self.post(CALL)
        self.channel.send(pack((name, arguments)), 10.0)
        return self.wait()

    def close(self) -> None:
        self.post(CLOSE)
        self.thread.join(10.0)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    with preserve_random_state():
        yield


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer(lambda: Walker(3), lambda: Walker(4))
    yield trainer
    trainer.close()


def test_a_step_writes_the_other_buffer_and_keeps_the_clock(trainer: Trainer):
    busy = int(trainer.control[BUSY_NS])
    assert trainer.step() is None
    assert trainer.control[MAIL] == NO_MAIL
    assert trainer.arrays.observations[1][3:, 2].tolist() == [1, 1]
    assert trainer.arrays.observations[0][3:, 2].tolist() == [0, 0]
    assert trainer.control[BUSY_NS] - busy == trainer.control[STEP_NS] > 0
    assert trainer.control[REPLY] == trainer.control[REQUEST]
    assert trainer.control[ROW] == NO_ROW


def test_whoever_waits_for_the_first_is_told_only_if_asked(trainer: Trainer):
    trainer.step()
    assert not trainer.notify.acquire(False)
    trainer.control[NOTIFY] = 1
    trainer.step()
    assert trainer.notify.acquire(True, 10.0), "a moment after the reply"


def test_hold_touches_nothing(trainer: Trainer):
    before = trainer.block.memory[:]
    trainer.post(HOLD)
    assert trainer.wait() is None
    trainer.control[REQUEST] -= 1
    trainer.control[REPLY] -= 1
    trainer.control[COMMAND] = CALL
    trainer.control[MAIL] = RESULT
    assert trainer.block.memory[:] == before


def test_a_trainer_that_goes_leaves_closed_envs(tmp_path: Path):
    trainer = Trainer(lambda: Walker(0), lambda: Walker(1))
    trainer.call("method", "write_when_closed", (str(tmp_path / "closed"),), {}, [0, 1])
    trainer.channel.connection.close()
    trainer.post(CALL)
    trainer.thread.join(10.0)
    assert (tmp_path / "closed").read_text().split() == ["0", "1"]


def test_a_seeded_reset_seeds_the_global_streams(trainer: Trainer):
    draws = []
    for seed in (5, 5, 6):
        trainer.call("reset", [seed, 1], [{}, {}], 0)
        draws.append(trainer.call("method", "process", (), {}, [0])[0]["draws"])
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "value", "same"),
    [(1, 1, True), (1, 2, False), (np.arange(3), np.arange(3), True), (np.arange(3), np.zeros(3), False),
     (np.arange(3), np.arange(4), False), (NAN, 1.0, False), ([1, [2]], [1, [2]], True), (NAN, NAN, True)],
)  # fmt: skip
def test_read_back(found: Any, value: Any, same: bool):
    assert _same(found, value) is same
