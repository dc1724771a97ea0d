from __future__ import annotations

import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from fasttrain.batch import FinishedEpisode
from fasttrain.vec.base import SlotAdapter, episode_info, slots_of
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


def test_masks_are_answered_from_the_slots(env: NativeVecEnv, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env, "call_envs", lambda *args: pytest.fail("an env was called"))
    assert env.has_attr("action_masks")
    masks = env.env_method("action_masks")
    assert [mask.tolist() for mask in masks] == env.slots.action_masks.tolist()
    masks[0][:] = False
    assert env.slots.action_masks[0].any(), "a copy is handed out"
    assert len(env.env_method("action_masks", indices=[1, 3])) == 2
    monkeypatch.undo()
    env.slots.action_masks = None
    assert not env.has_attr("action_masks")
    with pytest.raises(AttributeError):
        env.env_method("action_masks")


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


def run(adapter: SlotAdapter, steps: int) -> list:
    finished = []
    for _ in range(steps):
        adapter.step_slots(np.full(5, 7))
        finished += adapter.slots.finished
    return finished


@pytest.mark.parametrize("wrapper", [VecNormalize, VecMonitor])
def test_a_wrapper_over_a_native_env_is_not_bypassed(wrapper):
    native = NativeVecEnv(ToyGame())
    assert slots_of(native) is native
    env = wrapper(native)
    assert hasattr(env, "step_slots"), "SB3 wrappers forward unknown attributes"
    assert isinstance(slots_of(env), SlotAdapter)


def test_normalised_observations_arrive_normalised():
    env = VecNormalize(NativeVecEnv(ToyGame(), seed=50), norm_reward=False)
    env.reset()
    adapter = slots_of(env)
    adapter.step_slots(np.full(5, 7))
    assert np.abs(adapter.slots.observations).max() < 5
    np.testing.assert_allclose(adapter.slots.observations, env.normalize_obs(env.get_original_obs()))
    assert adapter.masked
    assert adapter.read_masks().tolist() == env.venv.slots.action_masks.tolist()


@pytest.mark.parametrize("monitor", [True, False])
def test_finished_episodes_equal_those_of_the_native_env(env: NativeVecEnv, monitor: bool):
    adapter = SlotAdapter(toy_gym_vec(monitor=monitor))
    adapter.env.seed(7)
    adapter.reset()
    for _ in range(20):
        env.step_slots(np.full(5, 7))
        adapter.step_slots(np.full(5, 7))
        for ours, theirs in zip(adapter.slots.finished, env.slots.finished, strict=True):
            assert (ours.env_index, ours.length, ours.truncated) == (theirs.env_index, theirs.length, theirs.truncated)
            assert ours.episode_return == pytest.approx(theirs.episode_return)
            np.testing.assert_array_equal(ours.final_observation, theirs.final_observation)
            assert ours.info["score"] == theirs.info["score"]
        dones = env.slots.terminations | env.slots.truncations
        np.testing.assert_array_equal(adapter.slots.terminations | adapter.slots.truncations, dones)
        np.testing.assert_array_equal(adapter.slots.rewards, env.slots.rewards)
        np.testing.assert_array_equal(adapter.read_masks(), env.slots.action_masks)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float32, list, "what is added to logits"])
def test_masks_of_any_type_become_bool(dtype, monkeypatch: pytest.MonkeyPatch):
    adapter = SlotAdapter(toy_gym_vec())
    row = [0, 1, 1, 0, 1, 1, 1, 1]
    given = np.where(row, 0.0, -np.inf) if isinstance(dtype, str) else row if dtype is list else np.array(row, dtype)
    monkeypatch.setattr(adapter.env, "env_method", lambda name: [given] * 5)
    masks = adapter.read_masks()
    assert masks.dtype == np.bool_
    assert masks.tolist() == [[bool(x) for x in row]] * 5


def test_an_env_without_masks_and_its_real_infos(monkeypatch: pytest.MonkeyPatch):
    adapter = SlotAdapter(toy_gym_vec())
    monkeypatch.setattr(adapter.env, "has_attr", lambda name: False)
    assert (adapter.masked, adapter.read_masks()) == (False, None)
    adapter.reset()
    run(adapter, 1)
    assert adapter.infos()[2] == {"TimeLimit.truncated": False}


def test_records_of_envs_reset_from_outside_are_dropped():
    adapter = SlotAdapter(toy_gym_vec(monitor=False))
    adapter.reset()
    run(adapter, 2)
    adapter.env.reset()
    adapter.begin_episodes(np.ones(5, np.bool_))
    assert run(adapter, 3)[0].length == 3
    adapter.reset()
    assert run(adapter, 3)[0].length == 3
