"""Errands, called here as a worker calls them: what is built, played, kept and said."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from fasttrain.envs.errands import Build, Kept, Look, Measure
from fasttrain.envs.make import EnvSpec
from fasttrain.envs.user_code import Place
from fasttrain.errors import EnvSpecError

ENV = """
import sys
import gymnasium as gym, numpy as np
built = []
class Walk(gym.Env):
    observation_space = gym.spaces.Box(-20, 20, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    def __init__(self, forgets=True, leaves=False, alone=False):
        if leaves:
            sys.exit(3)
        if alone and built:
            raise OSError("the port is taken")
        self.forgets, self.episodes = forgets, 0
        built.append(self)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.count, self.x = 0, self.np_random.random() + (0 if self.forgets else self.episodes)
        return self.observe(), {}
    def step(self, action):
        self.count += 1
        self.x += int(action) - 1
        return self.observe(), float(action), self.count == 10, False, {}
    def observe(self):
        return np.zeros(2, np.float32) + self.x
    def close(self):
        built.remove(self)
"""
SPEC = EnvSpec(entry_point="rehearsed:Walk", use_masks=False)


@pytest.fixture(autouse=True)
def _env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rehearsed.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rehearsed", raising=False)


def open_envs() -> list[object]:
    return sys.modules["rehearsed"].built


def test_the_env_that_is_built_is_the_one_that_is_looked_at_and_kept():
    kept: Kept = []
    built = Build(SPEC)(None, kept)
    assert (built.action_space.n, built.observation_space.shape, built.lacks_masks) == (3, (2,), "")
    memory = bytearray(4096)
    result = Look(SPEC, 12.5, stays=True, limits={"max_steps": 20, "max_seconds": 60.0})(memory, kept)
    assert result.findings == ()
    assert result.costs is not None
    assert result.costs.build_s == 12.5
    assert result.not_fresh == ""
    assert "seed 20260101" in str(Place(memory))
    assert open_envs() == [env.unwrapped for env in kept], "played, with all others closed"
    assert kept[0].unwrapped.episodes > 4


@pytest.mark.parametrize("errand", [Look(SPEC, 12.5, stays=True), Measure(SPEC, 12.5)])
@pytest.mark.parametrize("forgets", [True, False])
def test_an_env_that_remembers_earlier_episodes_is_not_like_a_fresh_one(errand: Look | Measure, forgets: bool):
    spec = dataclasses.replace(SPEC, kwargs={"forgets": forgets})
    kept: Kept = []
    Build(spec)(None, kept)
    found = dataclasses.replace(errand, spec=spec)(None, kept)
    assert ("the same seed gave another trajectory" in found.not_fresh) == (not forgets)


def test_measuring_plays_the_env_that_is_there():
    kept: Kept = []
    Build(SPEC)(None, kept)
    costs = Measure(SPEC, 3.5)(None, kept).costs
    assert (costs.build_s, costs.episode_steps) == (3.5, 10)
    assert len(open_envs()) == 1


def test_missing_masks_are_told_with_the_spaces_and_not_before():
    kept: Kept = []
    built = Build(dataclasses.replace(SPEC, needs_masks=True, use_masks=True))(None, kept)
    assert "offers no action masks" in built.lacks_masks
    assert open_envs() == kept == []


def test_a_constructor_that_leaves_is_named():
    with pytest.raises(
        EnvSpecError,
        match=r"could not be built with env.kwargs.leaves=True: SystemExit: 3 \(rehearsed.py:10, in __init__\)",
    ):
        Build(dataclasses.replace(SPEC, kwargs={"leaves": True}))(None, [])


def test_a_second_env_that_cannot_be_beside_the_first_names_the_way_out():
    kept: Kept = []
    spec = dataclasses.replace(SPEC, kwargs={"alone": True})
    Build(spec)(None, kept)
    with pytest.raises(EnvSpecError, match="the port is taken .* a second env beside the first: use num_envs=1"):
        Look(spec, 0.1, stays=False)(None, kept)
    assert Look(spec, 0.1, stays=False, copies=False)(None, kept).findings == ()
