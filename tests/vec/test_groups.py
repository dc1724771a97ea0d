from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from fasttrain import SharedMemoryVecEnv
from fasttrain.vec.groups import WorkerGroups
from workers import CounterFactory


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedMemoryVecEnv]:
    env = SharedMemoryVecEnv([CounterFactory(number) for number in range(5)], num_workers=3)
    yield env
    env.close()


def test_groups_step_apart_and_the_env_is_whole_again_afterwards(shared: SharedMemoryVecEnv):
    shared.reset()
    groups = WorkerGroups(shared)
    assert groups.rows == [slice(0, 2), slice(2, 3), slice(3, 5)]
    for _ in range(3):  # an odd number: this group's rows end up in the other observation array
        groups.send_all([0], np.array([1, 2]))
        (first,) = groups.take([0])
    groups.send_all([2], np.array([3, 4]))
    groups.take([2])
    assert first.observations[:, 2].tolist() == [3, 3]
    assert first.observations[:, 3].tolist() == [1, 2]
    groups.finish()
    assert shared.slots.observations[:, 2].tolist() == [3, 3, 0, 1, 1]
    observations, rewards, _, _ = shared.step(np.zeros(5, np.int64))
    assert observations[:, 2].tolist() == [4, 4, 1, 2, 2]
    np.testing.assert_allclose(rewards, [0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.usefixtures("forked_workers")
def test_the_first_ready_group_is_not_the_first_sent():
    env = SharedMemoryVecEnv([CounterFactory(0, 0.2), CounterFactory(1, 0.0)], num_workers=2)
    env.reset()
    groups = WorkerGroups(env)
    groups.send_all([0], np.array([1]))
    groups.send_all([1], np.array([2]))
    assert groups.first_ready([0, 1]) == [1]
    assert groups.take([1])[0].rows == slice(1, 2)
    assert groups.first_ready([0]) == [0]
    groups.take([0])
    groups.finish()
    assert env.slots.observations[:, 2].tolist() == [1, 1]
    env.close()


@pytest.mark.usefixtures("forked_workers")
def test_groups_made_while_a_worker_steps_leave_its_observations_alone():  # as at each rollout of schedule=continuous
    env = SharedMemoryVecEnv([CounterFactory(0), CounterFactory(1, 0.05)], num_workers=2)
    env.reset()
    groups = WorkerGroups(env)
    for group, step in itertools.product((0, 1), (1, 2, 3)):
        groups.send_all([group], np.array([1]))
        groups = WorkerGroups(env)
        assert groups.take([group])[0].observations[:, 2].tolist() == [step]
    groups.finish()
    assert env.slots.observations[:, 2].tolist() == [3, 3]
    env.close()


def test_finished_episodes_carry_their_own_numbers(shared: SharedMemoryVecEnv):
    shared.reset()
    groups = WorkerGroups(shared)
    for step in range(1, 9):  # env 0 ends after 7 steps, env 1, cut, after 8
        groups.send_all([0], np.array([1, 1]))
        done = groups.take([0])[0]
        ended = [(one.env_index, one.length, one.truncated, round(one.episode_return, 4)) for one in done.finished]
        assert ended == {7: [(0, 7, False, 7.0)], 8: [(1, 8, True, 8.8)]}.get(step, [])
        assert [one.final_observation[2] for one in done.finished] == [step][: len(ended)]
    assert done.finished[0].info == {"is_success": False}
    groups.finish()


def test_calls_between_wait_for_what_is_under_way(shared: SharedMemoryVecEnv):
    shared.reset()
    groups = WorkerGroups(shared)
    groups.send_all([1], np.array([2]))
    assert shared.env_method("level") == [0, 1, 2, 3, 4]
    (step,) = groups.take([1])
    assert step.rows == slice(2, 3)
    assert step.observations[0, 2:].tolist() == [1, 2]
    groups.finish()
