"""Malicious files (evil_files.py): none runs code, writes elsewhere or eats memory; and the same would, if trusted."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evil_files import MODEL, MOST_GROWTH_MB, PICKLED, STATISTICS, Bomb, Row, pickled_key, quietly

FEWEST = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evil")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    """In a process of its own, whose memory is that of the commands alone."""
    script = Path(__file__).with_name("evil_files.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "files")], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return [Row(**row) for row in json.loads(done.stdout)]


def test_none_of_them_runs_code(rows: list[Row]):
    assert len({row.name for row in rows}) == len(rows) >= FEWEST
    assert {row.command for row in rows} == {"eval", "play", "export", "resume"}
    assert [row.name for row in rows if row.executed] == []


def test_none_writes_outside_of_the_runs_folder(rows: list[Row]):
    assert {row.name: row.outside for row in rows if row.outside} == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the highest use of memory is read from /proc")
def test_none_takes_much_memory(rows: list[Row]):
    assert {row.name: row.growth_mb for row in rows if row.growth_mb > MOST_GROWTH_MB} == {}
    assert max(row.growth_mb for row in rows) > 0, "it is measured"


def test_each_is_refused_in_one_line_or_not_looked_at(rows: list[Row]):
    assert {row.name: (row.exit_code, row.said) for row in rows if row.exit_code != row.expected} == {}
    refused = [row for row in rows if row.expected == 2]
    assert all(row.said.startswith("fasttrain: error: ") and "\n" not in row.said for row in refused)
    assert len(refused) >= FEWEST


@pytest.mark.parametrize("what", ["model", "statistics"])
def test_the_payload_does_run_where_it_is_trusted(
    rows: list[Row], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """Else the tests above would show nothing."""
    from fasttrain.cli import main

    monkeypatch.chdir(tmp_path)
    run, canary = tmp_path / "run", tmp_path / "executed"
    shutil.copytree(folder / "files" / "trained", run)
    if what == "model":
        pickled_key("lr_schedule")(run, canary)
    else:
        (run / STATISTICS).unlink()
        (run / PICKLED).write_bytes(pickle.dumps(Bomb(canary)))
    quietly(lambda: main(["eval", f"run={run}", f"hydra.run.dir={tmp_path}/plain"]))
    assert (run / MODEL).is_file()
    assert not canary.exists()
    quietly(lambda: main(["eval", f"run={run}", "--trust", f"hydra.run.dir={tmp_path}/trusted"]))
    assert canary.exists()
