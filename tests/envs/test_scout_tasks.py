"""The scout's tasks, called here as a worker calls them: what they build, play, keep and report."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from fasttrain.envs.make import EnvSpec
from fasttrain.envs.scout_tasks import Build, Check, Envs, Measure
from fasttrain.envs.user_code import Place
from fasttrain.errors import EnvSpecError

ENV = """
import sys
import numpy as np
from gymnasium import spaces
from plain_env import PlainEnv
built = []
class Walk(PlainEnv):
    action_space = spaces.Discrete(3)
    def __init__(self, forgets=True, leaves=False, alone=False):
        if leaves:
            sys.exit(3)
        if alone and built:
            raise OSError("the port is taken")
        self.forgets, self.episodes = forgets, 0
        built.append(self)
    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed)
    def step(self, action):
        self.x += int(action) - 1
        return super().step(action)
    def seen(self):
        if self.time == 0:
            self.x = self.np_random.random() + (0 if self.forgets else self.episodes)
        return np.zeros(2, np.float32) + self.x
    def paid(self, action):
        return float(action)
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
    envs: Envs = []
    built = Build(SPEC)(None, envs)
    assert (built.action_space.n, built.observation_space.shape, built.mask_error) == (3, (2,), "")
    memory = bytearray(4096)
    result = Check(SPEC, 12.5, stays=True, limits={"max_steps": 20, "max_seconds": 60.0})(memory, envs)
    assert result.findings == ()
    assert result.costs is not None
    assert result.costs.build_s == 12.5
    assert result.not_fresh == ""
    assert "seed 20260101" in str(Place(memory))
    assert open_envs() == [env.unwrapped for env in envs], "played, with all others closed"
    assert envs[0].unwrapped.episodes > 4


@pytest.mark.parametrize("errand", [Check(SPEC, 12.5, stays=True), Measure(SPEC, 12.5)])
@pytest.mark.parametrize("forgets", [True, False])
def test_an_env_that_remembers_earlier_episodes_is_not_like_a_fresh_one(errand: Check | Measure, forgets: bool):
    spec = dataclasses.replace(SPEC, kwargs={"forgets": forgets})
    envs: Envs = []
    Build(spec)(None, envs)
    found = dataclasses.replace(errand, spec=spec)(None, envs)
    assert ("the same seed gave another trajectory" in found.not_fresh) == (not forgets)


def test_measuring_plays_the_env_that_is_there():
    envs: Envs = []
    Build(SPEC)(None, envs)
    costs = Measure(SPEC, 3.5)(None, envs).costs
    assert (costs.build_s, costs.episode_steps) == (3.5, 10)
    assert len(open_envs()) == 1


def test_missing_masks_are_told_with_the_spaces_and_not_before():
    envs: Envs = []
    built = Build(dataclasses.replace(SPEC, needs_masks=True, use_masks=True))(None, envs)
    assert "offers no action masks" in built.mask_error
    assert open_envs() == envs == []


def test_a_constructor_that_leaves_is_named():
    with pytest.raises(
        EnvSpecError,
        match=r"could not be built with env.kwargs.leaves=True: SystemExit: 3 \(rehearsed.py:11, in __init__\)",
    ):
        Build(dataclasses.replace(SPEC, kwargs={"leaves": True}))(None, [])


def test_a_second_env_that_cannot_be_beside_the_first_names_the_way_out():
    envs: Envs = []
    spec = dataclasses.replace(SPEC, kwargs={"alone": True})
    Build(spec)(None, envs)
    with pytest.raises(EnvSpecError, match="the port is taken .* a first env was still open; use num_envs=1"):
        Check(spec, 0.1, stays=False)(None, envs)
    assert Check(spec, 0.1, stays=False, copies=False)(None, envs).findings == ()
