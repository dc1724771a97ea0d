"""The campaign `victims`: a few of its envs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import victims
from injector import Nursery

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork"),
]


@pytest.mark.campaign
def test_what_envs_do_to_their_process_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
):
    some = ("hang", "exit", "segfault", "eat", "raises")
    monkeypatch.setattr(victims, "NAMED", {how: victims.NAMED[how] for how in some})
    found = victims.victims(8, 1, tmp_path, lambda line: None, nursery)
    assert found["bad"] == []
    assert found["victims"] == found["named"] == 8
    assert (found["processes"], found["shared"]) == (0, 0)
    assert found["ways"] == {"hang": 2, "exit": 2, "segfault": 2, "eat": 1, "raises": 1}
