"""scripts/bench_start.py on checkouts that only pretend to train."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PROGRAM = """
import json, os, pathlib, signal, sys, time
cache = pathlib.Path(os.environ["NUMBA_CACHE_DIR"])
if "--help" in sys.argv:
    print(HELP)
    sys.exit()
if "warmup" in sys.argv and not HELP:
    sys.exit("no such command")
print("loading")
begun = time.process_time()
while not (cache / "kernel").exists() and time.process_time() < begun + COMPILING:
    pass
cache.mkdir(exist_ok=True)
(cache / "kernel").touch()
if "warmup" in sys.argv:
    sys.exit()
print("[PERF] 1 step/s", flush=True)
signal.sigwait([signal.SIGTERM])
pathlib.Path("run").mkdir()
pathlib.Path("run/summary.json").write_text(json.dumps({"first_update_s": 0.25}))
sys.exit(4)
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_start")


def checkout(folder: Path, **values: object) -> Path:
    package = folder / "src" / "fasttrain"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    (package / "__main__.py").write_text(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [15])\n" + head + PROGRAM
    )
    return folder


def test_cold_and_warm_of_two_checkouts_in_turn(
    start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "ROOT", checkout(tmp_path / "new", HELP="  fasttrain warmup …", COMPILING=0.2))
    old = checkout(tmp_path / "old", HELP="", COMPILING=0.4)
    assert start.run(2, tmp_path / "results", old) == 0
    result = json.loads((tmp_path / "results" / "start.json").read_text())
    assert (
        result["ours"].keys() == result["against"].keys() == {*start.CASES, "default, compiling", "cartpole, compiling"}
    )
    for name in ("ours", "against"):
        for job in start.COMPILING:
            found = result[name][f"{job}, compiling"]["cpu_s"]
            assert found["min"] > 0, "what the cold cache costs was lost"
        assert result[name]["default, cold"]["told_s"] == {"median": 0.25, "min": 0.25, "max": 0.25}
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in said if line.startswith("  turn 2/2")][:4] == ["ours", "against"] * 2
    assert sum("wanted" in line for line in said) == 4


def test_a_run_without_an_update_is_said(start: ModuleType, tmp_path: Path) -> None:
    broken = checkout(tmp_path / "broken", HELP="")  # COMPILING is not there
    with pytest.raises(SystemExit, match=r"no first update(.|\n)*COMPILING"):
        start.measured(broken, start.CASES["default, cold"], tmp_path / "cache", tmp_path / "run")
