from __future__ import annotations

from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.monitor import Monitor

from duels import Duel
from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.masks import ActionMasks
from fasttrain.envs.wrappers import ActionRepeat, DictActions, LeanInfo, MemoryInputs, TwoSided
from fasttrain.errors import EnvError, EnvSpecError


class Steps(gymnasium.Env[Any, Any]):
    """Step t shows t and pays 10^t. Action a of a choice is legal while fewer than `legal_for[a]` steps were taken."""

    def __init__(
        self, length: int = 4, cut: bool = False, actions: Any = 2, seen: Any = None, legal_for: Any = (99, 99, 0)
    ) -> None:
        self.length, self.cut, self.legal_for = length, cut, legal_for
        self.action_space = spaces.Discrete(actions) if isinstance(actions, int) else actions
        self.observation_space = seen or spaces.Box(0, 99, (2,), np.float32)
        self.taken: list[Any] = []

    def action_masks(self) -> Any:
        return [len(self.taken) < limit for limit in self.legal_for[: self.action_space.n]]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.taken, self.options = [], options
        return self._seen(), self._told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        over = len(self.taken) == self.length
        self.told = self._told()
        return self._seen(), 10.0 ** len(self.taken), over and not self.cut, over and self.cut, self.told

    def _seen(self) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {"x": np.full(2, len(self.taken), np.float32)}
        return np.full(self.observation_space.shape or (), len(self.taken), self.observation_space.dtype)

    def _told(self) -> dict[str, Any]:
        return {"time": len(self.taken), "bulky": [1, 2], "perf": {"enemy_turn_ms": 2.0, "games": len(self.taken)}}


def made(**spec: Any) -> Any:
    return make_env(EnvSpec(entry_point=f"{__name__}:Steps", **spec))


def test_rewards_add_up_and_the_last_observation_and_info_are_seen() -> None:
    inner = Steps()
    env = ActionRepeat(inner, 3, masked=False)
    env.reset()
    observation, reward, terminated, truncated, info = env.step(1)
    assert inner.taken == [1, 1, 1]
    assert (observation.tolist(), reward, terminated, truncated) == ([3.0, 3.0], 1110.0, False, False)
    assert (info["time"], info["perf"]) == (3, {"enemy_turn_ms": 6.0, "games": 3}), "time adds up, state does not"


@pytest.mark.parametrize("cut", [False, True])
def test_the_episodes_end_ends_the_repetition(cut: bool) -> None:
    env = ActionRepeat(Steps(cut=cut), 3, masked=False)
    env.reset()
    env.step(0)
    observation, reward, terminated, truncated, info = env.step(1)
    assert (observation.tolist(), reward, terminated, truncated) == ([4.0, 4.0], 10_000.0, not cut, cut)
    assert info["time"] == 4


def test_make_env_repeats_inside_lean_info_and_counts_the_limit_in_the_envs_own_steps() -> None:
    env = made(kwargs={"length": 50}, action_repeat=4, max_episode_steps=6, lean_info=True)
    env.reset()
    first, second = env.step(0), env.step(0)
    assert (first[1], first[3], "time" in first[4]) == (11_110.0, False, False)
    assert (second[1], second[3], second[4]["time"]) == (1_100_000.0, True, 6)
    assert isinstance(env.env, ActionRepeat)
    assert isinstance(env.env.env, ActionMasks)
    assert not isinstance(made(), ActionRepeat)


@pytest.mark.parametrize(("use_masks", "taken"), [(True, [1, 1]), (False, [1, 1, 1])])
def test_an_action_that_is_no_longer_legal_is_not_repeated(use_masks: bool, taken: list[int]) -> None:
    env = made(kwargs={"legal_for": (99, 2)}, action_repeat=3, use_masks=use_masks)
    env.reset()
    env.step(1)
    assert env.unwrapped.taken == taken
    assert not use_masks or env.get_wrapper_attr("action_masks")().tolist() == [True, False]


def test_keeps_named_keys_between_and_everything_at_the_end() -> None:
    env = LeanInfo(Steps(length=2), keys=("time", "not_there"))
    assert set(env.reset(seed=1, options={"a": 1})[1]) == {"time", "perf"}
    assert env.unwrapped.options == {"a": 1}
    assert [set(env.step(0)[4]) for _ in range(2)] == [{"time", "perf"}, {"time", "perf", "bulky"}]
    env.reset()
    env.step(0)
    assert "bulky" in env.unwrapped.told, "the env's own dict is not changed"


def test_monitor_outside_and_inside_keeps_its_episode_entry() -> None:
    for env in (LeanInfo(Monitor(Steps())), Monitor(LeanInfo(Steps()))):
        env.reset()
        assert [env.step(0)[4].get("episode", {}).get("l") for _ in range(4)] == [None, None, None, 4]


BOTH = ("action", "reward")
NUMBERS = spaces.Box(-2, 2, (2,), np.float32)


@pytest.mark.parametrize(
    ("actions", "told", "action", "expected"),
    [
        (3, BOTH, 2, [1, 1, 0, 0, 1, 10]),
        (3, ("action",), np.array(1), [1, 1, 0, 1, 0]),
        (3, ("reward",), 2, [1, 1, 10]),
        (spaces.MultiDiscrete([2, 3]), BOTH, np.array([1, 0]), [1, 1, 0, 1, 1, 0, 0, 10]),
        (spaces.MultiBinary(3), BOTH, np.array([1, 0, 1], np.int8), [1, 1, 1, 0, 1, 10]),
        (NUMBERS, BOTH, np.array([-1.5, 0.25], np.float32), [1, 1, -1.5, 0.25, 10]),
    ],
)
def test_the_numbers_of_every_kind_of_action(actions: Any, told: tuple[str, ...], action: Any, expected: list[float]):
    env = MemoryInputs(Steps(actions=actions), told)
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
    env = MemoryInputs(Steps(seen=spaces.Dict({"x": spaces.Box(0, 9, (2,))})), BOTH)
    shapes = {key: part.shape for key, part in env.observation_space.items()}
    assert shapes == {"x": (2,), "last_action": (2,), "last_reward": (1,)}
    assert env.reset()[0]["last_action"].tolist() == [0, 0]
    seen = env.step(1)[0]
    assert {key: part.tolist() for key, part in seen.items()} == {
        "x": [1, 1], "last_action": [0, 1], "last_reward": [10]
    }  # fmt: skip
    assert env.observation_space.contains(seen)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64])
def test_other_numbers_become_floats(dtype: Any):
    env = MemoryInputs(Steps(seen=spaces.Box(0, 9, (2,), dtype)), BOTH)
    env.reset()
    seen = env.step(0)[0]
    assert seen.tolist() == [1, 1, 1, 0, 10]
    assert seen.dtype == env.observation_space.dtype == np.result_type(dtype, np.float32)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), "observes Box.* numbers are added to a Box with one axis"),
        (spaces.Discrete(4), r"observes Discrete\(4\); numbers are added"),
        (spaces.Dict({"last_reward": NUMBERS}), "observes last_reward already; rename that key in a wrapper"),
    ],
)
def test_other_observations_are_refused(seen: Any, message: str):
    with pytest.raises(EnvSpecError, match=message) as error:
        MemoryInputs(Steps(seen=seen), ["reward"])
    assert str(error.value).startswith("algo.memory_inputs=[reward]: env <")
    assert "\n" not in str(error.value)


def test_make_env_shows_what_a_decision_gained_and_lets_masks_through():
    env = made(kwargs={"actions": 3}, action_repeat=2, lean_info=True, memory_inputs=("action", "reward"))
    env.reset()
    assert env.step(1)[0].tolist() == [2, 2, 0, 1, 0, 110]
    assert env.get_wrapper_attr("action_masks")().tolist() == [True, True, False]
    assert isinstance(env.env, MemoryInputs)
    assert isinstance(env.env.env, ActionRepeat)


def test_turns_are_told_and_a_negative_action_changes_nothing():
    env = make_env(EnvSpec(entry_point="duels:Duel", two_sided=True, lean_info=True))
    assert isinstance(env, TwoSided)
    assert env.reset()[1] == {"opponents_turn": False}
    observation, reward, ended, _, info = env.step(2)
    assert (observation.tolist(), reward, ended, info) == ([1, 2, 1], 2.0, False, {"opponents_turn": True})
    for action in (-1, np.int64(-1), np.array([-1, -1])):
        after, reward, ended, cut, info = env.step(action)
        np.testing.assert_array_equal(after, observation)
        assert (reward, ended, cut, info) == (0.0, False, False, {"opponents_turn": True})
    assert env.unwrapped.seen == [(0, False, 2)]


def test_envs_that_cannot_be_played_against_oneself_are_refused():
    class Continuous(Duel):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = NUMBERS

    with pytest.raises(EnvSpecError, match="does not support self-play: it has no property opponents_turn"):
        TwoSided(gymnasium.make("CartPole-v1"))
    with pytest.raises(EnvSpecError, match="self-play needs discrete actions, the env has Box"):
        TwoSided(Continuous())


def test_a_property_that_raises_is_shown_with_its_own_exception():
    class Broken(Duel):
        @property
        def opponents_turn(self) -> bool:
            return self.board.turn

        def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:
            return np.zeros(3, np.float32), {}

    env = TwoSided(gymnasium.wrappers.TimeLimit(Broken(), 9))
    with pytest.raises(AttributeError, match="no attribute 'board'"):
        env.reset()


WAYS = ("method", "info", "observation")
DTYPES = (np.bool_, np.int8, np.float32)
# Declared in the order unit, order, place; Gymnasium sorts: order, place, unit.
HEADS = {"unit": spaces.Discrete(2), "order": spaces.Discrete(3, start=5), "place": spaces.Discrete(4, start=-1)}
MASKS = {"unit": [0, 1], "order": [1, 0, 0], "place": [0, 0, 1, 1]}
FLAT = [True, False, False, False, False, True, True, False, True]


class Squad(gymnasium.Env[Any, Any]):
    """Shows the same masks per head always, by name, in the order in which `names` come."""

    def __init__(
        self, way: str = "method", dtype: Any = np.bool_, names: tuple[str, ...] = tuple(MASKS), space: Any = None
    ) -> None:
        self.way, self.names, self.dtype = way, names, dtype
        self.action_space = spaces.Dict(HEADS) if space is None else space
        self.observation_space: spaces.Space[Any] = spaces.Box(0, 1, (2,))
        if way == "observation":
            masks = spaces.Dict({name: spaces.MultiBinary(len(MASKS[name])) for name in MASKS})
            self.observation_space = spaces.Dict({"seen": self.observation_space, "action_mask": masks})
        if way == "method":
            self.action_masks = self._masks
        self.got: list[Any] = []

    def _masks(self) -> dict[str, Any]:
        return {name: np.array(MASKS[name], self.dtype) for name in self.names}

    def _see(self) -> tuple[Any, dict[str, Any]]:
        seen: Any = np.zeros(2, np.float32)
        if self.way == "observation":
            seen = {"seen": seen, "action_mask": self._masks()}
        return seen, {"action_mask": self._masks()} if self.way == "info" else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.got = []
        return self._see()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{action} is not in {self.action_space}")
        legal = all(MASKS[name][action[name] - HEADS[name].start] for name in MASKS)
        self.got.append(action)
        observation, info = self._see()
        return observation, float(legal), len(self.got) == 4, False, info


def squad(**kwargs: Any) -> Any:
    return make_env(EnvSpec(entry_point=f"{__name__}:Squad", kwargs=kwargs))


def test_the_env_gets_its_own_dict_back_counted_from_each_start() -> None:
    env = squad()
    assert env.action_space == spaces.MultiDiscrete([3, 4, 2])
    env.reset()
    env.step(np.array([0, 2, 1]))
    assert env.unwrapped.got == [{"order": 5, "place": 1, "unit": 1}]


@given(st.permutations(list(MASKS)), st.sampled_from(WAYS), st.sampled_from(DTYPES))
def test_masks_by_name_come_in_the_spaces_order_in_every_convention(names: list[str], way: str, dtype: Any) -> None:
    env = squad(way=way, dtype=dtype, names=tuple(names))
    observation, _ = env.reset(seed=1)
    masks = env.get_wrapper_attr("action_masks")
    assert masks().dtype == np.bool_
    assert masks().tolist() == FLAT
    assert observation in env.observation_space
    assert env.step(np.array([0, 3, 1]))[1] == 1.0
    assert masks().tolist() == FLAT


def test_an_ordered_dict_keeps_its_order_and_a_dict_inside_is_walked_through() -> None:
    inner = spaces.Dict(OrderedDict(y=spaces.Discrete(2), x=spaces.Discrete(3)))
    env = DictActions(Squad(space=None), spaces.Dict(OrderedDict(unit=spaces.Discrete(4, start=1), place=inner)))
    assert env.action_space == spaces.MultiDiscrete([4, 2, 3])
    seen: list[Any] = []
    env.env.step = seen.append
    env.step([3, 1, 2])
    assert seen == [{"unit": 4, "place": {"y": 1, "x": 2}}]
    assert list(seen[0]["place"]) == ["y", "x"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"unit": None}, "names the heads order, place; the action space has order, place, unit"),
        ({"unit": [1, 1, 1], "order": [1, 1]}, "head 'order' has the wrong length: expected 3 entries, got 2"),
    ],
)
def test_masks_that_do_not_fit_the_heads(change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mask in change.items():
        monkeypatch.setitem(MASKS, name, mask)
    names = tuple(name for name in MASKS if MASKS[name] is not None)
    with pytest.raises(EnvError, match=text):
        squad(names=names).get_wrapper_attr("action_masks")()


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,))}), "whose head b is Box"),
        (spaces.Dict({"a": spaces.Dict({"c": spaces.MultiBinary(2)})}), r"whose head a\.c is MultiBinary"),
        (spaces.Dict({}), "a Dict without any Discrete space"),
    ],
)
def test_other_heads_are_refused_by_name(space: spaces.Dict, text: str) -> None:
    with pytest.raises(EnvSpecError, match=rf"env\.entry_point=.*{text}"):
        squad(space=space)
