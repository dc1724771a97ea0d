"""What scripts/run.py and scripts/test.py do: make .venv or renew it, then run fasttrain or the checks in it.

Standard library only. Only a .venv that was made here is made anew; one of the user's own is installed into.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "fasttrain-stamp.json"  # what is installed, and whether .venv was made here
UNFINISHED = VENV / "fasttrain-unfinished"  # only where .venv was made here: while it is made or installed into
LOCK = VENV / "fasttrain.lock"
CHECKS = ("ruff check", "ruff format --check", "mypy", "pytest -n 2 --dist worksteal")  # its last line is the last
# For the inner loop, in less than a minute: no processes, no kernels to compile, no trainings but tiny ones.
QUICK = (
    "tests/spec tests/buffers tests/algos tests/perf tests/test_architecture.py --ignore=tests/spec/test_algorithms.py"
)
LASTFAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"  # where pytest notes which tests failed


def say(text: str) -> None:
    """To stderr, so that stdout holds only what fasttrain prints."""
    print(f"fasttrain: {text}", file=sys.stderr, flush=True)


def ready(*extras: str) -> int:
    """Make .venv hold fasttrain with the extras. An exit code: 0, or what was said went wrong."""
    os.environ.pop("__PYVENV_LAUNCHER__", None)  # macOS: .venv's Python would take itself for the one named there
    try:
        if not _is_ready(extras):
            VENV.mkdir(exist_ok=True)
            with LOCK.open("a+b") as file:
                _lock(file)
                if not _is_ready(extras):  # the process that was waited for has not done it
                    _make(sorted({*extras, *_stamp().get("extras", ())}))
    except (RuntimeError, OSError) as error:
        say(f"cannot set up {VENV}: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the next use begins again")
        return 130
    return 0


def _stamp() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, TypeError):  # raised if there is none or it is damaged
        return dict(json.loads(STAMP.read_text(encoding="utf-8")))
    return {}


def _record(stamp: dict[str, Any]) -> None:
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(stamp), encoding="utf-8")
    partial.replace(STAMP)


def _is_ready(extras: tuple[str, ...]) -> bool:
    stamp = _stamp()
    ours = stamp.get("inputs") == _inputs() and PYTHON.exists() and not UNFINISHED.exists()
    return ours and {*extras} <= {*stamp["extras"]}


def _inputs() -> str:
    """A digest. The folder is part of it: a copied checkout must not run the original's code. So is .venv's Python."""
    files = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    return hashlib.sha256(files + os.fsencode(ROOT) + os.fsencode(PYTHON.resolve())).hexdigest()


def _lock(file: IO[bytes]) -> None:
    """An operating-system lock, which ends with the process and its pip. Who comes second waits."""
    if sys.platform == "win32":
        import msvcrt

        while True:
            try:
                return msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
            except OSError as error:  # noqa: PERF203  tried every 10 s
                if error.errno != 36:  # 36: another process holds it, tried for 10 s; else there are no locks here
                    return
    with contextlib.suppress(OSError):  # a file system without locks
        import fcntl

        os.set_inheritable(file.fileno(), True)  # pip keeps it if this process is killed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that sets up .venv ...")
            fcntl.flock(file, fcntl.LOCK_EX)


def _make(extras: list[str]) -> None:
    """Create .venv where it is not there or not to be kept, and install into it."""
    made = bool(_stamp().get("made")) or UNFINISHED.exists() or {*VENV.iterdir()} <= {LOCK}
    stamp = {"extras": extras, "made": made}
    if made and (UNFINISHED.exists() or not _has_pip()):
        UNFINISHED.touch()
        for path in {*VENV.iterdir()} - {LOCK, UNFINISHED}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        base = getattr(sys, "_base_executable", None) or sys.executable  # this one may lie in .venv
        _run("making .venv", base, "-m", "venv", str(VENV))
    elif not PYTHON.exists():
        raise RuntimeError("its Python is not there; move or delete .venv, and try again")
    _record(stamp)  # no inputs: half an upgrade is not ready
    if made:
        UNFINISHED.touch()
    try:
        _install(f".[{','.join(extras)}]" if extras else ".")
    except RuntimeError:  # pip failed and ended by itself: the next use continues from here
        UNFINISHED.unlink(missing_ok=True)
        raise
    _record({**stamp, "inputs": _inputs()})
    UNFINISHED.unlink(missing_ok=True)


def _has_pip() -> bool:
    """Whether .venv's Python starts and finds its packages, which it does not after an upgrade to another version."""
    with contextlib.suppress(OSError):
        return subprocess.call([str(PYTHON), "-c", "import pip"], stderr=subprocess.DEVNULL) == 0
    return False


def _install(target: str) -> None:
    """By uv, which is faster, or by pip, which works wherever it did before."""
    what = ["-c", "constraints.txt", "-e", target]
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    uv = shutil.which("uv")
    # uv reads none of pip's settings: where there are some, only pip takes the builds that they ask for.
    if uv and not subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout.strip():
        try:  # without bytecode each start would compile again where Python may not write
            return _run("installing", uv, "pip", "install", "--compile-bytecode", "--python", str(PYTHON), *what)
        except (RuntimeError, OSError) as error:
            say(f"uv: {error}; pip tries once more")
    return _run("installing into .venv", *pip, "install", *what)


def _run(title: str, *command: str) -> None:
    """Run it; what it prints is the progress, on stderr."""
    say(f"{title} (once)")
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=2, close_fds=False) as process:
        try:
            process.wait()
        finally:  # nothing of it may go on once the lock is gone
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)  # Ctrl-C on a terminal reaches it too; `kill -INT` does not
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGINT)
                    process.wait(10)  # pip puts back what it removed
            finally:
                process.kill()
    if process.returncode:
        raise RuntimeError(f"{title} failed with exit code {process.returncode}; the output is above")


def _call(command: list[str], cwd: Path | None = None) -> int:
    """Run it on this terminal; its exit code as a shell's (128 + signal). On Ctrl-C the child decides."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.call(command, cwd=cwd)
    return 128 - code if code < 0 else code


def run_fasttrain(arguments: list[str]) -> int:
    """`python -m fasttrain` with the arguments, in the caller's working directory."""
    python = Path(sys.orig_argv[0])
    shim = shutil.which(python.name) == str(python)  # pyenv's makes a path of `python3`, and puts it on PATH
    typed = shlex.join([python.name if shim else str(python), sys.argv[0]])
    fresh = "inputs" not in _stamp()
    if code := ready():
        return code
    if fresh:
        say(f"ready; wherever it says fasttrain, type {typed}")
    os.environ["FASTTRAIN_COMMAND"] = typed  # in what it prints to be typed
    command = [str(PYTHON), "-m", "fasttrain", *arguments]
    try:
        return _call(command) if os.name == "nt" else os.execv(command[0], command)  # exec there returns at once
    except OSError as error:
        say(f"cannot start {PYTHON}: {error}; delete .venv and try again")
        return 2


def run_checks(arguments: list[str]) -> int:
    """What scripts/test.py says; the exit code is the first that is not 0."""
    every = arguments[:1] == ["--all-extras"]
    if code := ready("dev", *["all"] * every):
        return code
    first, *more = arguments[every:] or [""]
    if first not in ("", "--quick"):
        return _python("pytest", first, *more)
    checks = [check.split() for check in CHECKS]
    if first:
        checks = [*checks[:2], [*checks[3], "-q", *(more or QUICK.split())]]
    failed: dict[str, int] = {}
    LASTFAILED.unlink(missing_ok=True)
    for check in checks:
        began, name = time.monotonic(), " ".join(check[:2]).partition(" -")[0]
        print(f"== {name}", flush=True)
        code = _python(*check)
        if check[0] == "pytest":  # which prints its own time
            code = _without_flaky(code)
        else:
            print(f"   exit code {code}, {time.monotonic() - began:.1f} s", flush=True)
        failed |= {name: code} if code else {}
    if failed:
        say(f"failed: {', '.join(f'{name} (exit code {code})' for name, code in failed.items())}")
    return next(iter(failed.values()), 0)


def _python(*arguments: str) -> int:
    return _call([str(PYTHON), "-m", *arguments], ROOT)


def _without_flaky(code: int) -> int:
    """Run each test that failed once more in a process of its own. The exit code of the tests: 0 if all passed then."""
    failed: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        failed = sorted(json.loads(LASTFAILED.read_text(encoding="utf-8"))) if code == 1 else []
    if not 0 < len(failed) <= 20:  # more are no accident
        return code
    flaky = [test for test in failed if _python("pytest", "-q", test) == 0]
    for test in flaky:
        say(f"flaky: {test} failed, and passed when it ran again alone; this does not fail the run, but mend it")
    return 0 if flaky == failed else code
