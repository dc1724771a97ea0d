"""The campaigns as often as docs/guides/checkpoints.md says: `pytest -m campaign tests/faults`, two hours on two cores.

`-k kills` tries one; other instants by another SEED.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
from injector import Nursery

SEED = 0
CAMPAIGNS = {  # name → module, how often
    "kills": ("campaigns", 200),
    "ends": ("group_signals", 100),
    "groups": ("group_signals", 60),
}


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_in_full(name: str, tmp_path: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]):
    module, count = CAMPAIGNS[name]
    found = getattr(import_module(module), name)(count, Random(SEED), tmp_path / name, nursery)
    with capsys.disabled():
        print(dict(found))  # noqa: T201
    if not found:
        pytest.skip("nothing could be tried here")
    assert found.bad == []
