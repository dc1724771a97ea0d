"""SlotVecEnv: SB3's interface built on slots."""

from __future__ import annotations

import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.batch import FinishedEpisode
from fasttrain.vec.base import copy_observations, episode_info
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame, toy_gym_vec


@pytest.fixture
def env() -> NativeVecEnv:
    env = NativeVecEnv(ToyGame(), seed=7)
    env.reset()
    return env


def test_steps_and_infos_equal_those_of_dummy_vec_env_with_monitor(env: NativeVecEnv):
    stock = toy_gym_vec()
    stock.seed(7)
    np.testing.assert_array_equal(env.reset(), stock.reset())
    for _ in range(40):
        actions = np.argmax(env.env_method("action_masks"), axis=1)
        *arrays, ours_infos = env.step(actions)
        *stock_arrays, stock_infos = stock.step(actions)
        for ours, theirs in zip(arrays, stock_arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        for info, stock_info in zip(ours_infos, stock_infos, strict=True):
            assert_same_info(info, stock_info)


def assert_same_info(info: dict, stock: dict) -> None:
    if not info:
        assert stock == {"TimeLimit.truncated": False}
        return
    assert info["episode"].keys() == stock["episode"].keys()
    assert info["episode"]["r"] == pytest.approx(stock["episode"]["r"], abs=1e-6)
    assert info["episode"]["l"] == stock["episode"]["l"]
    np.testing.assert_array_equal(info["terminal_observation"], stock["terminal_observation"])
    plain = ("episode", "terminal_observation")
    assert {k: v for k, v in info.items() if k not in plain} == {k: v for k, v in stock.items() if k not in plain}


def test_what_step_returns_survives_the_next_step(env: NativeVecEnv):
    observations, rewards, dones, infos = env.step(np.full(5, 5))
    kept = observations.copy(), rewards.copy(), dones.copy()
    env.step(np.full(5, 6))
    for value, before in zip((observations, rewards, dones), kept, strict=True):
        np.testing.assert_array_equal(value, before)
    assert len({id(info) for info in infos}) == 5, "infos of step() must not be shared"


def test_lean_infos_hold_content_only_where_an_episode_ended(env: NativeVecEnv):
    for _ in range(3):
        env.step_slots(np.full(5, 5))
    infos = env.infos()
    assert infos[0]["score"] == 0
    assert infos[1:] == [{}] * 4


def test_masks_are_answered_from_the_slots(env: NativeVecEnv, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env, "call_envs", lambda *args: pytest.fail("an env was called"))
    assert env.has_attr("action_masks")
    masks = env.env_method("action_masks")
    assert [mask.tolist() for mask in masks] == env.slots.action_masks.tolist()
    masks[0][:] = False
    assert env.slots.action_masks[0].any(), "a copy is handed out"
    assert len(env.env_method("action_masks", indices=[1, 3])) == 2


def test_no_masks_no_action_masks_attribute(env: NativeVecEnv):
    env.slots.action_masks = None
    assert not env.has_attr("action_masks")
    with pytest.raises(AttributeError):
        env.env_method("action_masks")


def test_step_wait_needs_step_async(env: NativeVecEnv):
    with pytest.raises(RuntimeError, match="step_async"):
        env.step_wait()


@pytest.mark.parametrize(
    ("indices", "expected"), [(None, [0, 1, 2, 3, 4]), (2, [2]), (-1, [4]), (np.int64(1), [1]), (range(1, 3), [1, 2])]
)
def test_indices_in_any_form(env: NativeVecEnv, indices, expected):
    assert env.env_indices(indices) == expected


def test_index_out_of_range(env: NativeVecEnv):
    with pytest.raises(IndexError, match="5 envs"):
        env.env_indices(5)


def test_the_episode_record_is_monitors_whatever_the_env_told_under_its_name():
    episode = FinishedEpisode(0, 1.23456789, 4, np.zeros(1), True, {"episode": {"r": 9.0, "l": 4, "t": 0.1}})
    info = episode_info(episode, 2.0)
    assert info["TimeLimit.truncated"] is True
    assert "terminal_observation" not in episode.info, "the env's own dict is left alone"
    assert episode_info(episode, 2.0, keeps_records=False)["episode"]["r"] == 9.0, "a life is no game"
    near = {"r": np.array(1.2345676), "l": 4, "t": 0.1}
    assert episode_info(episode._replace(info={"episode": near}), 2.0)["episode"] is near, "exact, by the env itself"
    for told in ({}, episode.info, {"episode": None}, {"episode": 3}, {"episode": {"number": 3}}):
        mine = episode._replace(info=told)
        assert episode_info(mine, 2.0)["episode"] == {"r": 1.234568, "l": 4, "t": 2.0}
        assert "episode" not in episode_info(mine, 2.0, keeps_records=False) or told is episode.info


def test_copies_of_dict_observations():
    observations = {"a": np.zeros(2), "b": np.ones(2)}
    copied = copy_observations(observations)
    observations["a"][:] = 5
    assert copied["a"].tolist() == [0, 0]


def test_it_is_a_vec_env(env: NativeVecEnv):
    assert isinstance(env, VecEnv)
    assert env.unwrapped is env
