"""scripts/: when they install, what it passes on, what it never deletes. Without network."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")

# Stands in for .venv's Python: notes its calls, and otherwise obeys FAKE_EXIT.
FAKE_PYTHON = """
import json, os, signal, sys, time
from pathlib import Path
here = Path(__file__).resolve().parent.parent
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps({"args": sys.argv[1:], "cwd": os.getcwd()}) + "\\n")
if "config" in sys.argv:
    print("global.index-url='https://mine'")
elif sys.argv[1] == "-c":
    sys.exit((here / "broken").exists())
elif "pip" in sys.argv:
    time.sleep(float(os.environ.get("FAKE_PIP_S", "0")))
    print("noise of pip")
    sys.exit(int(os.environ.get("FAKE_PIP_EXIT", "0")))
elif os.environ.get("FAKE_SIGNAL"):
    os.kill(os.getpid(), int(os.environ["FAKE_SIGNAL"]))
else:
    print("out:" + sys.stdin.read() + os.environ.get("FASTTRAIN_COMMAND", ""))
    codes = json.loads(os.environ.get("FAKE_EXIT", "{}"))
    if "worksteal" in sys.argv and "FAKE_FAILED" in os.environ:
        Path(".pytest_cache/v/cache").mkdir(parents=True)
        Path(".pytest_cache/v/cache/lastfailed").write_text(os.environ["FAKE_FAILED"])
    sys.exit(codes.get(sys.argv[-1], codes.get(sys.argv[2], codes.get("any", 0))))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv does not have the installation yet; its path has a space."""
    root = tmp_path / "check out"
    (root / "scripts").mkdir(parents=True)
    for name in ("_bootstrap.py", "run.py", "test.py"):
        (root / "scripts" / name).write_bytes((SCRIPTS / name).read_bytes())
    for name in ("pyproject.toml", "constraints.txt"):
        (root / name).write_text("\n", encoding="utf-8")
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "fake.py").write_text(FAKE_PYTHON, encoding="utf-8")
    python = root / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec \'{sys.executable}\' "${{0%/*}}/fake.py" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return root


def calls(root: Path) -> list[list[str]]:
    """Arguments of each call of the stand-in."""
    file = root / ".venv" / "calls.jsonl"
    return [json.loads(line)["args"] for line in file.read_text().splitlines()] if file.exists() else []


def installs(root: Path) -> list[str]:
    return [args[-1] for args in calls(root) if "install" in args]


def started(root: Path, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "check out/scripts/" + script, *arguments]
    return subprocess.Popen(
        command, cwd=root.parent, env={**os.environ, **environment}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def start(root: Path, script: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = started(root, script, *arguments, **environment)
    out, err = process.communicate("typed", timeout=200)
    return process.returncode, out, err


@pytest.fixture
def bootstrap(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The checkout's _bootstrap.py, in this process."""
    monkeypatch.syspath_prepend(checkout / "scripts")
    monkeypatch.delitem(sys.modules, "_bootstrap", raising=False)
    return importlib.import_module("_bootstrap")


def change(checkout: Path, text: str) -> None:
    (checkout / "constraints.txt").write_text(text, encoding="utf-8")


def stamp_of(checkout: Path, **changed: Any) -> dict[str, Any]:
    """What .venv notes of its installation, with these changes written into it."""
    file = checkout / ".venv" / "fasttrain-stamp.json"
    found: dict[str, Any] = {**json.loads(file.read_text()), **changed}
    file.write_text(json.dumps(found), encoding="utf-8")
    return found


def test_the_first_use_installs_and_later_ones_start_at_once(checkout: Path) -> None:
    code, out, err = start(checkout, "run.py", "eval", "a=b c", "--x", FAKE_EXIT='{"any": 3}')
    typed = f"{sys.executable} 'check out/scripts/run.py'"
    assert (code, out) == (3, f"out:typed{typed}\n")
    assert "installing into .venv (once)\nnoise of pip\n" in err
    assert f"type {typed}" in err
    call = json.loads((checkout / ".venv" / "calls.jsonl").read_text().splitlines()[-1])
    assert call == {"args": ["-m", "fasttrain", "eval", "a=b c", "--x"], "cwd": str(checkout.parent)}
    assert start(checkout, "run.py")[::2] == (0, ""), "nothing to say"
    assert installs(checkout) == ["."]


def test_what_changes_or_failed_is_installed_again(bootstrap, checkout, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_PIP_EXIT", "7")
    assert bootstrap.ready() == 2
    said = capfd.readouterr().err
    assert "noise of pip\n" in said
    assert "failed with exit code 7" in said
    monkeypatch.delenv("FAKE_PIP_EXIT")
    change(checkout, "torch==3\n")
    assert [bootstrap.ready(*extras) for extras in ((), ("dev",), ())] == [0, 0, 0]
    (checkout / ".venv" / "fasttrain-stamp.json").write_text("{damaged", encoding="utf-8")
    assert bootstrap.ready() == 0
    assert installs(checkout) == [".", ".", ".[dev]", "."]


def test_uv_installs_where_pip_has_no_settings_of_its_own(bootstrap, checkout, tmp_path, monkeypatch, capfd):
    uv, told = tmp_path / "uv", tmp_path / "told"
    uv.write_text(f'#!/bin/sh\necho "$@" > "{told}"; exit ${{FAKE_UV_EXIT:-0}}\n', encoding="utf-8")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert bootstrap.ready() == 0
    assert not told.exists(), "the stand-in has settings"
    python = checkout / ".venv" / "bin" / "fake.py"
    python.write_text(FAKE_PYTHON.replace("global.index-url='https://mine'", ""), encoding="utf-8")
    change(checkout, "torch==3\n")
    assert bootstrap.ready() == 0
    begin = f"pip install --compile-bytecode --python {checkout / '.venv/bin/python'}"
    assert told.read_text().strip() == f"{begin} -c constraints.txt -e ."
    assert installs(checkout) == ["."]
    change(checkout, "torch==4\n")
    monkeypatch.setenv("FAKE_UV_EXIT", "2")
    assert bootstrap.ready() == 0, "pip works where uv does not"
    assert "pip tries once more" in capfd.readouterr().err
    assert installs(checkout) == [".", "."]


def test_an_unusable_venv_of_the_users_is_named_and_kept(bootstrap, checkout, capfd):
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / ".venv" / "mine").touch()
    assert bootstrap.ready() == 2
    assert f"{checkout / '.venv'}: its Python is not there; move or delete .venv" in capfd.readouterr().err
    assert (checkout / ".venv" / "mine").exists()


@pytest.mark.parametrize("broken", ["unfinished", "upgraded", "dead"])
def test_a_broken_venv_of_our_own_is_made_anew(bootstrap, checkout, broken, monkeypatch):
    assert bootstrap.ready() == 0
    folder = checkout / ".venv"
    stamp_of(checkout, made=True)
    change(checkout, "torch==3\n")
    (folder / "old").mkdir()
    if broken == "unfinished":
        (folder / "fasttrain-unfinished").touch()
    elif broken == "upgraded":  # to another version of Python, which does not find the packages of the former
        (folder / "broken").touch()
    else:
        (folder / "bin" / "python").unlink()
    run = Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr(bootstrap, "_run", run)
    assert bootstrap.ready() == 130
    assert run.call_args_list[0].args[2:] == ("-m", "venv", str(folder))
    assert not (folder / "old").exists()
    assert (folder / "fasttrain-unfinished").exists(), "the next use begins again"


@pytest.mark.parametrize("made", [False, True])
def test_half_an_upgrade_is_not_ready_and_an_environment_of_the_users_is_kept(bootstrap, checkout, made, monkeypatch):
    monkeypatch.setenv("__PYVENV_LAUNCHER__", "/another/python")
    assert bootstrap.ready("dev") == 0
    assert "__PYVENV_LAUNCHER__" not in os.environ
    unfinished = checkout / ".venv" / "fasttrain-unfinished"
    stamp_of(checkout, made=made)
    change(checkout, "torch==3\n")
    monkeypatch.setenv("FAKE_PIP_EXIT", "1")
    assert bootstrap.ready() == 2
    change(checkout, "\n")
    monkeypatch.delenv("FAKE_PIP_EXIT")
    assert bootstrap.ready() == 0
    assert installs(checkout) == [".[dev]"] * 3
    assert not unfinished.exists()
    assert stamp_of(checkout)["made"] is made
    monkeypatch.setattr(bootstrap, "_run", Mock(side_effect=KeyboardInterrupt))
    change(checkout, "torch==3\n")
    assert bootstrap.ready() == 130
    assert unfinished.exists() is made, "what may be torn is made anew, but not if it is the user's"


def test_pip_has_the_lock(bootstrap):
    inherited = (
        "import os, sys\n"
        "def inode(file):\n    try: return os.stat(file).st_ino\n    except OSError: return 0\n"
        "sys.exit(inode(sys.argv[1]) not in map(inode, range(3, 256)))"
    )
    with bootstrap.LOCK.open("a+b") as file:
        bootstrap._lock(file)
        bootstrap._run("title", sys.executable, "-S", "-c", inherited, str(bootstrap.LOCK))


def test_ctrl_c_that_reaches_only_the_bootstrap_ends_pip_too(bootstrap, tmp_path, monkeypatch):
    note = tmp_path / "note"
    child = (
        "import os, signal, sys, time\n"
        "try:\n    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    open(sys.argv[1] + '.back', 'w')\n"
    )
    with pytest.raises(KeyboardInterrupt):
        bootstrap._run("title", sys.executable, "-S", "-c", child, str(note))
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert Path(f"{note}.back").exists(), "pip had the time to put back what it had removed"


def test_two_first_uses_install_once(checkout: Path) -> None:
    processes = [started(checkout, "run.py", FAKE_PIP_S="0.5") for _ in range(3)]
    said = [process.communicate("", timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert installs(checkout) == ["."]


def checks(root: Path) -> list[list[str]]:
    return [args[1:] for args in calls(root) if "pip" not in args and args[0] == "-m"]


def test_checks_all_run_and_the_first_failure_is_the_exit_code(checkout: Path) -> None:
    code, out, err = start(checkout, "test.py", FAKE_EXIT='{"mypy": 4, "pytest": 5}')
    assert code == 4
    assert [args[0] for args in checks(checkout)] == ["ruff", "ruff", "mypy", "pytest"]
    assert "mypy (exit code 4), pytest (exit code 5)" in err
    assert out.splitlines()[-1] == "out:", "nothing of ours after pytest's own last line"


def test_quick_checks_and_the_lane_with_all_extras(checkout: Path) -> None:
    assert start(checkout, "test.py", "--quick")[0] == 0
    *ruff, quick = checks(checkout)
    assert [args[0] for args in ruff] == ["ruff", "ruff"]
    named = [name.removeprefix("--ignore=") for name in quick if "tests/" in name]
    assert len(named) == 6
    assert all((SCRIPTS.parent / name).exists() for name in named)
    assert start(checkout, "test.py", "--all-extras", "tests/runs")[0] == 0
    assert installs(checkout) == [".[dev]", ".[all,dev]"]
    assert checks(checkout)[-1] == ["pytest", "tests/runs"]


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
def test_a_failed_test_runs_again_alone_and_is_flaky_if_it_passes(checkout, failed, alone, code, flaky):
    exits, noted = json.dumps({"pytest": 1, **alone}), json.dumps(dict.fromkeys(failed, True))
    done, _, err = start(checkout, "test.py", FAKE_FAILED=noted, FAKE_EXIT=exits)
    assert done == code
    told = [line.split(" failed, ")[0] for line in err.splitlines() if "flaky: " in line]
    assert told == [f"fasttrain: flaky: {test}" for test in flaky]
    assert [args[-1] for args in calls(checkout) if "::" in args[-1]] == list(alone)


def test_a_signal_and_ctrl_c_end_as_the_child_does(checkout: Path) -> None:
    assert start(checkout, "test.py", "-x", FAKE_SIGNAL=str(int(signal.SIGTERM)))[0] == 128 + signal.SIGTERM
    fake = checkout / ".venv" / "bin" / "fake.py"
    fake.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(0.3), print('saved', flush=True), sys.exit(4)))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(checkout / "scripts" / "test.py"), "-x"], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and child alike
        assert process.stdout.read() == "saved\n"
        assert process.wait(timeout=200) == 4


@pytest.mark.parametrize(("name", "first"), [("run.py", "sys.version_info < (3, 10)"), ("test.py", "from run ")])
def test_entry_scripts_use_only_what_old_pythons_parse(name: str, first: str) -> None:
    source = (SCRIPTS / name).read_text(encoding="ascii")  # no coding line, so ASCII for Python 2
    compile(source, name, "exec", dont_inherit=True)
    assert first in source[: source.index("import _bootstrap")]
    assert not any(part in source for part in ('f"', "f'", ":=", "->", "print "))
