"""Runs that a signal, a closing terminal, an error or a death ends at random instants: what they save and leave.

A cell of `groups` is a run with slow or fast steps in one kind of vector env that is stopped in mid-rollout, resumed
and stopped again. `ends` are abnormal ends of a training with workers.
"""

from __future__ import annotations

import itertools
import os
import pty
import select
import shutil
import signal
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
from campaigns import FOREVER, QUIET, WIRED, resumed
from injector import Nursery, Tally, Training, steps_of, temporary, unread
from wired import EXIT, RAISE, Wire

from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.saving.files import read_json
from resume_cases import SHARED

ENVS: dict[str, tuple[str, float]] = {
    **{
        f"{kind}, {step_s:g} s": (kind, step_s)
        for step_s in (0.001, 0.3, 2.0)
        for kind in ("dummy", "subproc", "shared")
    },
    "native": ("native", 0.0),
}
TERM, GROUP_TERM, GROUP_INT = "SIGTERM", "SIGTERM to the group", "SIGINT to the group"
JOB, CTRL_C, CLOSES = "SIGTERM to every process", "Ctrl-C in a terminal", "a terminal closes"
SIGNALS = (GROUP_TERM, GROUP_INT, CTRL_C, JOB, TERM, CLOSES)
OF_ALGORITHM = {
    "ppo": ("algo=ppo", "algo.rollout_size=32", "batch_size=16", "algo.n_epochs=1"),
    "dqn": ("algo=dqn", "algo.buffer_size=500", "warmup_steps=8", "batch_size=8", "updates_per_step=1", "prefetch=off"),
}
TOLD = ("log_every=1", "train_log_enabled=true", "train_log_to_console=true")
NATIVE = (*QUIET, "fused_update=off", "checkpoint_every=0", FOREVER, *TOLD)
OF_NATIVE = {
    "ppo": (*NATIVE, "num_envs=32", "algo.rollout_size=2048", "batch_size=512"),
    "dqn": (*NATIVE, *OF_ALGORITHM["dqn"], "num_envs=8"),
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


def arguments(cell: Cell) -> tuple[str, ...]:
    """Of the training."""
    kind, step_s = ENVS[cell.env]
    if kind == "native":
        return OF_NATIVE[cell.algorithm]
    return (*QUIET, *WIRED, f"env.kwargs.step_s={step_s}", *OF_KIND[kind], "num_envs=2", "fused_update=off",
            "checkpoint_every=0", "eval_every=200", FOREVER, *OF_ALGORITHM[cell.algorithm])  # fmt: skip


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


def groups(count: int, rng: Random, folder: Path, nursery: Nursery) -> Tally:
    """`count` cells; `stops` are twice as many: each is stopped, resumed and stopped again by another signal."""
    found, every = Tally(), [Cell(*factors) for factors in itertools.product(ENVS, SIGNALS, OF_ALGORITHM)]
    for number, cell in enumerate(rng.sample(every, count)):
        stop_and_resume(nursery, folder / f"cell{number}", cell, rng, found)
    return found


def stop_and_resume(nursery: Nursery, place: Path, cell: Cell, rng: Random, found: Tally) -> None:
    place.mkdir(parents=True)
    if first := stop(nursery, place, cell, None, rng, found):
        after = (*SIGNALS, *SIGNALS)[SIGNALS.index(cell.signal) + 1]
        found["resumed"] += stop(nursery, place, cell._replace(signal=after), first, rng, found) is not None
        shutil.rmtree(place, ignore_errors=True)


def stop(nursery: Nursery, place: Path, cell: Cell, resumes: Path | None, rng: Random, found: Tally) -> Path | None:
    """Start or resume a training and stop it; the checkpoint it leaves, None where a promise was broken."""
    wire, log = Wire(place / "wire"), place / f"log-{'resume' if resumes else 'train'}"
    wire.clear()
    kind, step_s = ENVS[cell.env]
    with closing(Terminal(log)) as terminal:
        special = {"tty": terminal.name} if cell.signal in (CTRL_C, CLOSES) else {}
        training = Training(nursery, place, resumed() if resumes else arguments(cell), log, **special)
        # In the first rollout where steps are slow, a few rollouts on where they are not.
        wanted = 300 if step_s < 0.1 else 5
        if kind == "native":
            training.until_said("[PERF]")
        else:
            training.until("train", lambda: wire.steps >= wanted, pause_s=0.01)
        time.sleep(rng.random() * max(1.0, step_s))
        if resumes and kind == "shared":  # what replaces it is still starting when the signal comes
            found["workers_killed"] += kill_a_worker(training, rng)
            time.sleep(rng.random() * 1.5)
        strike(training, cell.signal, terminal)
        training.end()
    return judge(training, cell, resumes, found)


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
        training.send(signal.SIGINT if how == GROUP_INT else signal.SIGTERM, group=how != TERM)


def kill_a_worker(training: Training, rng: Random) -> int:
    """One process that it started for its envs, or to evaluate; how many were killed."""
    found = []
    for pid in training.others():
        with suppress(psutil.Error):
            if "spawn_main" in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
    if found:
        os.kill(rng.choice(sorted(found)), signal.SIGKILL)
    return bool(found)


def judge(training: Training, cell: Cell, resumes: Path | None, found: Tally) -> Path | None:
    """The newest checkpoint, if everything is saved and nobody is left."""
    saved = CheckpointFolder(training.run / "checkpoints")
    newest = saved.newest()
    summary = read_json(training.run / "summary.json") if (training.run / "summary.json").exists() else {}
    said, left = training.said(), training.litter()
    well = found.judge(
        "stops", f"{cell}, exit code {training.code}, {newest}, {left}", said,
        code_4=training.code == 4, model=(training.run / "model.zip").is_file(),
        stopped_by_a_signal=summary.get("stopped_by") == "signal",
        checkpoint=newest is not None and newest == saved.all()[0] and not unread(newest),
        few_steps_dropped=newest is not None and summary and 0 <= summary["env_steps"] - steps_of(newest) <= 64,
        quiet="Traceback" not in said, alone=not left,
        gone_on=resumes is None or f"going on from {resumes.name}:" in said,
    )  # fmt: skip
    training.send(signal.SIGKILL, group=True)
    return newest if well else None


# --- ends that are none

ENDS = ("SIGKILL", "SIGKILL to the group", "SIGTERM twice", "SIGINT", "env raises", "worker exits",
        "a child is killed", "SIGTERM while starting", "SIGKILL while starting")  # fmt: skip
WITH_WORKERS = (*QUIET, "algo=ppo", *SHARED, "num_envs=4", "fused_update=off", "algo.rollout_size=64", "batch_size=32",
                "algo.n_epochs=1", "checkpoint_every=128", "eval_every=256", FOREVER)  # fmt: skip


def ends(count: int, rng: Random, folder: Path, nursery: Nursery) -> Tally:
    """Abnormal ends of a training with workers, one process that evaluates and checkpoints."""
    found, begun = Tally(), False
    folder.mkdir(parents=True)
    wire = Wire(folder / "wire")
    for number in range(count):
        kind = ENDS[number % len(ENDS)] if begun else "SIGKILL"
        wire.clear()
        training = Training(nursery, folder, resumed() if begun else (*WITH_WORKERS, *WIRED))
        if kind.endswith("while starting"):
            time.sleep(rng.random() * 1.5)
        else:
            training.until("train", lambda: wire.steps > 1000, pause_s=0.005)
            mine = f"-{training.pid}"
            others = [name for name in temporary(training.run) if not name.endswith(mine)]
            found.bad += [f"left by the run before: {others}"] if others else []
            time.sleep(rng.random() * 0.5)
        _end(training, kind, wire, rng)
        left_over = training.litter()
        found.judge("ends", kind, f"{left_over} left: {training.said()}", alone=not left_over)
        training.send(signal.SIGKILL, group=True)
        begun = CheckpointFolder(training.run / "checkpoints").newest() is not None
        if not begun:
            shutil.rmtree(training.run, ignore_errors=True)
    return found


def _end(training: Training, kind: str, wire: Wire, rng: Random) -> None:
    """Bring about one of `ENDS`. A run may survive a death; then it is told to stop."""
    if kind.startswith("SIG"):
        training.send(getattr(signal, kind.split()[0]), group=kind.endswith("group"))
    elif kind == "a child is killed":
        if others := training.others():
            os.kill(rng.choice(sorted(others)), signal.SIGKILL)
    else:
        wire.order(RAISE if kind == "env raises" else EXIT)
    deadline = time.monotonic() + (rng.random() * 0.05 if kind.endswith("twice") else 2.0)
    while training.lives() and time.monotonic() < deadline:
        time.sleep(0.01)
    training.send(signal.SIGTERM)
    training.end()
