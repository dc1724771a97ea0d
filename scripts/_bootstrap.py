"""The .venv behind scripts/run.py and scripts/test.py: made on first use, renewed when its inputs change.

Standard library only. Of what lies in .venv, only an environment that was made here is ever deleted: one that the user
made is installed into, and one that does not work is named in a message.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = os.name == "nt"
CHECKS = (
    ("ruff check", ("ruff", "check")),
    ("ruff format", ("ruff", "format", "--check")),
    ("mypy", ("mypy",)),
    (
        "pytest",
        ("pytest", "-n", "2", "--dist", "worksteal"),
    ),  # last, so that its closing line is the last thing printed
)
# For the inner loop, in less than a minute: no processes, no kernels to compile, no trainings but tiny ones.
QUICK = (
    "tests/spec",
    "tests/buffers",
    "tests/algos",
    "tests/perf",
    "tests/test_architecture.py",
    "--ignore=tests/spec/test_algorithms.py",  # it trains each of them
)
# pip's settings that uv takes from the environment, and those that do not decide what is chosen. With any other: pip.
FOR_UV = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
LASTFAILED = Path(".pytest_cache/v/cache/lastfailed")  # where pytest notes which tests failed
MOST_RERUN = 20  # more failures than that are no accident
HARMLESS = {
    "cache-dir", "default-timeout", "disable-pip-version-check", "no-color", "no-input", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "timeout", "verbose",
}  # fmt: skip


class SetupError(Exception):
    """The environment cannot be made or used; the text says why."""


class Venv:
    """The virtual environment of one checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / ("Scripts/python.exe" if WINDOWS else "bin/python")
        self.stamp = self.folder / "fasttrain-stamp.json"  # what was installed; there only after success
        self.unfinished = self.folder / "fasttrain-unfinished"  # there from creation until the first success
        self.lock = self.folder / "fasttrain.lock"

    def wanted(self, extras: Iterable[str]) -> dict[str, object]:
        """What the stamp must say. The root is part of it: a copied checkout must not run the original's code."""
        inputs = hashlib.sha256()
        for name in ("pyproject.toml", "constraints.txt"):
            inputs.update((self.root / name).read_bytes())
        version = ".".join(map(str, sys.version_info[:2]))
        return {"inputs": inputs.hexdigest(), "python": version, "root": str(self.root), "extras": sorted(extras)}

    def recorded(self) -> dict[str, object]:
        """What the stamp says; empty if there is none or it is damaged."""
        try:
            stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def is_ready(self, extras: Iterable[str]) -> bool:
        """Whether nothing has to be done. Costs no process start unless the launching Python is of another version."""
        wanted, recorded = self.wanted(extras), self.recorded()
        if not recorded or self.unfinished.exists() or not self.python.exists():
            return False
        if any(wanted[key] != recorded.get(key) for key in ("inputs", "root")):
            return False
        if not set(wanted["extras"]) <= set(recorded.get("extras", ())):  # type: ignore[call-overload]
            return False
        # Another Python than the one that made it may launch it; but one upgraded in place leaves it empty-handed.
        return wanted["python"] == recorded["python"] or self.version() == recorded["python"]

    def version(self) -> str | None:
        """The "3.11" of the environment's own Python, None if it does not start."""
        ask = [str(self.python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            return subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    def prepare(self, extras: Iterable[str] = ()) -> None:
        """Make the environment ready for `extras`; returns at once if it is.

        Raises:
            SetupError: creating or installing failed, or .venv is something that must not be touched.
        """
        if self.is_ready(extras):
            return
        self.folder.mkdir(exist_ok=True)
        with locked(self.lock):
            if self.is_ready(extras):  # the process that was waited for has done it
                return
            if self._must_be_created():
                self._create()
            extras = {*extras, *self.recorded().get("extras", ())}  # type: ignore[misc]
            self._install(extras)
            stamp = {**self.wanted(extras), "python": self.version()}
            partial = self.stamp.with_suffix(".partial")
            partial.write_text(json.dumps(stamp), encoding="utf-8")
            os.replace(partial, self.stamp)
            self.unfinished.unlink(missing_ok=True)

    def _must_be_created(self) -> bool:
        content = {path.name for path in self.folder.iterdir()} - {self.lock.name}
        if not content or self.unfinished.exists():
            return True
        ours = bool(self.recorded())
        if "pyvenv.cfg" not in content and not ours:
            raise SetupError(f"{self.folder} is in the way: it is not a virtual environment; move or delete it")
        version = self.version()
        usable = version is not None and tuple(map(int, version.split("."))) >= (3, 10)
        if not usable and not ours:
            what = f"has Python {version}, 3.10 or newer is needed" if version else "does not start"
            raise SetupError(f"the virtual environment {self.folder} {what}; move or delete it")
        return not usable or (ours and version != self.recorded()["python"])

    def _create(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self.lock:
                path.unlink()
        self.unfinished.touch()
        # The base Python, because the one running now may lie in the folder that was just emptied.
        python = getattr(sys, "_base_executable", None) or sys.executable
        watch("making .venv", [python, "-m", "venv", str(self.folder)], self.root)

    def _install(self, extras: set[str]) -> None:
        target = f".[{','.join(sorted(extras))}]" if extras else "."
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        what, title = ["-c", "constraints.txt", "-e", target], "installing into .venv (once)"
        uv = uv_like_pip(pip, self.root)
        try:
            if uv is not None:
                return watch(f"{title} by uv", [*uv.command, *what], self.root, uv.environment)
        except SetupError:  # its output stands there
            title += " by pip"
        watch(title, [*pip, "install", *what], self.root)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an operating-system lock on `path`; it ends with the process, so that none can be left behind."""
    with path.open("a+b") as file:
        if not _try_lock(file.fileno()):
            with counting("waiting for another first use, at work on .venv"):
                while not _try_lock(file.fileno()):
                    time.sleep(0.2)
        try:
            yield
        finally:
            _unlock(file.fileno())


if WINDOWS:
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 0, os.SEEK_SET)
        with suppress(OSError):
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            return True
        return False

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        with suppress(OSError):
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks: better unprotected than not at all
            say(f"no lock on .venv ({error}); do not start twice until this is done")
        return True

    def _unlock(descriptor: int) -> None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class Uv(NamedTuple):
    """uv, told what pip's configuration says."""

    command: list[str]
    environment: dict[str, str]


def uv_like_pip(pip: list[str], cwd: Path) -> Uv | None:
    """uv where it is there and takes the very torch build that pip would; None, for pip, where anything is in doubt.

    Everything else is pinned by constraints.txt; of torch 2.13.0 there are builds of 0.2 and of 3 GB.
    """
    uv = shutil.which("uv")
    if uv is None:
        return None
    with counting("looking whether uv would install the same"):
        try:
            environment = _uvs_environment(uv, pip, cwd)
        except (OSError, ValueError, LookupError, TypeError, SyntaxError, subprocess.SubprocessError):
            return None
    compiled = ["--compile-bytecode"] if sys.dont_write_bytecode else []  # else each start would compile again
    return Uv([uv, "pip", "install", *compiled, "--python", pip[0]], environment) if environment else None


def _uvs_environment(uv: str, pip: list[str], cwd: Path) -> dict[str, str]:
    """pip's configuration as uv reads it; empty if it cannot be said, or if torch would be another."""
    alone = ["--quiet", "--no-deps", "-c", "constraints.txt"]
    settings = pips_settings(_output([*pip, "config", "list"], cwd))
    if not settings.keys() <= FOR_UV.keys() | HARMLESS:
        return {}
    told = {FOR_UV[name]: value for name, value in settings.items() if name in FOR_UV}
    environment = {**os.environ, "UV_NO_CONFIG": "1", "UV_INDEX_STRATEGY": "unsafe-best-match", **told}
    report = _output([*pip, "install", "--dry-run", "--ignore-installed", "--report", "-", *alone, "torch"], cwd)
    [torch] = json.loads(report)["install"]
    chosen = torch["download_info"]["archive_info"]["hashes"]["sha256"]
    lock = [uv, "pip", "compile", "-", *alone, "--python", pip[0], "--format", "pylock.toml"]
    return environment if chosen in _output(lock, cwd, environment, "torch") else {}


def pips_settings(listed: str) -> dict[str, str]:
    """What `pip config list` says of installing: the environment before `install.…` before `global.…`."""
    found: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            key, equals, value = line.partition("=")
            if equals and key.startswith(section):
                name, words = key[len(section) :], ast.literal_eval(value).split()
                found[name] = ("," if name == "find-links" else " ").join(words)
    return found


def _output(command: list[str], cwd: Path, environment: Mapping[str, str] = os.environ, typed: str = "") -> str:
    """What it prints, within a minute."""
    asked = subprocess.run(
        command, cwd=cwd, env=environment, input=typed, capture_output=True, text=True, encoding="utf-8", timeout=60,
        check=True,
    )  # fmt: skip
    return asked.stdout


def watch(title: str, command: list[str], cwd: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Run `command` with one line of progress; its own output appears, in full, only if it fails.

    Raises:
        SetupError: it failed.
    """
    output: list[str] = []
    environment = {key: value for key, value in environment.items() if key != "__PYVENV_LAUNCHER__"}  # macOS
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    reader = threading.Thread(target=_collect, args=(process, output), daemon=True)
    reader.start()
    try:
        with counting(title, lambda: _activity(output)):
            process.wait()
    except KeyboardInterrupt:  # the child got it too
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        raise
    reader.join(timeout=5)
    took = f"{time.monotonic() - began:.0f} s"
    if process.returncode != 0:
        say(f"{title}: failed after {took}")
        sys.stderr.write("".join(output))
        raise SetupError(f"{title} failed with exit code {process.returncode}; the output is above")
    say(f"{title}: done in {took}")


@contextmanager
def counting(title: str, detail: Callable[[], str] = lambda: "") -> Iterator[None]:
    """One line with the seconds that the block takes: on a terminal moving, and gone at its end; else at times."""
    moving = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    began, over = time.monotonic(), threading.Event()

    def count() -> None:
        while not over.wait(0.5 if moving else 30):
            line = f"fasttrain: {title}: {time.monotonic() - began:.0f} s{detail()}"
            sys.stderr.write(f"\r\033[K{line[: _columns() - 1]}" if moving else f"{line}\n")
            sys.stderr.flush()

    counter = threading.Thread(target=count, daemon=True)
    if not moving:
        say(f"{title} ...")
    counter.start()
    try:
        yield
    finally:
        over.set()
        counter.join()
        if moving:
            sys.stderr.write("\r\033[K")


def _columns() -> int:
    """Of the terminal now: people resize it."""
    with suppress(OSError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def _collect(process: subprocess.Popen[str], output: list[str]) -> None:
    if process.stdout is not None:
        with process.stdout as lines:
            for line in lines:
                output.append(line)  # noqa: PERF402 - one by one, for others read it meanwhile


def _activity(output: list[str]) -> str:
    """What pip or uv last said it does, as " (downloading torch-2.13.0...)"; an address is cut to the file's name."""
    for line in reversed(output):
        words = line.split()
        if line.startswith(("Installing collected packages", "Prepared")):
            return " (unpacking)"
        if len(words) > 1 and words[0] in ("Collecting", "Downloading", "Processing", "Building"):
            return f" ({words[0].lower()} {words[1].rsplit('/', maxsplit=1)[-1][:50]})"
    return ""


def say(text: str) -> None:
    """Write to stderr, so that stdout holds only what fasttrain prints."""
    sys.stderr.write(f"fasttrain: {text}\n")
    sys.stderr.flush()


def call(command: list[str], cwd: Path | None = None) -> int:
    """Run `command` on this terminal; return its exit code as a shell would (128 + signal).

    On Ctrl-C the child gets the signal itself and decides what to do; it is waited for in any case.
    """
    process = subprocess.Popen(command, cwd=cwd)
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return 128 - code if code < 0 else code


def run_fasttrain(arguments: list[str], root: Path = ROOT) -> int:
    """`python -m fasttrain` with the arguments, in the caller's working directory."""
    venv = Venv(root)
    typed = shlex.join([_python_as_typed(sys.orig_argv[0]), sys.argv[0]])
    fresh = not venv.stamp.exists()
    code = _ready(venv, ())
    if code:
        return code
    if fresh:
        say(f"ready; wherever it says fasttrain, type {typed}")
    os.environ["FASTTRAIN_COMMAND"] = typed  # in what it prints to be typed
    command = [str(venv.python), "-m", "fasttrain", *arguments]
    if WINDOWS:  # exec there returns to the shell at once
        return call(command)
    try:
        os.execv(command[0], command)
    except OSError as error:
        say(f"cannot start {command[0]}: {error}; delete {venv.folder} and try again")
        return 2


def _python_as_typed(path: str) -> str:
    """`python3` again, where a shim on the PATH has made a path of it."""
    found = shutil.which(Path(path).name)
    return Path(path).name if found and os.path.realpath(found) == os.path.realpath(path) else path


def run_script(script: Path, arguments: list[str], root: Path = ROOT, extras: Iterable[str] = ()) -> int:
    """A script that needs what fasttrain needs, by the interpreter of .venv."""
    venv = Venv(root)
    return _ready(venv, extras) or call([str(venv.python), str(script), *arguments])


def run_checks(arguments: list[str], root: Path = ROOT) -> int:
    """pytest with the arguments, or all checks, or `--quick` ones; returns the first exit code that is not 0."""
    venv = Venv(root)
    code = _ready(venv, ("dev",))
    if code:
        return code
    checks = CHECKS
    if arguments[:1] == ["--quick"]:
        name, command = CHECKS[-1]
        checks = (*CHECKS[:2], (name, (*command, "-q", *(arguments[1:] or QUICK))))
    elif arguments:
        return call([str(venv.python), "-m", "pytest", *arguments], cwd=root)
    failed: dict[str, int] = {}
    flaky: list[str] = []
    for name, command in checks:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        if name == "pytest":  # which prints its own time
            code, flaky = _tests(venv, command)
        else:
            code = call([str(venv.python), "-m", *command], cwd=root)
            took = f"{time.monotonic() - began:.1f} s"
            print(f"   {f'failed with exit code {code}' if code else 'ok'}, {took}", flush=True)
        if code:
            failed[name] = code
    for test in flaky:
        say(f"flaky: {test} failed, and passed when it ran again alone; this does not fail the run, but mend it")
    if failed:
        say(f"failed: {', '.join(f'{name} (exit code {code})' for name, code in failed.items())}")
    return next(iter(failed.values()), 0)


def _tests(venv: Venv, command: tuple[str, ...]) -> tuple[int, list[str]]:
    """Run the tests, then each that failed once more in a process of its own; the exit code, and which are flaky.

    A flaky test fails and then passes alone. The exit code is 0 if every test passed or is flaky.
    """
    record = venv.root / LASTFAILED
    record.unlink(missing_ok=True)
    code = call([str(venv.python), "-m", *command], cwd=venv.root)
    if code != 1:  # 0: all passed; others: pytest was interrupted or could not begin
        return code, []
    try:
        failed = sorted(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        failed = []
    if not 0 < len(failed) <= MOST_RERUN:
        return code, []
    flaky: list[str] = []
    for number, test in enumerate(failed, 1):
        say(f"running again alone, {number} of {len(failed)}: {test}")
        if call([str(venv.python), "-m", "pytest", "-q", test], cwd=venv.root) == 0:
            flaky.append(test)
    return (0 if flaky == failed else code), flaky


def _ready(venv: Venv, extras: Iterable[str]) -> int:
    try:
        venv.prepare(extras)
    except SetupError as error:
        say(str(error))
        return 2
    except OSError as error:
        say(f"cannot set up {venv.folder}: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the next use begins again")
        return 130
    return 0
