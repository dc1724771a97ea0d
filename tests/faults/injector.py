"""Trainings that are killed, stopped and resumed at instants that a seed decides; what they leave is looked at.

Every wait has a deadline. What misses it writes its stacks, is killed with all it started, and is an error that shows
its log: a hang is a failure and no stuck test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from fasttrain.saving.checkpoints import MODEL, REMOVED, STAGED, CheckpointFolder, open_checkpoint
from fasttrain.saving.files import SAVING

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120.0  # for anything that takes seconds
LAST_WORDS = 10_000  # characters of the log before the stacks, and from them on
LITTER_S = 5.0  # the contract: so soon after the end no process is left


class Tally(Counter[str]):
    """What a campaign has tried, counted; `bad` are the broken promises in words, and must be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []

    def judge(self, kind: str, what: str, said: str, **holds: object) -> bool:
        """Count a try of that kind; `what` it was and what was `said` are told of one where not everything holds."""
        wrong = [name for name, value in holds.items() if not value]
        self[kind] += 1
        if wrong:
            self.bad.append(f"{what}: not {', not '.join(wrong)}: {said[-2000:]}")
        return not wrong


class HangError(AssertionError):
    """Something did not happen in time; the text has the stacks and the log."""


class Nursery:
    """Starts trainings by forking (nursery.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def ask(self, **request: Any) -> Any:
        """One request, its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HangError(f"the nursery has died (exit code {self._process.wait(10)})")
        return json.loads(line)

    def close(self) -> None:
        """End it, and what it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Training:
    """A training process. `folder`: where it is started; its run is in `run` there. `special`: nursery.py."""

    numbers = iter(range(10**9))

    def __init__(
        self, nursery: Nursery, folder: Path, arguments: Sequence[str], log: Path | None = None, **special: Any
    ) -> None:
        self.run = folder / "run"
        self.log = log or folder / f"log{next(self.numbers)}"
        self._nursery = nursery
        self.begun = time.monotonic()
        self.pid: int = nursery.ask(start=list(arguments), folder=str(folder), log=str(self.log), **special)["pid"]
        self.code: int | None = None  # of its end

    def said(self) -> str:
        """Its output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def lives(self) -> bool:
        """Whether it has not ended."""
        if self.code is None:
            self.code = self._nursery.ask(wait=self.pid, timeout_s=0.0)["code"]
        return self.code is None

    def send(self, number: int, group: bool = False) -> None:
        """A signal, to it or to all of its process group; to one that has ended, none."""
        with suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end; the exit code."""
        if self.code is None:
            self.code = self._nursery.ask(wait=self.pid, timeout_s=timeout_s)["code"]
        if self.code is None:
            self.hangs("end")
        return int(self.code)

    def until(self, what: str, holds: Callable[[], Any], pause_s: float = 0.002, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until it holds; False: the training has ended before."""
        deadline, look = time.monotonic() + timeout_s, 0
        while not holds():
            look += 1
            if look % 50 == 0 and not self.lives():
                return bool(holds())
            if time.monotonic() > deadline:
                self.hangs(what)
            time.sleep(pause_s)
        return True

    def until_said(self, words: str) -> bool:
        """Wait until it has said that; False: it has ended without."""
        return self.until(f"say {words!r}", lambda: words in self.said(), pause_s=0.01)

    def hangs(self, what: str) -> None:
        """Stacks, then SIGKILL to all.

        Raises:
            HangError: always.
        """
        before = len(self.said())
        self.send(signal.SIGUSR1)
        time.sleep(1.0)
        self.send(signal.SIGKILL, group=True)
        self.code = self._nursery.ask(wait=self.pid, timeout_s=10.0)["code"]
        said = self.said()[max(0, before - LAST_WORDS) : before + LAST_WORDS]
        raise HangError(f"it did not {what} in time; its output and stacks:\n{said}")

    def others(self) -> list[int]:
        """Living processes of its session but itself: workers, what evaluates, Python's helpers."""
        return [pid for pid in psutil.pids() if pid != self.pid and session_of(pid) == self.pid and not is_zombie(pid)]

    def litter(self, within_s: float = LITTER_S) -> list[int]:
        """Processes that are left after its end, waited for."""
        deadline = time.monotonic() + within_s
        while (left := self.others()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def of_group(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group and not is_zombie(pid):
                found.append(pid)
    return found


def wait_until_empty(group: int, within_s: float = LITTER_S) -> list[int]:
    """Those of a process group that live even then."""
    deadline = time.monotonic() + within_s
    while (left := of_group(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


# --- instants

PHASES = (("write", 0.6, 0.04), ("any", 0.3, 0.6), ("start", 0.1, 1.0))  # how often, and the longest delay


def wait_for(training: Training, phase: str, delay_s: float) -> bool:
    """So long after its start, after it began to write a checkpoint, or after a new one. False: it ended before."""
    checkpoints = training.run / "checkpoints"
    known = set(listed(checkpoints))
    there: dict[str, Callable[[], Any]] = {
        "start": lambda: True,
        "write": lambda: writing(training),
        "any": lambda: set(listed(checkpoints)) - known,
    }
    came = training.until(f"write a checkpoint ({phase})", there[phase], pause_s=0.0005)
    time.sleep(delay_s)
    return came and training.lives()


def writing(training: Training) -> list[str]:
    """Checkpoints that it has begun to write and not finished; another process's leftovers have another number."""
    staged = listed(training.run / "checkpoints")
    return [name for name in staged if name.startswith(STAGED) and name.endswith(f"-{training.pid}")]


def listed(folder: Path) -> list[str]:
    """Names in it, none where it is not."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


# --- what is left


def temporary(run: Path) -> list[str]:
    """Files and folders of a run that nobody should find after its next start has begun to train."""
    found = [name for name in listed(run / "checkpoints") if name.startswith((STAGED, REMOVED))]
    return found + [
        path.name for path in run.rglob("*") if path.suffix in (".tmp", ".partial") or path.name.startswith(SAVING)
    ]


def partial(run: Path) -> list[str]:
    """Published checkpoints that cannot be read to the last byte: there must be none."""
    return [
        f"{folder.name}: {why}" for folder in CheckpointFolder(run / "checkpoints").all() if (why := unread(folder))
    ]


def unread(folder: Path) -> str:
    """Why not all of a checkpoint can be read, looked at without its manifest; empty if it can."""
    try:
        with ExitStack() as files:
            _, arrays = files.enter_context(open_checkpoint(folder))
            for name in arrays:
                arrays[name]
            broken = files.enter_context(zipfile.ZipFile(folder / MODEL)).testzip()
    except Exception as error:
        return repr(error)
    return f"{MODEL}: {broken}" if broken else ""


def steps_of(folder: Path) -> int:
    """Env steps of a checkpoint."""
    return int(folder.name.removeprefix("step_"))
