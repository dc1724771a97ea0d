"""LeanInfo cuts the info of the steps between and touches nothing else."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.wrappers import LeanInfo

FULL = {"score": 3, "bulky": [1, 2], "perf": {"enemy_turn_s": 0.1}}


class Chatty(gymnasium.Env[Any, Any]):
    """Says the same on every step; ends at the third, by rule or by limit."""

    observation_space = spaces.Box(0, 10, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, truncates: bool = False) -> None:
        self.truncates = truncates
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        self.options = options
        return np.zeros(1, np.float32), dict(FULL)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ends = self.count == 3
        return np.full(1, self.count, np.float32), 0.5, ends and not self.truncates, ends and self.truncates, dict(FULL)


def test_keeps_named_keys_between_and_everything_at_the_end() -> None:
    env = LeanInfo(Chatty(), keys=("score", "not_there"))
    between = {"score": 3, "perf": FULL["perf"]}
    assert env.reset(seed=1, options={"a": 1})[1] == between
    assert env.unwrapped.options == {"a": 1}  # type: ignore[attr-defined]
    assert [env.step(0)[4] for _ in range(3)] == [between, between, FULL]


@pytest.mark.parametrize("truncates", [False, True])
def test_everything_but_info_is_unchanged(truncates: bool) -> None:
    lean, plain = LeanInfo(Chatty(truncates)), Chatty(truncates)
    lean.reset()
    plain.reset()
    for _ in range(3):
        assert lean.step(1)[:4] == plain.step(1)[:4]


def test_the_envs_own_dict_is_not_changed() -> None:
    class Keeps(Chatty):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.last = super().step(action)
            return self.last

    inner = Keeps()
    env = LeanInfo(inner)
    env.reset()
    env.step(0)
    assert inner.last[4] == FULL


def test_monitor_outside_and_inside_keeps_its_episode_entry() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor").Monitor
    for env in (LeanInfo(monitor(Chatty())), monitor(LeanInfo(Chatty()))):
        env.reset()
        assert [env.step(0)[4].get("episode", {}).get("l") for _ in range(3)] == [None, None, 3]
