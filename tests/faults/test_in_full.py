"""The campaigns as often as docs/guides/checkpoints.md says: `pytest -m campaign tests/faults`, two hours on two cores.

`-k kills` tries one; other instants by another SEED.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

SEED = 0
CAMPAIGNS = {  # name → module, how often
    "kills": ("campaigns", 200),
    "corruptions": ("campaigns", 500),
    "equalities": ("campaigns", 10),
    "disks": ("campaigns", 40),
    "fulls": ("campaigns", 10),
    "stops": ("campaigns", 100),
    "ends": ("campaigns", 100),
    "groups": ("group_signals", 40),
    "forks": ("fork_campaign", 40),
    "victims": ("victims", 90),
    "late_errors": ("lost", 50),
    "overwrites": ("lost", 50),
    "frames": ("engine_faults", 1_000_000),
    "trainings": ("engine_faults", 50_000),  # of engines that crash, hang, are killed, send garbage or refuse
}
TRIES = ("kills", "damages", "points", "stops", "ends", "victims", "pairs", "lives", "errors", "folders")


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:daemon . takes . games at once")
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_in_full(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    module, count = CAMPAIGNS[name]
    with capsys.disabled():
        found = getattr(import_module(module), name)(count, SEED, tmp_path / name, print)
        print({key: value for key, value in found.items() if key not in ("bad", "seconds")})  # noqa: T201
    if not all(found[key] for key in TRIES if key in found):
        pytest.skip("nothing could be tried here")
    assert found["bad"] == []
