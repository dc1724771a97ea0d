"""The worker's side of the protocol, served by a thread of this process."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from fasttrain.envs.user_code import kept_random_state
from fasttrain.vec.worker import (
    CALL,
    CLOSE,
    FAILED,
    HOLD,
    NO_MAIL,
    RECORDS,
    RESULT,
    STEP,
    Worker,
    _is_wrapped,
    _same,
    pack,
)
from fasttrain.vec.worker_envs import Failure, Packed, Record, Settings
from fasttrain.vec.worker_memory import (
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
    Layout,
    SharedBlock,
)
from fasttrain.vec.worker_start import Bell, Channel
from worker_toys import Chaos, Hat, Walker, action_of


class Trainer:
    """The other side, by hand."""

    def __init__(self, factories: list[Any], **changes: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        go, done = context.Semaphore(0), context.Semaphore(0)
        self.notify = Bell(context)
        self.channel = Channel(ours, go, done)
        values: dict[str, Any] = {
            "worker": 0, "first": 3, "factories": cloudpickle.dumps(factories), "info_keys": (), "use_masks": True,
            "check_finite": True, "restart_envs": False, "spin_s": 0.0,
        }  # fmt: skip
        worker = Worker(Channel(theirs, go, done), self.notify, Settings(**values | changes))
        self.thread = threading.Thread(target=worker.serve, daemon=True)
        self.thread.start()
        self.number = len(factories)

    def attach(self) -> None:
        ready = pickle.loads(self.channel.receive(10.0))
        layout = Layout(
            num_envs=3 + self.number, num_workers=1, observation_space=ready.observation_space,
            action_space=ready.action_space, mask_width=ready.mask_width, num_info_keys=0,
        )  # fmt: skip
        self.block = SharedBlock(layout.size_bytes)
        self.arrays, control = layout.views(self.block.memory)
        self.control = control[0]
        self.control[ROW] = NO_ROW
        self.channel.send(pack(layout), 10.0)
        self.block.send(self.channel.connection)
        assert pickle.loads(self.channel.receive(10.0)) is None

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
    with kept_random_state():
        yield


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer([lambda: Walker(3), lambda: Walker(4)])
    trainer.attach()
    trainer.call("reset", [1, 2], [{}, {}], 0)
    yield trainer
    trainer.close()


def test_a_reset_writes_its_rows_and_answers_with_the_infos(trainer: Trainer):
    infos = trainer.call("reset", [5, 6], [{}, {"length": 4}], 0)
    assert all(isinstance(info, Packed) for info in infos)
    assert [pickle.loads(info.info)["options"] for info in infos] == [None, {"length": 4}]
    assert trainer.arrays.observations[0][:, 0].tolist() == [0, 0, 0, 3, 4], "rows 3 and 4 are its own"
    assert trainer.arrays.action_masks[3:].any()
    assert not trainer.arrays.action_masks[:3].any()


def test_a_step_writes_the_other_buffer_and_keeps_the_clock(trainer: Trainer):
    busy = int(trainer.control[BUSY_NS])
    assert trainer.step() is None
    assert trainer.control[MAIL] == NO_MAIL
    assert trainer.arrays.observations[1][3:, 2].tolist() == [1, 1]
    assert trainer.arrays.observations[0][3:, 2].tolist() == [0, 0]
    assert trainer.control[BUSY_NS] - busy == trainer.control[STEP_NS] > 0
    assert trainer.control[REPLY] == trainer.control[REQUEST]
    assert trainer.control[ROW] == NO_ROW


def test_news_come_as_mail(trainer: Trainer):
    trainer.call("reset", [1, 2], [{"length": 1}, {"length": 2}], 0)
    (record,) = trainer.step()
    assert trainer.control[MAIL] == RECORDS
    assert isinstance(record, Record)
    assert record.env_index == 3
    assert pickle.loads(record.info)["int"] == 1
    assert record.reset_info == b"", "no key was asked for"


def test_hold_touches_nothing(trainer: Trainer):
    before = trainer.block.memory[:]
    trainer.post(HOLD)
    assert trainer.wait() is None
    trainer.control[REQUEST] -= 1
    trainer.control[REPLY] -= 1
    trainer.control[COMMAND] = CALL
    trainer.control[MAIL] = RESULT
    assert trainer.block.memory[:] == before


def test_whoever_waits_for_the_first_is_told_only_if_asked(trainer: Trainer):
    trainer.step()
    assert not trainer.notify.acquire(False)
    trainer.control[NOTIFY] = 1
    trainer.step()
    assert trainer.notify.acquire(True, 10.0), "a moment after the reply"


def test_a_late_reply_bears_the_number_of_its_own_request(tmp_path: Path):
    gates = [tmp_path / "first", tmp_path / "second"]

    class Slow(Walker):
        def step(self, action: Any) -> Any:
            while not gates[self.steps].exists():
                time.sleep(0.001)
            return super().step(action)

    trainer = Trainer([lambda: Slow(0)])
    trainer.attach()
    trainer.call("reset", [1], [{}], 0)
    taken = int(trainer.control[REQUEST]) + 1
    trainer.post(STEP)
    until = time.monotonic() + 30.0
    while trainer.control[ROW] == NO_ROW and time.monotonic() < until:
        time.sleep(0.001)
    assert trainer.control[ROW] == 0, "who finds it hung sees where"
    trainer.post(STEP)  # gave up on the first
    gates[0].touch()
    trainer.wait()
    assert trainer.control[REPLY] == taken
    gates[1].touch()
    trainer.wait()
    assert trainer.control[REPLY] == taken + 1
    trainer.close()


def test_a_failure_is_reported_and_the_worker_still_answers():
    trainer = Trainer([lambda: Chaos(3)])
    trainer.attach()
    trainer.call("reset", [7], [{}], 0)
    trainer.arrays.actions[3] = action_of("raise")
    failure = trainer.step()
    assert trainer.control[MAIL] == FAILED
    assert isinstance(failure, Failure)
    assert failure.env_index == 3
    assert failure.seed == 7
    assert failure.action == str(action_of("raise"))
    assert "RuntimeError: the board fell" in failure.text
    assert "in step" in failure.traceback
    assert trainer.control[ROW] == NO_ROW
    assert isinstance(trainer.call("reset", [7], [{"fault": "raise"}], 0), Failure)
    assert trainer.control[MAIL] == FAILED
    assert trainer.call("get", "number", [0]) == [3]
    trainer.close()


def test_calls_that_fail(trainer: Trainer):
    missing = trainer.call("get", "nothing", [0])
    assert isinstance(missing, Failure)
    assert missing.missing
    assert trainer.control[MAIL] == RESULT, "the env goes on"
    raised = trainer.call("method", "fail", (ValueError,), {}, [0])
    assert not raised.missing
    assert "ValueError: the board fell" in raised.text
    assert "in fail" in raised.traceback
    assert "Opaque stays where it is" in trainer.call("method", "opaque", (), {}, [0]).text
    trainer.post(CALL)
    trainer.channel.send(b"no pickle", 10.0)
    assert isinstance(trainer.wait(), Failure)
    assert trainer.call("get", "number", [1, 0]) == [4, 3]


def test_an_env_that_cannot_be_built():
    trainer = Trainer([lambda: Walker(0), lambda: 1 / 0])
    failure = pickle.loads(trainer.channel.receive(10.0))
    assert isinstance(failure, Failure)
    assert failure.spec
    assert failure.text.startswith("ZeroDivisionError")
    trainer.thread.join(10.0)


def test_close_closes_the_envs_and_so_does_a_trainer_that_goes(tmp_path: Any):
    for leave in (Trainer.close, lambda trainer: trainer.channel.connection.close()):
        trainer = Trainer([lambda: Walker(0), lambda: Walker(1)])
        trainer.attach()
        path = tmp_path / str(leave)
        trainer.call("method", "write_when_closed", (str(path),), {}, [0, 1])
        if leave is Trainer.close:
            trainer.close()
        else:
            trainer.channel.connection.close()
            trainer.post(CALL)
            trainer.thread.join(10.0)
        assert path.read_text().split() == ["0", "1"]


def test_unseeded_workers_do_not_share_the_global_streams_they_were_forked_with():
    draws = []
    for _ in range(2):
        with kept_random_state():
            trainer = Trainer([lambda: Walker(0)])
            trainer.attach()
            draws.append(trainer.call("method", "process", (), {}, [0])[0]["draws"])
            trainer.close()
    assert draws[0][0] != draws[1][0]
    assert draws[0][1] != draws[1][1]


def test_a_seeded_reset_seeds_the_global_streams(trainer: Trainer):
    draws = []
    for seed in (5, 5, 6):
        trainer.call("reset", [seed, 1], [{}, {}], 0)
        draws.append(trainer.call("method", "process", (), {}, [0])[0]["draws"])
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


@pytest.mark.parametrize(
    ("found", "value", "same"),
    [(1, 1, True), (1, 2, False), (np.arange(3), np.arange(3), True), (np.arange(3), np.zeros(3), False),
     (np.arange(3), np.arange(4), False), (float("nan"), 1.0, False), ([1, [2]], [1, [2]], True)],
)  # fmt: skip
def test_read_back(found: Any, value: Any, same: bool):
    assert _same(found, value) is same


def test_read_back_of_what_compares_to_nothing():
    odd = float("nan")
    assert _same(odd, odd)


def test_wrappers_by_name():
    env = Hat(TimeLimit(Walker(0), 5))
    name = ("worker_toys", "Hat")
    assert _is_wrapped(env, name)
    assert _is_wrapped(env, ("gymnasium.wrappers.common", "TimeLimit"))
    assert _is_wrapped(env, ("gymnasium.core", "Wrapper"))
    assert not _is_wrapped(env, ("worker_toys", "Walker")), "the env itself is no wrapper"
    assert not _is_wrapped(env.env, name)


def test_pack_names_what_cannot_travel():
    assert pickle.loads(pack({"a": 1})) == {"a": 1}
    with pytest.raises(TypeError, match="function cannot be sent to another process"):
        pack(lambda: 0)
