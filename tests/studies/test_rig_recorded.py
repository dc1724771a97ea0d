"""Recorded steps give back what the env gave, in a circle; random actions are legal and vary."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.studies.rig import RandomActions, RecordedVecEnv, record
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame


def recorded_toy(steps: int) -> tuple[NativeVecEnv, RecordedVecEnv]:
    env = NativeVecEnv(ToyGame(5), seed=3)
    env.reset()
    draw = RandomActions(env.action_space, 5, seed=0).draw
    frames = record(env, draw, masked=True, steps=steps)
    return env, RecordedVecEnv(frames, env.observation_space, env.action_space)


def test_frames_are_copies_of_every_step():
    env, _ = recorded_toy(1)
    draw = RandomActions(env.action_space, 5, seed=1).draw
    first, second, third = record(env, draw, masked=True, steps=3)
    assert not np.array_equal(first.observations, second.observations)
    assert np.array_equal(third.observations, env.slots.observations)
    assert third.observations is not env.slots.observations
    assert third.action_masks is not None
    assert np.array_equal(third.action_masks, env.slots.action_masks)


def test_it_plays_in_a_circle_with_ends_and_infos():
    _, env = recorded_toy(4)
    seen = []
    for _ in range(8):
        env.step_slots(np.zeros(5))
        frame = env.frames[len(seen) % 4]
        assert env.slots.finished is frame.finished
        assert env.infos() is frame.infos
        assert np.array_equal(frame.dones, env.slots.terminations | env.slots.truncations)
        seen.append(np.array(env.slots.observations))
    assert all(np.array_equal(seen[i], seen[i + 4]) for i in range(4))
    assert sum(len(frame.finished) for frame in env.frames) > 0, "env 0 ends after 3 steps"


def test_sb3_code_can_step_it():
    _, env = recorded_toy(4)
    first = env.reset()
    assert np.array_equal(first, env.frames[-1].observations)
    observations, rewards, dones, infos = env.step(np.zeros(5, np.int64))
    assert (observations.shape, rewards.shape, dones.shape, len(infos)) == ((5, 3), (5,), (5,), 5)
    assert np.array_equal(env.env_method("action_masks")[1], env.frames[0].action_masks[1])
    assert env.env_method("anything") == env.get_attr("anything") == [None] * 5
    assert env.env_is_wrapped(object) == [False] * 5


def test_random_actions_are_legal_and_vary():
    space = spaces.MultiDiscrete([3, 4])
    random = RandomActions(space, 50, seed=0)
    masks = np.random.default_rng(1).random((50, 7)) < 0.5
    masks[:, [1, 5]] = True
    drawn = [random.draw(masks) for _ in range(40)]
    for actions in drawn:
        assert actions.shape == (50, 2)
        assert masks[np.arange(50), actions[:, 0]].all()
        assert masks[np.arange(50), 3 + actions[:, 1]].all()
    assert len({actions.tobytes() for actions in drawn}) == RandomActions.TABLES
    free = random.draw(None)
    assert set(np.unique(free[:, 1])) == {0, 1, 2, 3}
    some = random.draw(masks[10:12], slice(10, 12))
    assert some.shape == (2, 2)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3)])
def test_other_spaces_are_sampled(space: spaces.Space):
    actions = RandomActions(space, 4, seed=0).draw(None)
    assert len(actions) == 4
    assert all(space.contains(action) for action in actions)
