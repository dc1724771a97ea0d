"""SB3's and sb3-contrib's own tests with our classes in place of theirs: `pytest -m campaign tests/parity`.

Downloads the source archives of the installed versions (only they hold `tests/`) into FASTTRAIN_SDISTS, or a temporary
folder, and runs the tests of PPO, MaskablePPO and DQN twice: with stock's classes, which shows what fails on this
machine anyway, and with ours. About ten minutes on two cores.
"""

from __future__ import annotations

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

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"
NAMED = re.compile(r"\b(PPO|DQN|MaskablePPO)\b")
LIMIT_S = 300  # of one test


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
    """`tests` and `unread`, as the plugin notes them, of the files that name one of the classes."""
    found = root / f"{classes}.json"
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(SRC)]), "OMP_NUM_THREADS": "1",
        "STOCK_SUITES_CLASSES": classes, "STOCK_SUITES_FOUND": str(found),
    }  # fmt: skip
    files = sorted((root / "tests").glob("test_*.py"))
    files = [f"tests/{path.name}" for path in files if NAMED.search(path.read_text(encoding="utf-8"))]
    options = ["-q", "-p", "stock_plugin", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, f"--timeout={LIMIT_S}", *files]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert found.exists(), f"pytest came to no end ({classes}):\n{(done.stdout + done.stderr)[-3000:]}"
    noted: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return noted


def newly_failed(root: Path) -> dict[str, str]:
    """Tests that pass with stock's classes and fail with ours, and why."""
    stock, ours = (outcome(root, classes)["tests"] for classes in ("stock", "ours"))
    passed = {test for test, one in stock.items() if one["outcome"] == "passed"}
    assert passed
    return {test: one["why"] for test, one in ours.items() if one["outcome"] == "failed" and test in passed}


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("package", ["stable_baselines3", "sb3_contrib"])
def test_what_passes_with_stocks_classes_passes_with_ours(package: str, tmp_path: Path) -> None:
    assert newly_failed(unpacked(package, tmp_path)) == {}
