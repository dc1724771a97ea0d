"""The campaigns, a few times each: killed, stopped, resumed; nothing lost, nothing left behind."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import campaigns
import pytest
from injector import HangError, Nursery, Training, instant, writing
from wired import Wire

from fasttrain.saving.checkpoints import CheckpointFolder

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork"),
]


def quiet(line: str) -> None:
    """Nobody watches."""


def test_kills_around_checkpoints_lose_an_interval_at_most(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lanes = {name: campaigns.LANES[name] for name in ("maskable_ppo", "dqn")}
    monkeypatch.setattr(campaigns, "LANES", lanes)
    monkeypatch.setattr(campaigns, "HORIZON", 640)
    found = campaigns.kills(4, 1, tmp_path, quiet, nursery)
    assert found["bad"] == []
    assert found["kills"] == found["resumes"] == 4
    assert (found["partial"], found["equal"]) == (0, found["runs"])
    assert found["runs"] >= 2


def test_damaged_checkpoints_are_named_and_the_one_before_taken(nursery: Nursery, tmp_path: Path):
    found = campaigns.corruptions(40, 1, tmp_path, quiet, nursery)
    assert found["bad"] == []
    assert found["damages"] == found["found"] == found["fell_back"] == found["said"] >= 40
    assert found["whole_resumes"] == 1


def test_a_signal_stops_a_run_with_everything_saved(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(campaigns, "STOPPED", {name: campaigns.STOPPED[name] for name in ("dqn", "workers")})
    found = campaigns.stops(2, 1, tmp_path, quiet, nursery)
    assert found["bad"] == []
    assert found["stops"] == found["saved"] == 2
    assert all(campaigns.GRACE_S < most < 2 * campaigns.GRACE_S for most in found["most_s"].values())


def test_instants_replay_from_their_seed_and_are_of_all_phases():
    found = [instant(f"1/ppo/{number}") for number in range(200)]
    assert found == [instant(f"1/ppo/{number}") for number in range(200)]
    assert {when.phase for when in found} == {"write", "any", "start"}
    assert sum(when.phase == "write" for when in found) > 100


def test_what_another_process_left_half_written_is_not_taken_for_writing(tmp_path: Path):
    training = SimpleNamespace(run=tmp_path, pid=7)
    (tmp_path / "checkpoints" / ".staged-step_000000000064-17").mkdir(parents=True)
    assert writing(training) == []
    (tmp_path / "checkpoints" / ".staged-step_000000000064-7").mkdir()
    assert writing(training) == [".staged-step_000000000064-7"]


def test_lost_intervals_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    CheckpointFolder(tmp_path / "checkpoints").publish(64, campaigns.PLAIN_FILES)
    monkeypatch.setattr(campaigns, "partial", lambda run: [])
    training = SimpleNamespace(run=tmp_path, pid=7)
    for steps, bad in ((64 + 64, 0), (64 + 66, 1)):
        result: dict[str, Any] = {"kills": 0, "while_writing": 0, "partial": 0, "lost": {"waiting": 0.0}, "bad": []}
        campaigns._look(training, None, SimpleNamespace(steps=steps), "ppo", result)
        assert (result["kills"], len(result["bad"])) == (1, bad)


def test_a_training_that_hangs_is_an_error_with_its_stacks(nursery: Nursery, tmp_path: Path):
    Wire(tmp_path / "wire")
    training = Training(nursery, tmp_path, campaigns.STOPPED["ppo"])
    assert training.until_said("[PERF]")
    with pytest.raises(HangError, match=r"it did not end in time(?s:.*)Current thread"):
        training.end(timeout_s=0.1)
    assert not training.lives()


def test_training_goes_on_where_a_checkpoint_cannot_be_written(nursery: Nursery, tmp_path: Path):
    result = {"points": 0, "kept": 0, "went_on": 0, "written_later": 0, "said": 0, "full_to_the_end": 0, "bad": []}
    operations = len(campaigns.noted(tmp_path / "noted"))
    plans = [
        {"at": operations + 4, "how": "half", "error": errno.ENOSPC},
        {"at": 2 * operations - 1, "how": "after", "error": errno.EIO},
        {"at": operations + 1, "times": campaigns.NEVER},
    ]
    for number, plan in enumerate(plans):
        campaigns.on_bad_disk(nursery, tmp_path / f"disk{number}", plan, result)
    assert result["bad"] == []
    assert result["points"] == result["kept"] == result["went_on"] == 3


@pytest.mark.campaign
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sessions, /dev/shm")
def test_abnormal_ends_leave_nothing(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kinds = ("SIGKILL", "SIGKILL to the group", "SIGTERM twice", "env raises", "worker exits", "a child is killed")
    monkeypatch.setattr(campaigns, "ENDS", kinds)
    found = campaigns.ends(len(kinds), 1, tmp_path / "ends", quiet, nursery)
    assert found["bad"] == []
    assert found["kinds"].keys() == set(kinds)
