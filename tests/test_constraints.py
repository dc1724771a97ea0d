from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 reads no TOML, and tomli is not installed")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WANTED = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([\w.-]+)==([^;\s]+)(;.*)?", line.replace(" ;", ";")) for line in lines if line[:1] != "#"]
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def test_every_line_is_one_pin_and_all_has_every_extra_but_the_tools_of_development():
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert len(pins()) == len(lines)
    assert "pygame" not in pins()  # pygame-ce has the same module
    (text,) = WANTED["all"]
    assert Requirement(text).extras == {*WANTED} - {"", "all", "dev", "docs"}


def test_what_an_extra_asks_for_is_pinned_to_a_version_that_it_takes():
    for text in (text for name in WANTED if name != "all" for text in WANTED[name]):
        wanted = Requirement(text)
        pinned = pins().get(canonicalize_name(wanted.name))
        assert pinned is not None, f"{text}: no pin in constraints.txt"
        assert wanted.specifier.contains(pinned), f"{text}: constraints.txt has {pinned}"


def pip(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What pip would install, as `report.json` in `folder`; nothing is installed. A dead network is not waited for."""
    words = ["install", "--dry-run", "--quiet", "--retries", "2", "--timeout", "10", "--report", "report.json"]
    command = [sys.executable, "-m", "pip", *words, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.campaign
def test_all_extras_together_resolve(tmp_path: Path):
    """By pip itself: what an extra's packages ask for in turn stands in no file here. 5 to 15 s."""
    if not any(distributions(name="pip")):
        pytest.skip("this Python has no pip")
    everything = f"{ROOT}[{','.join(PROJECT['optional-dependencies'])}]"
    done = pip(tmp_path, "--constraint", str(ROOT / "constraints.txt"), everything)
    if done.returncode and pip(tmp_path, "--ignore-installed", "--no-deps", "hatchling").returncode:
        pytest.skip("pip reaches no package index")
    assert done.returncode == 0, done.stderr
    chosen = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["install"]
    versions = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in chosen}
    assert versions["fasttrain"]
    for name, version in versions.items():
        assert pins().get(name, version) in (version, version.partition("+")[0])  # torch's builds have a suffix
