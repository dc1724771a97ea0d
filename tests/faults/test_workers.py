"""Workers and envs that break: one cause that names the place, nothing wrong in the data, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from injector import is_zombie, session_of

from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_vec.process import WorkerLostError, WorkerTraceback
from toys import single_thread
from worker_toys import END, FAULTS, GO, IN_PROCESS, Chaos, action_of, no_litter, shared_memory_names

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
    pytest.mark.usefixtures("forked_workers"),
]
_one_thread = pytest.fixture(autouse=True, scope="module")(single_thread)
TESTS = Path(__file__).parent.parent


def started(kind: type[Chaos] = Chaos, **options: Any) -> SharedMemoryVecEnv:
    env = SharedMemoryVecEnv([lambda number=number: kind(number) for number in range(4)], num_workers=2, **options)
    env.seed(100)
    env.reset()
    env.step(np.full(4, GO))
    return env


def close_twice(env: SharedMemoryVecEnv) -> None:
    """Whatever the workers do; one that waited for them would meet the suite's time limit."""
    env.close()
    env.close()


# --- raise

IN_WORDS = {
    "raise": "RuntimeError: the board fell (tests/worker_toys.py:",
    "nan_observation": "the observation is not finite (NaN or infinite)",
    "infinite_observation": "the observation is not finite (NaN or infinite)",
    "nan_reward": "the reward is not finite (NaN or infinite)",
    "wrong_shape": "the observation has shape (1,), its space says (4,)",
    "short_mask": "the action mask has the wrong length: expected",
    "wrong_answer": "step() returned 4 values, expected 5 values",
    "sys_exit": "SystemExit: 3 (tests/worker_toys.py:",
    "nan_at_the_end": "the last observation of the episode is not finite",
    "os_exit": "it ended with exit code 7, stepping",
    "kill": "it was killed by SIGKILL, stepping",
    "hang": "it did not answer in time",
    "stop": "it did not answer in time",
}


@pytest.mark.parametrize("fault", FAULTS[len(IN_PROCESS) :])
def test_a_worker_that_is_lost_is_one_error_that_names_env_worker_seed_and_action(fault: str):
    with no_litter():
        env = started(step_timeout_s=1.0 if fault in ("hang", "stop") else 20.0)
        with pytest.raises(EnvError) as caught:
            env.step([GO, GO, GO, action_of(fault)])
        said = str(caught.value)
        assert said.startswith(f"env 3 (worker 1, seed 103, last action {action_of(fault)}) failed: ")
        assert IN_WORDS[fault] in said
        assert '; on_env_error="restart" goes on without it' in said
        assert isinstance(caught.value.__cause__, WorkerLostError)
        assert env.restarts == env.lost_steps == 0
        close_twice(env)
        del env, caught


def test_a_fault_of_an_env_is_one_error_that_names_env_worker_seed_and_action():
    with no_litter():
        env = started()
        for fault in IN_PROCESS:
            env.seed(100)
            env.reset()
            with pytest.raises(EnvError) as caught:
                env.step([GO, GO, GO, action_of(fault)])
            said, cause = str(caught.value), caught.value.__cause__
            assert said.startswith(f"env 3 (worker 1, seed 103, last action {action_of(fault)}) failed at its step ")
            assert IN_WORDS[fault] in said
            assert isinstance(cause, WorkerTraceback)
            assert "worker_envs.py" in str(cause) or "BadDataError" in str(cause)
        assert env.restarts == env.lost_steps == 0
        close_twice(env)
        del env, caught, cause


@pytest.mark.parametrize("fault", ["raise", "os_exit"])
def test_a_fault_in_reset_is_named(fault: str):
    with no_litter():
        env = started()
        env.set_options([{}, {"fault": fault}, {}, {}])
        with pytest.raises(EnvError, match=r"env 1 \(worker 0, seed 101\) failed"):
            env.reset()
        close_twice(env)
        del env


def test_an_env_that_is_not_built_in_time():
    with no_litter():
        fns = [lambda: Chaos(0), lambda: time.sleep(3600.0)]
        with pytest.raises(EnvSpecError, match="worker 1 did not start: it did not answer in 1 s, building its envs"):
            SharedMemoryVecEnv(fns, num_workers=2, start_timeout_s=1.0)


@pytest.mark.parametrize("state", ["stopped", "stepping", "killed", "closing"])
def test_close_does_not_wait_for_workers_in_a_bad_state(state: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain_vec.crew.CLOSE_TIMEOUT_S", 0.5)

    class Stuck(Chaos):
        def close(self) -> None:
            time.sleep(3600.0)

    with no_litter():
        env = started(kind=Stuck if state == "closing" else Chaos)
        if state == "stepping":
            env.step_async([action_of("hang")] * 4)
        for worker in env.crew.workers if state in ("stopped", "killed") else ():
            os.kill(worker.process.pid, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
        close_twice(env)
        del env


# --- restart


def test_a_call_that_fails_with_its_worker_is_asked_again_of_the_new_one():
    env = started(on_env_error="restart")
    before = env.slots.observations.copy()
    pids = [pid for pid, *_ in env.env_method("where")]
    os.kill(pids[3], signal.SIGKILL)
    after = env.env_method("where")
    assert [pid == old for (pid, *_), old in zip(after, pids, strict=True)] == [True, True, False, False]
    np.testing.assert_array_equal(env.slots.observations, before)
    observations, rewards, dones, infos = env.step([GO] * 4)
    assert dones.tolist() == [False, False, True, True]
    assert rewards.tolist() == [1, 1, 0, 0]
    assert observations[:, 2].tolist() == [2, 2, 0, 0]
    assert observations[2:, 1].tolist() == [episode for _, episode, _ in after[2:]]
    for index in (2, 3):
        np.testing.assert_array_equal(infos[index]["terminal_observation"], before[index])
        assert infos[index]["TimeLimit.truncated"]
        assert "episode" not in infos[index], "no result of the game"
        assert env.slots.finished[index - 2].lost
    assert env.lost_steps == 4
    assert env.restarts == 1
    env.close()


def test_first_infos_of_the_episodes_after_a_fault_are_theirs():
    env = started(on_env_error="restart", info_keys=None)
    observations, *_ = env.step([GO, action_of("raise"), END, GO])
    assert [info["episode"] for info in env.reset_infos[1:3]] == observations[1:3, 1].tolist()
    env.close()


# --- the trainer ends

MANY_STATES = """
import os, signal, sys
from worker_toys import LongSteps, chaos_envs
from fasttrain import SharedMemoryVecEnv


if __name__ == "__main__":
    kept, failing = [], sys.argv[1:] == ["raise"]
    for method in ("forkserver",) if failing else ("forkserver", "spawn"):
        idle = SharedMemoryVecEnv(chaos_envs(2), 2, method)
        sleeping = SharedMemoryVecEnv([lambda: LongSteps(0)], 1, method)
        holding = SharedMemoryVecEnv([lambda: LongSteps(0, holding=True)], 1, method)  # no other thread of it ever runs
        kept += [idle, sleeping, holding]
        for env in (idle, sleeping, holding):
            env.reset()
        if not failing:
            os.kill(idle.crew.workers[1].process.pid, signal.SIGSTOP)
        sleeping.step_async([0])
        holding.step_async([0])
    print(*[worker.process.pid for env in kept for worker in env.crew.workers], flush=True)
    if failing:
        raise RuntimeError("the trainer's own fault")
    sys.stdin.read()
"""


@contextmanager
def trainer(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with vec envs in all states, and its workers."""
    command = [sys.executable, "-c", MANY_STATES, *arguments]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    pids: list[int] = []
    try:
        pids += [int(pid) for pid in process.stdout.readline().split()]
        yield process, pids
    finally:
        process.kill()
        process.communicate()
        for pid in gone_within(pids, 0.0):  # of a test that failed
            os.kill(pid, signal.SIGKILL)


def gone_within(pids: list[int], seconds: float) -> list[int]:
    """Those of `pids` that live even then."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if not is_zombie(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a stopped process elsewhere is not woken")
def test_kill_9_of_the_trainer_takes_all_workers_with_it_whatever_they_do():
    with trainer() as (process, pids):
        assert len(pids) == 8
        assert gone_within(pids, 0.0) == pids
        time.sleep(0.3)  # the long steps have begun
        assert shared_memory_names(process.pid) == set(), "no name to be left behind, however it ends"
        process.kill()
        process.wait()
        assert gone_within(pids, 60.0) == []
        helpers = [pid for pid in psutil.pids() if session_of(pid) == process.pid]
        assert gone_within(helpers, 60.0) == [], "fork server and resource tracker too"


def test_a_trainer_that_ends_by_an_error_of_its_own_takes_its_workers_with_it():
    with trainer("raise") as (process, pids):
        assert len(pids) == 4
        _, said = process.communicate(timeout=200)
        assert process.returncode == 1
        assert "the trainer's own fault" in said
        assert gone_within(pids, 60.0) == []
        assert "resource_tracker" not in said, "no semaphore was left for Python to clean up"


# --- from a script

SCRIPT = """
import gymnasium as gym
import numpy as np

class Home(gym.Env):
    observation_space = gym.spaces.Box(-1, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.array([0, 0], np.float32), {}
    def step(self, action):
        self.steps += 1
        return np.array([self.steps, action], np.float32), 1.0, self.steps == 3, False, {}

class Hat(gym.Wrapper):
    pass

def make():
    return Hat(Home())

if __name__ == "__main__":
    from fasttrain import SharedMemoryVecEnv
    for fns in ([make] * 3, [lambda: Hat(Home())] * 3):
        env = SharedMemoryVecEnv(fns, num_workers=1, start_method="spawn")
        env.seed(0)
        env.reset()
        for _ in range(4):
            observations, rewards, dones, infos = env.step(np.ones(3, int))
        print(observations.tolist(), env.env_is_wrapped(Hat), env.get_attr("steps"))
        env.close()
"""


def test_from_a_script_with_its_env_inside_under_spawn(tmp_path: Path):
    (tmp_path / "play.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "play.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{[[1.0, 1.0]] * 3} {[True] * 3} {[1] * 3}"] * 2
    assert done.stderr == ""
