"""The last action and reward beside the observation: in which numbers, from when on, and around which envs."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.wrappers import ActionRepeat, MemoryInputs
from fasttrain.errors import EnvSpecError


class Steps(gymnasium.Env[Any, Any]):
    """Step t shows t and pays 10^t; four steps. Of a choice all but the last are legal."""

    def __init__(self, actions: Any = 3, seen: Any = None) -> None:
        self.action_space = spaces.Discrete(actions) if isinstance(actions, int) else actions
        self.observation_space = seen or spaces.Box(0, 9, (2,), np.float32)

    def action_masks(self) -> Any:
        return [True] * (int(self.action_space.n) - 1) + [False]  # type: ignore[attr-defined]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._seen(), 10.0**self.time, self.time == 4, False, {}

    def _seen(self) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {"x": np.full(2, self.time, np.float32)}
        return np.full(self.observation_space.shape or (), self.time, self.observation_space.dtype)


BOTH = ("action", "reward")
MULTI, BITS = spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)
NUMBERS = spaces.Box(-2, 2, (2,), np.float32)


@pytest.mark.parametrize(
    ("actions", "told", "action", "expected"),
    [
        (3, BOTH, 2, [1, 1, 0, 0, 1, 10]),
        (3, ("action",), np.array(1), [1, 1, 0, 1, 0]),
        (3, ("reward",), 2, [1, 1, 10]),
        (MULTI, BOTH, np.array([1, 0]), [1, 1, 0, 1, 1, 0, 0, 10]),
        (BITS, BOTH, np.array([1, 0, 1], np.int8), [1, 1, 1, 0, 1, 10]),
        (NUMBERS, BOTH, np.array([-1.5, 0.25], np.float32), [1, 1, -1.5, 0.25, 10]),
    ],
)
def test_the_numbers_of_every_kind_of_action(actions: Any, told: tuple[str, ...], action: Any, expected: list[float]):
    env = MemoryInputs(Steps(actions), told)
    first, _ = env.reset()
    assert first.tolist() == [0.0] * len(expected)
    seen, reward, *_ = env.step(action)
    assert seen.tolist() == expected
    assert reward == 10.0
    assert seen.dtype == env.observation_space.dtype == np.float32
    assert env.observation_space.contains(seen)
    assert env.step(action)[0][-1] == (100 if "reward" in told else expected[-1])
    assert env.reset()[0].tolist() == [0.0] * len(expected)  # an episode that begins has no past


def test_a_dict_gets_further_keys():
    env = MemoryInputs(Steps(2, spaces.Dict({"x": spaces.Box(0, 9, (2,))})), BOTH)
    assert {key: part.shape for key, part in env.observation_space.items()} == {  # type: ignore[attr-defined]
        "x": (2,), "last_action": (2,), "last_reward": (1,)
    }  # fmt: skip
    assert {key: part.tolist() for key, part in env.reset()[0].items()}["last_action"] == [0, 0]
    seen = env.step(1)[0]
    assert {key: part.tolist() for key, part in seen.items()} == {
        "x": [1, 1], "last_action": [0, 1], "last_reward": [10]
    }  # fmt: skip
    assert env.observation_space.contains(seen)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64])
def test_other_numbers_become_floats(dtype: Any):
    env = MemoryInputs(Steps(2, spaces.Box(0, 9, (2,), dtype)), BOTH)
    env.reset()
    seen = env.step(0)[0]
    assert seen.tolist() == [1, 1, 1, 0, 10]
    assert seen.dtype == env.observation_space.dtype == np.result_type(dtype, np.float32)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (
            spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "observes Box.* numbers are added to a Box with one axis",
        ),
        (spaces.Discrete(4), r"observes Discrete\(4\); numbers are added"),
        (spaces.Dict({"last_reward": NUMBERS}), "observes last_reward already; rename that key in a wrapper"),
    ],
)
def test_other_observations_are_refused(seen: Any, message: str):
    with pytest.raises(EnvSpecError, match=message) as error:
        MemoryInputs(Steps(2, seen), ["reward"])
    assert str(error.value).startswith("algo.memory_inputs=['reward']: env <")
    assert "\n" not in str(error.value)


def test_make_env_shows_what_a_decision_gained_and_lets_masks_through():
    spec = EnvSpec(entry_point=f"{__name__}:Steps", action_repeat=2, lean_info=True, memory_inputs=("action", "reward"))
    env = make_env(spec)
    env.reset()
    assert env.step(1)[0].tolist() == [2, 2, 0, 1, 0, 110]
    assert env.get_wrapper_attr("action_masks")().tolist() == [True, True, False]
    inner = env.env  # type: ignore[attr-defined]
    assert isinstance(inner, MemoryInputs)
    assert isinstance(inner.env, ActionRepeat)
