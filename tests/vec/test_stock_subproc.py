from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from stable_baselines3.common.vec_env import SubprocVecEnv

import worker_toys
from fasttrain.vec.stock import killing_workers, start_subproc
from worker_toys import Walker, signals_rained

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Says who it is, then takes its time to be built."""

    def __init__(self, place: str, seconds: float) -> None:
        (Path(place) / str(os.getpid())).touch()
        time.sleep(seconds)
        super().__init__(Walker(0))


def test_signals_from_the_first_instruction_on_leave_the_workers(tmp_path: Path):
    """Started as for a user."""
    with signals_rained():
        env = start_subproc([lambda: Slow(str(tmp_path), 0.3)])
        assert isinstance(env, SubprocVecEnv)
        env.reset()
        env.step([0])
    assert len(list(tmp_path.iterdir())) == 1
    (process,) = env.processes
    assert os.getpgid(process.pid) == process.pid
    env.close()
    assert process.exitcode == 0


def test_a_start_that_is_broken_off_leaves_nobody(forked_stock_workers: None, tmp_path: Path):
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


def test_a_process_that_ends_without_closing_them_does_not_wait_for_them():
    text = (
        "from fasttrain.vec import stock\nfrom worker_toys import Walker\n"
        "if __name__ == '__main__':\n    stock.START_METHOD = 'fork'\n"
        "    kept = stock.start_subproc([lambda: Walker(0)] * 2)\n"
        "    print(*(process.pid for process in kept.processes))\n"
    )
    command, here = [sys.executable, "-c", text], Path(worker_toys.__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=here)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


class Dying(Walker):
    """Of two envs the second raises in its third step."""

    def step(self, action: Any) -> Any:
        if self.number and self.steps == 2:
            raise TypeError("no number")
        return super().step(action)


def test_after_an_error_nobody_waits_for_an_answer_that_was_taken(capfd: pytest.CaptureFixture[str]):
    """SB3's own `close` would: the first worker answered, the second is gone, and the step is not over."""
    env = start_subproc([functools.partial(Dying, index) for index in range(2)])
    env.set_options({"length": 9})
    env.reset()
    for _ in range(2):
        env.step([0, 0])
    with pytest.raises(EOFError), killing_workers(env):
        env.step([0, 0])
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        env.close()
    assert "no number" in capfd.readouterr().err
