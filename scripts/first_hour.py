#!/usr/bin/env python3
"""A new user's first hour, in a terminal that is watched: python3 scripts/first_hour.py [--columns 80] [--quick]

Clones this checkout into an empty folder and types there, one after another, what the README says: install, the default
job, CartPole with PPO and DQN, a wrong input, Ctrl-C and the command that the program then names, eval, report, export,
a small sweep. Notes every pause of more than two seconds in which nothing on the screen changed, with what stood there,
and every line that was shown for longer. Writes docs/results/first-hour.md. Takes about ten minutes; the
machine should be idle. Only the standard library is used; Linux and macOS.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import bench_machine

ROOT = Path(__file__).resolve().parent.parent
LONG_S = 2.0
LIMIT_S = 1800.0  # of one command
RUN = "python3 scripts/run.py"
CTRL_C = b"\x03"
# What a user's shell does not have set.
UNSET = (
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
    "VIRTUAL_ENV",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "CI",
)
CODES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b.|[\r\n\b\t]|[^\x1b\r\n\b\t]+", re.DOTALL)


class Screen:
    """What a terminal shows of what is written to it: enough for lines that are drawn over and cleared."""

    def __init__(self, columns: int) -> None:
        self.columns, self.rows, self.row, self.column = columns, [""], 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        """Take in what was written."""
        for found in CODES.finditer(self._decoder.decode(data)):
            text, (number, code) = found[0], found.groups()
            if code:
                self._obey(code, number)
            elif text == "\n":
                self._down()
            elif text == "\r":
                self.column = 0
            elif text == "\b":
                self.column = max(0, self.column - 1)
            elif text == "\t":
                self._put(" " * (8 - self.column % 8))
            elif not text.startswith("\x1b"):
                self._put(text)

    def _obey(self, code: str, number: str) -> None:
        count = int(number) if number.isdigit() else 0
        if code == "A":
            self.row = max(0, self.row - max(1, count))
        elif code == "G":
            self.column = max(0, count - 1)
        elif code == "K":
            row = self.rows[self.row]
            self.rows[self.row] = "" if count == 2 else row[: self.column]
        elif code == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            del self.rows[self.row + 1 :]

    def _put(self, text: str) -> None:
        for letter in text:
            if self.column >= self.columns:
                self.column = 0
                self._down()
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def foot(self, lines: int = 3) -> list[str]:
        """The last lines that are not empty."""
        return [row.rstrip() for row in self.rows[-60:] if row.strip()][-lines:]


@dataclass
class Command:
    """What was typed and what became of it."""

    about: str
    typed: str
    exit_code: int | None = None
    seconds: float = 0.0
    first_s: float | None = None  # until the first thing was on the screen
    pauses: list[dict[str, object]] = field(default_factory=list)
    phases: list[dict[str, object]] = field(default_factory=list)
    screen: list[str] = field(default_factory=list)  # all of it, as it stood at the end

    @property
    def longest_s(self) -> float:
        return max((float(str(pause["seconds"])) for pause in self.pauses), default=0.0)


class Watch:
    """Of one command: what changed on its screen, and when."""

    def __init__(self, command: Command, columns: int) -> None:
        self.command, self.screen = command, Screen(columns)
        self.begun = self.changed = self.phase_begun = time.monotonic()
        self.shown: list[str] = []
        self.phase = ""

    def take(self, data: bytes) -> None:
        """Note a pause or a phase that ends with this."""
        before = self.shown
        self.screen.write(data)
        self.shown = self.screen.foot()
        if self.shown == before:
            return
        now = time.monotonic()
        if self.command.first_s is None:
            self.command.first_s = round(now - self.begun, 1)
        self._note_pause(now, before)
        self.changed = now
        title = _title(self.shown[-1]) if self.shown else ""
        if title != self.phase:
            self._note_phase(now, before)
            self.phase, self.phase_begun = title, now

    def end(self) -> None:
        """The command has ended."""
        now = time.monotonic()
        self._note_pause(now, self.shown)
        self._note_phase(now, self.shown)
        self.command.seconds = round(now - self.begun, 1)
        self.command.screen = [row.rstrip() for row in self.screen.rows]

    def _note_pause(self, now: float, shown: list[str]) -> None:
        if now - self.changed > LONG_S:
            pause = {"at_s": round(self.changed - self.begun, 1), "seconds": round(now - self.changed, 1)}
            self.command.pauses.append({**pause, "screen": shown or ["(nothing)"]})

    def _note_phase(self, now: float, shown: list[str]) -> None:
        if now - self.phase_begun > LONG_S and shown and re.search(r"\d:\d\d|\d s\b", shown[-1]):
            self.command.phases.append({"seconds": round(now - self.phase_begun, 1), "line": shown[-1]})


def _title(line: str) -> str:
    """What a moving line is about: without the wheel, numbers and details."""
    told = line.lstrip("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏|/-\\ ").removeprefix("fasttrain: ")
    return re.sub(r"[\d.,:]+", "#", told.partition(": ")[0])[:40]


def environment(folder: Path) -> dict[str, str]:
    """A user's, with no kernels compiled before."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**kept, "TERM": "xterm-256color", "NUMBA_CACHE_DIR": str(folder / "numba")}


def watch(command: Command, clone: Path, columns: int, stop_after: str = "") -> Command:
    """Type it in a terminal of so many columns; Ctrl-C, as by a key, four seconds after `stop_after` is shown."""
    print(f"$ {command.typed}", flush=True)
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.chdir(clone)
        words = shlex.split(command.typed)
        os.execvpe(words[0], words, environment(clone.parent))
    watching = Watch(command, columns)
    press_at = float("inf")
    while time.monotonic() - watching.begun < LIMIT_S:
        if not select.select([terminal], [], [], 0.2)[0]:
            data = b""
        else:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # Linux's end of file
                break
            if not data:
                break
            watching.take(data)
        if stop_after and any(stop_after in row for row in watching.screen.foot(12)):
            stop_after, press_at = "", time.monotonic() + 4.0
        if time.monotonic() > press_at:
            os.write(terminal, CTRL_C)
            press_at = float("inf")
    watching.end()
    os.close(terminal)
    command.exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(
        f"  exit code {command.exit_code}, {command.seconds:.0f} s, longest pause {command.longest_s:.1f} s", flush=True
    )
    return command


def hour(clone: Path, columns: int, quick: bool) -> Iterator[Command]:
    """The commands, each when it has ended."""
    short = " total_timesteps=300000" if quick else ""
    long = "40000" if quick else "300000"
    cartpole = "env.id=CartPole-v1 algo=ppo"

    def typed(about: str, command: str, stop_after: str = "") -> Command:
        return watch(Command(about, command), clone, columns, stop_after)

    yield typed("install", f"{RUN} --version")
    yield typed("help", f"{RUN} --help")
    yield typed("the default job", f"{RUN} +profile=speed{short}")
    newest = max((clone / "outputs").glob("*/*"), key=lambda folder: folder.stat().st_mtime, default=Path("outputs"))
    run = newest.relative_to(clone) if newest.is_absolute() else newest
    yield typed("CartPole, PPO", f"{RUN} +profile=speed {cartpole} total_timesteps={long}")
    dqn = "env.id=CartPole-v1 algo=dqn num_envs=16 updates_per_step=8"
    yield typed("CartPole, DQN", f"{RUN} +profile=balance {dqn} total_timesteps={long}")
    yield typed("a wrong input", f"{RUN} +profile=sped")
    yield typed("another", f"{RUN} +profile=speed num_env=8")
    stopped = typed("Ctrl-C", f"{RUN} +profile=speed total_timesteps=2e7", stop_after="steps/s   ")
    yield stopped
    text = "".join(row.ljust(columns) if len(row) == columns else row + " " for row in stopped.screen)
    named = re.search(rf"{re.escape(RUN)} resume run=\S+", text)
    if named:
        steps = " stop.max_minutes=0.2"  # there are 20 million to go
        yield typed("what it says goes on", named[0].rstrip(",;.") + steps)
    else:
        yield Command("what it says goes on", "(it named no command)")
    yield typed("evaluation", f"{RUN} eval run={run} eval.episodes={'2000' if quick else '20000'}")
    yield typed("report", f"{RUN} report run={run}")
    yield typed("export", f"{RUN} export run={run} format=torchscript")
    yield typed("a sweep", f"{RUN} -m +profile=speed {cartpole} num_envs=8,16 total_timesteps=40000 eval.episodes=20")


def as_text(about: dict[str, object], columns: int, commands: list[Command]) -> str:
    """first-hour.md."""
    lines = [
        "# The first hour, watched",
        "",
        f"`python3 scripts/first_hour.py --columns {columns}`: a fresh clone, an empty cache of kernels, a terminal of "
        f"{columns} columns. {about['machine']}; {about['measured']}.",
        "",
        "A pause is a time of more than two seconds in which nothing on the screen changed; a counter that moves is a "
        "change.",
        "",
        "| what | typed | exit code | seconds | first sign after | longest pause |",
        "|---|---|---|---|---|---|",
    ]
    for one in commands:
        first, longest = ("-" if one.first_s is None else f"{one.first_s:.1f} s"), f"{one.longest_s:.1f} s"
        cells = (one.about, f"`{one.typed}`", one.exit_code, one.seconds, first, longest if one.pauses else "none")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    pauses = [(one, pause) for one in commands for pause in one.pauses]
    lines += ["", f"## Pauses over two seconds: {len(pauses)}", ""]
    for one, pause in pauses:
        lines += [f"{one.about}, after {pause['at_s']} s: {pause['seconds']} s", "", "```"]
        lines += [*map(str, pause["screen"]), "```", ""]  # type: ignore[call-overload]
    lines += ["## Lines that were shown for more than two seconds", ""]
    for one in commands:
        if one.phases:
            lines += [f"{one.about}:", "", "```"]
            lines += [f"{phase['seconds']:6} s  {phase['line']}" for phase in one.phases]
            lines += ["```", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Watch, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="shorter trainings")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the file")
    parser.add_argument("--keep", action="store_true", help="keep the clone")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fasttrain-first-hour-"))
    commands: list[Command] = []
    try:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "fasttrain")], check=True)
        for command in hour(folder / "fasttrain", chosen.columns, chosen.quick):
            commands.append(command)  # noqa: PERF402 - what there is, if one goes wrong
    finally:
        about = bench_machine.about()
        chosen.out.mkdir(parents=True, exist_ok=True)
        text = as_text(about, chosen.columns, commands).replace(f"{folder / 'fasttrain'}/", "")
        (chosen.out / "first-hour.md").write_text(text, encoding="utf-8")
        if chosen.keep:
            print(f"the clone is {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(one.exit_code in (0, 2, 4) for one in commands) else 1


if __name__ == "__main__":
    sys.exit(main())
