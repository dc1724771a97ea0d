"""What scripts/run.py and scripts/test.py do once .venv is there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _bootstrap import PYTHON, ROOT, STAMP, VENV, ready, say

CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ruff check", ("ruff", "check")),
    ("ruff format", ("ruff", "format", "--check")),
    ("mypy", ("mypy",)),
    ("pytest", ("pytest", "-n", "2", "--dist", "worksteal")),  # last, so that its closing line is the last printed
)
# For the inner loop, in less than a minute: no processes, no kernels to compile, no trainings but tiny ones.
QUICK = (
    "tests/spec",
    "tests/buffers",
    "tests/algos",
    "tests/perf",
    "tests/test_architecture.py",
    "--ignore=tests/spec/test_algorithms.py",  # it trains each of them
)
LASTFAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"  # where pytest notes which tests failed
MOST_RERUN = 20  # more failures than that are no accident


def call(command: list[str], cwd: Path | None = None) -> int:
    """Run it on this terminal; its exit code as a shell's (128 + signal). On Ctrl-C the child decides."""
    process = subprocess.Popen(command, cwd=cwd)
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return 128 - code if code < 0 else code


def run_fasttrain(arguments: list[str]) -> int:
    """`python -m fasttrain` with the arguments, in the caller's working directory."""
    python = Path(sys.orig_argv[0])
    shim = shutil.which(python.name) == str(python)  # pyenv's makes a path of `python3`, and puts it on PATH
    typed = shlex.join([python.name if shim else str(python), sys.argv[0]])
    fresh = not STAMP.exists()
    if code := ready():
        return code
    if fresh:
        say(f"ready; wherever it says fasttrain, type {typed}")
    os.environ["FASTTRAIN_COMMAND"] = typed  # in what it prints to be typed
    command = [str(PYTHON), "-m", "fasttrain", *arguments]
    if os.name == "nt":  # exec there returns to the shell at once
        return call(command)
    try:
        os.execv(command[0], command)
    except OSError as error:
        say(f"cannot start {command[0]}: {error}; delete {VENV} and try again")
        return 2


def run_checks(arguments: list[str]) -> int:
    """pytest with the arguments, or all checks, or `--quick` ones; returns the first exit code that is not 0.

    `--all-extras` before them installs the libraries of every integration too, so that no test skips for want of one.
    """
    every = arguments[:1] == ["--all-extras"]
    arguments = arguments[every:]
    if code := ready("dev", *["all"] * every):
        return code
    checks = CHECKS
    if arguments[:1] == ["--quick"]:
        name, command = CHECKS[-1]
        checks = (*CHECKS[:2], (name, (*command, "-q", *(arguments[1:] or QUICK))))
    elif arguments:
        return _python("pytest", *arguments)
    failed: dict[str, int] = {}
    flaky: list[str] = []
    for name, command in checks:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        if name == "pytest":  # which prints its own time
            code, flaky = _tests(command)
        else:
            code = _python(*command)
            took = f"{time.monotonic() - began:.1f} s"
            print(f"   {f'failed with exit code {code}' if code else 'ok'}, {took}", flush=True)
        if code:
            failed[name] = code
    for test in flaky:
        say(f"flaky: {test} failed, and passed when it ran again alone; this does not fail the run, but mend it")
    if failed:
        say(f"failed: {', '.join(f'{name} (exit code {code})' for name, code in failed.items())}")
    return next(iter(failed.values()), 0)


def _python(*arguments: str) -> int:
    return call([str(PYTHON), "-m", *arguments], ROOT)


def _tests(command: tuple[str, ...]) -> tuple[int, list[str]]:
    """Run the tests, then each that failed once more in a process of its own; the exit code, and which are flaky.

    A flaky test fails and then passes alone. The exit code is 0 if every test passed or is flaky.
    """
    LASTFAILED.unlink(missing_ok=True)
    code = _python(*command)
    try:  # 1: tests failed; other codes: pytest was interrupted or could not begin
        failed = sorted(json.loads(LASTFAILED.read_text(encoding="utf-8"))) if code == 1 else []
    except (OSError, ValueError):
        failed = []
    if not 0 < len(failed) <= MOST_RERUN:
        return code, []
    flaky: list[str] = []
    for number, test in enumerate(failed, 1):
        say(f"running again alone, {number} of {len(failed)}: {test}")
        if _python("pytest", "-q", test) == 0:
            flaky.append(test)
    return (0 if flaky == failed else code), flaky
