from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from conftest import RunCommand
from fasttrain import cli
from fasttrain.runs.view import make_console
from fasttrain_report import index
from fasttrain_report.index import write_report
from fasttrain_studies.sweep import Sweep
from report_toys import HOSTILE, PLAN, quality, write_comparison, write_episodes, write_run, write_sweep

DRAW_REPORT = cli.draw_report  # the fixture `fasttrain` puts a stub in its place


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


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing each chart once more, as a PNG, is half the time."""
    monkeypatch.setattr("fasttrain_report.page.to_png", lambda *_: None)


def page_of(folder: Path) -> Seen:
    return Seen(write_report(folder).read_text(encoding="utf-8"))


def test_one_file_for_both_themes_with_its_pictures_beside_it(fasttrain: RunCommand, tmp_path: Path):
    folder = write_run(tmp_path / "a run")
    done = fasttrain("report", f"run='{folder}'").ok()
    assert done.out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert len(text) < 500_000
    assert not re.findall(r"https?:|//[a-z]|@import|url\((?!#)", text)
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert "--paper: #ffffff;" in light
    assert "--paper: #171c22;" in dark
    for part in ("default-src 'none'", "var(--c0)", '<meta name="viewport" content="width=device-width'):
        assert part in text
    seen = Seen(text)
    pictures = [link for link in seen.links if link.endswith(".png")]
    assert "report/return_over_steps.png" in pictures
    assert seen.tags.count("svg") == len(pictures) == 11
    assert sorted(pictures) == sorted(f"report/{path.name}" for path in (folder / "report").iterdir())
    assert all((folder / link).read_bytes().startswith(b"\x89PNG") for link in pictures)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for fact in ("ppo on Toy-v0", "training episodes, mean", "50.0 %", "[40.0, 60.0]", "has a native batch"):
        assert fact in seen.text


def test_text_of_an_env_and_names_in_studies_stay_text(no_pictures: None, tmp_path: Path):
    told = quality(reasons={HOSTILE: 0.75, "</svg></script><img src=x onerror=alert(1)>": 0.25})
    more = {"status": "crashed", "overrides": [HOSTILE], "error": HOSTILE, "reward_terms": {HOSTILE: 1.0}}
    run = write_run(tmp_path / "run", quality=told, **more)
    plan = {"flags": [dict.fromkeys(PLAN["flags"][0], HOSTILE)], "config": {"env": {"id": HOSTILE}, "algo": HOSTILE}}
    (run / "plan.json").write_text(json.dumps(plan))
    write_episodes(run / "episodes.csv", reasons=(HOSTILE, "{{ 7 * 7 }}"))
    sweep = write_sweep(tmp_path / "sweep", {"a<b>": [1, 2], "<script>": ["<i>", "x"]}, broken=2)
    (tmp_path / "other").mkdir()
    rows = [{"name": HOSTILE, HOSTILE: HOSTILE, "steps_per_s": 1}, {"name": "b", "steps_per_s": 2}]
    (tmp_path / "other" / "study.json").write_text(json.dumps({"command": HOSTILE, "rows": rows}))
    for folder in (run, sweep, write_comparison(tmp_path / "study", name=HOSTILE), tmp_path / "other"):
        seen = page_of(folder)
        assert "svg" in seen.tags
        assert not {"script", "img", "iframe", "object"} & set(seen.tags)
        assert "<script>" in seen.text
        if folder == run:
            assert "<img src=x" in seen.text
            assert "{{ 7 * 7 }}" in seen.text


def test_the_kind_of_folder_is_found_out_and_one_file_of_a_run_is_enough(tmp_path: Path):
    kinds = {
        "Training run": write_run(tmp_path / "run"),
        "Sweep": write_sweep(tmp_path / "sweep", {"num_envs": [1, 2]}),
        "Comparison": write_comparison(tmp_path / "study"),
    }
    for kind, folder in kinds.items():
        assert index.page_of(folder).kind == kind
    (tmp_path / "study" / "study.json").write_text('{"command": "tune"}')
    assert index.page_of(tmp_path / "study").kind == "Study"
    for left in ("summary.json", "plan.json", "episodes.csv"):
        for path in write_run(tmp_path / "run").iterdir():
            if path.name != left:
                path.unlink()
        assert index.page_of(tmp_path / "run").kind == "Training run"


def test_a_second_report_takes_the_place_of_the_first(no_pictures: None, tmp_path: Path):
    first = write_report(write_sweep(tmp_path, {"num_envs": [1, 2]})).read_bytes()
    assert write_report(tmp_path).read_bytes() == first, "same files, same page"
    stored = json.loads((tmp_path / "sweep.json").read_text())
    stored["cells"][1]["steps_per_s"] = 54321.0
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    assert "54,321" in page_of(tmp_path).text
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report needs run=FOLDER"),
        (["run=nowhere"], "run=nowhere: no such folder"),
        (["run=empty"], "run=empty: no summary.json, sweep.json or study.json there"),
        (["run=empty", "num_envs=8"], "report takes run=… and output=… only: num_envs would do nothing"),
        (["run=full"], "run=full: cannot write the report there"),
    ],
)
def test_bad_input(fasttrain: RunCommand, tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "empty").mkdir()
    (write_run(tmp_path / "full") / "report").write_text("a file where the pictures should go")
    fasttrain("report", *arguments).refused(f"error: {message}")


def test_a_training_ends_with_its_report(trained: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "draw_report", DRAW_REPORT)
    done = trained("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "total_timesteps=256", "algo.rollout_size=128",
                   "batch_size=64", "algo.n_epochs=1", "eval.episodes=2", "vec_env=dummy", "checkup=off")  # fmt: skip
    assert done.out.splitlines()[-1].endswith("report.html")
    assert "ppo on CartPole-v1" in (done.folder / "report.html").read_text(encoding="utf-8")
    assert (done.folder / "report" / "return_over_steps.png").is_file()


@pytest.mark.parametrize("error", [RuntimeError("no ink"), KeyboardInterrupt(), ImportError("no matplotlib")])
def test_what_goes_wrong_in_drawing_costs_one_line(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(index, "write_report", Mock(side_effect=error))
    assert DRAW_REPORT(tmp_path)
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("fasttrain: warning: no report.html (")
    assert (said.out, (str(error) or "interrupted") in line) == ("", True)


def test_cells_get_no_report_unless_asked_for():
    for command, more, added in (("train", [], ["report=false"]), ("train", ["report=true"], []), ("eval", [], [])):
        assert Sweep(command, ["-m", "num_envs=1,2", *more], make_console())._without_report() == added


def test_watching_and_drawing_load_no_torch_and_the_command_line_no_matplotlib(tmp_path: Path):
    (write_run(tmp_path / "outputs" / "run") / "summary.json").unlink()
    loads = (
        "import sys, fasttrain.cli; fasttrain.cli.main(['watch'])\n"
        "found = {'hydra', 'numba'} & {*sys.modules}\n"
        "import fasttrain_report.index; from fasttrain.spec.config import Config\n"
        "sys.exit(str(found | {'torch', 'matplotlib', 'jinja2', 'scipy', 'stable_baselines3'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", loads], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stderr == "set()\n"
