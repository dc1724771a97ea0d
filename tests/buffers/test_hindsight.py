"""HindsightStorage: the draws of SB3's HerReplayBuffer, episodes that are gone or not over, rewards, priorities."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Env, spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from fasttrain.buffers.hindsight import GOAL_KEYS, HindsightStorage, PrioritizedHindsightStorage
from fasttrain.buffers.prefetch import draw_block
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.vec.shared import SharedMemoryVecEnv
from plain_env import PlainEnv

SPACE = spaces.Dict({name: spaces.Box(-np.inf, np.inf, (1,), np.float64) for name in GOAL_KEYS})
MASKS = 3


class Goals(Env[Any, Any]):
    observation_space, action_space = SPACE, spaces.Discrete(9)
    wrong: Any = None
    scale = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return SPACE.sample(), {}

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        assert infos == [{}] * len(achieved)
        if Goals.wrong:
            return Goals.wrong()
        return -self.scale * np.abs(achieved - desired)[..., 0]

    def set_scale(self, scale: float) -> None:
        self.scale = scale

    def compute_action_masks(self, observation: Any) -> Any:
        return np.repeat(observation["desired_goal"] > 0, MASKS, axis=1)


def envs(count: int) -> DummyVecEnv:
    return DummyVecEnv([Goals] * count)


def made(kind: Any = HindsightStorage, size: int = 40, count: int = 3, **options: Any) -> Any:
    return kind(size * count, SPACE, spaces.Discrete(9), device="cpu", n_envs=count, env=envs(count), **options)


def play(buffer: Any, steps: int, lengths: tuple[int, ...] = (4, 7, 5), start: int = 0, **more: Any) -> None:
    """Step t of env e achieves 100 e + t and wants -1; episodes of env e have `lengths[e]` steps."""
    count = buffer.n_envs
    for t in range(start, start + steps):
        at = 100.0 * np.arange(count) + t
        seen = {"observation": at[:, None], "achieved_goal": at[:, None] - 1, "desired_goal": -np.ones((count, 1))}
        dones = np.array([t % lengths[env] == lengths[env] - 1 for env in range(count)])
        cut = [{"TimeLimit.truncated": bool(done and t % 2)} for done in dones]
        buffer.add(seen, seen | {"achieved_goal": at[:, None]}, np.full((count, 1), t % 9), at, dones, cut, **more)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize(("steps", "size"), [(9, 40), (40, 40), (99, 40), (100, 9)])
def test_draws_are_those_of_stock(strategy: str, steps: int, size: int):
    buffers = [made(kind, size, goal_selection_strategy=strategy) for kind in (HindsightStorage, HerReplayBuffer)]
    normal = VecNormalize(envs(3))
    drawn = []
    for buffer in buffers:
        play(buffer, steps)
        np.random.seed(0)
        drawn.append([buffer.sample(23, env) for env in (None, normal, None)])
    for ours, stock in zip(*drawn, strict=True):
        for name in ("actions", "dones", "rewards"):
            assert torch.equal(getattr(ours, name), getattr(stock, name)), name
        for key in GOAL_KEYS:
            assert torch.equal(ours.observations[key], stock.observations[key])
            assert torch.equal(ours.next_observations[key], stock.next_observations[key])


def test_before_an_episode_has_ended_nothing_can_be_drawn():
    buffer = made()
    play(buffer, 3)
    assert not buffer.can_draw
    with pytest.raises(ConfigError, match="none has ended before the first update: set warmup_steps to more than"):
        buffer.sample(4)
    play(buffer, 1, start=3)
    assert buffer.can_draw
    assert set(buffer.sample(50).observations["observation"][:, 0].tolist()) == {0.0, 1.0, 2.0, 3.0}
    buffer.reset()
    assert not buffer.can_draw


def test_an_episode_that_a_fault_ended_is_drawn_without_its_last_step():
    buffer = made()
    play(buffer, 4)
    buffer.discard([0, 1])  # env 0 has just ended, env 1 was lost in the middle
    seen = set(buffer.sample(200).observations["observation"][:, 0].tolist())
    assert seen == {0.0, 1.0, 2.0, 100.0, 101.0, 102.0}
    play(buffer, 7, start=7)
    assert {107.0, 113.0} <= set(buffer.sample(400).observations["observation"][:, 0].tolist())
    with pytest.raises(EnvError, match="an env in which the policy acts at every step"):
        buffer.discard([], [1])


def test_an_episode_longer_than_the_buffer_is_drawn_from_what_is_left():
    buffer = made(size=5, count=1)
    play(buffer, 12, (12,))
    assert set(buffer.sample(100).observations["observation"][:, 0].tolist()) == {7.0, 8.0, 9.0, 10.0, 11.0}


def test_an_episode_under_way_is_ended_where_a_run_goes_on():
    buffer = made(count=2)
    play(buffer, 6, (9, 4))
    buffer.truncate_last_trajectory()
    assert buffer.dones[5].tolist() == buffer.timeouts[5].tolist() == [1, 1]
    assert {0.0, 5.0, 104.0, 105.0} <= set(buffer.sample(300).observations["observation"][:, 0].tolist())
    play(buffer, 4, (20, 4), start=8)
    assert buffer.ep_start[9].tolist() == [0, 6]
    assert buffer.ep_length[8:10].tolist() == [[0, 4], [0, 4]]


def test_a_pickled_buffer_draws_the_same_after_it_was_given_an_env():
    buffer = made()
    play(buffer, 30)
    again = pickle.loads(pickle.dumps(buffer))
    with pytest.raises(EnvError, match="call set_env after loading"):
        again.sample(8)
    again.set_env(envs(3))
    play(again, 5, start=30)
    play(buffer, 5, start=30)
    batches = []
    for each in (buffer, again):
        np.random.seed(1)
        batches.append(each.sample(30))
    assert torch.equal(batches[0].rewards, batches[1].rewards)


def test_masks_are_those_of_the_new_goal_where_the_env_computes_them():
    buffer = made(mask_width=MASKS, n_sampled_goal=1)
    play(buffer, 30, next_masks=np.array([[True, False, True]] * 3))
    masks = buffer.sample(40).next_action_masks
    assert masks[:20].tolist() == [[True, False, True]] * 20
    assert masks[20:].all(dim=1).sum() > 15


def test_a_block_for_kernels_has_goals_and_rewards_too():
    buffer = made(n_sampled_goal=3)
    play(buffer, 60)
    batches = draw_block(buffer, 2, 8, None).batches
    wanted = batches.next_observations[batches.next_rows][..., 1]
    assert ((wanted >= 0) == (np.arange(8) < 6)).all()
    reached = batches.next_observations[batches.next_rows][..., 0]
    np.testing.assert_array_equal(batches.rewards[:, :6], -np.abs(reached - wanted)[:, :6])
    np.testing.assert_array_equal(batches.rewards[:, 6:], reached[:, 6:])


def test_priorities_of_episodes_under_way_and_gone_are_zero():
    buffer = made(PrioritizedHindsightStorage, size=12, count=1, n_sampled_goal=1)
    play(buffer, 6, (4,))
    assert buffer.priorities[:, 0].tolist() == [1] * 4 + [0] * 8
    batch = buffer.sample(16)
    assert batch.weights.tolist() == [[1.0]] * 16
    assert (batch.next_observations["desired_goal"][::2] == -1).all()
    assert (batch.next_observations["desired_goal"][1::2] >= 0).all()
    buffer.update_priorities(np.array([3]), np.array([7.0]))
    play(buffer, 7, (4,), start=6)
    assert buffer.priorities[:4, 0].tolist() == [0] * 4
    np.testing.assert_allclose(buffer.priorities[4:, 0], [7.000001**0.6] * 8)


def test_an_env_in_a_worker_computes_rewards_by_what_it_is_now():
    with_workers = SharedMemoryVecEnv([Goals] * 2, num_workers=1)
    try:
        buffer = made(count=2)
        buffer.set_env(with_workers)
        play(buffer, 20)
        np.random.seed(0)
        before = buffer.sample(10).rewards
        with_workers.env_method("set_scale", 3.0)
        np.random.seed(0)
        after = buffer.sample(10).rewards
        assert torch.equal(before[2:] * 3, after[2:])
        assert (before[2:] != 0).any()
    finally:
        with_workers.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"goal_selection_strategy": "past"}, "choose future, final, episode"),
        ({"n_sampled_goal": 0}, "n_sampled_goal=0 must be at least 1"),
        ({"copy_info_dict": True}, "only in SB3's HerReplayBuffer"),
        ({"n_steps": 2}, "hindsight supports only n_steps=1"),
        ({"optimize_memory_usage": True, "handle_timeout_termination": False}, "optimize_memory_usage=False"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        made(**options)


def test_a_vec_env_without_gymnasium_envs_is_asked_too():
    class Batch(DummyVecEnv):
        def env_method(self, method_name: str, *arguments: Any, **further: Any) -> list[Any]:
            assert method_name == "compute_reward", "it has no other method"
            return [np.full(len(arguments[0]), 7.0)]

    buffer = made(count=2)
    buffer.set_env(Batch([Goals] * 2))
    play(buffer, 20)
    assert buffer.sample(10).rewards[2:].tolist() == [[7.0]] * 8


def test_envs_that_are_no_goal_envs():
    plain = spaces.Dict({"observation": SPACE["observation"]})
    with pytest.raises(ConfigError, match="achieved_goal and desired_goal is missing"):
        HindsightStorage(9, plain, spaces.Discrete(9), "cpu")
    without = DummyVecEnv([PlainEnv])
    with pytest.raises(ConfigError, match=r"give it a method compute_reward\(achieved_goal"):
        HindsightStorage(9, SPACE, spaces.Discrete(9), "cpu", env=without)


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (lambda: np.zeros((3, 1)), r"for each of 3 rows, and it returned the shape \(3, 1\)"),
        (lambda: np.full(3, np.nan), "returned a number that is not finite"),
        (lambda: 1 / 0, "compute_reward failed for a batch of transitions: ZeroDivisionError"),
    ],
)
def test_rewards_that_are_wrong(reward: Any, text: str, monkeypatch: pytest.MonkeyPatch):
    early, late = made(), made()
    for buffer in (early, late):
        play(buffer, 30)
    late.sample(4)
    monkeypatch.setattr(Goals, "wrong", reward)
    for buffer, kind in ((early, EnvSpecError), (late, EnvError)):
        with pytest.raises(EnvError, match=text) as told:
            buffer.sample(4)
        assert told.type is kind
