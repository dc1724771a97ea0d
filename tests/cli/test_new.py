from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import fasttrain
from conftest import RunCommand
from fasttrain.cli import main


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Path:
    """A new project, as working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_project"]) == 0
    assert "--config-dir conf +profile=speed env=my_project" in capfd.readouterr().out
    monkeypatch.chdir("my_project")
    monkeypatch.syspath_prepend(str(tmp_path / "my_project"))
    for name in ("game", "callbacks", "test_game"):  # other tests have modules of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "my_project"


def test_no_placeholder_is_left_and_its_own_tests_pass(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {str(path.relative_to(project)): path.read_text() for path in project.rglob("*") if path.is_file()}
    assert {*found} == {".gitignore", "Dockerfile", "README.md", "callbacks.py", "conf/env/my_project.yaml",
                        "conf/profile/mine.yaml", "game.py", "test_game.py"}  # fmt: skip
    assert not any("$name" in text for text in found.values())
    assert "fasttrain --config-dir conf +profile=speed env=my_project" in found["README.md"]
    own = importlib.import_module("test_game")
    train = Mock(return_value=Mock(summary={"quality": {"win_rate": 0.2}}))
    monkeypatch.setattr(own, "train", train)
    own.test_the_env_keeps_gymnasiums_rules()
    own.test_legal_moves_keep_the_row_sorted()
    own.test_a_short_training_learns_something(tmp_path)
    (env,), settings = train.call_args
    short = {"total_timesteps": 64, "num_envs": 2, "algo.n_steps": 32, "batch_size": 32, "eval.episodes": 2}
    assert fasttrain.train(env, **{**settings, "settings": {}, **short}, report=False).summary["status"] == "done"


def test_what_it_says_trains(project: Path, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(project)
    done = fasttrain("--config-dir", "conf", "+profile=mine", "env=my_project", "total_timesteps=512", "num_envs=4",
                     "eval.episodes=4", "workers=0", "log_every=1", "algo.rollout_size=256").ok()  # fmt: skip
    assert "custom/win_rate" in (done.folder / "progress.csv").read_text()
    assert done.json("summary.json")["quality"]["win_rate"] is not None
    sources = {row["flag"]: row["source"] for row in done.json("plan.json")["flags"]}
    assert (sources["lean_info"], sources["algo.learning_rate"]) == ("profile speed", "profile mine")


def test_wrong_names_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for arguments, told in (
        ([], "new needs the folder to create"),
        (["a", "b"], "new needs the folder to create"),
        (["my-game"], "a project cannot be called 'my-game'"),
        (["there"], "it exists and is not empty"),
        (["gym"], "new gym: env=gym has a meaning already"),
        (["x/Null"], "env=Null has a meaning already"),
        (["skullking"], "env=skullking has a meaning already"),
        (["there/file/mine"], "new there/file/mine: cannot be written"),
    ):
        assert main(["new", *arguments]) == 2
        assert told in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
