"""Signals to a whole process group, to every process of a job, and Ctrl-C in a terminal: what a run comes to then.

A cell is a run with slow or fast steps in one kind of vector env that is stopped in mid-rollout, resumed and stopped
again. Cells are taken in an order in which the first few of them hold as many pairs of factors as they can.
"""

from __future__ import annotations

import itertools
import os
import pty
import random
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from campaigns import FOREVER, QUIET, STOPPED, TOLD, Result, Say, resumed
from injector import Nursery, Training, steps_of, unread
from wired import Wire

from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.saving.files import read_json
from resume_cases import SHARED

STEPS_S = (0.001, 0.3, 2.0)
ENVS: dict[str, tuple[str, float]] = {
    **{f"{kind}, {step_s:g} s": (kind, step_s) for step_s in STEPS_S for kind in ("dummy", "subproc", "shared")},
    "native": ("native", 0.0),
}
GROUP_TERM, GROUP_INT = "SIGTERM to the group", "SIGINT to the group"
JOB, CTRL_C = "SIGTERM to every process", "Ctrl-C in a terminal"
SIGNALS = (GROUP_TERM, GROUP_INT, CTRL_C, JOB)
CLOSES = "a terminal closes"  # in the tests alone: nothing is heard of it from then on
NEXT = dict(zip((*SIGNALS, CLOSES), (*SIGNALS[1:], *SIGNALS[:1], GROUP_TERM), strict=True))  # of the resumed run
ALGORITHMS = ("ppo", "dqn")

OF_ALGORITHM = {
    "ppo": ("algo=ppo", "algo.rollout_size=32", "batch_size=16", "algo.n_epochs=1"),
    "dqn": ("algo=dqn", "algo.buffer_size=500", "warmup_steps=8", "batch_size=8", "updates_per_step=1", "prefetch=off"),
}
NATIVE = {
    "ppo": STOPPED["skullking"],
    "dqn": (*QUIET, *OF_ALGORITHM["dqn"], "num_envs=8", "fused_update=off", "checkpoint_every=0", FOREVER, *TOLD),
}
OF_KIND = {
    "dummy": ("vec_env=dummy",),
    "subproc": ("vec_env=subproc",),
    "shared": (*SHARED, "env.on_env_error=restart"),
}


class Cell(NamedTuple):
    """One combination."""

    env: str
    signal: str
    algorithm: str


def cells(rng: random.Random) -> Iterator[Cell]:
    """All of them; next is always one that has the most pairs that no cell before it has."""
    left = [Cell(*factors) for factors in itertools.product(ENVS, SIGNALS, ALGORITHMS)]
    rng.shuffle(left)
    seen: set[Any] = set()
    while left:
        cell = max(left, key=lambda each: len(pairs(each) - seen))
        left.remove(cell)
        seen |= pairs(cell)
        yield cell


def pairs(cell: Cell) -> set[Any]:
    """What is tried together in it."""
    return set(itertools.combinations(enumerate(cell), 2))


def arguments(cell: Cell) -> tuple[str, ...]:
    """Of the training."""
    kind, step_s = ENVS[cell.env]
    if kind == "native":
        return NATIVE[cell.algorithm]
    return (*QUIET, "env.entry_point=wired:WiredEnv", "env.kwargs.wire=wire", f"env.kwargs.step_s={step_s}",
            *OF_KIND[kind], "num_envs=2", "fused_update=off", "checkpoint_every=0", "eval_every=200", FOREVER,
            *OF_ALGORITHM[cell.algorithm])  # fmt: skip


class Terminal:
    """A terminal as a person has it; what is shown goes to the log."""

    def __init__(self, log: Path) -> None:
        self._ours, self._theirs = pty.openpty()
        self.name = os.ttyname(self._theirs)
        self._log, self._closed = log, threading.Event()
        self._shown = threading.Thread(target=self._copy)
        self._shown.start()

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        """As its window does: whoever still uses it is told by SIGHUP."""
        self._closed.set()
        self._shown.join(10.0)

    def _copy(self) -> None:
        with self._log.open("ab", buffering=0) as file:
            while not self._closed.is_set():
                if select.select([self._ours], [], [], 0.05)[0]:
                    file.write(os.read(self._ours, 65536))
        os.close(self._ours)
        os.close(self._theirs)


def groups(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """`count` cells. `stops` are twice as many: each is stopped, resumed and stopped again."""
    rng = random.Random(seed)
    result: Result = {"cells": 0, "stops": 0, "saved": 0, "resumed": 0, "workers_killed": 0, "processes": 0,
                      "pairs": 0, "seconds": [], "bad": []}  # fmt: skip
    seen: set[Any] = set()
    with Nursery.lent(lent) as nursery:
        for number, cell in enumerate(itertools.islice(cells(rng), count)):
            place = folder / f"cell{number}"
            place.mkdir(parents=True)
            first = stop(nursery, place, cell, None, rng, result)
            if first is not None:
                again = cell._replace(signal=NEXT[cell.signal])
                result["resumed"] += stop(nursery, place, again, first, rng, result) is not None
                shutil.rmtree(place, ignore_errors=True)
            result["cells"] += 1
            seen |= pairs(cell)
            result["pairs"] = len(seen)
            say(f"{number + 1} of {count}: {', '.join(cell)}; {result['saved']} of {result['stops']} saved")
    return result


def stop(
    nursery: Nursery, place: Path, cell: Cell, resumes: Path | None, rng: random.Random, result: Result
) -> Path | None:
    """Start or resume a training and stop it; the checkpoint it leaves, None where a promise was broken."""
    wire, log = Wire(place / "wire"), place / f"log-{'resume' if resumes else 'train'}"
    wire.clear()
    said = resumed() if resumes else arguments(cell)
    with closing(Terminal(log)) as terminal:
        special = {"tty": terminal.name} if cell.signal in (CTRL_C, CLOSES) else {}
        training = Training(nursery, place, said, log, **special)
        if not until_it_steps(training, wire, cell):
            result["bad"].append(f"{cell}: ended by itself: {training.said()[-2000:]}")
            return None
        time.sleep(rng.random() * max(1.0, ENVS[cell.env][1]))
        if resumes and ENVS[cell.env][0] == "shared":  # what replaces it is still starting when the signal comes
            result["workers_killed"] += kill_a_worker(training, rng)
            time.sleep(rng.random() * 1.5)
        sent = time.monotonic()
        strike(training, cell.signal, terminal)
        code = training.end()
        took = time.monotonic() - sent
    return judge(training, cell, code, took, resumes, result)


def until_it_steps(training: Training, wire: Wire, cell: Cell) -> bool:
    """Until it trains: in the first rollout where steps are slow, a few rollouts on where they are not."""
    kind, step_s = ENVS[cell.env]
    if kind == "native":
        return training.until_said("[PERF]")
    wanted = 300 if step_s < 0.1 else 5
    return training.until("train", lambda: wire.steps >= wanted, pause_s=0.01)


def strike(training: Training, how: str, terminal: Terminal) -> None:
    """Bring about one of `SIGNALS`."""
    if how == CTRL_C:
        terminal.press(b"\x03")
    elif how == CLOSES:
        terminal.close()
    elif how == JOB:  # as `scancel` and `systemctl stop` do
        for pid in [training.pid, *training.others()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    else:
        training.send(signal.SIGTERM if how == GROUP_TERM else signal.SIGINT, group=True)


def kill_a_worker(training: Training, rng: random.Random) -> int:
    """One process that it started for its envs, or to evaluate; how many were killed."""
    found = []
    for pid in training.others():
        with suppress(psutil.Error):
            if "spawn_main" in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
    if found:
        os.kill(rng.choice(sorted(found)), signal.SIGKILL)
    return bool(found)


def judge(training: Training, cell: Cell, code: int, took: float, resumes: Path | None, result: Result) -> Path | None:
    """Whether everything is saved and nobody is left."""
    newest, problems = CheckpointFolder(training.run / "checkpoints").newest()
    summary = read_json(training.run / "summary.json") if (training.run / "summary.json").exists() else {}
    said, left = training.said(), training.litter()
    why = [text for text, holds in {
        f"exit code {code}": code == 4,
        "no model.zip": (training.run / "model.zip").is_file(),
        f"stopped by {summary.get('stopped_by')}": summary.get("stopped_by") == "signal",
        f"no checkpoint {problems}": newest is not None and not problems and not unread(newest),
        "a traceback": "Traceback" not in said,
        f"did not go on from {resumes}": resumes is None or f"going on from {resumes.name}:" in said,
        f"{left} left": not any(left),
    }.items() if not holds]  # fmt: skip
    result["stops"] += 1
    result["saved"] += not why
    result["processes"] += left.processes
    result["seconds"].append(round(took, 2))
    if why or newest is None:
        result["bad"].append(f"{', '.join(cell)}{' (resumed)' if resumes else ''}: {'; '.join(why)}: {said[-1500:]}")
        training.send(signal.SIGKILL, group=True)
        return None
    assert summary["env_steps"] >= steps_of(newest)
    return newest
