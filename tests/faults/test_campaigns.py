"""Runs that are killed, or on a bad disk: nothing is lost."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from random import Random
from typing import Any

import campaigns
import pytest
from bad_disk import NEVER
from injector import Nursery, Tally

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork"),
]


def test_kills_around_checkpoints_lose_an_interval_at_most(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(campaigns, "LANES", {name: campaigns.LANES[name] for name in ("maskable_ppo", "dqn")})
    monkeypatch.setattr(campaigns, "HORIZON", 384)
    found = campaigns.kills(2, Random(1), tmp_path, nursery)
    assert found.bad == []
    assert found["kills"] == found["resumes"] == found["runs"] == 2


OPERATIONS = 7  # make, three writes, sync, rename, sync


@pytest.mark.parametrize(
    "plan",
    [
        {"at": OPERATIONS + 4, "how": "half", "error": errno.ENOSPC},
        {"at": 2 * OPERATIONS - 1, "how": "after", "error": errno.EIO},
        {"at": OPERATIONS + 1, "times": NEVER},
    ],
    ids=["half a file", "after the rename", "for ever"],
)
def test_training_goes_on_where_a_checkpoint_cannot_be_written(nursery: Nursery, tmp_path: Path, plan: dict[str, Any]):
    campaigns.on_bad_disk(nursery, tmp_path / "disk", plan, found := Tally())
    assert found.bad == []
