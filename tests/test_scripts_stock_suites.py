"""scripts/stock_suites.py on a made-up suite: which tests run, with which classes, and what is stored of them."""

from __future__ import annotations

import importlib
import json
import os
import tarfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = "fasttrain.algos"
TESTS = {
    "test_ours.py": f"""
import pytest
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.ppo import PPO as SAME

@pytest.mark.parametrize("model_class", [A2C, PPO])
def test_differs(model_class):
    assert "fasttrain" not in model_class.__module__

def test_same():
    assert SAME is PPO

def test_only_ours():
    assert DQN.__module__.startswith("{OURS}")

def test_meant():
    assert not DQN.__module__.startswith("{OURS}"), "one line\\nand more"

def test_of_others():
    raise ValueError("is not run")
""",
    "test_unread.py": "import no_such_module\nfrom stable_baselines3 import PPO\n",
    "test_others.py": "from stable_baselines3 import A2C\nraise ValueError('is not read')\n",
}


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("stock_suites")
    monkeypatch.setattr(module, "PACKAGES", ("stable_baselines3",))
    return module


def archived(folder: Path, tests: dict[str, str]) -> Path:
    """A source archive as the registry has it."""
    release = f"stable_baselines3-{version('stable_baselines3')}"
    inside = folder / release / "tests"
    inside.mkdir(parents=True)
    for name, text in tests.items():
        (inside / name).write_text(text, encoding="utf-8")
    with tarfile.open(folder / f"{release}.tar.gz", "w:gz") as file:
        file.add(folder / release, release)
    return folder


def test_a_suite_is_compared_and_stored(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(suites, "EXCEPTIONS", {"tests/test_ours.py::test_meant": "so be it"})
    results = tmp_path / "stock_suites.json"
    command = ["--results", str(results), "--sdists", str(archived(tmp_path, TESTS))]
    assert suites.main(command) == 1
    stored = json.loads(results.read_text(encoding="utf-8"))
    assert (stored["name"], stored["command"]) == ("stock_suites", "python3 scripts/stock_suites.py")
    suite = stored["suites"]["stable_baselines3"]
    assert suite["files"] == {
        "tests/test_ours.py": {
            "stock": {"passed": 3, "failed": 1, "skipped": 0}, "ours": {"passed": 2, "failed": 2, "skipped": 0}
        }
    }  # fmt: skip
    assert suite["failed_with_stock"] == ["tests/test_ours.py::test_only_ours"]
    assert suite["exceptions"] == {"tests/test_ours.py::test_meant": "so be it"}
    [bad] = suite["bad"]
    assert bad.startswith("tests/test_ours.py::test_differs[PPO]: ")
    assert list(suite["not_read_with_stock_either"]) == ["tests/test_unread.py"]
    assert "no_such_module" in suite["not_read_with_stock_either"]["tests/test_unread.py"]
    assert str(tmp_path) not in results.read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert "meant: tests/test_ours.py::test_meant: so be it" in said
    assert suites.main(["--results", str(results), "--show"]) == 1
    assert capsys.readouterr().out == said.partition("with ours\n")[2]


def test_some_files_are_stored_nowhere(suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[list[str], str]] = []

    def outcome(root: Path, files: list[str], classes: str) -> dict[str, object]:
        ran.append((files, classes))
        return {"tests": {f"{files[0]}::test_it": {"outcome": "passed", "why": ""}}, "unread": {}}

    monkeypatch.setattr(suites, "outcome", outcome)  # what it really does: the test above
    results = tmp_path / "stock_suites.json"
    good = {"test_good.py": "from stable_baselines3 import PPO\ndef test_it():\n    assert PPO\n"}
    command = ["--results", str(results), "--sdists", str(archived(tmp_path, {**TESTS, **good}))]
    assert suites.main([*command, "--files", "test_good.py"]) == 0
    assert ran == [(["tests/test_good.py"], "stock"), (["tests/test_good.py"], "ours")]
    assert not results.exists()


def test_without_archives_it_says_so(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert suites.main(["--sdists", str(tmp_path), "--results", str(tmp_path / "no.json")]) == 2
    said = capsys.readouterr().err
    assert "could not be had" in said
    assert "--sdists" in said
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


def test_an_archive_without_tests_is_refused(suites: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = archived(tmp_path, {})
    release = f"stable_baselines3-{version('stable_baselines3')}"
    with tarfile.open(folder / f"{release}.tar.gz", "w:gz") as file:
        file.add(folder / release / "tests", f"{release}/other")
    assert suites.main(["--sdists", str(folder), "--results", str(tmp_path / "no.json")]) == 2
    assert "holds no tests" in capsys.readouterr().err
