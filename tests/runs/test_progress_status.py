"""status.json: what a run says of itself while it goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import progress as status
from fasttrain.runs.progress import EVALUATING, STATUS, Progress, StatusFile

CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "total_timesteps=1024", "algo.rollout_size=512",
            "batch_size=64", "algo.n_epochs=1", "eval.episodes=4", "vec_env=dummy", "torch_threads=1")  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> StatusFile:
    return StatusFile(tmp_path, Progress(4000, PhaseClock(), env_steps=1000), lambda: "one\nline \x1b[31m")


def content(folder: Path) -> Any:
    return json.loads((folder / STATUS).read_text())


def test_it_says_what_the_live_line_knows(file: StatusFile, tmp_path: Path):
    file.write()
    said = content(tmp_path)
    assert (said["phase"], said["env_steps"], said["total_timesteps"]) == ("training", 1000, 4000)
    assert (said["reward"], said["win_rate"], said["pid"]) == (None, None, os.getpid())
    assert said["eta_s"] > 0 < said["steps_per_s"]
    assert said["said"] == "one line \N{REPLACEMENT CHARACTER}[31m"
    assert os.listdir(tmp_path) == [STATUS], "nothing half written is left"


def test_a_tick_writes_at_most_every_two_seconds(file: StatusFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = [10.0]
    monkeypatch.setattr(status.time, "perf_counter", lambda: clock[0])
    assert file.tick(10.0) == 12.0
    (tmp_path / STATUS).unlink()
    assert file.tick(11.9) == 12.0
    assert not (tmp_path / STATUS).exists()
    clock[0] = 12.0
    assert file.tick(12.0) == 14.0
    assert (tmp_path / STATUS).exists()


def test_a_slow_disk_is_written_to_less_often(file: StatusFile, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, *[0.0] * 2, 0.5, 0.5])

    def slow(*_: Any) -> None:
        monkeypatch.setattr(status.time, "perf_counter", lambda: 0.5)

    monkeypatch.setattr(status.time, "perf_counter", lambda: next(clock, 0.5))
    monkeypatch.setattr(status, "write_whole", slow)
    assert file.tick(0.0) == pytest.approx(500.0), "half a second is a thousandth of 500"


def test_a_phase_is_told_at_once_and_ends(file: StatusFile, tmp_path: Path):
    with file.doing(EVALUATING):
        assert content(tmp_path)["phase"] == "evaluating"
        assert content(tmp_path)["eta_s"] is None
    file.write()
    assert content(tmp_path)["phase"] == "training"


def test_what_cannot_be_written_is_nobodys_business(file: StatusFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status, "write_whole", full)
    file.now("done")
    assert not (tmp_path / STATUS).exists()


def test_a_reward_that_is_no_number_is_left_out(file: StatusFile, tmp_path: Path):
    file._progress.add_episode(float("nan"), {})
    file.write()
    assert content(tmp_path)["reward"] is None


def test_a_run_leaves_how_it_ended(trained: RunCommand):
    done = trained(*CARTPOLE, "eval_every=512", "eval_async=false")
    said = done.json(STATUS)
    assert (said["phase"], said["env_steps"], said["total_timesteps"]) == (
        "done",
        done.json("summary.json")["env_steps"],
        1024,
    )
    assert said["said"].startswith("everything is in ")
    assert said["reward"] > 0


RAISES = """
from stable_baselines3.common.callbacks import BaseCallback


class Raises(BaseCallback):
    def _on_step(self):
        if self.num_timesteps > 600:
            raise ValueError("enough")
        return True
"""


def test_a_run_that_crashes_says_so(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "raising.py").write_text(RAISES)
    done = fasttrain(*CARTPOLE, "callbacks=[raising:Raises]")
    assert done.exit_code == 1
    assert done.json(STATUS)["phase"] == "crashed"
    assert done.json("summary.json")["status"] == "crashed"
