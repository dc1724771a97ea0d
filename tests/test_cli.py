from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import fasttrain
from conftest import RunCommand
from fasttrain import cli
from fasttrain.cli import main
from fasttrain.spec.checks import FLAGS
from messages import assert_says, wrong_inputs


def test_version_help_and_public_names(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fasttrain {fasttrain.__version__}\n"
    for arguments in (["--help"], ["help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert "fasttrain +profile=speed env.id=CartPole-v1 algo=ppo" in text
        assert all(f"  {flag.name} " in text for flag in FLAGS)
    assert all(getattr(fasttrain, name) for name in fasttrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Maskable'"):
        fasttrain.Maskable  # noqa: B018


def test_cfg_job_prints_the_configuration_without_running(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUM_ENVS", "16")
    done = fasttrain("profile=speed", "--cfg", "job").ok()
    assert "num_envs: 16" in done.out, "the environment beats the profile"
    assert "engine: fast" in done.out
    assert not done.folder.exists()
    assert "num_envs: 4" in fasttrain("+profile=speed", "num_envs=4", "--cfg", "job").out


def test_a_crash_keeps_the_end_of_its_traceback(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "crash.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Crash(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}\n"
        "    def step(self, action): raise RuntimeError('the board fell')\n"
    )
    crashed = fasttrain("+profile=speed", "env.entry_point=crash:Crash", "algo=ppo", "vec_env=dummy", "checkup=off")
    told = "env 0, step 1 of its episode, RuntimeError: the board fell (crash.py:6, in step)"
    assert (crashed.exit_code, crashed.err.splitlines()[-1]) == (1, f"fasttrain: error: {told}")
    assert "Traceback" in crashed.err
    checked = fasttrain("+profile=speed", "env.entry_point=crash:Crash", "algo=ppo", "vec_env=dummy")
    checked.refused("RuntimeError: the board fell (crash.py:6, in step)")


@pytest.mark.parametrize("typed", wrong_inputs("command lines"))
def test_bad_input_is_one_line(fasttrain: RunCommand, typed: str):
    done = fasttrain(*shlex.split(typed))
    done.refused()
    assert_says("command lines", typed, done.err)


@pytest.mark.parametrize("mode", [["num_envs=4"], ["-m", "num_envs=4,8"]])
def test_a_folder_that_cannot_be_written_is_one_line(fasttrain: RunCommand, tmp_path: Path, mode: list[str]):
    (tmp_path / "run0").write_text("a file where the folder should be")
    fasttrain(*mode).refused("error: cannot write the output folder: ")


def test_an_os_error_while_running_stays_a_crash(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    crash = Mock(side_effect=OSError("the disk is full"))  # in no file of the user's
    monkeypatch.setattr(cli.commands, "implementation", lambda name: crash)
    with pytest.raises(OSError, match="^the disk is full$"):
        fasttrain("num_envs=4")


@pytest.mark.parametrize(("text", "said"), [("Unable to allocate 9 TiB", ": Unable to allocate 9 TiB"), ("", "")])
def test_too_little_memory_is_one_line(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, text: str, said: str):
    full, smaller = Mock(side_effect=MemoryError(text)), "algo.rollout_size (algo.n_steps) or algo.buffer_size"
    monkeypatch.setattr(cli.commands, "implementation", lambda name: full)
    told = f"fasttrain: error: not enough memory{said}; use a smaller num_envs, {smaller}\n"
    assert fasttrain("num_envs=4")[::2] == (2, told)
    monkeypatch.setattr(cli, "split_options", full)  # before the task
    assert fasttrain("num_envs=4")[::2] == (2, told)


def python(code: str, folder: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


BEGIN = "\nimport sys\nfrom fasttrain import __main__ as command\n"
ASKED = "sys.argv = ['fasttrain', 'num_envs=0']\nsys.exit(command.main())"
# What lives in a module would print when that is taken down.
LATE = "class Late:\n    def __del__(self, write=sys.__stdout__.write):\n        write('late')\ncommand.late = Late()\n"
THREAD = """
import sys, threading, types
def main():
    threading.Thread(target=threading.Event().wait).start()
    return 3
sys.modules['fasttrain.cli'] = types.SimpleNamespace(main=main)
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "out", "err"),
    [
        (BEGIN + ASKED, 2, "", "fasttrain: error: num_envs=0: must be at least 1\n"),
        ("import sys; sys.modules['psutil'] = None" + BEGIN + ASKED, 2, "",
         "fasttrain: error: import of psutil halted; None in sys.modules: fasttrain needs this"),
        ("import os; os.rmdir(os.getcwd())" + BEGIN + ASKED, 2, "",
         "fasttrain: error: the working directory was deleted (No such file or directory)"),
        (BEGIN + LATE + "import atexit\nsys.argv = ['fasttrain', 'trian']\ncode = command.main()\n"
         "atexit.register(print, 'registered')\nprint('held back, ', end='')\nsys.exit(code)", 2,
         "held back, registered\n", "fasttrain: error: unknown command 'trian'"),
        (THREAD + BEGIN + "command.THREADS_S = 0.1\nsys.exit(command.main())", 3, "", ""),
        ("import io, sys; from fasttrain.cli import main; sys.stdout = io.StringIO(); main(['--help']); "
         "sys.exit('torch' in sys.modules)", 0, "", ""),
    ],
    ids=["as python -m", "a package is missing", "no working directory", "after what was registered", "a thread stays",
         "without torch"],
)  # fmt: skip
def test_the_process_ends_with_the_commands_exit_code(tmp_path: Path, code: str, exit_code: int, out: str, err: str):
    place = tmp_path / "gone"
    place.mkdir()
    ended, printed, told = python(code, place)
    assert (ended, printed) == (exit_code, out)
    assert told.startswith(err)
    assert told.count("\n") == (1 if err else 0)


def test_a_script_that_begins_a_run_when_it_is_imported_is_told(tmp_path: Path):
    """As a process that evaluates imports it: it must not train, too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, multiprocessing\n"
        "from fasttrain.cli import main\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=int)\n"
        "    process.start()\n"
        "    process.join(100)\n"
        "    sys.exit(process.exitcode)\n"
        "sys.exit(main([]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "fasttrain: error: a process of a run imports the script that began the run" in done.stderr


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    closed: list[str] = []

    def command(arguments: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5.0)
        finally:
            closed.append("envs")
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "split_options", command)
    assert main(["eval"]) == 130
    assert closed == ["envs"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "fasttrain: stopped before anything could be saved\n"
