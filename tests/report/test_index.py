from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conftest import RunCommand
from fasttrain import cli
from fasttrain.errors import ConfigError
from fasttrain.report import index
from fasttrain.report.index import write_report
from fasttrain.studies.sweep import Sweep
from report_toys import (
    HOSTILE,
    PLAN,
    quality,
    summary,
    write_comparison,
    write_episodes,
    write_run,
    write_sweep,
)

DRAW_REPORT = cli.draw_report  # the fixture `fasttrain` puts a stub in its place
CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "total_timesteps=1024", "algo.rollout_size=512",
            "batch_size=64", "algo.n_epochs=1", "eval.episodes=4", "vec_env=dummy", "torch_threads=1")  # fmt: skip


class Seen(HTMLParser):
    """Tags, what they refer to, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")], "no event handlers"

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> Seen:
    return Seen(write_report(folder).read_text(encoding="utf-8"))


def test_one_file_for_both_themes_without_anything_from_outside(tmp_path: Path):
    file = write_report(write_run(tmp_path))
    text = file.read_text(encoding="utf-8")
    assert file == tmp_path / "report.html"
    assert not re.findall(r"https?:|//[a-z]|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert "--paper: #ffffff;" in light
    assert "--paper: #171c22;" in dark
    assert "var(--c0)" in dark
    assert '<meta name="viewport" content="width=device-width' in text
    assert file.stat().st_size < 500_000


def test_every_picture_lies_beside_the_page(tmp_path: Path):
    seen = page_of(write_run(tmp_path))
    pictures = [link for link in seen.links if link.endswith(".png")]
    assert "report/return_over_steps.png" in pictures
    assert seen.tags.count("svg") == len(pictures) == 11
    assert sorted(pictures) == sorted(f"report/{path.name}" for path in (tmp_path / "report").iterdir())
    assert all((tmp_path / link).read_bytes().startswith(b"\x89PNG") for link in pictures)
    ids = re.findall(r'\bid="([^"]+)"', (tmp_path / "report.html").read_text())
    assert len(ids) == len(set(ids))
    for fact in (
        "ppo on Toy-v0",
        "training episodes, mean",
        "50.0 %",
        "[40.0, 60.0]",
        "the game has a batched native form",
    ):
        assert fact in seen.text


def test_text_of_an_env_stays_text(tmp_path: Path):
    reasons = {HOSTILE: 0.75, "</svg></script><img src=x onerror=alert(1)>": 0.25}
    write_run(tmp_path, quality=quality(reasons=reasons), overrides=[HOSTILE], status="crashed", error=HOSTILE,
              reward_terms={HOSTILE: 1.0})  # fmt: skip
    config = {"env": {"id": HOSTILE}, "algo": {"name": HOSTILE}}
    (tmp_path / "plan.json").write_text(
        json.dumps({"flags": [dict.fromkeys(PLAN["flags"][0], HOSTILE)], "config": config})
    )
    write_episodes(tmp_path / "episodes.csv", reasons=(HOSTILE, "{{ 7 * 7 }}"))
    seen = page_of(tmp_path)
    assert not {"script", "img", "iframe", "object"} & set(seen.tags)
    assert '<script>alert("x")</script>' in seen.text
    assert "<img src=x" in seen.text
    assert "{{ 7 * 7 }}" in seen.text


def test_hostile_names_in_studies(tmp_path: Path):
    sweep = write_sweep(tmp_path / "sweep", {"a<b>": [1, 2], "<script>": ["<i>", "x"]}, broken=2)
    compared = write_comparison(tmp_path / "study", name=HOSTILE)
    other = tmp_path / "other"
    other.mkdir()
    rows = [{"name": HOSTILE, HOSTILE: HOSTILE, "steps_per_s": 1}, {"name": "b", "steps_per_s": 2}]
    (other / "study.json").write_text(json.dumps({"command": HOSTILE, "rows": rows}))
    for folder in (sweep, compared, other):
        seen = page_of(folder)
        assert "svg" in seen.tags
        assert "script" not in seen.tags
        assert "<script>" in seen.text


def test_the_kind_of_folder_is_found_out(tmp_path: Path):
    kinds = {
        "Training run": write_run(tmp_path / "run"),
        "Sweep": write_sweep(tmp_path / "sweep", {"num_envs": [1, 2]}),
        "Comparison": write_comparison(tmp_path / "study"),
    }
    for kind, folder in kinds.items():
        assert index.page_of(folder).kind == kind
    (tmp_path / "study" / "study.json").write_text('{"command": "tune"}')
    assert index.page_of(tmp_path / "study").kind == "Study"


@pytest.mark.parametrize("left", ["summary.json", "plan.json", "episodes.csv"])
def test_one_file_of_a_run_is_enough(tmp_path: Path, left: str):
    write_run(tmp_path)
    for path in list(tmp_path.iterdir()):
        if path.name != left:
            path.unlink()
    assert "Training run" in page_of(tmp_path).text


def test_a_second_report_takes_the_place_of_the_first(tmp_path: Path):
    first = write_report(write_sweep(tmp_path, {"num_envs": [1, 2]})).read_bytes()
    assert write_report(tmp_path).read_bytes() == first, "same files, same page"
    stored = json.loads((tmp_path / "sweep.json").read_text())
    stored["cells"][1]["steps_per_s"] = 54321.0
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    assert "54,321" in page_of(tmp_path).text
    assert not list(tmp_path.glob("*.tmp"))


# --- the command


def test_the_command_says_where_it_wrote(fasttrain: RunCommand, tmp_path: Path):
    folder = write_run(tmp_path / "a run")
    done = fasttrain("report", f"run='{folder}'")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == f"report: {folder / 'report.html'}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report needs run=FOLDER"),
        (["run=nowhere"], "run=nowhere: no such folder"),
        (["run=empty"], "run=empty: no summary.json, sweep.json or study.json there"),
        (["run=empty", "num_envs=8"], "report takes run=… and output=… only: num_envs would do nothing"),
    ],
)
def test_bad_input(fasttrain: RunCommand, tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "empty").mkdir()
    done = fasttrain("report", *arguments)
    assert done.exit_code == 2
    assert done.err.startswith(f"fasttrain: error: {message}")
    assert len(done.err.splitlines()) == 1


def test_a_folder_that_cannot_be_written(fasttrain: RunCommand, tmp_path: Path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "report").write_text("a file where the pictures should go")
    done = fasttrain("report", "run=run")
    assert done.exit_code == 2
    assert "run=run: cannot write the report there" in done.err
    with pytest.raises(ConfigError, match="no such folder"):
        write_report(tmp_path / "run" / "report")


def test_a_training_ends_with_its_report(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "draw_report", DRAW_REPORT)
    done = fasttrain(*CARTPOLE)
    assert done.exit_code == 0
    assert done.out.splitlines()[-1] == f"report: {done.folder / 'report.html'}"
    page = (done.folder / "report.html").read_text(encoding="utf-8")
    assert "ppo on CartPole-v1" in page
    assert (done.folder / "report" / "return_over_steps.png").is_file()
    off = fasttrain(*CARTPOLE, "report=false")
    assert off.exit_code == 0
    assert not (off.folder / "report.html").exists()


@pytest.mark.parametrize("error", [RuntimeError("no ink"), KeyboardInterrupt(), ImportError("no matplotlib")])
def test_what_goes_wrong_in_drawing_costs_one_line(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(folder: Path) -> Path:
        raise error

    monkeypatch.setattr(index, "write_report", fail)
    assert DRAW_REPORT(tmp_path)
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("fasttrain: warning: no report.html (")
    assert (str(error) or "interrupted") in line


@pytest.mark.parametrize(("arguments", "added"), [
    (["-m", "num_envs=1,2"], ["report=false"]), (["-m", "num_envs=1,2", "report=true"], [])])  # fmt: skip
def test_cells_get_no_report_unless_asked_for(arguments: list[str], added: list[str]):
    from fasttrain.runs.view import make_console

    assert Sweep("train", arguments, make_console())._without_report() == added
    assert Sweep("eval", arguments, make_console())._without_report() == []


def test_drawing_loads_no_torch_and_the_command_line_no_matplotlib():
    import subprocess
    import sys

    loads = (
        "import sys, fasttrain.cli, fasttrain.report.index; from fasttrain.spec.config import Config\n"
        "print([name for name in ('torch', 'matplotlib', 'jinja2', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
    assert summary()["status"] == "done"
