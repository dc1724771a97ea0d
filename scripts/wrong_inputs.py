#!/usr/bin/env python3
"""Wrong inputs by the thousand: each must end with code 2 and one line that names what is wrong.

python3 scripts/wrong_inputs.py [--only settings …] tries them; docs/results/wrong_inputs.json. Of each is judged:
exit code 2, no traceback, an end within the time limit, and the wrong key or file in the message's first line. A wrong
input that is taken after all is bad too. Exit code 1: something was bad; each is printed and stored.

  --only PART …   settings: every declared setting, wrong in many ways; hand: envs, files, folders, YAML, commands;
                  processes: the same door as a process of its own, with closed pipes, Ctrl-C, no home
  --count N       so many of a part, drawn by the seed, in place of all
  --seed N        other misspellings, another draw     --show   what is stored, runs nothing

All of it takes a quarter of an hour on two cores.
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
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
BARE = find_spec("fasttrain") is None and Path(sys.prefix) != ROOT / ".venv"
if __name__ == "__main__" and BARE:  # go on in the checkout's own .venv
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:]))

import bench_machine  # noqa: E402
import wrong_inputs_envs  # noqa: E402
import wrong_inputs_files  # noqa: E402
import wrong_inputs_processes  # noqa: E402
import wrong_inputs_settings  # noqa: E402
import wrong_inputs_typed  # noqa: E402
from wrong_inputs_processes import Ended  # noqa: E402
from wrong_inputs_settings import Case  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "wrong_inputs.json"
MOST_S = 60.0  # of one case in this process; the first ones load PyTorch
MOST_PROCESS_S = 120.0
PARTS = ("settings", "hand", "processes")
Result = dict[str, Any]


class Accepted(BaseException):
    """The input was taken: training would begin now. No `Exception`, which the runs' own handlers would keep."""


class TooLong(BaseException):
    """The time limit of one case."""


def judged(case: Case, ended: Ended) -> str:
    """What is wrong about it; empty if nothing is."""
    lines = [line for line in ended.text.splitlines() if "fasttrain: error: " in line]
    lines = lines or [line for line in ended.text.splitlines() if "illegal" in line or line.startswith("Checkup of")]
    if ended.how:
        return f"{ended.how}: {_last(ended.text)}" if ended.text.strip() else ended.how
    if "Traceback" in ended.text:
        return f"traceback: {_last(ended.text)}"
    if ended.code not in case.codes:
        return f"exit code {ended.code}, not {' or '.join(map(str, case.codes))}: {_last(ended.text)}"
    if case.named and not lines:
        return f"wordless: {_last(ended.text)}"
    if case.named and not any(name in lines[0] for name in case.named):
        return f"does not name {' or '.join(case.named)}: {lines[0]}"
    return ""


def _last(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


# --- in this process


@contextmanager
def caught() -> Iterator[Callable[[], str]]:
    """What this process and its children print meanwhile, down to the file descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            with (
                open(1, "w", encoding="utf-8", closefd=False, buffering=1) as out,
                open(2, "w", encoding="utf-8", closefd=False, buffering=1) as err,
                mock.patch.object(sys, "stdout", out),
                mock.patch.object(sys, "stderr", err),
            ):

                def said() -> str:
                    out.flush()
                    err.flush()
                    end = file.seek(0, os.SEEK_END)
                    return os.pread(file.fileno(), end, 0).decode("utf-8", "replace")

                yield said
        finally:
            for fd, saved in enumerate(kept, 1):
                os.dup2(saved, fd)
                os.close(saved)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """`TooLong` is raised when the time is over; where no signal can be caught there is no limit."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def no_training() -> Iterator[None]:
    """Whatever would take minutes raises `Accepted` instead: an input that comes so far was taken."""
    from fasttrain.runs import resume, train
    from fasttrain.studies import doctor, study

    def accepted(*arguments: Any, **_: Any) -> None:
        if arguments and isinstance(arguments[0], train.Run):
            arguments[0].model.logger.close()
            arguments[0].env.close()
        raise Accepted

    places = ((train, "carry_out"), (resume, "carry_out"), (study, "run_cell"), (doctor, "run_cell"))
    with mock.patch.object(doctor.Doctor, "examine", accepted):
        patches = [mock.patch.object(module, name, accepted) for module, name in places]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def in_this_process(case: Case, folder: Path, trained: Callable[[], Path]) -> Ended:
    """`fasttrain.cli.main` on the case, in an empty working directory."""
    from fasttrain import cli
    from fasttrain.spec.checks import FLAGS

    def told(error: BaseException, report: Callable[[BaseException], int] = cli._report_users) -> int:
        if isinstance(error, (Accepted, TooLong)):  # of this file, and so of a user's code
            raise error
        return report(error)

    environment = {
        name: value for name, value in os.environ.items() if name.lower() not in {flag.name for flag in FLAGS}
    }
    before, path = Path.cwd(), list(sys.path)
    folder.mkdir(parents=True)
    if case.prepare:
        case.prepare(folder, trained)
    os.chdir(folder)
    try:
        with caught() as said, mock.patch.dict(os.environ, {**environment, **dict(case.environment)}, clear=True):
            code, how = None, ""
            try:
                with no_training(), limited(MOST_S), mock.patch.object(cli, "_report_users", told):
                    code = cli.main(list(case.arguments))
            except Accepted:
                how = "accepted"
            except TooLong:
                how = f"hung for {MOST_S:g} s"
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:
                how = f"raised {type(error).__name__}: {error}"
            return Ended(code, said(), how)
    finally:
        os.chdir(before)
        sys.path[:] = path
        shutil.rmtree(folder, ignore_errors=True)


# --- as processes


def as_process(case: Case, folder: Path, trained: Callable[[], Path]) -> Ended:
    """The command as a process of its own group, ended with all it started when its time is over."""
    folder.mkdir(parents=True)
    if case.prepare:
        case.prepare(folder, trained)
    try:
        return wrong_inputs_processes.start(case, folder, MOST_PROCESS_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train_once(folder: Path) -> Callable[[], Path]:
    """What gives a small finished run, trained when first asked for."""

    def trained() -> Path:
        if not (folder / "summary.json").exists():
            command = [sys.executable, "-m", "fasttrain", *wrong_inputs_files.SMALL_RUN, f"hydra.run.dir={folder}"]
            subprocess.run(command, cwd=folder.parent, check=True, stdout=subprocess.DEVNULL)
        return folder

    return trained


# --- parts


def cases_of(part: str, seed: int) -> list[Case]:
    """All of a part."""
    if part == "settings":
        return list(wrong_inputs_settings.settings(seed))
    if part == "processes":
        return list(wrong_inputs_processes.cases())
    by_hand = (
        wrong_inputs_typed.contradictions, wrong_inputs_typed.typed, wrong_inputs_envs.envs, wrong_inputs_files.yamls,
        wrong_inputs_files.folders,
    )  # fmt: skip
    return [case for make in by_hand for case in make()]


def run(part: str, cases: list[Case], seed: int, count: int | None, say: Callable[[str], None]) -> Result:
    """Try a part's cases, or `count` of them drawn by the seed; what is stored of it."""
    begun = time.perf_counter()
    if count is not None and count < len(cases):
        cases = random.Random(seed).sample(cases, count)
    bad, kinds = [], Counter(case.kind for case in cases)
    tried = as_process if part == "processes" else in_this_process
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made).resolve()
        trained = train_once(folder / "trained")
        for number, case in enumerate(cases):
            if wrong := judged(case, tried(case, folder / f"case{number}", trained)):
                bad.append(without_paths(f"{case}: {wrong}", folder))
                say(bad[-1])
    took = round(time.perf_counter() - begun, 1)
    return {
        "cases": len(cases),
        "bad_count": len(bad),
        "seed": seed,
        "kinds": dict(kinds),
        "elapsed_s": took,
        "bad": bad,
    }


def without_paths(text: str, folder: Path) -> str:
    """As seen from the checkout and from the folder it ran in."""
    for place in (folder, ROOT, Path(sys.prefix)):
        text = text.replace(f"{place}{os.sep}", "").replace(str(place), ".")
    return re.sub(r"(?<![\w.])/[\w.-]+(?:/[\w.-]+)+", "…", text)


def load(path: Path) -> Result:
    found: Result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def store(path: Path, part: str, found: Result) -> None:
    """One part; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {**load(path).get("parts", {}), part: found}
    about = {"name": "wrong_inputs", **bench_machine.about(), "command": "python3 scripts/wrong_inputs.py"}
    text = json.dumps({**about, "parts": {name: parts[name] for name in PARTS if name in parts}}, indent=2)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds with this in their name; nothing is stored")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file (default: docs/results/wrong_inputs.json)")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args(arguments)
    if options.count is not None and options.count < 1:
        parser.error("--count must be at least 1")
    tried: Result = {}
    if not options.show:
        for part in options.only:
            print(f"{part}:", flush=True)
            cases = [case for case in cases_of(part, options.seed) if options.kind in case.kind]
            found = run(part, cases, options.seed, options.count, lambda line: print(f"  bad: {line}", flush=True))
            if not options.kind:
                store(options.results, part, found)
            tried[part] = found
    parts = tried if options.kind else load(options.results).get("parts", {})
    for part, found in parts.items():
        print(f"{part:<10} {found['cases']} cases, {found['bad_count']} bad, {found['elapsed_s']:.0f} s")
    return 1 if any(found["bad"] for found in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
