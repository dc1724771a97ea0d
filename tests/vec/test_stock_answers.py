"""What an env must not answer in its step number 3 is told with env and step, by the loop in the training process."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from fasttrain.envs.retrace import Retrace
from fasttrain.errors import EnvError
from fasttrain.runs.envs import CheckedMonitor
from fasttrain.vec.stock import ActionLogVecEnv
from plain_env import PlainEnv

SEEN = np.zeros(3, np.float32)


class Wrong(PlainEnv):
    """Answers `answer` in its step number 3, and `reset()` with `begin` from its second episode on."""

    observation_space, begun = spaces.Box(-1, 1, (3,), np.float32), 0

    def __init__(self, answer: Any = None, begin: Any = None) -> None:
        self.answer, self.begin, self.length = answer, begin, 0 if begin is None else 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.begun += 1
        good = super().reset(seed=seed)
        return self.begin if self.begun > 1 else good

    def step(self, action: Any) -> Any:
        good = super().step(action)
        if self.time < 3 or self.begin is not None:
            return good
        if callable(self.answer):
            self.answer()
            return good
        return self.answer


def played(limit: bool = False, steps: int = 4, **wrong: Any) -> None:
    def build() -> Retrace:
        env: Any = Wrong(**wrong)
        return Retrace(CheckedMonitor(TimeLimit(env, 100) if limit else env))

    env = ActionLogVecEnv([build])
    env.reset()
    for _ in range(steps):
        env.step(np.zeros(1, np.int64))


@pytest.mark.parametrize("limit", [False, True])
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((SEEN, None, False, False, {}), "step() returned the reward None, a NoneType; return a number"),
        ((SEEN, "win", False, False, {}), "step() returned the reward 'win', a str; return a number"),
        ((SEEN, 1.0, np.array([True, False]), False, {}), "step() returned terminated=array([ True, False])"),
        ((SEEN, 1.0, False, False, None), "step() returned an info of type NoneType, expected a dict"),
        ((SEEN, 1e300, False, False, {}), "step() returned the reward 1e+300, which is too large for float32"),
        ((SEEN, 1.0, False, {}), "step() "),
        (None, "step() "),
        ((np.zeros(4), 1.0, False, False, {}), "the observation has shape (4,), declared (3,)"),
        (({"seen": SEEN}, 1.0, False, False, {}), "the observation holds object, declared Box(-1.0, 1.0, (3,)"),
    ],
)
def test_a_wrong_answer_is_told_with_its_place(answer: Any, told: str, limit: bool):
    with pytest.raises(EnvError) as caught:
        played(limit, answer=answer)
    assert str(caught.value).startswith(f"env 0, step 3 of its episode: {told}")


@pytest.mark.parametrize("begin", [SEEN, (SEEN, {}, 1), (SEEN, [])])
def test_so_is_a_wrong_reset(begin: Any):
    with pytest.raises(EnvError, match=r"^env 0, its reset: reset\(\) must return \(observation, info\), it "):
        played(begin=begin)


@pytest.mark.parametrize("answer", [(SEEN, 1.0, False, {}), None])
def test_what_step_must_return_is_said_in_a_wrapper_too(answer: Any):
    with pytest.raises(EnvError, match=r"step\(\) must return \(observation, reward, terminated, truncated, info\)"):
        played(limit=True, answer=answer)
    with pytest.raises(EnvError, match=r"step\(\) returned \w+( values)?, expected 5 values"):
        played(answer=answer)


def test_an_array_with_one_entry_is_a_reward_and_a_lock_in_the_info_is_passed_on():
    lock = threading.Lock()
    env = ActionLogVecEnv(
        [lambda: Retrace(CheckedMonitor(Wrong((SEEN, np.ones(1), False, False, {"a": lock, "b": [1]}))))]
    )
    env.reset()
    for _ in range(3):
        _, rewards, _, infos = env.step(np.zeros(1, np.int64))
    assert (rewards.tolist(), infos[0]["a"], infos[0]["b"]) == ([1.0], lock, [1])


def test_what_the_env_itself_raises_stays_as_it_is():
    with pytest.raises(ValueError, match="could not convert"):
        played(answer=lambda: float("the reward"))  # as the loop would fail, but in the env's own code


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_comes_back_from_the_env_ends():
    children: list[int] = []
    played(steps=3, answer=lambda: children.append(os.fork()))
    assert children[0] > 0, "the child would go on with these tests"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 1
