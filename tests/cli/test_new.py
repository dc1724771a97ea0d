from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import RunCommand
from fasttrain.cli import main

FILES = {".gitignore", "Dockerfile", "README.md", "callbacks.py", "conf/env/my_project.yaml", "conf/profile/mine.yaml",
         "game.py", "test_game.py"}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Path:
    """A new project, as working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_project"]) == 0
    assert "--config-dir conf +profile=speed env=my_project" in capfd.readouterr().out
    monkeypatch.chdir("my_project")
    monkeypatch.syspath_prepend(str(tmp_path / "my_project"))
    return tmp_path / "my_project"


def test_it_says_what_to_type_and_no_placeholder_is_left(project: Path):
    found = {str(path.relative_to(project)): path.read_text() for path in project.rglob("*") if path.is_file()}
    assert {*found} == FILES
    assert not any("$name" in text for text in found.values())
    assert "fasttrain --config-dir conf +profile=speed env=my_project" in found["README.md"]


def test_what_it_says_trains_checks_and_evaluates(
    project: Path, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(project)
    short = (
        "total_timesteps=2048",
        "eval.episodes=8",
        "num_envs=4",
        "workers=0",
        "log_every=1",
        "algo.rollout_size=512",
    )
    done = fasttrain("--config-dir", "conf", "+profile=mine", "env=my_project", *short)
    assert done.exit_code == 0, done.err
    assert "custom/win_rate" in (done.folder / "progress.csv").read_text()
    assert done.json("summary.json")["quality"]["win_rate"] is not None
    sources = {row["flag"]: row["source"] for row in done.json("plan.json")["flags"]}
    assert (sources["lean_info"], sources["algo.learning_rate"]) == ("profile speed", "profile mine")
    again = fasttrain("eval", f"run={done.folder}", "eval.episodes=4")
    assert again.exit_code == 0, again.err


def test_its_own_tests_pass(project: Path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")])),
    }
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)]
    done = subprocess.run(line, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "new takes the folder to make"),
        (["a", "b"], "new takes the folder to make"),
        (["my-game"], "'my-game' is no name for a project"),
        (["there"], "there is something already"),
    ],
)
def test_wrong_names_are_told(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert main(["new", *arguments]) == 2
    assert told in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
