from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fasttrain.perf.clock import PhaseClock
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
        self, folder: Path, every: int = 10, background: bool = False, grace_s: float = 5.0, every_s: float = 0.0
    ) -> None:
        self.said: list[str] = []
        self.value, self.steps = np.zeros(1), 0
        self.disk, self.folder = FullDisk(), folder
        self.disk.full = False
        store = CheckpointFolder(folder, disk=self.disk)
        settings = Settings(every, background, grace_s, every_s)
        self.checkpoints = Checkpoints(store, self.take, settings, PhaseClock(), self.said.append)

    def take(self) -> Snapshot:
        return Snapshot(self.steps, {"env_steps": self.steps}, {"value": self.value}, lambda file: None)

    def go(self, *steps: int, due: bool = False, stopping: bool = False) -> None:
        for self.steps in steps:
            self.value[:] = self.steps
            self.checkpoints.at_rest(self.steps, due, stopping)

    def stop(self) -> None:
        while not self.checkpoints.may_stop(for_signal=True):
            pass

    def finish(self, steps: int, at_rest: bool = True, stopped: bool = True) -> None:
        self.steps = steps
        self.checkpoints.finish(steps, at_rest=at_rest, stopped=stopped)

    def break_off(self, steps: int) -> None:
        self.steps = steps
        self.checkpoints.after_error(self.take)

    def names(self) -> list[str]:
        self.checkpoints.wait()
        return [path.name[-3:] for path in sorted(self.folder.glob("step_*"))]

    def value_of(self, name: str) -> list[float]:
        with np.load(self.folder / f"step_000000000{name}" / "arrays.npz") as arrays:
            return list(arrays["value"])


def slowly(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    """Publishing begins with a call of `wait`."""
    publish = trainer.checkpoints.folder.publish
    monkeypatch.setattr(trainer.checkpoints.folder, "publish", lambda *given: (wait(), publish(*given))[1])


def test_in_the_background_training_goes_on_and_the_copy_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer, gate = Trainer(tmp_path, background=True), threading.Event()
    slowly(trainer, monkeypatch, lambda: gate.wait(30))
    trainer.go(0, 5)
    trainer.go(10, due=True)
    trainer.go(15)
    assert list(tmp_path.glob("step_*")) == [], "not written yet, and nobody waited"
    gate.set()
    trainer.go(20, due=True)
    trainer.finish(20)
    assert (trainer.names(), trainer.said) == (["010", "020"], [])
    assert trainer.value_of("010") == [10]


def test_a_stop_waits_for_the_next_rest(tmp_path: Path):
    trainer = Trainer(tmp_path)
    trainer.go(0, 5)
    assert not trainer.checkpoints.may_stop(for_signal=True)
    trainer.go(8, stopping=True)
    assert trainer.checkpoints.may_stop(for_signal=True)
    trainer.finish(9, at_rest=False)
    assert trainer.names() == ["008"]
    assert trainer.said == ["checkpoint of 8 steps written; the 1 later steps are dropped"]


def test_a_stop_in_a_long_rollout_takes_the_state_at_its_beginning(tmp_path: Path):
    trainer = Trainer(tmp_path, grace_s=0.0)
    trainer.go(0, 5)
    trainer.value[:] = 99  # the rollout goes on
    trainer.stop()
    trainer.finish(7, at_rest=False)
    assert trainer.names() == ["005"]
    assert trainer.value_of("005") == [5]


def test_a_rule_that_stops_waits_only_where_checkpoints_are_on_and_leaves_the_state_kept_last(tmp_path: Path):
    trainer = Trainer(tmp_path / "off", every=0)
    trainer.go(0)
    assert trainer.checkpoints.may_stop(for_signal=False)
    assert not trainer.checkpoints.may_stop(for_signal=True)
    trainer = Trainer(tmp_path / "timed", every=0, every_s=60.0)
    trainer.go(0, 5)
    assert trainer.checkpoints.may_stop(for_signal=False), "by time or not, a rule stops at the same step"
    trainer.finish(7, at_rest=False, stopped=False)
    assert trainer.names() == ["005"]


def test_a_state_too_large_to_keep_is_taken_once_and_known_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HOLD_MOST_BYTES", 4)
    take, taken = Trainer.take, list[int]()
    monkeypatch.setattr(Trainer, "take", lambda trainer: taken.append(1) or take(trainer))
    trainer = Trainer(tmp_path, grace_s=0.0)
    trainer.go(0, 5, 6, 7)
    assert len(taken) == 1
    trainer.stop()
    assert trainer.names() == []
    assert "the state of 7 steps is too large to be kept in memory" in trainer.checkpoints.failed
    assert "raise checkpoint.grace_s, or set checkpoint_every" in trainer.checkpoints.failed


def test_for_a_crash_a_state_is_kept_seldom_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HOLD_SHARE", 1e-12)
    trainer = Trainer(tmp_path, every=0)
    trainer.go(0, 5, 10, 15)
    trainer.value[:] = 99
    trainer.break_off(15)
    assert trainer.names() == ["005"], "after the first two the next one is far away"
    assert trainer.value_of("005") == [5]
    monkeypatch.setattr(module, "HOLD_SHARE", 1e12)
    trainer.go(20, 25)
    trainer.break_off(25)
    assert trainer.names() == ["005", "025"]


def test_a_crash_leaves_what_is_written_alone_and_takes_a_large_state_as_it_is(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    trainer.go(10, due=True)
    trainer.break_off(11)
    assert trainer.names() == ["010"]
    monkeypatch.setattr(module, "HOLD_MOST_BYTES", 4)
    trainer.go(12)
    trainer.break_off(13)
    assert trainer.names() == ["010", "013"]
    trainer.disk.full = True
    trainer.go(14)
    trainer.break_off(14)
    assert "No space left on device" in trainer.checkpoints.failed


@pytest.mark.parametrize(
    ("takes_s", "times", "written"),
    [
        (0.0, {0: 1000.0, 5: 1059.0, 6: 1061.0, 7: 1120.0, 8: 1122.0}, ["006", "008", "009"]),
        (2.0, {0: 1000.0, 5: 1061.0, 6: 1130.0, 7: 1262.0, 8: 1264.0}, ["005", "008", "009"]),  # a hundredth at most
    ],
)
def test_by_time_they_come_every_so_many_seconds_of_training_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_s: float, times: dict[int, float], written: list[str]
):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = Trainer(tmp_path, every=0, every_s=60.0)
    slowly(trainer, monkeypatch, lambda: now.append(now.pop() + takes_s))
    for steps, now[0] in times.items():
        trainer.go(steps)
    assert trainer.names() == written[:-1]
    trainer.finish(9, stopped=False)
    assert trainer.names() == written


def test_by_time_nothing_large_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TIMED_MOST_BYTES", 4)
    trainer = Trainer(tmp_path, every=0, every_s=1e-9)
    trainer.go(0, 5)
    trainer.finish(5, stopped=False)
    assert trainer.names() == []
    assert trainer.said == ["the state takes 0.0 GB, too large for timed checkpoints; set checkpoint_every"]


def test_a_checkpoint_that_failed_is_tried_again_before_a_stop_and_once_more_at_the_end(tmp_path: Path):
    trainer = Trainer(tmp_path)
    trainer.disk.full = True
    trainer.go(10, due=True)
    assert not trainer.checkpoints.may_stop(for_signal=True), "the disk may have room by the rollout's end"
    trainer.go(12, stopping=True)
    assert trainer.checkpoints.may_stop(for_signal=True), "it was tried"
    assert "the checkpoint of 12 steps could not be written" in trainer.checkpoints.failed
    trainer.disk.full = False
    trainer.finish(20)
    assert (trainer.names(), trainer.checkpoints.failed) == (["020"], "")


def test_what_another_process_wrote_is_not_said_to_be_written(tmp_path: Path):
    trainer = Trainer(tmp_path, every=0)
    trainer.checkpoints.at = 10
    trainer.go(10)
    assert trainer.checkpoints.may_stop(for_signal=False)
    trainer.finish(15, at_rest=False, stopped=False)
    assert trainer.said == []


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, background: bool):
    trainer = Trainer(tmp_path, background=background)
    trainer.go(10, due=True)
    trainer.checkpoints.wait()
    trainer.disk.full = True
    trainer.go(20, 30, due=True)
    trainer.checkpoints.wait()
    (said,) = trainer.said
    assert said.startswith("warning: the checkpoint of 20 steps could not be written (OSError: [Errno 28]")
    assert said.endswith("training goes on; the next try is in 10 steps")
    assert trainer.names() == ["010"]
    trainer.finish(40, at_rest=False)
    assert trainer.said[1].startswith("warning: not saved for a resume: the checkpoint of 30 steps")
    trainer.disk.full = False
    trainer.go(50, due=True)
    assert (trainer.names(), trainer.checkpoints.failed) == (["010", "050"], "")
