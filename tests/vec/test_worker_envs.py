"""The rows of one worker, without a process: DummyVecEnv's numbers, and nothing wrong gets through."""

from __future__ import annotations

import functools
import mmap
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain_vec.replacing import SEED_STRIDE, successor_seed
from fasttrain_vec.worker_envs import EnvRows, MaskReader, NeedsRestartError, Settings
from fasttrain_vec.worker_memory import NO_ROW, Layout
from worker_toys import CUT, END, GO, Chaos, Sampler, Walker, action_of

EnvFn = Callable[[], gym.Env[Any, Any]]


class Rows:
    """`EnvRows` over memory of its own; env numbers begin at 10."""

    def __init__(self, factories: list[EnvFn], **changes: Any) -> None:
        self.envs = [factory() for factory in factories]
        values: dict[str, Any] = {
            "worker": 0, "first": 10, "factories": b"", "info_keys": (), "use_masks": True, "check_finite": True,
            "restart_envs": False, "spin_s": 0.0,
        }  # fmt: skip
        options = Settings(**values | changes)
        masks = MaskReader(self.envs[0], options.use_masks)
        layout = Layout(
            num_envs=len(factories), num_workers=1, observation_space=self.envs[0].observation_space,
            action_space=self.envs[0].action_space, mask_width=masks.width, num_info_keys=len(options.info_keys or ()),
        )  # fmt: skip
        self.arrays, _ = layout.views(mmap.mmap(-1, layout.size_bytes))
        self.current = np.full(1, NO_ROW)
        self.rows = EnvRows(options, factories, self.envs, masks, self.arrays, self.current)
        self.buffer = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> list[Any]:
        self.buffer = 0
        seeds = [None if seed is None else seed + row for row in range(len(self.envs))]
        return self.rows.reset(seeds, [options or {}] * len(self.envs), 0)

    def step(self, *actions: Any) -> list[Any]:
        for row, action in enumerate(actions):
            self.arrays.actions[row] = action
        self.buffer = 1 - self.buffer
        return self.rows.step(self.buffer)

    @property
    def observations(self) -> Any:
        return self.arrays.observations[self.buffer]


FLAT_SPACES = st.one_of(
    st.builds(
        lambda shape, dtype: spaces.Box(0, 100, tuple(shape), dtype),
        st.lists(st.integers(1, 3), max_size=3),
        st.sampled_from([np.float32, np.float64, np.uint8, np.int8, np.int64]),
    ),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-4, 4)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 5)),
    st.builds(spaces.MultiBinary, st.lists(st.integers(1, 3), min_size=2, max_size=2)),
)
DICT_SPACES = st.dictionaries(st.sampled_from("abcdef"), FLAT_SPACES, min_size=1, max_size=4).map(spaces.Dict)


@settings(max_examples=60)
@given(st.one_of(FLAT_SPACES, DICT_SPACES), FLAT_SPACES, st.integers(0, 2**31 - 10), st.integers(1, 3))
def test_any_spaces_bring_the_numbers_of_dummy_vec_env(
    observation_space: spaces.Space, action_space: spaces.Space, seed: int, num_envs: int
):
    factory = functools.partial(Sampler, observation_space, action_space)
    ours, theirs = Rows([factory] * num_envs), DummyVecEnv([factory] * num_envs)
    theirs.seed(seed)
    first = theirs.reset()
    ours.reset(seed)
    equal(ours.observations, first)
    action_space.seed(seed)
    for _ in range(8):
        actions = np.array([action_space.sample() for _ in range(num_envs)], action_space.dtype)
        observations, rewards, dones, infos = theirs.step(actions.copy())
        ours.step(*actions)
        equal(ours.observations, observations)
        np.testing.assert_array_equal(ours.arrays.rewards, rewards)
        np.testing.assert_array_equal(ours.arrays.terminations | ours.arrays.truncations, dones)
        for row in np.flatnonzero(dones):
            last, final = infos[row]["terminal_observation"], ours.arrays.final_observations
            if isinstance(last, dict):
                equal({key: part[row] for key, part in final.items()}, last)
            else:
                equal(final[row], last)


def equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            equal(ours[key], value)
    else:
        assert ours.dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def test_a_mask_that_is_missing():
    class Forgetful(Walker):
        def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
            return super()._with_mask(info) if self.steps == 0 else info

    rows = Rows([lambda: Forgetful(0, masks="info")])
    rows.reset(0)
    with pytest.raises(NeedsRestartError, match="no action mask in info.'action_mask'.; every reset and step"):
        rows.step(0)


class Bad(Walker):
    """Answers with `change(answer)`."""

    def __init__(self, change: Callable[[Any], Any], number: int = 0) -> None:
        super().__init__(number)
        self.change = change

    def step(self, action: Any) -> Any:
        return self.change(super().step(action))


def leave(answer: Any) -> Any:
    raise GeneratorExit


def bad(position: int, value: Any) -> Callable[[Any], Any]:
    return lambda answer: (*answer[:position], value, *answer[position + 1 :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bad(0, np.full(4, np.nan, np.float32)), "the observation is not finite"),
        (bad(0, np.zeros(1, np.float32)), r"the observation has shape \(1,\), its space says \(4,\)"),
        (bad(0, np.zeros((4, 1), np.float32)), r"the observation has shape \(4, 1\)"),
        (bad(0, [1, 2, 3]), r"the observation has shape \(3,\)"),
        (bad(0, None), r"the observation has shape \(\)"),
        (bad(0, ["a"] * 4), "the observation, .'a', .*, does not fit its space: ValueError: could not convert string"),
        (bad(1, float("inf")), "the reward is not finite"),
        (bad(1, 1e300), r"the reward 1e\+300, which is too large for float32 \(at most 3.4e38\); scale it down"),
        (bad(1, None), "the reward None, a NoneType; return a number"),
        (bad(1, "1.5"), "the reward '1.5', a str; return a number"),
        (
            bad(2, np.array([True, False])),
            r"terminated=array\(\[ True, False\]\) and truncated=False; return two bools",
        ),
        (bad(4, None), "an info of type NoneType, expected a dict"),
        (bad(4, [1]), "an info of type list, expected a dict"),
        (lambda answer: answer[:4], r"step\(\) returned 4 values, expected 5 values \(env.wrappers=.* adapts"),
        (lambda answer: None, r"step\(\) returned NoneType, expected 5 values"),
        (leave, r"^GeneratorExit \(tests/vec/test_worker_envs.py:\d+, in leave"),
    ],
)
def test_answers_that_are_refused(change: Callable[[Any], Any], message: str):
    rows = Rows([lambda: Walker(0), lambda: Bad(change, 1)])
    rows.reset(20)
    with pytest.raises(NeedsRestartError, match=message) as caught:
        rows.step(0, 4)
    failure = caught.value.failure
    assert failure.env_index == 11
    assert failure.seed == 21
    assert failure.action == "4"
    assert failure.traceback


def test_an_answer_as_a_list_and_an_info_of_another_mapping_are_fine():
    rows = Rows([lambda: Bad(lambda answer: [*answer[:4], MappingProxyType({"int": 3})])], info_keys=("int",))
    rows.reset(0)
    rows.step(0)
    assert rows.arrays.info_values[0, 0] == 3


@pytest.mark.parametrize("answer", [np.zeros(4, np.float32), (np.zeros(4, np.float32),), (np.zeros(4), 3), None, 0])
def test_resets_that_are_refused(answer: Any):
    class Old(Walker):
        def reset(self, **kwargs: Any) -> Any:
            return answer

    rows = Rows([lambda: Old(0)])
    with pytest.raises(NeedsRestartError, match=r"reset\(\) must return \(observation, info\), it returned "):
        rows.reset()


def test_a_bad_last_observation_is_refused_before_the_reset_hides_it():
    rows = Rows([lambda: Chaos(0)])
    rows.reset(0)
    with pytest.raises(NeedsRestartError, match="the last observation of the episode is not finite"):
        rows.step(action_of("nan_at_the_end"))


def test_one_key_of_a_dict_is_named():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64), "b": spaces.Box(-1, 1, (2,), np.float64)})

    class Half(Sampler):
        def step(self, action: Any) -> Any:
            seen = ({"b": np.zeros(3)}, {"b": np.full(2, np.nan)}, {})[int(action)]
            return {"a": np.zeros(2), **seen}, 0.0, False, False, {}

    rows = Rows([lambda: Half(space, spaces.Discrete(3))])
    rows.reset(0)
    with pytest.raises(NeedsRestartError, match="the observation, .*, does not fit its space: KeyError: 'b'"):
        rows.step(2)
    with pytest.raises(NeedsRestartError, match="the observation 'b' is not finite"):
        rows.step(1)
    with pytest.raises(NeedsRestartError, match="the observation 'b' has shape"):
        rows.step(0)


def test_the_check_for_finite_numbers_can_be_left_out():
    rows = Rows([lambda: Chaos(0)], check_finite=False)
    rows.reset(0)
    rows.step(action_of("nan_observation"))
    assert np.isnan(rows.observations[0, 1])


def test_a_failed_env_is_rebuilt_and_its_episode_ends_at_the_state_before():
    """For other faults: test_worker_campaign.py."""
    rows = Rows([lambda number=number: Chaos(number) for number in range(3)], restart_envs=True)
    rows.reset(40)
    rows.step(GO, GO, GO)
    before, broken = rows.observations.copy(), rows.envs[1]
    (record,) = rows.step(GO, action_of("nan_at_the_end"), GO)
    failure = record.failure
    assert (record.env_index, failure.seed, failure.step) == (11, 41, 2)
    assert failure.action == str(action_of("nan_at_the_end"))
    assert rows.envs[1] is not broken
    assert rows.envs[1].seed_given == 41 + SEED_STRIDE
    assert rows.arrays.truncations.tolist() == rows.arrays.lost.tolist() == [False, True, False]
    assert not rows.arrays.terminations.any()
    assert rows.arrays.rewards.tolist() == [1, 0, 1]
    np.testing.assert_array_equal(rows.arrays.final_observations[1], before[1])
    assert rows.observations[:, 2].tolist() == [2, 0, 2], "a first state"
    assert rows.observations[1, 1] > before[1, 1], "of another episode"
    assert rows.step(GO, GO, GO) == []
    assert not rows.arrays.lost.any()
    (again,) = rows.step(GO, action_of("raise"), GO)
    assert again.failure.seed == 41 + SEED_STRIDE, "of the env that failed, not of the one before"


def test_two_failures_in_one_step_and_an_end_between():
    rows = Rows([lambda number=number: Chaos(number) for number in range(4)], restart_envs=True)
    rows.reset(0)
    records = rows.step(action_of("raise"), END, action_of("short_mask"), CUT)
    assert sorted(record.env_index for record in records) == [10, 11, 12, 13], "one record each"
    assert rows.arrays.lost.tolist() == [True, False, True, False]
    assert rows.arrays.terminations.tolist() == [False, True, False, False]
    assert rows.arrays.truncations.tolist() == [True, False, True, True]
    infos = {record.env_index: record.info for record in records}
    assert infos[10] == infos[12] == b""
    assert pickle.loads(infos[11]) == {"number": 1}


@pytest.mark.parametrize(
    ("fault", "told"), [("no build", "OSError: no more licences"), ("blind", "bad data right after a rebuild")]
)
def test_a_rebuilt_env_that_is_no_better_needs_another_process(fault: str, told: str):
    class Blind(Chaos):
        def reset(self, **kwargs: Any) -> Any:
            observation, info = super().reset(**kwargs)
            return (observation * np.nan if len(made) > 1 else observation), info

    def factory() -> Any:
        made.append(1)
        if fault == "no build" and len(made) > 1:
            raise OSError("no more licences")
        return Blind(0)

    made: list[int] = []
    rows = Rows([factory], restart_envs=True)
    rows.reset(0)
    with pytest.raises(NeedsRestartError, match=told):
        rows.step(action_of("raise"))


def test_an_unseeded_reset_keeps_the_seed_that_the_stream_came_from():
    rows = Rows([lambda: Chaos(0)], restart_envs=True)
    rows.reset(9)
    rows.reset()
    (record,) = rows.step(action_of("raise"))
    assert record.failure.seed == 9
    assert rows.envs[0].seed_given == 9 + SEED_STRIDE


def test_seeds_of_successors_differ_and_stay_in_range():
    seeds = [5]
    for _ in range(5000):
        seeds.append(successor_seed(seeds[-1]))
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert successor_seed(5, failures=2) == seeds[2]
    assert successor_seed(None) is None
