"""Files that cannot be written: the run goes on, and its end names what is missing. Really full disks: campaigns.py."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain import cli
from fasttrain.runs.logs import EpisodeLog
from fasttrain.saving.checkpoints import CheckpointFolder

NO_ROOM = f"[Errno {errno.ENOSPC}] No space left on device"
SMALL = ("+profile=speed", "algo.rollout_size=512", "batch_size=64", "algo.net_arch=[8]", "num_envs=8", "checkup=off",
         "total_timesteps=2048", "eval.episodes=4", "eval_async=false")  # fmt: skip


def full(*arguments: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_everything_that_is_missing_is_named_once(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.parts.save_model", full)
    monkeypatch.setattr(EpisodeLog, "_append", full)
    done = fasttrain(*SMALL, "eval_every=512")
    assert done.exit_code == 1
    (line,) = done.err.splitlines()
    what = (
        f"fasttrain: error: not saved: best_model.zip, episodes.csv, model.zip ({NO_ROOM}); make room, then fasttrain"
    )
    assert line == f"{what} resume run={done.folder} goes on from step_000000002048", (
        "the checkpoint of the end is there"
    )
    for name in ("best_model.zip", "episodes.csv", "model.zip"):
        assert done.out.count(f"warning: {name} could not be written ({NO_ROOM}); the run goes on") == 1
    assert done.json("summary.json")["env_steps"] == 2048
    assert not list(done.folder.glob(".saving*"))


def test_what_could_be_written_later_is_not_missing(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    append, calls = EpisodeLog._append, iter([full])
    monkeypatch.setattr(EpisodeLog, "_append", lambda log: next(calls, append)(log))
    done = fasttrain(*SMALL, "checkpoint_every=512")
    assert done.exit_code == 0, done.err
    assert "warning: episodes.csv could not be written" in done.out
    episodes = (done.folder / "episodes.csv").read_text().splitlines()
    assert len(episodes) == 1 + done.json("summary.json")["episodes"]


def test_a_checkpoint_is_the_way_on(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.parts.save_model", full)
    done = fasttrain(*SMALL, "checkpoint_every=512")
    assert done.exit_code == 1
    assert f"make room, then fasttrain resume run={done.folder} goes on from step_000000002048" in done.err


def test_stopped_without_a_checkpoint_is_no_stop_with_everything_saved(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    def publish(folder: CheckpointFolder, step: int, files: Any) -> Path:
        return full()

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    append = EpisodeLog.add
    at_first: list[Callable[[], None]] = [lambda: os.kill(os.getpid(), signal.SIGTERM)]

    def add(log: EpisodeLog, *row: Any) -> None:
        append(log, *row)
        if at_first:
            at_first.pop()()

    monkeypatch.setattr(CheckpointFolder, "publish", publish)
    monkeypatch.setattr(EpisodeLog, "add", add)
    try:
        done = fasttrain(*SMALL, "total_timesteps=1e6")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1
    assert f"could not be written (OSError: {NO_ROOM})" in done.err
    assert done.json("summary.json")["status"] == "stopped"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_no_room_for_the_plan_is_one_line(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, number: int):
    def refuse(path: Path, content: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("fasttrain.runs.parts.write_json", refuse)
    done = fasttrain(*SMALL)
    assert done.exit_code == 1
    (line,) = done.err.splitlines()
    assert line.startswith(f"fasttrain: error: [Errno {number}]")
    assert "plan.json" in line


def test_what_comes_after_the_training_costs_its_own_output_alone(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments: Any, **more: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr("fasttrain.runs.summary.measured", broken)
    monkeypatch.setattr("fasttrain.runs.summary.finish", broken)
    monkeypatch.setattr(cli, "draw_report", lambda _: "no ink")
    monkeypatch.setattr("fasttrain.terminal.Output.lost", NO_ROOM)
    done = fasttrain(*SMALL)
    (line,) = done.err.splitlines()
    assert done.exit_code == 1
    lost = f"evaluation, loggers (ValueError: broken); report.html (no ink); the output ({NO_ROOM})"
    assert line == f"fasttrain: error: failed, and cost nothing else: {lost}"
    assert (done.folder / "model.zip").is_file()
    summary = done.json("summary.json")
    assert (summary["status"], summary["evaluation"]) == ("done", "failed: ValueError: broken")


def test_a_folder_that_is_deleted_in_the_middle_costs_what_was_written_before(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    add, deleted = EpisodeLog.add, list[bool]()

    def delete(log: EpisodeLog, *row: Any) -> None:
        if not deleted:
            deleted.append(True)
            shutil.rmtree(tmp_path / "run0", ignore_errors=True)  # a checkpoint may be under way
        add(log, *row)

    monkeypatch.setattr(EpisodeLog, "add", delete)
    done = fasttrain(*SMALL, "checkpoint_every=512")
    assert (done.folder / "model.zip").is_file()
    assert (done.folder / "plan.json").is_file()
    assert done.json("summary.json")["env_steps"] == 2048
    assert done.exit_code == 0, done.err


def test_too_few_open_files_are_one_line(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cli, "_dispatch", refuse)
    done = fasttrain(*SMALL)
    assert done.exit_code == 2
    assert done.err.startswith("fasttrain: error: [Errno 24] Too many open files: raise the limit of this shell")
    assert done.err.count("\n") == 1
