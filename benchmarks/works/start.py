"""From the command to the first training update, with nothing compiled and again.

What is timed is seen from outside, so that it is the same of any checkout: the run is told to print [PERF] after every
update, and gets SIGTERM at the first such line, which counts. CPU seconds are those of the whole tree of processes
until then. `cold` has an empty cache of compiled kernels.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial

import psutil

from benchmarks.work import OURS, Sample, Work, works_of

FIRST_LINE = "[PERF]"
TOLD = ("log_every=1", "train_log_enabled=true", "train_log_to_console=true", "train_log_to_file=false", "live=off",
        "report=false", "eval.episodes=2", "hydra.run.dir=run")  # fmt: skip
DEFAULT = ("+profile=speed",)
CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo")
OF_ONE = 600  # seconds that one run may take


def first_update(arguments: tuple[str, ...], cold: bool) -> Sample:
    """`rate` is starts per minute.

    Raises:
        SystemExit: there was no first update.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        unusual = ("NUMBA_", "PYTHONDONTWRITEBYTECODE")  # without bytecode every start compiles our sources, 0.3 s
        environment = {name: value for name, value in os.environ.items() if not name.startswith(unusual)}
        environment["PYTHONUNBUFFERED"] = "1"
        if cold:
            environment["NUMBA_CACHE_DIR"] = f"{folder}/cache"
        command = [sys.executable, "-m", "fasttrain", *arguments, *TOLD]
        begun, found, said = time.perf_counter(), dict[str, float](), list[str]()
        with subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            guard = threading.Timer(OF_ONE, process.kill)
            guard.start()
            try:
                for line in process.stdout or ():
                    said.append(line)
                    if FIRST_LINE in line and not found:
                        wall_s = time.perf_counter() - begun
                        found = {"rate": 60 / wall_s, "wall_s": wall_s, "cpu_s": cpu_s(psutil.Process(process.pid))}
                        process.send_signal(signal.SIGTERM)
            except BaseException:
                process.kill()
                raise
            finally:
                guard.cancel()
    if not found:
        raise SystemExit(f"fasttrain {' '.join(arguments)}: no first update\n{''.join(said)[-3000:]}")
    return found


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


def printed(*arguments: str) -> Sample:
    """A command to its end: `--help`, or `warmup` with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment, before, begun = {**os.environ, "NUMBA_CACHE_DIR": folder}, os.times(), time.perf_counter()
        command = [sys.executable, "-m", "fasttrain", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment)
        wall_s, after = time.perf_counter() - begun, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"rate": 60 / wall_s, "wall_s": wall_s, "cpu_s": used}


UNIT = "starts per minute"
WORKS = works_of(
    *(
        Work(
            f"start-{name}-{'cold' if cold else 'warm'}",
            f"From the command to the first update, {name}, with {'an empty' if cold else 'a full'} cache of kernels.",
            {OURS: partial(first_update, arguments, cold)},
            unit=UNIT,
            equal=(),
            target="T10",
        )
        for name, arguments in {"default": DEFAULT, "cartpole": CARTPOLE}.items()
        for cold in (True, False)
    ),
    Work("start-help", "`fasttrain --help`.", {OURS: partial(printed, "--help")}, unit=UNIT, equal=()),
    *(
        Work(
            f"start-warmup-{name}",
            f"`fasttrain warmup`, {name}, with an empty cache: all kernels of the run.",
            {OURS: partial(printed, "warmup", *arguments)},
            unit=UNIT,
            equal=(),
            target="T10",
        )
        for name, arguments in {"default": DEFAULT, "cartpole": CARTPOLE}.items()
    ),
)
