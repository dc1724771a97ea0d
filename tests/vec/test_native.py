from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor

from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame


@pytest.fixture
def env() -> NativeVecEnv:
    env = NativeVecEnv(ToyGame(), seed=7)
    env.reset()
    return env


def run(env: NativeVecEnv, steps: int) -> list:
    finished = []
    for _ in range(steps):
        env.step_slots(np.full(5, 7))
        finished += env.slots.finished
    return finished


def test_env_i_is_seeded_with_seed_plus_i(env: NativeVecEnv):
    assert env.slots.observations[:, 0].tolist() == [7, 8, 9, 10, 11]
    env.seed(100)
    assert env.reset()[:, 0].tolist() == [100, 101, 102, 103, 104]
    assert env.reset()[:, 0].tolist() == [100, 101, 102, 103, 104], "a seed is used once; the games go on after it"


def test_records_of_episodes(env: NativeVecEnv):
    """Their numbers are those of DummyVecEnv: test_base.py."""
    env._returns[0] = 2.0**24  # float32 would lose the 0.7 that is added
    first, *later = [episode for episode in run(env, 9) if episode.env_index == 0]
    assert first.episode_return == pytest.approx(2.0**24 + 2.1, abs=1e-4)
    assert first.final_observation.tolist() == [7, 3, 7], "it survives the next steps"
    assert [episode.length for episode in (first, *later)] == [3, 3, 3]
    run(env, 1)
    env.reset()
    assert [episode.length for episode in run(env, 3)] == [3], "reset drops the unfinished records"


def test_methods_reach_the_game(env: NativeVecEnv):
    assert env.env_method("set_level", 3) == [None] * 5
    assert env.game.level == 3
    assert env.env_method("set_level", 4, indices=[1, 2]) == ["env 1", "env 2"]
    run(env, 2)
    assert env.env_method("total_steps") == [10] * 5
    with pytest.raises(EnvError, match="'total_steps'.*indices"):  # acts on all or not at all
        env.env_method("total_steps", indices=[0])
    with pytest.raises(AttributeError):
        env.env_method("no_such_method")


def test_attributes(env: NativeVecEnv):
    assert env.get_attr("level") == [0] * 5
    assert env.get_attr("steps", indices=[1, 2]) == [0, 0]
    env.set_attr("handicaps", 2.5, indices=[3])
    assert env.game.handicaps.tolist() == [0, 0, 0, 2.5, 0]
    env.set_attr("level", 9)
    assert env.game.level == 9
    with pytest.raises(EnvError, match="'level'"):
        env.set_attr("level", 1, indices=0)
    with pytest.raises(AttributeError):
        env.get_attr("no_such_attribute")
    assert env.has_attr("level")
    assert not env.has_attr("no_such_attribute")


def test_wrapped_closed_and_options(env: NativeVecEnv):
    assert env.env_is_wrapped(Monitor) == [False] * 5
    assert list(env.get_images()) == [None] * 5
    with pytest.raises(EnvError, match="options"):
        env.set_options({"level": 1})
    env.set_options(None)
    env.close()
    assert env.game.closed


def test_frames_come_from_the_game(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ToyGame, "render_mode", "rgb_array", raising=False)
    monkeypatch.setattr(ToyGame, "render", lambda self, i: np.full((2, 3, 3), i, np.uint8), raising=False)
    env = NativeVecEnv(ToyGame(2))
    assert env.render().shape[2] == 3
    assert [frame[0, 0, 0] for frame in env.get_images()] == [0, 1]


def test_a_game_of_several_heads_takes_a_row_of_actions_per_env():
    class TwoHeads(ToyGame):
        """The second head is ignored."""

        def __init__(self) -> None:
            super().__init__(2)
            self.action_space = spaces.MultiDiscrete([self.NUM_ACTIONS, 3])

        def _write_mask(self, index: int) -> None:
            self.slots.action_masks[index, : self.NUM_ACTIONS] = np.arange(self.NUM_ACTIONS) != self.steps[index]

        def step(self) -> None:
            slots, self.slots = self.slots, dataclasses.replace(self.slots, actions=self.slots.actions[:, 0])
            super().step()
            self.slots = slots

    env = NativeVecEnv(TwoHeads(), seed=1)
    env.reset()
    assert (env.slots.actions.shape, env.slots.action_masks.shape) == ((2, 2), (2, 11))
    assert env.slots.action_masks[:, 8:].all()
    _, rewards, _, _ = env.step(np.array([[4, 0], [6, 2]]))
    assert rewards.tolist() == pytest.approx([0.4, 0.6])
    assert env.slots.actions.tolist() == [[4, 0], [6, 2]]


def test_an_illegal_action_is_named(env: NativeVecEnv):
    with pytest.raises(EnvError, match="env 0: action 0"):
        env.step(np.zeros(5, np.int64))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"episode_info": None}, "ToyGame lacks episode_info: see fasttrain.envs.protocol.NativeGame"),
        ({"observation_space": spaces.Discrete(3)}, "ToyGame: observations must be a Box"),
        ({"final_observations": np.zeros((2, 3))}, "final_observations has shape .2, 3., expected .5, "),
    ],
)
def test_a_game_that_is_none_is_refused(change: dict[str, Any], told: str):
    class Broken(ToyGame):
        def __getattribute__(self, name: str) -> Any:
            if name in change:
                if change[name] is None:
                    raise AttributeError(name)
                return change[name]
            return super().__getattribute__(name)

    Broken.__name__ = "ToyGame"
    with pytest.raises(EnvSpecError, match=told):
        NativeVecEnv(Broken(5))


@pytest.mark.parametrize("method", ["bind", "reset", "step"])
def test_what_a_game_raises_is_told_with_the_place(method: str):
    class Failing(ToyGame):
        pass

    def fail(*_: Any) -> None:
        raise IndexError("out of the board")

    def played() -> None:
        env = NativeVecEnv(Failing(5))
        env.reset()
        env.step(np.zeros(5, np.int64))

    setattr(Failing, method, fail)
    with pytest.raises(EnvError, match=rf"Failing.{method} failed: IndexError: out of the board .*test_native.py:\d+"):
        played()
