"""SlotAdapter: stock vector envs behind the slots interface."""

from __future__ import annotations

import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from fasttrain.vec.base import SlotAdapter, slots_of
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame, toy_gym_vec


def run(adapter: SlotAdapter, steps: int) -> list:
    finished = []
    for _ in range(steps):
        adapter.step_slots(np.full(5, 7))
        finished += adapter.slots.finished
    return finished


def test_a_native_env_is_its_own_slots():
    env = NativeVecEnv(ToyGame())
    assert slots_of(env) is env


@pytest.mark.parametrize("wrapper", [VecNormalize, VecMonitor])
def test_a_wrapper_over_a_native_env_is_not_bypassed(wrapper):
    env = wrapper(NativeVecEnv(ToyGame()))
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
def test_finished_episodes_equal_those_of_the_native_env(monitor: bool):
    native = NativeVecEnv(ToyGame(), seed=7)
    native.reset()
    adapter = SlotAdapter(toy_gym_vec(monitor=monitor))
    adapter.env.seed(7)
    adapter.reset()
    for _ in range(20):
        native.step_slots(np.full(5, 7))
        adapter.step_slots(np.full(5, 7))
        for ours, theirs in zip(adapter.slots.finished, native.slots.finished, strict=True):
            assert (ours.env_index, ours.length, ours.truncated) == (theirs.env_index, theirs.length, theirs.truncated)
            assert ours.episode_return == pytest.approx(theirs.episode_return)
            np.testing.assert_array_equal(ours.final_observation, theirs.final_observation)
            assert ours.info["score"] == theirs.info["score"]
        dones = native.slots.terminations | native.slots.truncations
        np.testing.assert_array_equal(adapter.slots.terminations | adapter.slots.truncations, dones)
        np.testing.assert_array_equal(adapter.slots.rewards, native.slots.rewards)
        np.testing.assert_array_equal(adapter.read_masks(), native.slots.action_masks)


def test_the_real_infos_are_kept():
    adapter = SlotAdapter(toy_gym_vec())
    adapter.reset()
    run(adapter, 1)
    assert adapter.infos()[2] == {"TimeLimit.truncated": False}


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float32, list, "what is added to logits"])
def test_masks_of_any_type_become_bool(dtype, monkeypatch: pytest.MonkeyPatch):
    adapter = SlotAdapter(toy_gym_vec())
    row = [0, 1, 1, 0, 1, 1, 1, 1]
    given = np.where(row, 0.0, -np.inf) if isinstance(dtype, str) else row if dtype is list else np.array(row, dtype)
    monkeypatch.setattr(adapter.env, "env_method", lambda name: [given] * 5)
    masks = adapter.read_masks()
    assert masks.dtype == np.bool_
    assert masks.tolist() == [[bool(x) for x in row]] * 5


def test_no_masks():
    adapter = SlotAdapter(toy_gym_vec())
    adapter.env.has_attr = lambda name: False
    assert not adapter.masked
    assert adapter.read_masks() is None


def test_records_of_envs_reset_from_outside_are_dropped():
    adapter = SlotAdapter(toy_gym_vec(monitor=False))
    adapter.reset()
    run(adapter, 2)
    adapter.env.reset()
    adapter.begin_episodes(np.ones(5, np.bool_))
    assert run(adapter, 3)[0].length == 3
    adapter.reset()
    assert run(adapter, 3)[0].length == 3
