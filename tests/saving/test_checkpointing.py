"""When checkpoints are written, and what happens if they cannot be."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunCommand
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import train
from fasttrain.saving import checkpointing as module
from fasttrain.saving.checkpointing import Checkpoints, Settings
from fasttrain.saving.checkpoints import CheckpointFolder, Disk, Snapshot


class FullDisk(Disk):
    """Has no room while `full`."""

    full = True

    def write(self, path: Path, write: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, write)


class Trainer:
    """Something that counts, and its checkpoints."""

    def __init__(
        self,
        folder: Path,
        every: int = 10,
        background: bool = False,
        grace_s: float = 5.0,
        every_s: float = 0.0,
    ) -> None:
        self.said: list[str] = []
        self.value, self.steps = np.zeros(1), 0
        self.disk = FullDisk()
        self.disk.full = False
        store = CheckpointFolder(folder, disk=self.disk)
        settings = Settings(every, background, grace_s, every_s)
        self.checkpoints = Checkpoints(store, self.take, settings, PhaseClock(), self.said.append)

    def take(self) -> Snapshot:
        return Snapshot(self.steps, {"env_steps": self.steps}, {"value": self.value}, lambda file: None)

    def go(self, steps: int, due: bool = False, stopping: bool = False) -> None:
        self.steps = steps
        self.value[:] = steps
        self.checkpoints.at_rest(steps, due, stopping)


def names(folder: Path) -> list[str]:
    return [path.name[-3:] for path in sorted(folder.glob("step_*"))]


def test_one_is_written_when_due_and_at_the_end(tmp_path: Path):
    trainer = Trainer(tmp_path)
    for steps in (0, 5, 10, 15):
        trainer.go(steps, due=steps == 10)
    trainer.steps = 20
    trainer.checkpoints.finish(20, at_rest=True, stopped=True)
    assert names(tmp_path) == ["010", "020"]
    assert trainer.said == []


def test_in_the_background_training_goes_on_and_the_copy_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer, gate = Trainer(tmp_path, background=True), threading.Event()
    publish = trainer.checkpoints.folder.publish

    def slowly(*arguments: Any) -> Any:
        assert gate.wait(30)
        return publish(*arguments)

    monkeypatch.setattr(trainer.checkpoints.folder, "publish", slowly)
    trainer.go(10, due=True)
    trainer.go(15)
    assert names(tmp_path) == [], "not written yet, and nobody waited"
    gate.set()
    trainer.go(20, due=True)
    trainer.checkpoints.finish(20, at_rest=True, stopped=True)
    assert names(tmp_path) == ["010", "020"]
    with np.load(tmp_path / "step_000000000010" / "arrays.npz") as arrays:
        assert arrays["value"].tolist() == [10]


def test_a_stop_waits_for_the_next_rest(tmp_path: Path):
    trainer = Trainer(tmp_path)
    trainer.go(0)
    trainer.go(5)
    assert not trainer.checkpoints.may_stop(for_signal=True)
    trainer.go(8, stopping=True)
    assert trainer.checkpoints.may_stop(for_signal=True)
    trainer.checkpoints.finish(9, at_rest=False, stopped=True)
    assert names(tmp_path) == ["008"]
    assert trainer.said == ["checkpoint of 8 steps written; the 1 steps since are dropped"]


def test_a_stop_in_a_long_rollout_takes_the_state_at_its_beginning(tmp_path: Path):
    trainer = Trainer(tmp_path, grace_s=0.0)
    trainer.go(0)
    trainer.go(5)
    trainer.value[:] = 99  # the rollout goes on
    while not trainer.checkpoints.may_stop(for_signal=True):
        pass
    trainer.checkpoints.finish(7, at_rest=False, stopped=True)
    assert names(tmp_path) == ["005"]
    with np.load(tmp_path / "step_000000000005" / "arrays.npz") as arrays:
        assert arrays["value"].tolist() == [5]


def test_a_rule_that_stops_waits_only_where_checkpoints_are_on(tmp_path: Path):
    trainer = Trainer(tmp_path, every=0)
    trainer.go(0)
    assert trainer.checkpoints.may_stop(for_signal=False)
    assert not trainer.checkpoints.may_stop(for_signal=True)


def test_a_state_too_large_to_keep_is_not_kept_and_known_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HOLD_MOST_BYTES", 4)
    trainer = Trainer(tmp_path, grace_s=0.0)
    trainer.go(0)
    trainer.go(5)
    while not trainer.checkpoints.may_stop(for_signal=True):
        pass
    assert names(tmp_path) == []
    assert "the state of 5 steps is too large to be kept in memory" in trainer.checkpoints.failed
    assert "raise checkpoint.grace_s, or set checkpoint_every" in trainer.checkpoints.failed


def test_a_large_state_is_taken_once_to_know_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HOLD_MOST_BYTES", 4)
    trainer = Trainer(tmp_path, grace_s=0.0)
    taken: list[int] = []
    take = trainer.checkpoints._take
    monkeypatch.setattr(trainer.checkpoints, "_take", lambda: taken.append(1) or take())
    for steps in (0, 5, 6, 7):
        trainer.go(steps)
    assert len(taken) == 1


def test_for_a_crash_a_state_is_kept_seldom_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HOLD_SHARE", 1e-12)
    trainer = Trainer(tmp_path, every=0)
    for steps in (0, 5, 10, 15):
        trainer.go(steps)
    trainer.value[:] = 99
    trainer.checkpoints.after_error(trainer.take)
    assert names(tmp_path) == ["005"], "after the first two the next one is far away"
    with np.load(tmp_path / "step_000000000005" / "arrays.npz") as arrays:
        assert arrays["value"].tolist() == [5]
    monkeypatch.setattr(module, "HOLD_SHARE", 1e12)
    for steps in (20, 25):
        trainer.go(steps)
    trainer.checkpoints.after_error(trainer.take)
    assert names(tmp_path) == ["005", "025"]


def test_a_crash_leaves_what_is_written_alone_and_takes_a_large_state_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = Trainer(tmp_path)
    trainer.go(10, due=True)
    trainer.steps = 11
    trainer.checkpoints.after_error(trainer.take)
    assert names(tmp_path) == ["010"]
    monkeypatch.setattr(module, "HOLD_MOST_BYTES", 4)
    trainer.go(12)
    trainer.steps = 13
    trainer.checkpoints.after_error(trainer.take)
    assert names(tmp_path) == ["010", "013"]


def test_a_crash_on_a_full_disk_says_so(tmp_path: Path):
    trainer = Trainer(tmp_path)
    trainer.go(10)
    trainer.disk.full = True
    trainer.checkpoints.after_error(trainer.take)
    assert "No space left on device" in trainer.checkpoints.failed


class Clock:
    """In the place of the module `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_by_time_they_come_every_so_many_seconds_of_training_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    trainer = Trainer(tmp_path, every=0, every_s=60.0)
    for steps, now in ((0, 1000.0), (5, 1059.0), (6, 1061.0), (7, 1120.0), (8, 1122.0)):
        clock.now = now
        trainer.go(steps)
    assert names(tmp_path) == ["006", "008"]
    trainer.steps = 9
    trainer.checkpoints.finish(9, at_rest=True, stopped=False)
    assert names(tmp_path) == ["006", "008", "009"]


def test_by_time_they_take_a_hundredth_of_it_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    trainer = Trainer(tmp_path, every=0, every_s=60.0)
    publish = trainer.checkpoints.folder.publish

    def slowly(*arguments: Any) -> Any:
        clock.now += 2.0
        return publish(*arguments)

    monkeypatch.setattr(trainer.checkpoints.folder, "publish", slowly)
    for steps, now in ((0, 1000.0), (5, 1061.0), (6, 1130.0), (7, 1262.0), (8, 1264.0)):
        clock.now = now
        trainer.go(steps)
    assert names(tmp_path) == ["005", "008"]


def test_by_time_nothing_large_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TIMED_MOST_BYTES", 4)
    trainer = Trainer(tmp_path, every=0, every_s=1e-9)
    for steps in (0, 5):
        trainer.go(steps)
    trainer.checkpoints.finish(5, at_rest=True, stopped=False)
    assert names(tmp_path) == []
    assert trainer.said == ["the run's state takes 0.0 GB: none is written by time; checkpoint_every=… does"]


def test_where_a_rule_stopped_a_rollout_the_state_kept_last_is_the_final_one(tmp_path: Path):
    trainer = Trainer(tmp_path, every=0, every_s=60.0)
    for steps in (0, 5):
        trainer.go(steps)
    assert trainer.checkpoints.may_stop(for_signal=False), "by time or not, a rule stops at the same step"
    trainer.checkpoints.finish(7, at_rest=False, stopped=False)
    assert names(tmp_path) == ["005"]


def test_a_checkpoint_that_failed_is_tried_again_before_a_stop_and_that_once(tmp_path: Path):
    trainer = Trainer(tmp_path)
    trainer.disk.full = True
    trainer.go(10, due=True)
    assert not trainer.checkpoints.may_stop(for_signal=True), "the disk may have room by the rollout's end"
    trainer.go(12, stopping=True)
    assert trainer.checkpoints.may_stop(for_signal=True), "it was tried"
    assert "the checkpoint of 12 steps could not be written" in trainer.checkpoints.failed


def test_what_another_process_wrote_is_not_said_to_be_written(tmp_path: Path):
    trainer = Trainer(tmp_path, every=0)
    trainer.checkpoints.at = 10
    trainer.go(10)
    assert trainer.checkpoints.may_stop(for_signal=False)
    trainer.checkpoints.finish(15, at_rest=False, stopped=False)
    assert trainer.said == []


def test_the_last_checkpoint_is_tried_once_more_at_the_end(tmp_path: Path):
    trainer = Trainer(tmp_path)
    trainer.disk.full = True
    trainer.go(20, due=True)
    trainer.checkpoints.wait()
    trainer.disk.full = False
    trainer.checkpoints.finish(20, at_rest=True, stopped=True)
    assert (names(tmp_path), trainer.checkpoints.failed) == (["020"], "")


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, background: bool):
    trainer = Trainer(tmp_path, background=background)
    trainer.go(10, due=True)
    trainer.checkpoints.wait()
    trainer.disk.full = True
    for steps in (20, 30):
        trainer.go(steps, due=True)
    trainer.checkpoints.wait()
    assert len(trainer.said) == 1
    assert trainer.said[0].startswith("warning: the checkpoint of 20 steps could not be written (OSError: [Errno 28]")
    assert trainer.said[0].endswith("training goes on; the next try is in 10 steps")
    assert names(tmp_path) == ["010"]
    trainer.checkpoints.finish(40, at_rest=False, stopped=True)
    assert trainer.said[1].startswith("warning: not saved for a resume: the checkpoint of 30 steps")
    trainer.disk.full = False
    trainer.go(50, due=True)
    trainer.checkpoints.wait()
    assert names(tmp_path) == ["010", "050"]
    assert trainer.checkpoints.failed == ""


def test_a_whole_run_on_a_full_disk_trains_to_its_end(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "CheckpointFolder", lambda root, keep: CheckpointFolder(root, keep, FullDisk()))
    done = fasttrain("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "checkup=off",
                     "eval.episodes=2", "total_timesteps=1024", "checkpoint_every=256")  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.out.count("warning: the checkpoint of 256 steps could not be written") == 1
    assert "warning: not saved for a resume: the checkpoint of 1,024 steps" in done.out
    assert done.json("summary.json")["env_steps"] == 1024
    assert not list((done.folder / "checkpoints").iterdir())
