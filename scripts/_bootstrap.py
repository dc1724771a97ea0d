"""The .venv behind scripts/run.py and scripts/test.py: made on first use, renewed when its inputs change.

Standard library only. Only a .venv that was made here is made anew; one of the user's own is installed into.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "fasttrain-stamp.json"  # what is installed, and whether .venv was made here
UNFINISHED = VENV / "fasttrain-unfinished"  # only where .venv was made here: while it is made or installed into
LOCK = VENV / "fasttrain.lock"


def say(text: str) -> None:
    """To stderr, so that stdout holds only what fasttrain prints."""
    print(f"fasttrain: {text}", file=sys.stderr, flush=True)


def ready(*extras: str) -> int:
    """Make .venv hold fasttrain with the extras. An exit code: 0, or what was said went wrong."""
    os.environ.pop("__PYVENV_LAUNCHER__", None)  # macOS: .venv's Python would take itself for the one named there
    try:
        if not _is_ready(extras):
            VENV.mkdir(exist_ok=True)
            with _locked():
                if not _is_ready(extras):  # the process that was waited for has not done it
                    _make(sorted({*extras, *_recorded().get("extras", ())}))
    except (RuntimeError, OSError) as error:
        say(f"cannot set up {VENV}: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the next use begins again")
        return 130
    return 0


def _recorded() -> dict[str, Any]:
    """What the stamp says; empty if there is none or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
        return stamp if isinstance(stamp, dict) else {}
    return {}


def _record(stamp: dict[str, Any]) -> None:
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(stamp), encoding="utf-8")
    partial.replace(STAMP)


def _inputs() -> str:
    """A digest. The folder is part of it: a copied checkout must not run the original's code."""
    files = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    return hashlib.sha256(files + os.fsencode(ROOT)).hexdigest()


def _is_ready(extras: tuple[str, ...]) -> bool:
    """Costs no process, unless another version of Python than the one that made .venv asks."""
    stamp = _recorded()
    if stamp.get("inputs") != _inputs() or UNFINISHED.exists() or not PYTHON.exists():
        return False
    same = stamp.get("python") == ".".join(map(str, sys.version_info[:2])) or stamp.get("python") == _version()
    return same and set(extras) <= set(stamp.get("extras", ()))


def _version() -> str:
    """The "3.11" of the environment's own Python; empty if it does not start."""
    ask = [str(PYTHON), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return ""


def _make(extras: list[str]) -> None:
    """Create .venv where it is not there or not to be kept, and install into it."""
    content = {path.name for path in VENV.iterdir()} - {LOCK.name}
    stamp, version = _recorded(), _version()
    usable = version != "" and tuple(map(int, version.split("."))) >= (3, 10)
    made = not content or bool(stamp.get("made")) or UNFINISHED.exists()
    if not made:  # the user's own
        if "pyvenv.cfg" not in content:
            raise RuntimeError("this folder is not a virtual environment; move or delete it")
        if not usable:
            what = f"has Python {version}, 3.10 or newer is needed" if version else "does not start"
            raise RuntimeError(f"it {what}; move or delete it")
    elif not usable or UNFINISHED.exists() or version != stamp.get("python"):
        UNFINISHED.touch()
        for path in {*VENV.iterdir()} - {LOCK, UNFINISHED}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        stamp = {}
        base = getattr(sys, "_base_executable", None) or sys.executable  # this one may lie in .venv
        _watch("making .venv", [base, "-m", "venv", str(VENV)])
    if stamp and stamp.get("inputs") != _inputs():  # half an upgrade is not ready, whatever is checked out next
        _record({**stamp, "inputs": None})
    if made:
        UNFINISHED.touch()
    try:
        _install(f".[{','.join(extras)}]" if extras else ".")
    except RuntimeError:
        if stamp:  # what failed was an upgrade, and it ended by itself: the next use continues from here
            UNFINISHED.unlink(missing_ok=True)
        raise
    _record({"inputs": _inputs(), "python": _version(), "extras": extras, "made": made})
    UNFINISHED.unlink(missing_ok=True)


def _install(target: str) -> None:
    """By uv, which is faster, or by pip, which works wherever it did before."""
    title, what = "installing into .venv (once)", ["-c", "constraints.txt", "-e", target]
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    uv = shutil.which("uv")
    # uv reads none of pip's settings: where there are some, only pip takes the builds that they ask for.
    if uv and not subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout.strip():
        compiled = ["--compile-bytecode"] if sys.dont_write_bytecode else []  # else each start would compile again
        try:
            return _watch(title, [uv, "pip", "install", *compiled, "--python", str(PYTHON), *what])
        except (RuntimeError, OSError) as error:
            say(f"uv: {error}; pip tries once more")
    return _watch(title, [*pip, "install", *what])


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """An operating-system lock, which ends with the process and its pip. Who comes second waits."""
    with LOCK.open("a+b") as file:
        for attempt in itertools.count():
            try:
                if os.name == "nt":
                    file.seek(0)
                    importlib.import_module("msvcrt").locking(file.fileno(), 2, 1)  # LK_NBLCK
                else:
                    importlib.import_module("fcntl").flock(file, 2 | 4)  # LOCK_EX | LOCK_NB
                    os.set_inheritable(file.fileno(), True)  # pip keeps it if this process is killed
                break
            except (BlockingIOError, PermissionError):
                if attempt == 0:
                    say("waiting for another process that sets up .venv ...")
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield


def _watch(title: str, command: list[str]) -> None:
    """Run it with one line of progress; its own output appears, in full, only if it fails."""
    moving, began, ticks = sys.stderr.isatty() and os.environ.get("TERM") != "dumb", time.monotonic(), 0
    begin, end = ("\r\033[K", "") if moving else ("", "\n")
    with tempfile.TemporaryFile() as file:
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, close_fds=False
        ) as process:
            try:
                while process.poll() is None:
                    if ticks % (10 if moving else 300) == 0:
                        print(f"{begin}fasttrain: {title}: {ticks // 10} s", end=end, file=sys.stderr, flush=True)
                    time.sleep(0.1)
                    ticks += 1
            finally:
                _end(process)
        sys.stderr.write(begin)
        if process.returncode:
            file.seek(0)
            sys.stderr.write(file.read().decode("utf-8", "replace"))
            raise RuntimeError(f"{title} failed with exit code {process.returncode}; the output is above")
    say(f"{title}: done in {time.monotonic() - began:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it may go on once the lock is gone. Ctrl-C on a terminal reaches it too; `kill -INT` does not."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        process.terminate() if os.name == "nt" else process.send_signal(signal.SIGINT)  # pip puts back what it removed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:
        process.kill()
