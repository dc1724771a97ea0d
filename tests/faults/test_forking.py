"""Envs that fork in their worker: the trajectories stay right, pools work, and nobody is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forking import CODE, KINDS, Forking
from injector import of_group, wait_until_empty
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.vec.shared import SharedMemoryVecEnv

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
NOTHING = list(KINDS).index("nothing")


@pytest.fixture(scope="module")
def env() -> Iterator[SharedMemoryVecEnv]:
    """One for all tests: two workers, a failed one is replaced."""
    made = SharedMemoryVecEnv([Forking] * 4, num_workers=2, on_env_error="restart", max_restarts=99)
    yield made
    workers = groups(made)
    made.close()
    assert [pid for group in workers for pid in wait_until_empty(group)] == []


def groups(env: SharedMemoryVecEnv) -> list[int]:
    return [worker.process.pid for worker in env.crew.workers]


def expected(seed: int, steps: int) -> list[Any]:
    """What the same envs do that fork nothing."""
    plain = DummyVecEnv([Forking] * 4)
    plain.seed(seed)
    return [plain.reset(), *(plain.step(np.full(4, NOTHING))[:3] for _ in range(steps))]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing"])
def test_what_an_env_forks_changes_nothing(env: SharedMemoryVecEnv, kind: str):
    steps = 12  # beyond an episode
    env.seed(7)
    found = [env.reset(), *(env.step(np.full(4, list(KINDS).index(kind)))[:3] for _ in range(steps))]
    for one, other in zip(found, expected(7, steps), strict=True):
        np.testing.assert_equal(one, other)
    assert env.restarts == 0
    assert {code for codes in env.get_attr("codes") for code in codes} <= {CODE}, "as its sys.exit said"


def test_a_fork_within_a_reset_changes_nothing(env: SharedMemoryVecEnv):
    env.seed(8)
    env.set_options({"fork": True})
    found = [env.reset(), *(env.step(np.full(4, NOTHING))[:3] for _ in range(5))]
    for one, other in zip(found, expected(8, 5), strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("kind", ["the child lives on", "a program"])
def test_a_replaced_worker_takes_along_what_it_started(env: SharedMemoryVecEnv, kind: str):
    env.seed(7)
    env.reset()
    before = groups(env)
    for group in before:  # without what other tests left in the envs
        os.kill(group, signal.SIGKILL)
    env.step(np.full(4, NOTHING))
    for group in before:
        assert wait_until_empty(group) == []
    env.step(np.full(4, NOTHING))
    env.step(np.full(4, list(KINDS).index(kind)))
    first, other = groups(env)
    assert len(of_group(first)) >= 1 + 2
    os.kill(first, signal.SIGKILL)
    _, _, dones, infos = env.step(np.full(4, NOTHING))
    assert dones.tolist() == [True, True, False, False]
    assert ["lost" in info for info in infos] == [True, True, False, False]
    assert wait_until_empty(first) == []
    assert len(of_group(other)) >= 1 + 2, "the other worker's live on"
