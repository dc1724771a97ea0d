"""Frames stored once give what stock's buffer gives, byte by byte."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

from fasttrain import DQN
from fasttrain.buffers.frames import Frames
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.stock import frames_in
from fasttrain.errors import ConfigError, EnvError
from fasttrain.saving.model_state import load_replay_state, replay_state
from plain_env import PlainEnv


class Noise(PlainEnv):
    """Images of 40 × 40 noise; an episode of env i ends after 3 + i steps, every second one is cut."""

    observation_space = spaces.Box(0, 255, (40, 40, 1), np.uint8)

    def __init__(self, number: int) -> None:
        self.length, self.cut = 3 + number, False

    def reset(self, **given: Any) -> Any:
        self.cut = not self.cut
        return super().reset(**given)

    def seen(self) -> Any:
        return self.np_random.integers(0, 256, (40, 40, 1), np.uint8)

    def paid(self, action: Any) -> float:
        return float(self.time)


def stacked(num_envs: int, stack: int = 4) -> Any:
    env = VecFrameStack(DummyVecEnv([lambda number=number: Noise(number) for number in range(num_envs)]), stack)
    return VecTransposeImage(env)


def fill(env: Any, buffers: list[Any], steps: int, seen: Any = None) -> Any:
    """Play, store in all of them as SB3 does; the last observation."""
    seen = env.reset() if seen is None else seen
    for step in range(steps):
        actions = np.full(env.num_envs, step % 2)
        following, rewards, dones, infos = env.step(actions)
        last = following.copy()
        for index in np.flatnonzero(dones):
            last[index] = infos[index]["terminal_observation"]
        for buffer in buffers:
            buffer.add(seen, last, actions, rewards, dones, infos)
        seen = following
    return seen


def pair(num_envs: int, rows: int, kind: Any = ReplayStorage, **options: Any) -> tuple[Any, Any]:
    env = stacked(num_envs)
    made = (rows * num_envs, env.observation_space, env.action_space, "cpu", num_envs)
    whole = kind(*made, **options) if options else ReplayBuffer(*made, handle_timeout_termination=True)
    return whole, kind(*made, **options, frame_stack=4)


def same(one: Any, other: Any, batch: int = 400) -> None:
    drawn = []
    for buffer in (one, other):
        np.random.seed(0)
        drawn.append(buffer.sample(batch))
    for name in ("observations", "next_observations", "actions", "rewards", "dones"):
        assert torch.equal(getattr(drawn[0], name), getattr(drawn[1], name)), name


@pytest.mark.parametrize(("num_envs", "steps"), [(1, 2), (3, 9), (3, 13), (1, 14), (3, 60)])
def test_what_is_drawn_is_stocks_to_the_byte(num_envs: int, steps: int):
    stock, ours = pair(num_envs, rows=13)
    fill(stacked(num_envs), [stock, ours], steps)
    same(stock, ours)


@pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayBuffer])
def test_windows_of_several_steps_and_priorities(kind: Any):
    whole, ours = pair(2, rows=13, kind=kind, n_steps=3)
    fill(stacked(2), [whole, ours], 40)
    same(whole, ours)


def test_envs_that_are_reset_between_two_steps_and_a_buffer_that_is_emptied():
    stock, ours = pair(2, rows=13)
    env = stacked(2)
    fill(env, [stock, ours], 5)
    fill(env, [stock, ours], 6)  # begins with a reset in the middle of episodes
    same(stock, ours)
    stock.reset()
    ours.reset()
    seen = fill(env, [], 2)
    fill(env, [stock, ours], 20, seen)  # begins in the middle of an episode, with frames from before
    same(stock, ours)


@pytest.mark.parametrize("rows", [13, 60])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(rows: int):
    env = stacked(2)
    whole, ours = pair(2, rows=rows)
    seen = fill(env, [whole, ours], 31)
    same(whole, ours)
    ours.discard([], [], [1])
    seen = env.reset()
    state, arrays = replay_state(ours)
    _, again = pair(2, rows=rows)
    load_replay_state(again, state, {name: array.copy() for name, array in arrays.items()})
    same(ours, again)
    fill(env, [ours, again], 9, seen)
    same(ours, again)
    with pytest.raises(KeyError, match="ages"):
        load_replay_state(pair(2, rows=rows)[1], state, {k: v for k, v in arrays.items() if k != "frames/ages"})


@pytest.mark.parametrize(("lost", "resting"), [([0], []), ([0, 1], []), ([], [1]), ([0], [1])])
def test_what_is_left_out_is_the_same_as_in_whole_observations(lost: list[int], resting: list[int]):
    made = (26, stacked(2).observation_space, spaces.Discrete(2), "cpu", 2)
    whole, ours, env = ReplayStorage(*made), ReplayStorage(*made, frame_stack=4), stacked(2)
    for _ in range(9):  # each begins with a reset, as after a fault
        seen = fill(env, [whole, ours], 1)
        for buffer in (whole, ours):
            buffer.discard((), (), resting)
        for last in (False, True):
            seen = fill(env, [whole, ours], 1, seen)
            for buffer in (whole, ours):
                buffer.discard(lost, resting, [] if last else resting)
        same(whole, ours)


def test_what_does_not_go_together_is_refused():
    frames = Frames(5, 1, (4, 2, 2), np.uint8, 4)
    one = np.ones((1, 4, 2, 2), np.uint8)
    frames.put(one, one, np.zeros(1))
    with pytest.raises(EnvError, match="env 0: an observation is not the previous one with one new frame"):
        frames.put(2 * one, one, np.zeros(1))
    with pytest.raises(ConfigError, match="frame_stack=3 needs images of 3"):
        ReplayStorage(10, spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(2), "cpu", frame_stack=3)


def test_dqn_stores_frames_once_and_learns_the_same():
    whole, ours = pair(2, rows=13)
    size = whole.observations.nbytes + whole.next_observations.nbytes
    assert ours.frames.frames.nbytes <= size / 8 * (13 + 5) / 13
    assert Frames.bytes_of((4, 40, 40), np.uint8, 4) == 40 * 40 + 1
    assert frames_in(stacked(1)) == 4
    assert frames_in(stacked(1).venv) == 1  # channels last: as they are
    assert frames_in(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])) is None
    found = []
    for plain in (False, True):
        model = DQN("CnnPolicy", stacked(2), buffer_size=60, learning_starts=10, batch_size=8, seed=0)
        if plain:
            made = (60, model.observation_space, model.action_space, "cpu", 2)
            model.replay_buffer = ReplayStorage(*made)
        assert (model.replay_buffer.frames is None) is plain
        model.learn(40)
        found.append([*model.policy.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
