"""Files that cannot be written: the run goes on, and its end names what is missing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain import cli
from fasttrain.runs.logs import EpisodeLog
from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.terminal import Output

NO_ROOM = f"[Errno {errno.ENOSPC}] No space left on device"
SMALL = ("+profile=speed", "algo.rollout_size=128", "batch_size=64", "algo.net_arch=[8]", "num_envs=8", "checkup=off",
         "env=skirmish", "total_timesteps=512", "eval.episodes=2", "eval_async=false",
         "checkpoint_every=128")  # fmt: skip


def failing(error: int, name: str = "") -> Any:
    """A function that always raises this error of the system."""

    def fail(*given: Any, **_: Any) -> Any:
        raise OSError(error, os.strerror(error), *([str(given[0])] if name else []))

    return fail


full = failing(errno.ENOSPC)


def test_everything_that_is_missing_is_named_once(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.parts.save_model", full)
    monkeypatch.setattr(EpisodeLog, "_append", full)
    done = fasttrain(*SMALL, "eval_every=128")
    assert done.exit_code == 1
    assert done.err == (
        f"fasttrain: error: not saved: best_model.zip, episodes.csv, model.zip ({NO_ROOM}); make room, then fasttrain "
        f"resume run={done.folder} continues from step_000000000512\n"
    )
    for name in ("best_model.zip", "episodes.csv", "model.zip"):
        assert done.out.count(f"warning: {name} could not be written ({NO_ROOM}); the run goes on") == 1
    assert done.json("summary.json")["env_steps"] == 512
    assert not list(done.folder.glob(".saving*"))


def test_what_could_be_written_later_is_not_missing(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    append, calls = EpisodeLog._append, iter([full])
    monkeypatch.setattr(EpisodeLog, "_append", lambda log: next(calls, append)(log))
    done = fasttrain(*SMALL).ok()
    assert "warning: episodes.csv could not be written" in done.out
    episodes = (done.folder / "episodes.csv").read_text().splitlines()
    assert len(episodes) == 1 + done.json("summary.json")["episodes"]


def once_an_episode_ends(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """`act` at the first one."""
    add, done = EpisodeLog.add, list[bool]()

    def acting(log: EpisodeLog, *row: Any) -> None:
        if not done:
            done.append(True)
            act()
        add(log, *row)

    monkeypatch.setattr(EpisodeLog, "add", acting)


def test_stopped_without_a_checkpoint_is_no_stop_with_everything_saved(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    once_an_episode_ends(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(CheckpointFolder, "publish", full)
    try:
        done = fasttrain(*SMALL, "total_timesteps=1e6", "checkpoint_every=0")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1
    assert f"could not be written (OSError: {NO_ROOM})" in done.err
    assert done.json("summary.json")["status"] == "stopped"


def test_a_folder_that_is_deleted_in_the_middle_costs_what_was_written_before(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # A checkpoint may be under way.
    once_an_episode_ends(monkeypatch, lambda: shutil.rmtree(tmp_path / "run0", ignore_errors=True))
    done = fasttrain(*SMALL)
    assert (done.folder / "model.zip").is_file()
    assert (done.folder / "plan.json").is_file()
    assert done.json("summary.json")["env_steps"] == 512
    assert done.exit_code == 0, done.err


def test_what_comes_after_the_training_costs_its_own_output_alone(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments: Any, **more: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr("fasttrain.runs.summary.evaluate_run", broken)
    monkeypatch.setattr("fasttrain.runs.summary.finish", broken)
    monkeypatch.setattr(cli, "draw_report", lambda _: "no ink")
    monkeypatch.setattr("fasttrain.terminal.Output.lost", NO_ROOM)
    done = fasttrain(*SMALL)
    assert done.exit_code == 1
    why = f"ValueError: broken ({__file__}:{broken.__code__.co_firstlineno + 1}, in broken)"
    lost = f"evaluation, loggers ({why}); report.html (no ink); the output ({NO_ROOM})"
    assert done.err == f"fasttrain: error: failed, without harm to the rest: {lost}\n"
    assert (done.folder / "model.zip").is_file()
    summary = done.json("summary.json")
    assert (summary["status"], summary["evaluation"]) == ("done", f"failed: {why}")


@pytest.mark.parametrize(
    ("place", "error", "code", "said"),
    [
        ("runs.parts.write_json", errno.ENOSPC, 1, f"[Errno {errno.ENOSPC}] .*plan.json"),
        ("runs.parts.write_json", errno.EACCES, 1, f"[Errno {errno.EACCES}] .*plan.json"),
        ("cli.split_options", errno.EMFILE, 2, "[Errno 24] Too many open files: raise the limit of this shell"),
        ("cli.split_options", errno.EFBIG, 2, "[Errno 27] File too large: raise the limit of this shell (ulimit -f"),
        (
            "cli.split_options",
            errno.ENAMETOOLONG,
            2,
            f"[Errno {errno.ENAMETOOLONG}] File name too long: use a shorter path",
        ),
    ],
)
def test_what_stops_a_start_is_one_line(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, place: str, error: int, code: int, said: str
):
    monkeypatch.setattr(f"fasttrain.{place}", failing(error, name="" if code == 2 else place))
    done = fasttrain(*SMALL)
    assert done.exit_code == code
    begins, _, contains = said.partition(" .*")
    assert done.err.startswith(f"fasttrain: error: {begins}")
    assert contains in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_a_command_whose_output_is_lost_does_not_end_as_done(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, command: str
):
    monkeypatch.setattr(Output, "lost", "No space left on device")
    done = fasttrain(command)
    assert done.exit_code == 1
    assert done.err == "fasttrain: error: the output could not be written (No space left on device)\n"
