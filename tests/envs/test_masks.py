from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.envs.masks import (
    ActionMasks,
    FlatMasks,
    find_mask_convention,
    head_sizes,
    is_legal,
    mask_width,
    random_legal_action,
    sounds_like_masks,
)
from fasttrain.envs.wrappers import OldGym
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.base import stuck_envs


class Toy(gymnasium.Env[Any, Any]):
    """Shows `masks[t]` at time t in the way asked for."""

    def __init__(self, way: str, masks: list[Any], action_space: spaces.Space[Any] | None = None, extra: bool = False):
        self.way, self.masks, self.time, self.resets = way, masks, 0, 0
        self.action_space = action_space if action_space is not None else spaces.Discrete(3)
        self.observation_space = spaces.Box(0, 9, (1,))
        if way == "observation":
            keys = {"observation": spaces.Box(0, 9, (1,)), "action_mask": spaces.MultiBinary(3)}
            self.observation_space = spaces.Dict({**keys, **({"hand": spaces.Discrete(9)} if extra else {})})
        if way == "method":
            self.action_masks = lambda: self.masks[self.time]

    def _see(self) -> tuple[Any, dict[str, Any]]:
        mask = self.masks[self.time]
        value: Any = np.full(1, self.time, np.float32)
        if self.way == "observation":
            value = {"observation": value, "action_mask": mask, "hand": 4}
            value = {key: value[key] for key in self.observation_space.spaces}
        return value, {"action_mask": mask} if self.way == "info" and mask is not None else {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        self.resets += 1
        return self._see()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        observation, info = self._see()
        return observation, 0.0, False, False, info


MASKS = [[1, 0, 1], [0, 1, 1]]
WAYS = ("method", "info", "observation")


HEADS, FLAT = spaces.MultiDiscrete([2, 3]), [1, 0, 0, 1, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.float32, list])
@pytest.mark.parametrize(
    ("space", "shown", "flat"),
    [
        (spaces.Discrete(3), [1, 0, 1], [1, 0, 1]),
        (HEADS, ([1, 0], [0, 1, 1]), FLAT),
        (HEADS, {"z": [1, 0], "a": [0, 1, 1]}, FLAT),
        (HEADS, FLAT, FLAT),
        (spaces.MultiBinary(2), ([1, 0], [1, 1]), [1, 0, 1, 1]),
        (spaces.MultiBinary(2), [[0, 1], [1, 0]], [0, 1, 1, 0]),
    ],
    ids=["choice", "heads", "named_heads", "flat", "bits", "bits_as_a_matrix"],
)
def test_every_convention_and_type_gives_the_mask_of_the_present_state(
    way: Any, dtype: Any, space: spaces.Space[Any], shown: Any, flat: list[int]
) -> None:
    def typed(mask: Any) -> Any:
        return mask if dtype is list else np.array(mask, dtype)

    if isinstance(shown, dict):
        mask: Any = {name: typed(head) for name, head in shown.items()}
    else:
        mask = tuple(map(typed, shown)) if isinstance(shown, tuple) else typed(shown)
    everything = np.ones(len(flat), np.bool_)
    wrapped_twice = gymnasium.wrappers.TimeLimit(
        gymnasium.wrappers.OrderEnforcing(Toy(way, [mask, everything], space)), 9
    )
    assert find_mask_convention(wrapped_twice) == way
    env = ActionMasks(wrapped_twice, way)
    env.reset(seed=1)
    assert env.action_masks().dtype == np.bool_
    assert env.action_masks().tolist() == [bool(one) for one in flat]
    env.step(env.action_space.sample())
    assert env.action_masks().all()


def test_only_the_info_convention_costs_a_reset() -> None:
    for way, resets in (("method", 0), ("observation", 0), ("info", 1), ("none", 1)):
        env = Toy(way, list(MASKS))
        assert find_mask_convention(env) == (None if way == "none" else way)
        assert env.resets == resets


@pytest.mark.parametrize(("answer", "text"), [(0.0, r"must return \(observation, info\)"), (None, "returned None")])
def test_old_reset_is_named(answer: Any, text: str) -> None:
    env = Toy("none", list(MASKS))
    env.reset = lambda **_: answer
    with pytest.raises(EnvSpecError, match=text):
        find_mask_convention(env)


def test_reset_that_raises_is_located() -> None:
    with pytest.raises(EnvSpecError, match=r"first reset\(\) failed: IndexError.*test_masks\.py:\d+, in _see"):
        find_mask_convention(Toy("none", []))


def test_the_answer_is_a_copy() -> None:
    shown = np.array([True, False, True])
    env = ActionMasks(Toy("method", [shown]), "method")
    env.action_masks()[:] = False
    assert shown.tolist() == [True, False, True]


@pytest.mark.parametrize("extra", [False, True])
def test_observation_loses_the_mask_and_one_left_key_is_unwrapped(extra: bool) -> None:
    env = ActionMasks(Toy("observation", list(MASKS), extra=extra), "observation")
    observation, _ = env.reset()
    assert observation in env.observation_space
    if extra:
        assert set(observation) == set(env.observation_space.spaces) == {"observation", "hand"}
    else:
        assert env.observation_space == spaces.Box(0, 9, (1,))
        assert env.step(0)[0].tolist() == [1.0]


def test_observation_of_nothing_but_the_mask() -> None:
    inner = Toy("observation", list(MASKS))
    inner.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(3)})
    with pytest.raises(EnvSpecError, match="nothing else"):
        ActionMasks(inner, "observation")


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ([1, 0], r"expected 3 entries, got 2 \(action space Discrete\(3\)\)"),
        (([1, 0], [1, 1]), r"expected 3 entries, got 4 \(2 \+ 2 per head\)"),
        ({}, "expected 3 entries, got 0"),
        (np.array([0.0, -1.0, 0.0]), "booleans, 0 and 1"),
        ([0, 2, 1], "booleans, 0 and 1"),
        (["a", "b", "c"], "booleans, 0 and 1"),
        ([[1, [1, 2], 0]], "not an array"),
        (None, r"no action mask in action_masks\(\)"),
    ],
)
def test_wrong_masks_are_refused_with_the_reason(mask: Any, text: str) -> None:
    env = ActionMasks(Toy("method", [mask]), "method")
    with pytest.raises(EnvError, match=text) as caught:
        env.action_masks()
    assert "Toy" in str(caught.value)


def test_width_of_a_space_without_masks() -> None:
    with pytest.raises(EnvSpecError, match="Discrete, MultiDiscrete or MultiBinary"):
        mask_width(spaces.Box(0, 1, (2,)))


def test_every_legal_action_is_drawn() -> None:
    rng = np.random.default_rng(0)
    drawn = {int(random_legal_action(spaces.Discrete(5), np.array(FLAT, np.bool_), rng)) for _ in range(200)}
    assert drawn == {0, 3, 4}


@pytest.mark.parametrize(
    ("space", "width"),
    [
        (spaces.Discrete(4, start=2), 4),
        (spaces.Discrete(3, start=-1), 3),
        (spaces.MultiDiscrete([2, 3, 1]), 6),
        (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [-2, 3]]), 14),
        (spaces.MultiBinary(3), 6),
        (spaces.MultiBinary([2, 2]), 8),
    ],
    ids=str,
)
@given(data=st.data())
def test_a_drawn_action_is_legal_and_taking_one_of_its_entries_away_makes_it_illegal(
    space: spaces.Space[Any], width: int, data: st.DataObject
) -> None:
    assert mask_width(space) == width
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=width, max_size=width)))
    action = random_legal_action(space, mask, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert space.contains(action)
    if stuck_envs(mask[None], head_sizes(space)).size:  # a head without a legal choice: any is drawn
        return
    assert is_legal(space, mask, action)
    needed = [entry for entry in np.flatnonzero(mask) if not is_legal(space, np.arange(width) != entry, action)]
    heads = 1 if isinstance(space, spaces.Discrete) else int(np.prod(space.shape))
    assert len(needed) == heads
    for entry in needed:
        without = mask.copy()
        without[entry] = False
        assert not is_legal(space, without, action)


def test_masks_that_are_added_to_logits_are_read_the_right_way_round() -> None:
    added = FlatMasks(3)
    assert added(np.zeros(3, np.float32)).all(), "not known yet: the first state of an env that adds them"
    assert added(np.array([-np.inf, 0, 0])).tolist() == [False, True, True]
    assert added(np.array([0, -1e8, -1e9])).tolist() == [True, False, False]
    assert added(np.zeros(3, np.float32)).all()
    factors = FlatMasks(3)
    assert factors(np.array([1.0, 0, 1])).tolist() == [True, False, True]
    assert not factors(np.zeros(3, np.float32)).any()
    assert not FlatMasks(3)([0, 0, 0]).any()


class Named(Toy):
    """Masks under names and in forms that people give them."""

    legal = np.array([[1], [0], [1]])

    def __init__(self) -> None:
        super().__init__("none", list(MASKS))
        self.get_valid_actions = self.legal  # an attribute

    @property
    def current(self) -> Any:
        return self.masks[self.time]

    def valid_action_mask(self) -> Any:
        return self.legal

    def of_state(self, state: Any) -> Any:
        return self.legal


def test_masks_of_another_name_are_a_method_a_property_or_an_attribute() -> None:
    inner = gymnasium.wrappers.TimeLimit(Named(), 9)
    for name in ("valid_action_mask", "get_valid_actions", "current"):
        assert find_mask_convention(inner, name) == "method"
        env = ActionMasks(inner, "method", name=name)
        env.reset()
        assert env.action_masks().tolist() == [True, False, True]
    env.step(0)
    assert env.action_masks().tolist() == [False, True, True], "a property is asked anew"
    assert find_mask_convention(inner, "elsewhere") is None
    assert sounds_like_masks(inner) == ["valid_action_mask"]
    with pytest.raises(EnvSpecError, match=r"of_state must be a method without arguments, it is of_state\(state"):
        find_mask_convention(inner, "of_state")


def test_masks_in_the_steps_info_of_an_old_env() -> None:
    class Old:
        observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(3)

        def reset(self) -> Any:
            return np.zeros(1, np.float32)

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), 0.0, False, {"action_mask": [0, 1, 0]}

    inner = OldGym(Old())
    assert find_mask_convention(inner) == "info"
    env = ActionMasks(inner, "info")
    for _ in range(2):
        env.reset()
        assert env.action_masks().all(), "its reset tells nothing"
        env.step(0)
        assert env.action_masks().tolist() == [False, True, False]
