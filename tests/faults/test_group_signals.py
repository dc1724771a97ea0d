"""The campaigns `groups` and `forks`, a few times each."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("POSIX signals, terminals and fork", allow_module_level=True)

import fork_campaign
import group_signals
from group_signals import CLOSES, GROUP_TERM, JOB, Cell
from injector import Nursery

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sessions, /dev/shm"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def quiet(line: str) -> None:
    """Nobody watches."""


@pytest.mark.campaign
def test_signals_to_the_group_stop_a_run_in_mid_rollout_with_everything_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
):
    chosen = [Cell("shared, 0.3 s", GROUP_TERM, "ppo"), Cell("subproc, 0.001 s", CLOSES, "dqn")]
    monkeypatch.setattr(group_signals, "cells", lambda rng: iter(chosen))
    found = group_signals.groups(len(chosen), 1, tmp_path / "groups", quiet, nursery)
    assert found["bad"] == []
    assert found["stops"] == found["saved"] == 4
    assert found["resumed"] == 2
    assert found["workers_killed"] == 1
    forked = fork_campaign.forks(1, 1, tmp_path / "forks", quiet, nursery)
    assert forked["bad"] == []
    assert forked["wrong"] == forked["processes"] == 0
    assert forked["forks"] > 50
    assert (forked["lives"], forked["trainings"]) == (1, 1)


def test_forty_cells_hold_all_pairs():
    found = list(group_signals.cells(random.Random(0)))
    assert len(set(found)) == len(found) == 10 * 4 * 2
    wanted = set(itertools.chain.from_iterable(group_signals.pairs(cell) for cell in found))
    assert len(wanted) == 10 * 4 + 10 * 2 + 4 * 2
    of_some = set(itertools.chain.from_iterable(group_signals.pairs(cell) for cell in found[:40]))
    assert of_some == wanted
    assert any(cell.signal == JOB for cell in found[:10])
