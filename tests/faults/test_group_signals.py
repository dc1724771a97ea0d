"""A signal stops a run with everything saved, in the first training and in the resumed one; and each campaign in full.

`pytest -m campaign tests/faults -k kills` tries that as often as docs/guides/checkpoints.md says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("POSIX signals, terminals and fork", allow_module_level=True)

from campaigns import kills
from group_signals import GROUP_INT, TERM, Cell, ends, groups, stop, stop_and_resume
from injector import Nursery, Tally

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sessions, /dev/shm")


def test_a_signal_stops_a_run_and_a_closing_terminal_the_resumed_one(tmp_path: Path, nursery: Nursery):
    found = Tally()
    stop_and_resume(nursery, tmp_path / "cell", Cell("shared, 0.001 s", TERM, "dqn"), Random(1), found)
    assert found.bad == []
    assert (found["stops"], found["resumed"]) == (2, 1)


def test_ctrl_c_to_the_whole_group_stops_a_run_with_stocks_workers(tmp_path: Path, nursery: Nursery):
    found = Tally()
    stop(nursery, tmp_path, Cell("subproc, 0.3 s", GROUP_INT, "ppo"), None, Random(1), found)
    assert found.bad == []


IDS = ("kills", "ends", "groups")


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("campaign", "count"), [(kills, 200), (ends, 100), (groups, 60)], ids=IDS)
def test_in_full(campaign: Any, count: int, tmp_path: Path, nursery: Nursery):
    assert campaign(count, Random(0), tmp_path / "all", nursery).bad == []
