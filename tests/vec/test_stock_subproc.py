"""Stock's workers: deaf to signals while they start and while they step, and gone when the start is broken off."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from stable_baselines3.common.vec_env import SubprocVecEnv

from fasttrain.vec.stock import start_subproc
from worker_toys import Walker, signals_rained

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Says who it is, then takes its time to be built."""

    def __init__(self, place: str, seconds: float) -> None:
        (Path(place) / str(os.getpid())).touch()
        time.sleep(seconds)
        super().__init__(Walker(0))


def test_signals_from_the_first_instruction_on_leave_the_workers(tmp_path: Path):
    with signals_rained():
        env = start_subproc([lambda: Slow(str(tmp_path), 0.3)])
        assert type(env) is SubprocVecEnv
        env.reset()
        env.step([0])
    assert len(list(tmp_path.iterdir())) == 1
    (process,) = env.processes
    assert os.getpgid(process.pid) == process.pid
    env.close()
    assert process.exitcode == 0


def test_a_start_that_is_broken_off_leaves_nobody(tmp_path: Path):
    """The main thread waits for a worker that never comes up, and is open to Ctrl-C all the same."""

    def interrupt() -> None:
        until = time.monotonic() + 60.0
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        start_subproc([lambda: Slow(str(tmp_path), 3600.0)] * 2)
    waiting.join()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
