#!/usr/bin/env python3
"""Games with an engine that does everything wrong, in full: python3 scripts/faults_daemons.py [--only trainings …]

`trainings` is one run of 50,000 decisions in which engines crash, hang, are stopped or killed, send garbage or refuse,
thousands of faults of 21 kinds; what was learnt is played again by the rules of the game. `frames` are a million wrong
frames. Both are campaigns of tests/faults/engine_faults.py, which the tests try in small. What is found is stored in
docs/results/faults_daemons.json; exit code 1: a promise was broken, what is stored says which.

  --only PART …   some parts             --count N   so many, in place of the README's numbers
  --seed N        other faults           --results FILE
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
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BARE = (find_spec("fasttrain") is None or find_spec("pytest") is None) and Path(sys.prefix) != ROOT / ".venv"
if __name__ == "__main__" and BARE:  # go on in the checkout's own .venv
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:], extras=("dev",)))

import bench_machine  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "faults_daemons.json"
COUNTS = {"frames": 1_000_000, "trainings": 50_000}  # frames first: memory is measured in a process that is still small
Result = dict[str, Any]


def run(name: str, count: int, seed: int) -> Result:
    """Try one part; what is stored of it."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]
    begun = time.perf_counter()

    def say(line: str) -> None:
        print(f"  {time.perf_counter() - begun:5.0f} s  {line}", flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = getattr(import_module("engine_faults"), name)(count, seed, Path(folder) / name, say)
    return {"count": count, "seed": seed, "elapsed_s": round(time.perf_counter() - begun, 1), **found}


def add(path: Path, name: str, found: Result) -> None:
    """Store one part; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored: Result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = {"name": "faults_daemons", **bench_machine.about(), "command": "python3 scripts/faults_daemons.py"}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    text = json.dumps({**about, "parts": {**stored.get("parts", {}), name: found}}, indent=2, allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COUNTS, metavar="PART", default=list(COUNTS))
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file")
    options = parser.parse_args(arguments)
    if options.count is not None and options.count < 1:
        parser.error("--count must be at least 1")
    bad: list[str] = []
    for name in options.only:
        count = options.count or COUNTS[name]
        print(f"{name}: {count:,}", flush=True)
        found = run(name, count, options.seed)
        add(options.results, name, found)
        print("  " + ", ".join(f"{key} {value}" for key, value in found.items()))
        bad += found["bad"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
