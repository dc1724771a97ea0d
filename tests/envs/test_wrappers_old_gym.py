"""Envs of the old gym interface, with and without the gym package (a stand-in of it, the real one is not needed)."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.masks import ActionMasks
from fasttrain.envs.wrappers import OldGym, converted
from fasttrain.errors import EnvError, EnvSpecError


class OldSpace:
    """Spaces of the old gym: told apart by the name of their class."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


Discrete, Box, MultiDiscrete, MultiBinary, Tuple, Dict, Graph = (
    type(name, (OldSpace,), {})
    for name in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Tuple", "Dict", "Graph")
)
BOX = Box(low=np.zeros(2, np.float32), high=np.ones(2, np.float32), shape=(2,), dtype=np.dtype(np.float32))


class Old:
    """gym 0.21: `seed()`, reset returns the observation, step four values. Its own TimeLimit cuts after 3 steps."""

    observation_space: Any = BOX
    action_space: Any = Discrete(n=3)

    def __init__(self, ends_by: str = "rules") -> None:
        self.ends_by, self.seeds, self.level, self.closed = ends_by, [], 1, False

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.seeds.append(seed)
        return [seed]

    def action_masks(self) -> Any:
        return [True, self.time % 2 == 0, False]

    def reset(self) -> Any:
        self.time = 0
        return np.zeros(2, np.float32)

    def step(self, action: int) -> tuple[Any, float, bool, dict[str, Any]]:
        self.time += 1
        done = self.time == 3
        info = {"TimeLimit.truncated": True} if done and self.ends_by == "limit" else {}
        return np.full(2, self.time / 10, np.float32), float(action), done, info

    def close(self) -> None:
        self.closed = True


def made(**spec: Any) -> Any:
    return make_env(EnvSpec(entry_point=f"{__name__}:Old", **spec))


@pytest.mark.parametrize(("ends_by", "end"), [("rules", (True, False)), ("limit", (False, True))])
def test_four_values_become_five(ends_by: str, end: tuple[bool, bool]) -> None:
    env = made(kwargs={"ends_by": ends_by})
    env.reset()
    observation, info = env.reset(seed=7)
    assert (observation.tolist(), info) == ([0.0, 0.0], {})
    steps = [env.step(2) for _ in range(3)]
    assert [step[1:4] for step in steps] == [(2.0, False, False), (2.0, False, False), (2.0, *end)]
    assert env.unwrapped.seeds == [7]
    assert (env.observation_space, env.action_space) == (spaces.Box(0, 1, (2,)), spaces.Discrete(3))


def test_methods_and_attributes_reach_the_old_env() -> None:
    env = made(needs_masks=True)
    assert isinstance(env, ActionMasks)
    env.reset()
    assert env.action_masks().tolist() == [True, True, False]
    env.step(0)
    assert env.action_masks().tolist() == [True, False, False]
    old = env.unwrapped.old
    assert env.set_wrapper_attr("level", 5)
    assert (old.level, env.get_wrapper_attr("level")) == (5, 5)
    assert not env.has_wrapper_attr("nothing_of_this_name")
    env.close()
    assert old.closed


class Newer(Old):
    """gym 0.26: seed and options in reset, which returns an info too; five values."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.told = (seed, options)
        return super().reset(), {"new": True}

    def step(self, action: int) -> Any:
        observation, reward, done, info = super().step(action)
        return observation, reward, done, False, info


def test_envs_of_the_last_gym_pass_through() -> None:
    env = OldGym(Newer())
    assert env.reset(seed=3, options={"a": 1})[1] == {"new": True}
    assert env.told == (3, {"a": 1})
    assert env.seeds == []
    assert env.step(1)[1:] == (1.0, False, False, {})


def test_another_number_of_values() -> None:
    env = OldGym(Old())
    env.old.step = lambda action: (0, 0.0, False)
    with pytest.raises(EnvError, match=r"step\(\) returned 3 values; the old gym interface has"):
        env.step(0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Discrete(n=4), spaces.Discrete(4)),
        (Discrete(n=4, start=2), spaces.Discrete(4, start=2)),
        (BOX, spaces.Box(0, 1, (2,), np.float32)),
        (MultiDiscrete(nvec=np.array([2, 5])), spaces.MultiDiscrete([2, 5])),
        (MultiBinary(n=3), spaces.MultiBinary(3)),
        (Tuple(spaces=[Discrete(n=2), BOX]), spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,))))),
        (
            Dict(spaces=OrderedDict(b=Discrete(n=2), a=BOX)),
            spaces.Dict(OrderedDict(b=spaces.Discrete(2), a=spaces.Box(0, 1, (2,)))),
        ),
        (spaces.Discrete(9), spaces.Discrete(9)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_spaces(old: Any, new: spaces.Space[Any]) -> None:
    found = converted(old, "action_space")
    assert found == new
    if isinstance(new, spaces.Dict):
        assert list(found) == list(new)


@pytest.mark.parametrize(("space", "found"), [(Graph(), r"test_wrappers_old_gym\.Graph"), (None, "nothing")])
def test_other_spaces_are_refused(space: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Old, "action_space", space)
    with pytest.raises(
        EnvSpecError, match=f"env.entry_point=.* seems .* old gym interface: action_space must be.*found {found}"
    ):
        made()


class Halfway(gymnasium.Env[Any, Any]):
    """Gymnasium's by its class, and the old interface by its methods."""

    observation_space, action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)

    def step(self, action: int) -> Any:
        return np.ones(2, np.float32), 1.0, True, {}


def test_one_of_gymnasiums_class_is_adapted_by_a_wrapper() -> None:
    env = make_env(EnvSpec(entry_point=f"{__name__}:Halfway", wrappers=("fasttrain.envs.wrappers:OldGym",)))
    assert env.reset(seed=1)[1] == {}
    assert env.step(0)[1:] == (1.0, True, False, {})


def test_many_envs_in_one_are_not_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Old, "num_envs", 4, raising=False)
    with pytest.raises(EnvSpecError, match="built Old, a vector of many envs; name a class that builds one env"):
        made()


def test_ids_are_looked_up_in_the_old_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gym", None)
    spec = EnvSpec(id="OldGame-v0", kwargs={"ends_by": "limit"})
    with pytest.raises(EnvSpecError, match="env.id=OldGame-v0 is not registered with Gymnasium"):
        make_env(spec)
    (tmp_path / "gym.py").write_text(
        f"from {__name__} import Old\n"
        "def spec(id):\n"
        "    if id not in ('OldGame-v0', 'Broken-v0'): raise LookupError(f'no {id} here')\n"
        "def make(id, disable_env_checker=None, **kwargs):\n"
        "    if not disable_env_checker: raise AttributeError('numpy has no bool8')\n"
        "    if id != 'OldGame-v0': raise RuntimeError('no board')\n"
        "    return Old(**kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gym")
    assert make_env(spec).unwrapped.old.ends_by == "limit"
    with pytest.raises(EnvSpecError, match="could not be built by the old gym: RuntimeError: no board"):
        make_env(EnvSpec(id="Broken-v0"))
    with pytest.raises(EnvSpecError, match="env.id=Other-v0 is not registered with Gymnasium"):
        make_env(EnvSpec(id="Other-v0"))
    monkeypatch.delitem(sys.modules, "gym")
