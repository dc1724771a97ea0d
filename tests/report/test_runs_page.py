from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand
from fasttrain.cli.commands import prepare
from fasttrain_report import page
from fasttrain_report.index import named_folders
from fasttrain_report.runs_page import Run, differing, grouped, runs_page
from report_toys import HOSTILE, PLAN, quality, write_episodes, write_run, write_sweep


def make(folder: Path, seed: int = 0, lift: float = 0.0, speed: float = 1000.0, **settings: Any) -> Path:
    """A run whose returns are `lift` higher."""
    write_run(folder, speed=speed, seed=seed, quality=quality(mean_reward=2.0 + lift))
    write_episodes(folder / "episodes.csv", lift=lift)
    plan: dict[str, Any] = copy.deepcopy(PLAN)
    plan["config"] |= {"seed": seed, "live": f"{seed}", **settings}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    """Two settings, two seeds each."""
    return [
        make(tmp_path / "day" / f"{size}_{seed}", seed, seed + size / 64, 1000.0 * (seed + 1), batch_size=size)
        for size in (64, 128)
        for seed in (0, 1)
    ]


def runs_of(folders: list[Path]) -> list[Run]:
    return [Run.of(folder, folder.parent) for folder in folders]


def test_seeds_of_the_same_settings_are_a_group(four: list[Path]):
    assert differing(runs_of(four)) == ["batch_size"]
    groups = grouped(runs_of(four))
    assert {name: [run.seed for run in runs] for name, runs in groups.items()} == {
        "batch_size=64": ["0", "1"], "batch_size=128": ["0", "1"],
    }  # fmt: skip


def test_what_differs_and_names_of_groups(tmp_path: Path):
    folders = [make(tmp_path / name, vec_env=effective) for name, effective in (("a", "native"), ("b", "shared"))]
    assert differing(runs_of(folders)) == [], "both asked for auto"
    make(tmp_path / "b", brand_new=3)
    assert differing(runs_of(folders)) == []
    folders = [make(tmp_path / str(n), one=n, two=n, three=n, algo={"name": "ppo", "four": n}) for n in range(2)]
    assert list(grouped(runs_of(folders))) == ["1: ppo on Toy-v0", "2: ppo on Toy-v0"]
    assert list(grouped(runs_of(folders[:1]))) == ["ppo on Toy-v0"]


def test_curves_have_the_mean_over_seeds_and_its_interval(four: list[Path]):
    page = runs_page(four, four[0].parent)
    learning, figures, differ, table = page.sections
    assert [chart.name for chart in learning.charts] == [
        "return_over_steps", "return_over_time", "win_rate_over_steps", "win_rate_over_time",
    ]  # fmt: skip
    first, second = learning.charts[0].lines
    assert (first.name, second.name) == ("batch_size=64", "batch_size=128")
    assert second.y - first.y == pytest.approx(1.0)
    assert (first.high > first.y).all()
    assert (first.y > first.low).all()
    assert [chart.name for chart in figures.charts] == ["win_rate", "mean_reward", "steps_per_s"]
    rewards = {row.name: row for row in figures.charts[1].rows}
    assert rewards["batch_size=64"].value == pytest.approx(3.5)
    assert rewards["batch_size=64"].bounds is not None
    assert [[cell.text for cell in row] for row in differ.tables[0].cells] == [["batch_size", "64", "128"]]
    assert [row[0].text for row in table.tables[0].cells] == ["64_0", "64_1", "128_0", "128_1"]


def test_one_run_has_its_own_interval_and_runs_without_anything_are_shown(tmp_path: Path):
    make(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "plan.json").write_text("{")
    page = runs_page([tmp_path / "a", tmp_path / "b"], tmp_path)
    charts = {chart.name: chart for section in page.sections for chart in section.charts}
    assert [row.bounds for row in charts["mean_reward"].rows] == [(1.75, 2.25)]
    assert [[cell.text for cell in row[:4]] for row in page.sections[-1].tables[0].cells] == [
        ["a", "ppo on Toy-v0", "0", "done"], ["b", "b", "", "unfinished"],
    ]  # fmt: skip


def test_the_command_writes_it_above_all_of_them(
    four: list[Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    make(four[3], 1, env={"id": HOSTILE})
    (four[0] / "report.html").touch()
    done = fasttrain("report", *map(str, four))
    assert (done.exit_code, done.err) == (0, "")
    text = (four[0].parent / "report.html").read_text()
    assert "<script" not in text
    assert 'href="./64_0/report.html"' in text
    assert 'href="./128_1"' in text
    assert (four[0].parent / "report" / "return_over_steps.png").is_file()
    monkeypatch.setattr(page, "to_png", lambda figure, file, title: file.touch())
    assert fasttrain("report", f"run={four[0]},{four[3]}", "output=two.html").exit_code == 0
    assert "128_1" in Path("two.html").read_text()
    assert Path("two/return_over_steps.png").is_file()


def test_wrong_input_is_one_line(four: list[Path], fasttrain: RunCommand, tmp_path: Path):
    sweep = write_sweep(tmp_path / "sweep", {"num_envs": [2, 4]})
    cells = [str(make(sweep / name)) for name in ("0", "1")]
    (tmp_path / "empty").mkdir()
    for typed, told in (
        (cells, "contains all these runs and has its own report; use output=FILE.html"),
        ([str(four[0]), "nowhere"], "run=nowhere: no such folder"),
        ([f"run={four[0]},{four[1]}", "output=x.txt"], "output=x.txt: name a file that ends in .html"),
        ([f"run={four[0]}", "output=x.html"], "output=x.html is for the page over several runs"),
        (["empty"], "run=empty: no summary.json, sweep.json or study.json there or below"),
    ):
        fasttrain("report", *typed).refused(told)


def test_folders_may_be_typed_as_a_shell_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert prepare("report", [], ["a", "b/c"])[1][-1] == "run='./a,b/c'"
    assert prepare("report", [], ["run=a,b", "output=x.html"])[1][-2:] == ["run='a,b'", "output=x.html"]
    assert prepare("report", [], ["run=a"])[1][-1] == "run=a"
    (tmp_path / "lr=1,size=2").mkdir()
    assert prepare("report", [], ["lr=1,size=2"])[1][-1] == "run='./lr=1,size=2'"
    assert named_folders("lr=1,size=2,b,c") == [Path("lr=1,size=2"), Path("b,c")]
