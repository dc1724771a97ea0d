#!/usr/bin/env python3
"""Stable-Baselines3's and sb3-contrib's own tests with our classes in place of theirs: python3 scripts/stock_suites.py

Downloads the source archives of the installed versions (pip download; only they hold `tests/`), and runs the tests of
PPO, MaskablePPO and DQN twice: with stock's classes, which shows what fails on this machine anyway, and with ours. The
counts per file go to docs/results/stock_suites.json. Exit code 1: a test passes with stock's class and fails with ours,
and is not in the table EXCEPTIONS below; 2: the archives could not be had.

  --files FILE …   some files of tests (test_gae.py …), stored nowhere
  --sdists DIR     archives that are there already, nothing is downloaded
  --show           what is stored, runs nothing

About ten minutes on two cores.
"""

# fmt: off
import sys

# An older Python must be able to parse this file to reach the message.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.stderr.write("fasttrain needs Python 3.10 or newer, this is " + sys.version.split()[0] + "\n")
    sys.exit(2)
# fmt: on

import argparse
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BARE = (find_spec("fasttrain") is None or find_spec("pytest") is None) and Path(sys.prefix) != ROOT / ".venv"
if __name__ == "__main__" and BARE:  # go on in the checkout's own .venv
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:], extras=("dev",)))

import bench_machine  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "stock_suites.json"
PACKAGES = ("stable_baselines3", "sb3_contrib")
NAMED = re.compile(r"\b(PPO|DQN|MaskablePPO)\b")
OUTCOMES = ("passed", "failed", "skipped")
LIMIT_S = 300  # of one test
# Tests that pass with stock's class and fail with ours, and why that is meant.
EXCEPTIONS: Mapping[str, str] = {}
Result = dict[str, Any]


class UnavailableError(Exception):
    """The archives, or the tests in them, cannot be had."""


def archive_of(package: str, folder: Path) -> Path:
    """The source archive of the installed version, downloaded into `folder` if it is not there."""
    release = f"{package}-{version(package)}"
    path = folder / f"{release}.tar.gz"
    if path.exists():
        return path
    wanted = f"{package}=={version(package)}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps",
               "--no-binary", ":all:", "--dest", str(folder), wanted]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not path.exists():
        said = (done.stderr or done.stdout).strip().splitlines()
        why = said[-1] if said else f"pip left no {path.name}"
        raise UnavailableError(
            f"the source archive of {wanted} could not be had ({why}): try again with a network, or name a folder "
            f"that holds {path.name} by --sdists"
        )
    return path


def unpacked(archive: Path, into: Path) -> Path:
    """The folder in it that holds `tests`."""
    with tarfile.open(archive) as file:
        file.extractall(into, filter="data")
    root = into / archive.name.removesuffix(".tar.gz")
    if not (root / "tests").is_dir():
        raise UnavailableError(f"{archive.name} holds no tests")
    return root


def files_of(root: Path, only: Iterable[str]) -> list[str]:
    """Those that name one of the classes."""
    wanted = set(only)
    found = sorted(path for path in (root / "tests").glob("test_*.py") if not wanted or path.name in wanted)
    return [f"tests/{path.name}" for path in found if NAMED.search(path.read_text(encoding="utf-8"))]


def outcome(root: Path, files: Sequence[str], classes: str) -> Result:
    """`tests` and `unread`, as the plugin notes them."""
    found = root / f"{classes}.json"
    python_path = [str(ROOT / "scripts"), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1",
        "STOCK_SUITES_CLASSES": classes, "STOCK_SUITES_FOUND": str(found),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "stock_plugin", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", f"--timeout={LIMIT_S}", *files]  # fmt: skip
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if not found.exists():
        raise SystemExit(f"pytest came to no end ({classes}):\n{(done.stdout + done.stderr)[-3000:]}")
    noted: Result = json.loads(found.read_text(encoding="utf-8"))
    return noted


def compared(stock: Result, ours: Result) -> Result:
    """Counts per file, and by name what differs or fails anyway."""
    files: dict[str, Result] = {}
    for classes, noted in (("stock", stock), ("ours", ours)):
        for test, one in noted["tests"].items():
            counts = files.setdefault(test.partition("::")[0], {"stock": Counter(), "ours": Counter()})[classes]
            counts[one["outcome"]] += 1
    failed = {test: one["why"] for test, one in ours["tests"].items() if one["outcome"] == "failed"}
    anyway = {test for test, one in stock["tests"].items() if one["outcome"] == "failed"}
    return {
        "files": {
            name: {classes: {each: counts[each] for each in OUTCOMES} for classes, counts in both.items()}
            for name, both in sorted(files.items())
        },
        "failed_with_stock": sorted(anyway),
        "exceptions": {test: EXCEPTIONS[test] for test in sorted(failed.keys() - anyway) if test in EXCEPTIONS},
        "bad": [f"{test}: {failed[test]}" for test in sorted(failed.keys() - anyway - EXCEPTIONS.keys())],
        "not_read_with_stock_either": {name: stock["unread"].get(name, why) for name, why in ours["unread"].items()},
    }


def run(sdists: Path | None, only: Iterable[str]) -> Result:
    """Both suites."""
    suites: Result = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for package in PACKAGES:
            root = unpacked(archive_of(package, sdists or folder), folder)
            files = files_of(root, only)
            if not files:
                continue
            print(f"{package} {version(package)}: {len(files)} files, with stock's classes and with ours", flush=True)
            stock, ours = (outcome(root, files, classes) for classes in ("stock", "ours"))
            suites[package] = {"version": version(package), **compared(stock, ours)}
    return suites


def show(stored: Result) -> None:
    """A line a file, the totals, and what fails."""
    for package, suite in stored.get("suites", {}).items():
        print(f"{package} {suite['version']:<24} {'stock':>22} {'ours':>24}")
        totals = {classes: Counter[str]() for classes in ("stock", "ours")}
        for name, both in suite["files"].items():
            print(f"  {name:<36}" + "".join(f"  {counted(both[classes])}" for classes in totals))
            for classes, total in totals.items():
                total.update(both[classes])
        print(f"  {'all':<36}" + "".join(f"  {counted(total)}" for total in totals.values()))
        for name, why in suite["not_read_with_stock_either"].items():
            print(f"  not read, with stock's classes neither: {name}: {why}")
        for test in suite["failed_with_stock"]:
            print(f"  fails with stock's class: {test}")
        for test, why in suite["exceptions"].items():
            print(f"  meant: {test}: {why}")
        for text in suite["bad"]:
            print(f"  broken: {text}")


def counted(counts: Mapping[str, int]) -> str:
    return f"{counts['passed']:>4} passed {counts['failed']:>3} failed"


def store(path: Path, suites: Result) -> Result:
    """A reader never sees half a file."""
    about = {"name": "stock_suites", **bench_machine.about(), "command": "python3 scripts/stock_suites.py"}
    stored = {**about, "suites": suites}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return stored


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", metavar="FILE", default=[])
    parser.add_argument("--sdists", type=Path, metavar="DIR")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file (default: docs/results/stock_suites.json)")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args(arguments)
    if options.show:
        stored = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    else:
        try:
            suites = run(options.sdists, options.files)
        except UnavailableError as error:
            print(f"stock_suites: {error}", file=sys.stderr)
            return 2
        stored = {"suites": suites} if options.files else store(options.results, suites)
    show(stored)
    return 1 if any(suite["bad"] for suite in stored.get("suites", {}).values()) else 0


if __name__ == "__main__":
    sys.exit(main())
