"""The bootstrap of scripts/: when it installs, what it passes on, what it never deletes. Without network."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
HERE = "%d.%d" % sys.version_info[:2]  # noqa: UP031 - as the script asks
posix = pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")

# Stands in for .venv's Python: notes its calls; answers the version, pip's settings and what torch it would take;
# otherwise obeys FAKE_EXIT.
FAKE_PYTHON = """
import json, os, signal, sys
from pathlib import Path
here = Path(__file__).resolve().parent.parent
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps({"args": sys.argv[1:], "cwd": os.getcwd()}) + "\\n")
if sys.argv[1] == "-c":
    print((here / "version").read_text())
elif "config" in sys.argv:
    print(os.environ.get("FAKE_CONFIG", ""))
elif "--report" in sys.argv:
    print(json.dumps({"install": [{"download_info": {"archive_info": {"hashes": {"sha256": "abc123"}}}}]}))
elif "pip" in sys.argv:
    print("Collecting torch==2.13.0\\nsecret noise of pip")
    sys.exit(int(os.environ.get("FAKE_PIP_EXIT", "0")))
elif os.environ.get("FAKE_SIGNAL"):
    os.kill(os.getpid(), int(os.environ["FAKE_SIGNAL"]))
else:
    print("out:" + sys.stdin.read())
    codes = json.loads(os.environ.get("FAKE_EXIT", "{}"))
    if "worksteal" in sys.argv and "FAKE_FAILED" in os.environ:
        Path(".pytest_cache/v/cache").mkdir(parents=True)
        Path(".pytest_cache/v/cache/lastfailed").write_text(os.environ["FAKE_FAILED"])
    if "::" in sys.argv[-1]:
        sys.exit(codes[sys.argv[-1]])
    sys.exit(codes.get(sys.argv[2], codes.get("any", 0)))
"""


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_bootstrap_under_test", SCRIPTS / "_bootstrap.py")
    if spec is None or spec.loader is None:
        raise ImportError(str(SCRIPTS))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv."""
    root = tmp_path / "check out"  # with a space
    (root / "scripts").mkdir(parents=True)
    for name in ("_bootstrap.py", "run.py", "test.py"):
        (root / "scripts" / name).write_bytes((SCRIPTS / name).read_bytes())
    (root / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    (root / "constraints.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    return root


# Stands in for uv: notes what it is told, takes the torch of FAKE_TORCH, and installs with the exit code FAKE_UV_EXIT.
FAKE_UV = """
import json, os, sys
from pathlib import Path
if "compile" in sys.argv:
    print("hashes = { sha256 = \\"%s\\" }" % os.environ.get("FAKE_TORCH", ""))
else:
    told = {name: os.environ[name] for name in os.environ if name.startswith("UV_") or name == "SSL_CERT_FILE"}
    Path(os.environ["FAKE_TOLD"]).write_text(json.dumps({"args": sys.argv[1:], **told}))
    sys.exit(int(os.environ.get("FAKE_UV_EXIT", "0")))
"""


@pytest.fixture(autouse=True)
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but the stand-in for uv once `put_uv` is called, so that no uv of this machine is used."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_TOLD", str(folder / "told.json"))
    for name in ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def put_uv(folder: Path) -> None:
    (folder / "fake_uv.py").write_text(FAKE_UV, encoding="utf-8")
    (folder / "uv").write_text(f"#!/bin/sh\nexec '{sys.executable}' '{folder}/fake_uv.py' \"$@\"\n", encoding="utf-8")
    (folder / "uv").chmod(0o755)


def put_venv(root: Path, version: str = HERE) -> None:
    """What `python -m venv` would leave, with the stand-in as Python."""
    folder = root / ".venv"
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").write_text("home = nowhere\n", encoding="utf-8")
    (folder / "version").write_text(version, encoding="utf-8")
    python = folder / "bin" / "python"
    # Not by a first line of its own: that cannot name an interpreter with a space in its path.
    python.with_name("fake.py").write_text(FAKE_PYTHON, encoding="utf-8")
    python.write_text(f'#!/bin/sh\nexec \'{sys.executable}\' "${{0%/*}}/fake.py" "$@"\n', encoding="utf-8")
    python.chmod(0o755)


def put_stamp(bootstrap: ModuleType, root: Path, extras: tuple[str, ...] = (), **changes: Any) -> None:
    stamp = {**bootstrap.Venv(root).wanted(extras), **changes}
    (root / ".venv" / "fasttrain-stamp.json").write_text(json.dumps(stamp), encoding="utf-8")


def calls(root: Path) -> list[list[str]]:
    file = root / ".venv" / "calls.jsonl"
    return [json.loads(line)["args"] for line in file.read_text().splitlines()] if file.exists() else []


def installs(root: Path) -> list[str]:
    return [args[-1] for args in calls(root) if "pip" in args]


@pytest.fixture
def created(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the making of a venv by putting the stand-in; returns the roots for which it happened."""
    made: list[Path] = []
    real = bootstrap.watch

    def watch(title: str, command: list[str], cwd: Path, *environment: Any) -> None:
        if command[1:3] != ["-m", "venv"]:
            return real(title, command, cwd, *environment)  # type: ignore[no-any-return]
        made.append(cwd)
        put_venv(cwd)
        return None

    monkeypatch.setattr(bootstrap, "watch", watch)
    return made


def start(root: Path, script: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / script), *args]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=root.parent, input="typed", timeout=120)


# --- when it installs


@posix
def test_first_use_creates_installs_and_stamps(bootstrap: ModuleType, checkout: Path, created: list[Path]) -> None:
    venv = bootstrap.Venv(checkout)
    venv.prepare()
    assert created == [checkout]
    pip = calls(checkout)[0]
    assert pip[:2] == ["-m", "pip"]
    assert pip[-4:] == ["-c", "constraints.txt", "-e", "."]
    assert venv.recorded() == {**venv.wanted(()), "python": HERE}
    assert not venv.unfinished.exists()
    venv.prepare()
    assert len(installs(checkout)) == 1


@posix
def test_dev_adds_what_is_missing_and_is_kept_afterwards(
    bootstrap: ModuleType, checkout: Path, created: list[Path]
) -> None:
    venv = bootstrap.Venv(checkout)
    venv.prepare()
    venv.prepare(["dev"])
    venv.prepare()  # dev holds all that a run needs
    assert installs(checkout) == [".", ".[dev]"]
    (checkout / "constraints.txt").write_text("torch==2.14.0\n", encoding="utf-8")
    venv.prepare()
    assert installs(checkout)[2:] == [".[dev]"]
    assert len(created) == 1


@posix
@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_inputs_install_again(bootstrap: ModuleType, checkout: Path, name: str) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout)
    venv = bootstrap.Venv(checkout)
    assert venv.is_ready(())
    with (checkout / name).open("a") as file:
        file.write("# more\n")
    assert not venv.is_ready(())
    venv.prepare()
    assert installs(checkout) == ["."]


@posix
def test_moved_checkout_installs_again(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout)
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert not bootstrap.Venv(moved).is_ready(())


@posix
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"inputs": 3}'])
def test_damaged_stamp_installs_again(bootstrap: ModuleType, checkout: Path, content: str) -> None:
    put_venv(checkout)
    (checkout / ".venv" / "fasttrain-stamp.json").write_text(content, encoding="utf-8")
    assert not bootstrap.Venv(checkout).is_ready(())


@posix
def test_another_launching_python_keeps_a_working_venv(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout, version="3.99")
    put_stamp(bootstrap, checkout, python="3.99")
    assert bootstrap.Venv(checkout).is_ready(())
    assert calls(checkout)[0][0] == "-c"


@posix
def test_python_upgraded_in_place_is_rebuilt(bootstrap: ModuleType, checkout: Path, created: list[Path]) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout, python="3.1")
    (checkout / ".venv" / "old").mkdir()
    bootstrap.Venv(checkout).prepare()
    assert created
    assert not (checkout / ".venv" / "old").exists()


@posix
def test_half_built_venv_is_rebuilt(bootstrap: ModuleType, checkout: Path, created: list[Path]) -> None:
    put_venv(checkout)
    (checkout / ".venv" / "fasttrain-unfinished").touch()
    (checkout / ".venv" / "half").write_text("x", encoding="utf-8")
    bootstrap.Venv(checkout).prepare()
    assert created
    assert not (checkout / ".venv" / "half").exists()


@posix
def test_failed_install_shows_pips_output_and_is_repeated(
    bootstrap: ModuleType, checkout: Path, created: list[Path], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    venv = bootstrap.Venv(checkout)
    monkeypatch.setenv("FAKE_PIP_EXIT", "7")
    with pytest.raises(bootstrap.SetupError, match="exit code 7"):
        venv.prepare()
    assert "secret noise of pip" in capfd.readouterr().err
    assert not venv.is_ready(())
    monkeypatch.setenv("FAKE_PIP_EXIT", "0")
    venv.prepare()
    assert len(created) == 2
    assert "secret noise" not in capfd.readouterr().err


# --- uv or pip


@posix
def test_uv_installs_what_pip_would_and_is_told_pips_settings(
    bootstrap: ModuleType, checkout: Path, created: list[Path], uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_uv(uv)
    monkeypatch.setenv("FAKE_TORCH", "abc123")
    monkeypatch.setenv("FAKE_CONFIG", "\n".join([
        "global.find-links='/old'", ":env:.find-links='/a /b'", "global.extra-index-url='https://one https://two'",
        "install.index-url='https://mine'", "global.cert='/c.pem'", "global.timeout='60'", "download.pre='true'",
    ]))  # fmt: skip
    bootstrap.Venv(checkout).prepare()
    told = json.loads((uv / "told.json").read_text())
    assert told["args"][:2] == ["pip", "install"]
    assert told["args"][-4:] == ["-c", "constraints.txt", "-e", "."]
    assert told["args"][told["args"].index("--python") + 1] == str(bootstrap.Venv(checkout).python)
    assert told["UV_FIND_LINKS"] == "/a,/b"
    assert told["UV_EXTRA_INDEX_URL"] == "https://one https://two"
    assert told["UV_INDEX_URL"] == "https://mine"
    assert told["SSL_CERT_FILE"] == "/c.pem"
    assert not any(args[-1] == "." for args in calls(checkout)), "pip installs nothing then"
    assert bootstrap.Venv(checkout).is_ready(())


@posix
@pytest.mark.parametrize(
    ("torch", "config", "uv_exit"),
    [
        ("another", "", "0"),
        ("abc123", "global.no-binary=':all:'", "0"),
        ("abc123", "global.cert=not quoted", "0"),
        ("abc123", "", "1"),
    ],
)
def test_pip_installs_where_anything_is_in_doubt(
    bootstrap: ModuleType, checkout: Path, created: list[Path], uv: Path, monkeypatch: pytest.MonkeyPatch,
    torch: str, config: str, uv_exit: str,
) -> None:  # fmt: skip
    put_uv(uv)
    for name, value in (("FAKE_TORCH", torch), ("FAKE_CONFIG", config), ("FAKE_UV_EXIT", uv_exit)):
        monkeypatch.setenv(name, value)
    bootstrap.Venv(checkout).prepare()
    assert (uv / "told.json").exists() == (uv_exit == "1")
    assert installs(checkout)[-1] == "."
    assert bootstrap.Venv(checkout).is_ready(())


# --- what it leaves alone


@posix
def test_own_venv_without_stamp_is_installed_into_not_deleted(
    bootstrap: ModuleType, checkout: Path, created: list[Path]
) -> None:
    put_venv(checkout)
    (checkout / ".venv" / "mine").touch()
    bootstrap.Venv(checkout).prepare()
    assert not created
    assert (checkout / ".venv" / "mine").exists()
    assert installs(checkout) == ["."]


@posix
@pytest.mark.parametrize(
    ("version", "text"), [("3.9", r"has Python 3\.9, 3\.10 or newer"), (None, "does not start"), ("", "not a virtual")]
)
def test_unusable_venv_of_someone_else_is_named(
    bootstrap: ModuleType, checkout: Path, version: str | None, text: str
) -> None:
    put_venv(checkout, version or "")
    if version is None:
        (checkout / ".venv" / "bin" / "python").write_text("#!/nowhere\n", encoding="utf-8")
    elif not version:
        (checkout / ".venv" / "pyvenv.cfg").unlink()
    (checkout / ".venv" / "mine").touch()
    with pytest.raises(bootstrap.SetupError, match=text):
        bootstrap.Venv(checkout).prepare()
    assert (checkout / ".venv" / "mine").exists()


# --- two at once


@posix
def test_two_first_uses_install_once(bootstrap: ModuleType, checkout: Path, created: list[Path]) -> None:
    (checkout / ".venv").mkdir()
    venv = bootstrap.Venv(checkout)
    threads = [threading.Thread(target=venv.prepare) for _ in range(3)]
    with bootstrap.locked(venv.lock):
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert not created
    for thread in threads:
        thread.join(timeout=200)
    assert len(created) == 1
    assert installs(checkout) == ["."]


def test_lock_ends_with_its_holder(bootstrap: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold = (
        "import importlib.util, os, sys\n"
        f"spec = importlib.util.spec_from_file_location('b', {str(SCRIPTS / '_bootstrap.py')!r})\n"
        "b = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(b)\n"
        "from pathlib import Path\n"
        f"with b.locked(Path({str(path)!r})):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with path.open("a+b") as file:
            assert not bootstrap._try_lock(file.fileno())
        holder.kill()
        holder.wait(timeout=200)
        with bootstrap.locked(path):
            pass


# --- what it passes on


@posix
def test_run_passes_arguments_streams_folder_and_exit_code(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout)
    done = start(checkout, "run.py", "eval", "a=b c", "--x", FAKE_EXIT='{"any": 3}')
    assert done.returncode == 3
    assert done.stdout == "out:typed\n"
    assert done.stderr == ""
    call = json.loads((checkout / ".venv" / "calls.jsonl").read_text())
    assert call["args"] == ["-m", "fasttrain", "eval", "a=b c", "--x"]
    assert call["cwd"] == str(checkout.parent)


@posix
def test_another_script_runs_by_the_interpreter_of_the_venv(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout)
    assert bootstrap.run_script(Path("reproduce.py"), ["--only", "a b"], checkout) == 0
    assert calls(checkout) == [["reproduce.py", "--only", "a b"]]


@posix
def test_setup_failure_exits_2_and_says_why(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "data").touch()
    done = start(checkout, "run.py")
    assert done.returncode == 2
    assert "is not a virtual environment" in done.stderr
    assert "Traceback" not in done.stderr


@posix
def test_checks_all_run_and_the_first_failure_is_the_exit_code(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout, ("dev",))
    done = start(checkout, "test.py", FAKE_EXIT='{"mypy": 4, "pytest": 5}')
    assert done.returncode == 4
    assert [args[1] for args in calls(checkout)] == ["ruff", "ruff", "mypy", "pytest"]
    assert "mypy (exit code 4), pytest (exit code 5)" in done.stderr
    assert done.stdout.splitlines()[-1] == "out:"  # nothing of ours after pytest's own last line
    assert start(checkout, "test.py").returncode == 0


FIRST, SECOND = "tests/a.py::test_a[x y]", "tests/b.py::test_b"


@pytest.mark.parametrize(
    ("failed", "alone", "code", "flaky"),
    [
        ([FIRST, SECOND], {FIRST: 0, SECOND: 0}, 0, [FIRST, SECOND]),
        ([FIRST, SECOND], {FIRST: 0, SECOND: 1}, 1, [FIRST]),
        ([f"tests/a.py::test_{n}" for n in range(21)], {}, 1, []),  # so many are no accident
        ([], {}, 1, []),  # a failure that pytest did not note
    ],
)
@posix
def test_a_failed_test_runs_again_alone_and_is_flaky_if_it_passes(
    bootstrap: ModuleType, checkout: Path, failed: list[str], alone: dict[str, int], code: int, flaky: list[str]
) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout, ("dev",))
    exits = json.dumps({"pytest": 1, **alone})
    done = start(checkout, "test.py", FAKE_FAILED=json.dumps(dict.fromkeys(failed, True)), FAKE_EXIT=exits)
    assert done.returncode == code
    told = [line.split(" failed, ")[0] for line in done.stderr.splitlines() if "flaky: " in line]
    assert told == [f"fasttrain: flaky: {test}" for test in flaky]
    assert [args[-1] for args in calls(checkout) if "::" in args[-1]] == list(alone)


@posix
def test_quick_checks_are_ruff_and_the_tests_that_take_no_time(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout, ("dev",))
    assert start(checkout, "test.py", "--quick").returncode == 0
    *ruff, pytest_call = [args[1:] for args in calls(checkout)]
    assert [args[0] for args in ruff] == ["ruff", "ruff"]
    assert pytest_call[0] == "pytest"
    assert pytest_call[-len(bootstrap.QUICK) :] == list(bootstrap.QUICK)
    assert all((SCRIPTS.parent / name.removeprefix("--ignore=")).exists() for name in bootstrap.QUICK)


@posix
def test_arguments_go_to_pytest_alone(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout, ("dev",))
    assert start(checkout, "test.py", "-k", "x or y", FAKE_EXIT='{"pytest": 1}').returncode == 1
    assert calls(checkout) == [["-m", "pytest", "-k", "x or y"]]


@posix
def test_death_by_signal_becomes_a_shells_exit_code(bootstrap: ModuleType, checkout: Path) -> None:
    put_venv(checkout)
    put_stamp(bootstrap, checkout, ("dev",))
    done = start(checkout, "test.py", "-x", FAKE_SIGNAL=str(int(signal.SIGTERM)))
    assert done.returncode == 128 + signal.SIGTERM


@posix
def test_ctrl_c_reaches_the_child_which_decides_the_exit_code(bootstrap: ModuleType) -> None:
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(0.3), print('saved', flush=True), sys.exit(4)))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    parent = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('b', {str(SCRIPTS / '_bootstrap.py')!r})\n"
        "b = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(b)\n"
        f"sys.exit(b.call([sys.executable, '-c', {child!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and child alike
        assert process.stdout.read() == "saved\n"
        assert process.wait(timeout=200) == 4


@posix
def test_what_is_printed_to_be_typed_is_what_was_typed(bootstrap: ModuleType, checkout: Path, uv: Path) -> None:
    put_venv(checkout)
    (checkout / ".venv" / "bin" / "fake.py").write_text("import os; print(os.environ['FASTTRAIN_COMMAND'])")
    put_stamp(bootstrap, checkout)
    started = subprocess.run(
        [sys.executable, "check out/scripts/run.py", "eval"], capture_output=True, text=True, cwd=checkout.parent,
        timeout=200, check=True,
    )  # fmt: skip
    assert started.stdout == f"{sys.executable} 'check out/scripts/run.py'\n"
    (uv / "python9").symlink_to(sys.executable)  # as a shim hands over, by its path
    typed = bootstrap._python_as_typed(str(uv / "python9"))
    assert typed == "python9"


# --- progress


@posix
@pytest.mark.parametrize("columns", [60, 80])
def test_progress_is_one_line_of_the_terminals_width(columns: int) -> None:
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = (
        "import importlib.util, sys, pathlib\n"
        f"spec = importlib.util.spec_from_file_location('b', {str(SCRIPTS / '_bootstrap.py')!r})\n"
        "b = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(b)\n"
        'print_and_wait = \'import time; print("Downloading https://host/" + 90 * "x", flush=True); time.sleep(1.8)\'\n'
        "b.watch('installing into .venv (once)', [sys.executable, '-c', print_and_wait], pathlib.Path())\n"
    )
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, timeout=200, check=True)
    os.close(theirs)
    written = os.read(ours, 65536).decode()
    os.close(ours)
    shown = [text for text in written.replace("\r\n", "").split("\r\x1b[K") if text]
    assert len(shown) >= 3
    assert all(len(text) < columns for text in shown)
    assert any("(downloading" in text for text in shown)
    assert "done in" in shown[-1]


def test_activity_names_what_pip_does_without_addresses(bootstrap: ModuleType) -> None:
    assert bootstrap._activity(["Collecting torch==2.13.0 (from x)\n", "\n"]) == " (collecting torch==2.13.0)"
    assert bootstrap._activity(["Downloading https://host/a/torch.whl (9 MB)"]) == " (downloading torch.whl)"
    assert bootstrap._activity(["Collecting torch\n", "WARNING: slow\n"]) == " (collecting torch)"
    assert bootstrap._activity(["Installing collected packages: a, b\n"]) == " (unpacking)"
    assert bootstrap._activity(["Looking in indexes: https://host/simple"]) == ""
    assert bootstrap._activity([]) == ""


@pytest.mark.parametrize("name", ["run.py", "test.py"])
def test_entry_scripts_use_only_what_old_pythons_parse(name: str) -> None:
    source = (SCRIPTS / name).read_text(encoding="ascii")  # no coding line, so ASCII for Python 2
    compile(source, name, "exec", dont_inherit=True)
    assert "sys.version_info < (3, 10)" in source[: source.index("import _bootstrap")]
    assert not any(part in source for part in ('f"', "f'", ":=", "->", "print "))
