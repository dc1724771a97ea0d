"""Named heads become MultiDiscrete, and masks by name arrive in the space's order, whatever order they came in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunCommand
from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.wrappers import DictActions
from fasttrain.errors import EnvError, EnvSpecError

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


def made(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    return make_env(EnvSpec(entry_point=f"{__name__}:Squad", kwargs=kwargs))


def test_the_env_gets_its_own_dict_back_counted_from_each_start() -> None:
    env = made()
    assert env.action_space == spaces.MultiDiscrete([3, 4, 2])
    env.reset()
    env.step(np.array([0, 2, 1]))
    assert env.unwrapped.got == [{"order": 5, "place": 1, "unit": 1}]  # type: ignore[attr-defined]


@given(st.permutations(list(MASKS)), st.sampled_from(WAYS), st.sampled_from(DTYPES))
def test_masks_by_name_come_in_the_spaces_order_in_every_convention(names: list[str], way: str, dtype: Any) -> None:
    env = made(way=way, dtype=dtype, names=tuple(names))
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
    env.env.step = seen.append  # type: ignore[method-assign, assignment]
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
        made(names=names).get_wrapper_attr("action_masks")()


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,))}), "whose head b is Box"),
        (spaces.Dict({"a": spaces.Dict({"c": spaces.MultiBinary(2)})}), r"whose head a\.c is MultiBinary"),
        (spaces.Dict({}), "a Dict without a head"),
    ],
)
def test_other_heads_are_refused_by_name(space: spaces.Dict, text: str) -> None:
    with pytest.raises(EnvSpecError, match=rf"env\.entry_point=.*{text}"):
        made(space=space)


def test_a_squad_trains_with_masks_from_the_command_line(fasttrain: RunCommand) -> None:
    done = fasttrain(
        "+profile=speed", f"env.entry_point={__name__}:Squad", "env.kwargs.way=info",
        "env.kwargs.names=[place,unit,order]", "vec_env=dummy", "total_timesteps=1024", "algo.rollout_size=512",
        "batch_size=128", "eval.episodes=8",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] == 4.0, "every action was legal in every head"
    assert quality["sampled"]["mean_reward"] == 4.0
