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
STAMP = VENV / "fasttrain-stamp.json"  # what is installed; written after success alone
UNFINISHED, LOCK = VENV / "fasttrain-unfinished", VENV / "fasttrain.lock"


def say(text: str) -> None:
    """To stderr, so that stdout holds only what fasttrain prints."""
    print(f"fasttrain: {text}", file=sys.stderr, flush=True)


def ready(*extras: str) -> int:
    """Make .venv hold fasttrain with the extras. An exit code: 0, or what was said went wrong."""
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
    if content and not (stamp or UNFINISHED.exists()):  # the user's own
        if "pyvenv.cfg" not in content:
            raise RuntimeError("this folder is not a virtual environment; move or delete it")
        if not usable:
            what = f"has Python {version}, 3.10 or newer is needed" if version else "does not start"
            raise RuntimeError(f"it {what}; move or delete it")
    elif not usable or UNFINISHED.exists() or version != stamp.get("python"):
        for path in {*VENV.iterdir()} - {LOCK}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        UNFINISHED.touch()
        base = getattr(sys, "_base_executable", None) or sys.executable  # this one may lie in .venv
        _watch("making .venv", [base, "-m", "venv", str(VENV)])
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    uv, command = shutil.which("uv"), [*pip, "install"]
    # uv reads none of pip's settings: where there are some, only pip takes the builds that they ask for.
    if uv and not subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout.strip():
        command = [uv, "pip", "install", "--python", str(PYTHON)]
    target = f".[{','.join(extras)}]" if extras else "."
    _watch("installing into .venv (once)", [*command, "-c", "constraints.txt", "-e", target])
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps({"inputs": _inputs(), "python": _version(), "extras": extras}), encoding="utf-8")
    partial.replace(STAMP)
    UNFINISHED.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """An operating-system lock, which ends with the process. Who comes second waits."""
    with LOCK.open("a+b") as file:
        for attempt in itertools.count():
            try:
                if os.name == "nt":
                    file.seek(0)
                    importlib.import_module("msvcrt").locking(file.fileno(), 2, 1)  # LK_NBLCK
                else:
                    importlib.import_module("fcntl").flock(file, 2 | 4)  # LOCK_EX | LOCK_NB
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
    moving, began, ticks = sys.stderr.isatty(), time.monotonic(), 0
    begin, end = ("\r\033[K", "") if moving else ("", "\n")
    with tempfile.TemporaryFile() as file:
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file) as process:
            while process.poll() is None:
                if ticks % (10 if moving else 300) == 0:
                    print(f"{begin}fasttrain: {title}: {ticks // 10} s", end=end, file=sys.stderr, flush=True)
                time.sleep(0.1)
                ticks += 1
        sys.stderr.write(begin)
        if process.returncode:
            file.seek(0)
            sys.stderr.write(file.read().decode("utf-8", "replace"))
            raise RuntimeError(f"{title} failed with exit code {process.returncode}; the output is above")
    say(f"{title}: done in {time.monotonic() - began:.0f} s")
