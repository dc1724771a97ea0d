#!/usr/bin/env python3
"""Runs killed, stopped, damaged and out of disk as often as the README says: python3 scripts/faults.py [--only kills …]

Each part is a campaign of tests/faults/ (campaigns.py and others), test_nan.py or evil_files.py there; the tests try
the same a few times. A part that has come to its end is stored at once in docs/results/faults.json and is not
tried again with the same count and seed, so that the command can be stopped (Ctrl-C) and given again. Exit code 1: a
promise was broken, what is stored says which; or nothing of a part could be tried here, which is said and not stored.

  --only PART …   some parts                     --count N   so often, in place of the README's numbers
  --seed N        other random instants          --again     also what is stored
  --keep DIR      folders of what went wrong stay there      --show   what is stored, runs nothing

All of it takes two hours on two cores.
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
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BARE = (find_spec("fasttrain") is None or find_spec("pytest") is None) and Path(sys.prefix) != ROOT / ".venv"
if __name__ == "__main__" and BARE:  # go on in the checkout's own .venv
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:], extras=("dev",)))

import bench_machine  # noqa: E402

TESTS = ROOT / "tests"
RESULTS = ROOT / "docs" / "results" / "faults.json"
Say = Callable[[str], None]
Result = dict[str, Any]


class Part(NamedTuple):
    """What is tried."""

    count: int  # as the README has it
    minutes: float  # on two cores
    title: str
    run: Callable[[int, int, Path, Say], Result]


def campaign(name: str, module: str = "campaigns") -> Callable[[int, int, Path, Say], Result]:
    """That of a module in tests/faults; imported when it is run."""

    def run(count: int, seed: int, folder: Path, say: Say) -> Result:
        sys.path[:0] = [str(TESTS), str(TESTS / "faults")]
        result: Result = getattr(import_module(module), name)(count, seed, folder, say)
        return result

    return run


# --- parts that are no campaigns

PLACES = {  # test of tests/faults/test_nan.py → where the number was put
    "test_bad_data_is_named_before_anything_uses_it[observation": "observation",
    "test_bad_data_is_named_before_anything_uses_it[reward": "reward",
    "test_a_bad_weight_is_named_when_it_acts": "logits",
    "test_a_bad_weight_is_named_when_it_learns": "logits",
    "test_a_bad_loss_is_skipped_and_the_run_goes_on": "loss",
    "test_a_gradient_that_overflows_is_named": "gradient",
    "test_too_many_rounds_in_a_row_stop_the_run": "rounds in a row",
    "test_a_rollback_goes_to_the_last_good_weights_once": "guard.at_limit",
}


def nan(count: int, seed: int, folder: Path, say: Say) -> Result:
    """tests/faults/test_nan.py, counted by place and algorithm. There is nothing random in it."""
    folder.mkdir(parents=True)
    tests, report = TESTS / "faults" / "test_nan.py", folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", str(tests), f"--junitxml={report}", "-p", "no:cacheprovider"], cwd=ROOT
    )
    result = by_place(ElementTree.parse(report).getroot().iter("testcase"))
    result["bad"] += [f"{place}: not tried" for place in sorted({*PLACES.values()} - result["places"].keys())]
    return result


def by_place(cases: Iterable[ElementTree.Element]) -> Result:
    """Cases of a report of pytest's: how many there were, how many passed."""
    result: Result = {"cases": 0, "passed": 0, "places": {}, "bad": []}
    for case in cases:
        name = case.get("name", "")
        place = next((place for test, place in PLACES.items() if _is_of(name, test)), None)
        if place is None:
            continue
        (algorithm,) = set(re.split(r"[\[\]-]", name)) & {"ppo", "maskable_ppo", "dqn"}
        passed = len(case) == 0
        row = result["places"].setdefault(place, {}).setdefault(algorithm, {"cases": 0, "passed": 0})
        for counted in (row, result):
            counted["cases"] += 1
            counted["passed"] += passed
        if not passed:
            result["bad"].append(name)
    return result


def _is_of(name: str, test: str) -> bool:
    test, _, field = test.partition("[")
    return name.partition("[")[0] == test and field in [*re.split(r"[\[\]-]", name), ""]


def evil(count: int, seed: int, folder: Path, say: Say) -> Result:
    """tests/faults/evil_files.py: all its files, in a process of its own, whose peak of memory it measures."""
    folder.mkdir(parents=True)
    script = TESTS / "faults" / "evil_files.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, script.parent)))}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, env=environment, cwd=folder
    )
    if done.returncode:
        raise SystemExit(f"{script.name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return judged(json.loads(done.stdout.splitlines()[-1]))


def cold_cache(count: int, seed: int, folder: Path, say: Say) -> Result:
    """tests/faults/cold_cache.py, in a process of its own, which forks those that compile."""
    folder.mkdir(parents=True)
    script = TESTS / "faults" / "cold_cache.py"
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(script), str(count), str(seed), str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if not line.startswith("{"):
                say(line.rstrip())
    if process.returncode:
        raise SystemExit(f"{script.name}: exit code {process.returncode}")
    found: Result = json.loads(lines[-1])
    return found


MOST_GROWTH_MB = 100


def judged(rows: Sequence[Mapping[str, Any]]) -> Result:
    """The files of `check_all` in figures."""
    bad = [
        f"{row['name']} ({row['command']}): exit code {row['exit_code']}, {row['growth_mb']:.0f} MB: {row['said']}"
        for row in rows
        if row["executed"] or row["outside"] or row["exit_code"] != row["expected"] or row["growth_mb"] > MOST_GROWTH_MB
    ]
    return {
        "files": len(rows),
        "as_expected": len(rows) - len(bad),
        "executed": sum(bool(row["executed"]) for row in rows),
        "outside": sum(len(row["outside"]) for row in rows),
        "growth_mb": round(max(row["growth_mb"] for row in rows), 1),
        "bad": bad,
    }


def guards(count: int, seed: int, folder: Path, say: Say) -> Result:
    """bench_guards.py: what all of them cost. Wants an idle machine, as every timing."""
    import bench_guards

    return bench_guards.measure(count, seed, folder, say)


PARTS = {
    "kills": Part(200, 20, "kill -9 around the writing of checkpoints", campaign("kills")),
    "corruptions": Part(500, 3, "damaged checkpoints", campaign("corruptions")),
    "equality": Part(10, 15, "stop points of each of six combinations, resumed", campaign("equalities")),
    "disk": Part(40, 6, "numbers of bytes after which the disk is full, and every operation", campaign("disks")),
    "full": Part(10, 2, "full file systems", campaign("fulls")),
    "nan": Part(1, 2, "NaN and infinity in five places", nan),
    "stops": Part(100, 8, "SIGTERM at random instants", campaign("stops")),
    "ends": Part(100, 15, "abnormal ends", campaign("ends")),
    "groups": Part(
        40, 25, "runs with signals to their group, a Ctrl-C or a stopped job", campaign("groups", "group_signals")
    ),
    "forks": Part(40, 10, "lives and trainings of envs that fork", campaign("forks", "fork_campaign")),
    "victims": Part(90, 8, "envs that hang, end their process, crash it, eat memory", campaign("victims", "victims")),
    "late-errors": Part(50, 6, "errors in random late steps", campaign("late_errors", "lost")),
    "overwrites": Part(50, 3, "folders that hold something", campaign("overwrites", "lost")),
    "evil": Part(1, 3, "malicious files", evil),
    "cold-cache": Part(200, 5, "caches of compiled kernels: cold, shared, damaged, unwritable", cold_cache),
    "guards": Part(600, 6, "pairs of stretches with all guards and without", guards),
}


# --- what is stored


def load(path: Path) -> Result:
    """Empty where nothing is stored."""
    found: Result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def add(path: Path, name: str, found: Result) -> None:
    """Store one part; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"name": "faults", **bench_machine.about(), "command": "python3 scripts/faults.py"}
    parts = {**load(path).get("parts", {}), name: found}
    ordered = {each: parts[each] for each in [*PARTS, *(parts.keys() - PARTS.keys())] if each in parts}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    text = json.dumps({**about, "parts": ordered}, indent=2, ensure_ascii=False, allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


TRIES = (  # names of what parts count
    "kills", "damages", "points", "cases", "stops", "ends", "victims", "files", "pairs", "lives", "errors", "folders",
)  # fmt: skip


def was_tried(found: Mapping[str, Any]) -> bool:
    """False: this machine could not do anything of that part."""
    return all(found[name] for name in TRIES if name in found)


def is_done(stored: Mapping[str, Any] | None, count: int, seed: int) -> bool:
    """Whether it was tried so often with that seed, and no promise was broken."""
    return stored is not None and (stored["count"], stored["seed"], stored["bad"]) == (count, seed, [])


def without_paths(text: str, folder: Path) -> str:
    """Shown as seen from the checkout and from the part's folder."""
    for place in (folder, ROOT, Path(sys.prefix)):
        text = text.replace(f"{place}{os.sep}", "").replace(str(place), ".")
    return re.sub(r"(?<![\w.])/[\w.-]+(?:/[\w.-]+)+", "…", text)


def run(name: str, count: int, seed: int, keep: Path | None) -> Result:
    """Try one part; what is stored of it."""
    begun = time.perf_counter()

    def say(line: str) -> None:
        print(f"  {time.perf_counter() - begun:5.0f} s  {line}", flush=True)

    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder = folder.resolve() / (f"{name}-{os.getpid()}" if keep else name)
        result = PARTS[name].run(count, seed, folder, say)
    result["bad"] = [without_paths(text, folder) for text in result["bad"]]
    return {"count": count, "seed": seed, "elapsed_s": round(time.perf_counter() - begun, 1), **result}


def show(stored: Result) -> None:
    """A line a part, and what went wrong."""
    for name, found in stored.get("parts", {}).items():
        shown = {key: value for key, value in found.items() if key not in ("bad", "seconds", "kinds", "places")}
        print(f"{name:<12} {', '.join(f'{key} {value}' for key, value in shown.items())}")
        for text in found.get("bad", ()):
            print(f"    broken: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file (default: docs/results/faults.json)")
    for name in ("again", "show"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(arguments)
    os.environ.setdefault("FASTTRAIN_ENGINE_SWITCH_AT", "0")  # trainings are compared
    if options.count is not None and options.count < 1:
        parser.error("--count must be at least 1")
    untried: list[str] = []
    if not options.show:
        for name in options.only:
            count = options.count or PARTS[name].count
            if is_done(load(options.results).get("parts", {}).get(name), count, options.seed) and not options.again:
                print(f"{name}: stored")
                continue
            print(f"{name}: {count} {PARTS[name].title}, about {PARTS[name].minutes:g} minutes in full", flush=True)
            try:
                found = run(name, count, options.seed, options.keep)
            except KeyboardInterrupt:
                print(f"\nstopped; {name} begins again, what was finished before is stored")
                return 130
            if not was_tried(found):
                print(f"{name}: nothing could be tried here; not stored")
                untried.append(name)
                continue
            add(options.results, name, found)
    stored = load(options.results)
    show(stored)
    return 1 if untried or any(found.get("bad") for found in stored.get("parts", {}).values()) else 0


if __name__ == "__main__":
    sys.exit(main())
