"""Work `start` of benchmark.py: from the command to the first training update, with nothing compiled and again.

Every run is a fresh process in an empty folder. `cold` has a cache of compiled kernels of its own, empty at its start.
What is timed is seen from outside, so that it is the same of any checkout: the run is told to print [PERF] after every
update, and gets SIGTERM at the first such line, which counts. CPU seconds are those of the whole tree of processes
until then. What compiling costs is what `fasttrain warmup` takes with an empty cache less what it takes again.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

import bench_machine

ROOT = Path(__file__).resolve().parent.parent
FIRST_LINE = "[PERF]"
TOLD = ("log_every=1", "train_log_enabled=true", "train_log_to_console=true", "train_log_to_file=false", "live=off",
        "report=false", "eval.episodes=2", "hydra.run.dir=run")  # fmt: skip
DEFAULT = ("+profile=speed",)
CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo")
Sample = dict[str, float]
OF_ONE = 600  # seconds that one run may take


class Case(NamedTuple):
    """What is started."""

    arguments: tuple[str, ...]
    cold: bool = False
    waits_for: str = FIRST_LINE  # a part of the line at which it is there; empty: the end of the process
    target_s: float | None = None


CASES = {
    "help": Case(("--help",), waits_for="", target_s=0.7),
    "default, warm": Case(DEFAULT, target_s=4.0),
    "cartpole, warm": Case(CARTPOLE),
    "default, cold": Case(DEFAULT, cold=True, target_s=20.0),
    "cartpole, cold": Case(CARTPOLE, cold=True, target_s=10.0),
}
COMPILING = {"default": DEFAULT, "cartpole": CARTPOLE}
CACHES = ("cold", "warm")


# --- one run


def started(checkout: Path, arguments: Sequence[str], cache: Path, folder: Path) -> subprocess.Popen[str]:
    """`fasttrain ARGUMENTS` with the sources of a checkout."""
    unusual = ("NUMBA_", "PYTHONDONTWRITEBYTECODE")  # without bytecode every start compiles our sources, 0.3 s
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unusual)}
    environment |= {"PYTHONPATH": str(checkout / "src"), "NUMBA_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fasttrain", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds so far of a process, its living descendants, and those of them that were waited for."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:  # ended meanwhile: its parent's `children_*` has it, if it waited
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measured(checkout: Path, case: Case, cache: Path, folder: Path) -> Sample:
    """Seconds from the command to the line, and CPU seconds until then.

    Raises:
        SystemExit: the line did not come.
    """
    folder.mkdir(parents=True)
    begun = time.perf_counter()
    before = os.times()
    found: Sample = {}
    said: list[str] = []
    with started(checkout, [*case.arguments, *(TOLD if case.waits_for else ())], cache, folder) as process:
        guard = threading.Timer(OF_ONE, process.kill)
        guard.start()
        try:
            for line in process.stdout or ():
                said.append(line)
                if case.waits_for and case.waits_for in line and not found:
                    found = {"wall_s": time.perf_counter() - begun, "cpu_s": cpu_s(psutil.Process(process.pid))}
                    process.send_signal(signal.SIGTERM)
        except BaseException:
            process.kill()
            raise
        finally:
            guard.cancel()
    if not case.waits_for and process.returncode == 0:
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        found = {"wall_s": time.perf_counter() - begun, "cpu_s": spent}
    if not found:
        raise SystemExit(f"fasttrain {' '.join(case.arguments)}: no first update\n{''.join(said)[-3000:]}")
    summary = folder / "run" / "summary.json"
    told = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
    return {**found, **({"told_s": told["first_update_s"]} if told.get("first_update_s") else {})}


def warm_up(arguments: Sequence[str]) -> Case:
    """A command that compiles everything and trains nothing."""
    return Case(("warmup", *arguments), waits_for="")


def has_warmup(checkout: Path, folder: Path) -> bool:
    """Of older checkouts compiling is what a cold run takes longer than a warm one, as both do it before they train."""
    with started(checkout, ["--help"], folder, folder) as process:
        return "fasttrain warmup" in process.communicate()[0]


# --- all of them, in turn


def run(repeats: int, results: Path, against: Path | None = None) -> int:
    """Measure this checkout, and another in turn with it; store and show what was found."""
    checkouts = {"ours": ROOT, **({"against": against.resolve()} if against else {})}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        samples = _in_turn(checkouts, repeats, Path(folder))
    result = {
        "work": "start",
        **bench_machine.about(),
        "command": f"python3 scripts/benchmark.py start --repeats {repeats}{' --against CHECKOUT' if against else ''}",
        "targets_s": {name: case.target_s for name, case in CASES.items() if case.target_s},
        **{name: {case: _spreads(found) for case, found in cases.items()} for name, cases in samples.items()},
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / "start.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(results / "start.json")
    return 0


def _in_turn(checkouts: Mapping[str, Path], repeats: int, folder: Path) -> dict[str, dict[str, list[Sample]]]:
    """Checkout → case → samples."""
    samples: dict[str, dict[str, list[Sample]]] = {name: {} for name in checkouts}

    def add(turn: int, name: str, case: str, found: Sample) -> None:
        samples[name].setdefault(case, []).append(found)
        wall, cpu = found["wall_s"], found["cpu_s"]
        print(f"  turn {turn}/{repeats}  {name:<8} {case:<20} {wall:6.1f} s, {cpu:6.1f} s of CPU", flush=True)

    with_warmup = {name for name, checkout in checkouts.items() if has_warmup(checkout, folder)}
    for name, checkout in checkouts.items():
        for job, arguments in COMPILING.items():  # fills the warm cache; not counted
            case = warm_up(arguments) if name in with_warmup else Case(arguments)
            measured(checkout, case, folder / name, folder / f"{name}-{job}")
    for turn in range(1, repeats + 1):
        of_turn = folder / str(turn)
        for case, settings in CASES.items():
            for name, checkout in checkouts.items():
                one = of_turn / name / case.replace(", ", "-")
                add(
                    turn,
                    name,
                    case,
                    measured(checkout, settings, one / "cache" if settings.cold else folder / name, one),
                )
        for job, arguments in COMPILING.items():
            for name, checkout in checkouts.items():
                cold, warm = (samples[name][f"{job}, {step}"][-1] for step in CACHES)
                if name in with_warmup:
                    one = of_turn / name / f"{job}-warmup"
                    cold, warm = (measured(checkout, warm_up(arguments), one / "cache", one / step) for step in CACHES)
                add(turn, name, f"{job}, compiling", {key: cold[key] - warm[key] for key in ("wall_s", "cpu_s")})
    return samples


def _spreads(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    return {
        key: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for key in samples[0]
        if (values := [round(sample[key], 3) for sample in samples if key in sample])
    }


def show(file: Path) -> None:
    """What is stored."""
    if not file.is_file():
        return
    result = json.loads(file.read_text(encoding="utf-8"))
    print(f"\nstart: from the command to the first update  ({result['machine']}; {result['command']})")
    for name in ("ours", "against"):
        for case, found in result.get(name, {}).items():
            wall, cpu = found["wall_s"], found["cpu_s"]
            target = result["targets_s"].get(case) if name == "ours" else None
            wanted = f"   wanted {target:g} s or less" if target else ""
            print(
                f"  {name:<8} {case:<20} {wall['median']:6.1f} s [{wall['min']:.1f}, {wall['max']:.1f}]   "
                f"CPU {cpu['median']:6.1f} s [{cpu['min']:.1f}, {cpu['max']:.1f}]{wanted}"
            )
