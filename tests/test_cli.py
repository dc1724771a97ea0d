from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import fasttrain
from conftest import RunCommand
from fasttrain import cli
from fasttrain.cli import main
from fasttrain.cli.compose import conf_dir
from fasttrain.spec.checks import FLAGS


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fasttrain {fasttrain.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "-h"]])
def test_help_has_examples_and_every_flag(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "fasttrain +profile=speed env.id=CartPole-v1 algo=ppo" in text
    assert all(f"  {flag.name} " in text for flag in FLAGS)


def test_cfg_job_prints_the_configuration_without_running(fasttrain: RunCommand):
    done = fasttrain("profile=speed", "num_envs=5", "--cfg", "job")
    assert done.exit_code == 0
    assert "num_envs: 5" in done.out
    assert "engine: fast" in done.out
    assert not done.folder.exists()


def test_environment_variables_beat_the_profile_and_yield_to_the_command_line(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NUM_ENVS", "16")
    assert "num_envs: 16" in fasttrain("+profile=speed", "--cfg", "job").out
    assert "num_envs: 4" in fasttrain("+profile=speed", "num_envs=4", "--cfg", "job").out


def test_own_profiles_by_config_dir(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "mine" / "profile").mkdir(parents=True)
    (tmp_path / "mine" / "profile" / "tiny.yaml").write_text("# @package _global_\nnum_envs: 3\nengine: fast\n")
    done = fasttrain(
        "--config-dir", str(tmp_path / "mine"), "+profile=tiny", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy",
        "total_timesteps=30", "algo.rollout_size=30", "batch_size=10", "eval.episodes=2", "algo.n_epochs=1",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    rows = {row["flag"]: row for row in done.json("plan.json")["flags"]}
    assert (rows["num_envs"]["effective"], rows["num_envs"]["source"]) == (3, "profile tiny")


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
    refused = fasttrain("+profile=speed", "env.entry_point=crash:Crash", "algo=ppo", "vec_env=dummy")
    assert refused.exit_code == 2, "by the checkup: nothing was ever stepped"
    assert "RuntimeError: the board fell (crash.py:6, in step)" in refused.err


FOREIGN = (
    "algo.rollout_size means nothing for algo=dqn (only for maskable_ppo, ppo, recurrent_ppo, maskable_recurrent_ppo, "
    "a2c, trpo); leave it out"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tier=xyz"], "tier=xyz: not one of baseline, balance, speed, debug"),
        (
            ["+tune.sampler=optuna"],
            "tune.sampler is no setting any more: settings are drawn at random, the best go on; leave it out",
        ),
        (
            ["hydra.job.chdir=true"],
            "hydra.job.chdir=true: fasttrain writes into the run's folder by itself, and finds your modules and "
            "folders from where the command was typed; leave it out",
        ),
        (["num_envs=4,8"], "num_envs=4,8: several values need a sweep: add -m"),
        (["num_envs=choice(4,8)"], "num_envs=choice(4,8): several values need a sweep: add -m"),
        (["+profile="], "profile= is empty; choose from balance, baseline, debug, exact, speed"),
        (["profile="], "profile= is empty; choose from balance, baseline, debug, exact, speed"),
        (["algo=dqn", "env.id=CartPole-v1", "algo.rollout_size=64"], FOREIGN),
        (["algo=dqn", "env.id=CartPole-v1", "++algo.rollout_size=64"], FOREIGN),
        (
            ["algo.tau=1"],
            "algo.tau means nothing for algo=maskable_ppo (only for dqn, qrdqn, sac, td3, ddpg, tqc); leave it out",
        ),
        (["algo.gama=1"], "unknown key 'algo.gama'; did you mean 'algo.gamma' or 'algo.name'?"),
        (["train", "run=x"], "run=x means nothing for train; to evaluate that run: fasttrain eval run=…"),
    ],
)
def test_bad_input_is_one_line(fasttrain: RunCommand, arguments: list[str], message: str):
    done = fasttrain(*arguments)
    assert (done.exit_code, done.err) == (2, f"fasttrain: error: {message}\n")


@pytest.mark.parametrize("mode", [["num_envs=4"], ["-m", "num_envs=4,8"]])
def test_a_folder_that_cannot_be_written_is_one_line(fasttrain: RunCommand, tmp_path: Path, mode: list[str]):
    (tmp_path / "run0").write_text("a file where the folder should be")
    done = fasttrain(*mode)
    assert done.exit_code == 2
    assert done.err.startswith("fasttrain: error: cannot write the output folder: ")
    assert done.err.count("\n") == 1


SMALLER = "algo.rollout_size (algo.n_steps) or algo.buffer_size"


def raising(error: Exception) -> Any:
    def command(*_: Any, **__: Any) -> int:
        raise error

    return lambda name: command


def test_an_os_error_while_running_stays_a_crash(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    crash = Mock(side_effect=OSError("the disk is full"))  # in no file of the user's
    monkeypatch.setattr(cli.commands, "implementation", lambda name: crash)
    with pytest.raises(OSError, match="^the disk is full$"):
        fasttrain("num_envs=4")


@pytest.mark.parametrize(("text", "said"), [("Unable to allocate 9 TiB", ": Unable to allocate 9 TiB"), ("", "")])
def test_too_little_memory_is_one_line(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, text: str, said: str):
    monkeypatch.setattr(cli.commands, "implementation", raising(MemoryError(text)))
    done = fasttrain("num_envs=4")
    assert done.exit_code == 2
    assert done.err == (f"fasttrain: error: not enough memory{said}; take a smaller num_envs, {SMALLER}\n")


def test_too_little_memory_before_the_task(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "_dispatch", raising(MemoryError("none left"))(""))
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("fasttrain: error: not enough memory: none left; ")


def test_python_dash_m_is_the_same_and_passes_the_exit_code_on(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain", "num_envs=0"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr == "fasttrain: error: num_envs=0: must be at least 1\n"


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            "import sys; sys.modules['psutil'] = None",
            "import of psutil halted; None in sys.modules: fasttrain needs it",
        ),
        ("import os; os.rmdir(os.getcwd())", "the working directory is gone (No such file or directory)"),
    ],
)
def test_what_is_missing_before_the_command_begins_is_one_line(tmp_path: Path, before: str, said: str):
    code = f"{before}\nfrom fasttrain import __main__ as command\nsys = __import__('sys')\n"
    code += "sys.argv = ['fasttrain', 'num_envs=0']\nsys.exit(command.main())"
    place = tmp_path / "gone"
    place.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fasttrain: error: {said}")
    assert done.stderr.count("\n") == 1


def test_help_does_not_load_torch(tmp_path: Path):
    code = "import sys; from fasttrain.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=120).returncode == 0


def test_conf_dir_holds_the_configuration():
    assert (conf_dir() / "profile" / "speed.yaml").is_file()


def test_public_names_resolve_and_others_do_not():
    for name in fasttrain.__all__:
        assert getattr(fasttrain, name)
    with pytest.raises(AttributeError, match="no attribute 'Maskable'"):
        fasttrain.Maskable  # noqa: B018


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
    monkeypatch.setattr(cli, "_dispatch", command)
    assert main(["eval"]) == 130
    assert closed == ["envs"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "fasttrain: stopped before anything could be saved\n"


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


def test_the_process_ends_at_once_after_what_was_registered_and_printed():
    """With the command's exit code, and without taking modules down: what lives in one would print in that."""
    code = (
        "import atexit, sys\nfrom fasttrain import __main__ as command\n"
        "class Late:\n    def __del__(self, write=sys.__stdout__.write):\n        write('late')\n"
        "command.late = Late()\nsys.argv = ['fasttrain', 'trian']\n"
        "code = command.main()\natexit.register(print, 'registered')\nprint('held back, ', end='')\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "held back, registered\n")
    assert "unknown command 'trian'" in done.stderr


def test_the_process_ends_though_a_thread_of_the_envs_does_not():
    code = (
        "import sys, threading, types\n"
        "def main():\n    threading.Thread(target=threading.Event().wait).start()\n    return 3\n"
        "sys.modules['fasttrain.cli'] = types.SimpleNamespace(main=main)\n"
        "from fasttrain import __main__ as command\n"
        "command.THREADS_S = 0.1\nsys.exit(command.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")
