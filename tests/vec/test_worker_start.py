"""How a worker begins: one numeric thread, no torch, deaf to Ctrl-C, and gone with its trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain.vec.worker_start import ONE_THREAD, SAFE_PATH, inherited, safe_path
from worker_toys import Walker, signals_rained, walkers

TESTS = Path(__file__).parent.parent


def test_the_trainers_environment_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv(SAFE_PATH, "1")
    before = dict(os.environ)
    with inherited(ONE_THREAD):
        assert all(os.environ[name] == "1" for name in ONE_THREAD)
        del os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]  # as an env may
    assert dict(os.environ) == before
    with suppress(KeyError), inherited(ONE_THREAD):
        raise KeyError
    with safe_path():
        assert dict(os.environ) == before
    assert dict(os.environ) == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", sorted(set(multiprocessing.get_all_start_methods())))
def test_start_methods(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    before = dict(os.environ)
    env = SharedMemoryVecEnv(walkers(3), num_workers=2, start_method=method)
    assert dict(os.environ) == before
    first, _, last = env.env_method("process")
    for process in (first, last):
        assert {name: process["threads"][name] for name in ONE_THREAD} == ONE_THREAD
        assert process["prints_at_once"], "lines must not wait in a process that may be killed"
        if method != "fork":  # which copies the trainer with all it has loaded
            assert process["loaded"] == []
    assert first["draws"] != last["draws"], "each worker has its own global random streams, seeded or not"
    env.seed(3)
    env.reset()
    env.step([0, 0, 0])
    env.close()
    assert dict(os.environ) == before


def test_a_fork_server_that_was_there_before_us():
    """Started by somebody else with other values, it hands those to every process."""
    script = """
import multiprocessing, os, sys
from worker_toys import walkers
from fasttrain.vec import SharedMemoryVecEnv

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=print)
    process.start(), process.join()
    env = SharedMemoryVecEnv(walkers(1), num_workers=1, start_method="forkserver")
    print(env.env_method("process")[0]["threads"]["OMP_NUM_THREADS"], os.environ["OMP_NUM_THREADS"])
    env.close()
"""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "OMP_NUM_THREADS": "7", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["1", "7"], done.stderr


class Engine(Walker):
    """Talks to a program of its own, as many real envs do."""

    def begin_engine(self) -> int:
        self.engine = subprocess.Popen(["sleep", "3600"])
        return self.engine.pid

    def end_engine(self) -> Any:
        self.engine.terminate()
        return self.engine.wait(timeout=5.0)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_signals_from_the_first_instruction_on_leave_the_worker_and_its_trainer_as_they_were():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals_rained():
        env = SharedMemoryVecEnv(walkers(1), num_workers=1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        env.reset()
        env.step([0])
    pid = env.crew.workers[0].process.pid
    assert os.getpgid(pid) == pid, "what its env starts ends with it"
    env.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_signals_to_the_group_leave_the_worker_but_reach_what_its_env_started():
    env = SharedMemoryVecEnv([lambda: Engine(0)], num_workers=1)
    env.reset()
    (pid,) = env.env_method("begin_engine")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(env.crew.workers[0].process.pid, number)
        env.step([0])
    assert env.env_method("end_engine") == [-signal.SIGTERM]
    assert not psutil.pid_exists(pid)
    env.close()
