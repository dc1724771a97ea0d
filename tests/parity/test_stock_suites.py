"""SB3's and sb3-contrib's own tests with our classes in place of theirs: `pytest -m campaign tests/parity`.

Downloads the source archives of the installed versions (only they hold `tests/`) into FASTTRAIN_SDISTS, or a temporary
folder, and runs the tests of PPO, MaskablePPO and DQN twice: with stock's classes, which shows what fails on this
machine anyway, and with ours. About ten minutes on two cores. This file is also pytest's plugin for these runs: it is
loaded before any test module, so that `from stable_baselines3 import PPO` there finds ours.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import sb3_contrib
import stable_baselines3
from stable_baselines3.common.base_class import BaseAlgorithm

import fasttrain

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
NAMED = re.compile(r"\b(PPO|DQN|MaskablePPO)\b")
LIMIT_S = 300  # of one test
STOCK = {"PPO": stable_baselines3.PPO, "DQN": stable_baselines3.DQN, "MaskablePPO": sb3_contrib.MaskablePPO}


# --- the plugin


def put_ours_in_place() -> None:
    """Under every name by which a module of stock's packages has one of the classes."""
    ours = {stock: getattr(fasttrain, name) for name, stock in STOCK.items()}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("stable_baselines3", "sb3_contrib"):
            for name, value in list(vars(module).items()):
                if inspect.isclass(value) and value in ours:
                    setattr(module, name, ours[value])


def concerns(item: Any) -> bool:
    """Whether a test is of one of the classes: a parameter says so, or, without a class among them, its text."""
    given = getattr(item, "callspec", None)
    classes = [one for one in (given.params.values() if given else ()) if inspect.isclass(one)]
    algorithms = [one.__name__ for one in classes if issubclass(one, BaseAlgorithm)]
    if algorithms:
        return bool(set(algorithms) & STOCK.keys())
    return bool(NAMED.search(inspect.getsource(item.function)))


class Notes:
    """What came of each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if concerns(item)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        noted = self.tests.setdefault(report.nodeid, {"outcome": "passed"})
        if report.outcome != "passed" and noted["outcome"] != "failed":
            told = str(report.longrepr).splitlines()
            errors = [line[1:].strip() for line in told if line.startswith("E  ")] or told
            noted |= {"outcome": report.outcome, "why": errors[-1][:300]}

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["STOCK_SUITES_CLASSES"] == "ours":
        put_ours_in_place()
    config.pluginmanager.register(Notes(Path(os.environ["STOCK_SUITES_FOUND"])))


# --- the runs


def unpacked(package: str, folder: Path) -> Path:
    """The folder of a source archive that holds `tests`; skips where it cannot be had."""
    folder = Path(os.environ.get("FASTTRAIN_SDISTS", folder))
    archive = folder / f"{package}-{version(package)}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), f"{package}=={version(package)}"], capture_output=True)
    if not archive.exists():
        pytest.skip(f"{archive.name} could not be downloaded: name a folder that holds it by FASTTRAIN_SDISTS")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def outcome(root: Path, classes: str) -> dict[str, Any]:
    """What the plugin notes of the tests in files that name one of the classes."""
    found = root / f"{classes}.json"
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(SRC)]), "OMP_NUM_THREADS": "1",
        "STOCK_SUITES_CLASSES": classes, "STOCK_SUITES_FOUND": str(found),
    }  # fmt: skip
    files = sorted((root / "tests").glob("test_*.py"))
    files = [f"tests/{path.name}" for path in files if NAMED.search(path.read_text(encoding="utf-8"))]
    options = ["-q", "-p", "test_stock_suites", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, f"--timeout={LIMIT_S}", *files]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert found.exists(), f"pytest came to no end ({classes}):\n{(done.stdout + done.stderr)[-3000:]}"
    noted: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return noted


def newly_failed(root: Path) -> dict[str, str]:
    """Tests that pass with stock's classes and fail with ours, and why."""
    stock, ours = (outcome(root, classes) for classes in ("stock", "ours"))
    passed = {test for test, one in stock.items() if one["outcome"] == "passed"}
    assert passed
    return {test: one["why"] for test, one in ours.items() if one["outcome"] == "failed" and test in passed}


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("package", ["stable_baselines3", "sb3_contrib"])
def test_what_passes_with_stocks_classes_passes_with_ours(package: str, tmp_path: Path) -> None:
    assert newly_failed(unpacked(package, tmp_path)) == {}
