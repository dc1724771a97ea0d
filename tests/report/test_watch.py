from __future__ import annotations

import io
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.runs.progress import STATUS
from fasttrain.saving.files import lock_folder
from fasttrain_report import watch
from fasttrain_report.watch import Row, Watch, row_of
from report_toys import HOSTILE, write_comparison, write_run, write_sweep


def write_status(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "phase": "training", "env_steps": 1000, "total_timesteps": 4000, "steps_per_s": 250.0, "reward": 1.5,
        "win_rate": 0.25, "eta_s": 12.0, "said": "hello", "time": time.time(), "pid": os.getpid(), "host": None,
    }  # fmt: skip
    (folder / STATUS).write_text(json.dumps(said | more))
    return folder


def rows(*roots: Path) -> dict[str, Row]:
    return dict(Watch(roots).rows())


def shown(root: Path, width: int = 220) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(Watch([root]).table(console))
    return out.getvalue()


def test_a_training_at_work_and_what_it_says(tmp_path: Path):
    folder = write_status(tmp_path / "day" / "run")
    with lock_folder(folder):
        found = rows(tmp_path)["day/run"]
        assert (found.state, found.alive, found.env_steps, found.total) == ("training", True, 1000, 4000)
        assert (found.steps_per_s, found.reward, found.win_rate, found.said) == (250.0, 1.5, 0.25, "hello")
        text = shown(tmp_path)
    for part in ("day/run", "training, ETA 0:12", "1,000 of 4,000", "250", "1.50", "25.0 %", "hello", "1 training"):
        assert part in text
    assert rows(tmp_path)["day/run"].state == "dead", "nobody holds the folder, and nothing says how it ended"


@pytest.mark.parametrize(
    ("said", "held", "ended", "state"),
    [
        ({"phase": "evaluating"}, True, "", "evaluating"),
        ({"pid": 1}, True, "", "starting"),  # of a process that was there before
        ({"phase": "done"}, True, "", "starting"),
        ({"time": time.time() + 1e6}, False, "stopped", "dead"),  # continued, and killed
        ({"time": time.time() - 100}, False, "stopped", "stopped"),
        ({"host": "elsewhere"}, False, "", "training"),
        ({"host": "elsewhere", "time": time.time() - 1000}, False, "", "dead"),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, said: dict[str, Any], held: bool, ended: str, state: str):
    folder = tmp_path / "run"
    if ended:
        write_run(folder, status=ended)
        (folder / ".lock").touch()
    write_status(folder, **said)
    with lock_folder(folder) if held else nullcontext():
        found = rows(tmp_path)["run"]
    assert (found.state, found.env_steps) == (state, 4000 if state == "stopped" else 1000), "the newest figures"


@pytest.mark.parametrize(
    ("state", "said"), [("done", "ended by patience"), ("stopped", "hello"), ("crashed", "ValueError('x')")]
)
def test_an_end_is_told_with_the_final_figures(tmp_path: Path, state: str, said: str):
    write_run(write_status(tmp_path / "run", phase=state), status=state, error="ValueError('x')", stopped_by="patience")
    found = rows(tmp_path)["run"]
    assert (found.state, found.alive, found.env_steps, found.steps_per_s) == (state, False, 4000, 1234.5)
    assert (found.reward, found.win_rate, found.said) == (2.0, 0.5, said)


def test_which_folders_are_runs(tmp_path: Path):
    (write_status(tmp_path / "outputs" / "parts" / "0") / "said.txt").touch()  # what a doctor measures
    assert rows(tmp_path) == {}
    write_run(write_sweep(tmp_path / "multirun", {"num_envs": [2, 4]}) / "0")
    write_comparison(tmp_path / "study")
    names = rows(tmp_path)
    assert {name.split("/")[0] for name in names} == {"multirun", "study"}
    assert len(names) > 4
    assert [*rows(write_run(tmp_path / "run"))] == [str(tmp_path / "run")]


@pytest.mark.parametrize("name", [STATUS, "summary.json", "plan.json"])
def test_damaged_and_half_written_files(tmp_path: Path, name: str):
    write_status(write_run(tmp_path / "run"))
    odd = b'{"phase": [1], "time": "x", "host": {}}'
    for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", odd, b"[" * 100_000):
        (tmp_path / "run" / name).write_bytes(text)
        assert "run" in shown(tmp_path)


def test_those_at_work_come_first_then_the_newest(tmp_path: Path):
    for age, name in enumerate(("newest", "older", "oldest")):
        plan = write_run(tmp_path / name) / "plan.json"
        os.utime(plan, (1e9 - age, 1e9 - age))
    assert list(rows(tmp_path)) == ["newest", "older", "oldest"]
    with lock_folder(write_status(tmp_path / "oldest")):
        assert list(rows(tmp_path)) == ["oldest", "newest", "older"]


def test_texts_of_a_run_are_harmless(tmp_path: Path):
    write_status(tmp_path / "run", said=HOSTILE + "[red]", phase=HOSTILE, env_steps="many", reward=float("inf"))
    with lock_folder(tmp_path / "run"):
        text = shown(tmp_path)
    assert "\x1b" not in text
    assert "[red]" in text
    assert row_of({"said": 5}, {"quality": 3, "status": 7}, {"config": {"total_timesteps": "x"}}, "").state == "dead"


def test_only_what_changed_is_looked_at_again_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "two"):
        write_status(write_run(tmp_path / name), phase="done")
    for path in (*tmp_path.rglob("*"), tmp_path):
        os.utime(path, (1e9, 1e9))
    look = Watch([tmp_path])
    first = look.rows()
    assert {path.stat().st_mtime for path in tmp_path.rglob("*")} == {1e9}
    monkeypatch.setattr(watch, "read_json", lambda path: pytest.fail("nothing has changed there"))
    monkeypatch.setattr(watch, "holder", lambda _: pytest.fail("an ended run is held by nobody"))
    assert look.rows() == first


def test_runs_come_change_and_go_those_at_work_first(tmp_path: Path):
    look = Watch([tmp_path])
    assert look.rows() == []
    write_status(tmp_path / "a" / "run", phase="done")
    assert [row.state for _, row in look.rows()] == ["done"]
    write_status(tmp_path / "a" / "run", phase="stopped")
    assert [row.state for _, row in look.rows()] == ["stopped"]
    for file in (tmp_path / "a" / "run").iterdir():
        file.unlink()
    (tmp_path / "a" / "run").rmdir()
    assert look.rows() == []


def test_a_small_terminal_shows_what_fits(tmp_path: Path):
    for number in range(30):
        write_status(tmp_path / f"a_run_with_quite_a_long_name_{number}", phase="done")
    out = io.StringIO()
    console = Console(file=out, width=80, height=12, force_terminal=True, no_color=True)
    console.print(Watch([tmp_path]).table(console))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 12
    assert "30 done; 23 older ones are not shown" in out.getvalue()
    assert "last message" not in lines[0]


@pytest.mark.parametrize("width", [80, 130])
def test_long_names_and_messages_cover_no_figures(tmp_path: Path, width: int):
    folder = write_status(tmp_path / ("long_" * 20 + "end"), said="word " * 40, steps_per_s=54321.0)
    with lock_folder(folder):
        text = shown(tmp_path, width)
    for part in ("end", "training, ETA 0:12", "1,000 of 4,000", "54,321", "1.50", "25.0 %"):
        assert part in text
    assert all(len(line) <= width for line in text.splitlines())
    assert ("word word" in text) == (width >= 130)


def test_the_table_once_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert "none of outputs, multirun, studies is here; name a folder that holds runs" in capsys.readouterr().err
    write_run(tmp_path / "outputs" / "one")
    write_run(tmp_path / "multirun" / "two")
    assert main(["watch"]) == 0
    out = capsys.readouterr().out
    assert "outputs/one" in out
    assert "multirun/two" in out
    assert main(["watch", "--once", "outputs"]) == 0
    assert "two" not in capsys.readouterr().out


def test_wrong_words():
    for typed, told in (
        ("nowhere", "watch nowhere: no such folder"),
        ("seed=3", "seed=3 would do nothing"),
        ("-m", "-m w"),
    ):
        with pytest.raises(ConfigError, match=told):
            watch.main([typed])


def test_ctrl_c_ends_it_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "run")
    out = io.StringIO()
    monkeypatch.setattr(watch, "make_console", lambda: Console(file=out, force_terminal=True, width=120, height=20))
    monkeypatch.setattr(watch.time, "sleep", Mock(side_effect=[None, None, KeyboardInterrupt]))
    assert watch.main([str(tmp_path)]) == 0
    assert "1 done" in out.getvalue()
