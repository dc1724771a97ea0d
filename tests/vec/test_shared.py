"""SharedMemoryVecEnv: a whole SB3 VecEnv, with the trajectories of DummyVecEnv bit for bit."""

from __future__ import annotations

import functools
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize

import fasttrain
from fasttrain.envs.masks import random_legal_action
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.shared import SharedMemoryVecEnv
from toys import single_thread
from worker_toys import ACTION_SPACES, Hat, Sampler, Stubborn, Walker, processes_left, walkers

pytestmark = pytest.mark.usefixtures("forked_workers")

_one_thread = pytest.fixture(autouse=True, scope="module")(single_thread)

EnvFns = list[Callable[[], gym.Env[Any, Any]]]
KEYS = ("int", "float", "bool", "text", "none", "np_float", "np_int", "np_bool", "array", "big", "nested", "point",
        "a key with spaces", "sometimes", "no such key")  # fmt: skip


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal, of equal types, all the way down; floats bit for bit."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), where
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert ours.tobytes() == theirs.tobytes(), f"{where}: {ours} {theirs}"
    else:
        assert type(ours) is type(theirs), f"{where}: {type(ours)} {type(theirs)}"
        assert ours == theirs, where


def in_space(space: spaces.Space[Any], observation: Any) -> Any:
    """In the dtypes of its space, as DummyVecEnv's buffer holds what an env gave; scalars as arrays."""
    if isinstance(space, spaces.Dict):
        return {key: np.asarray(observation[key], part.dtype) for key, part in space.spaces.items()}
    return np.asarray(observation, space.dtype)


def without(info: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in keys}


class Twins:
    """The same envs in our vector env and in DummyVecEnv, stepped with the same legal actions."""

    def __init__(self, env_fns: EnvFns, **options: Any) -> None:
        self.ours, self.theirs = SharedMemoryVecEnv(env_fns, **options), DummyVecEnv(env_fns)
        self.keys = options.get("info_keys", ())
        self.monitored = all(self.theirs.env_is_wrapped(Monitor))
        self.ends = 0

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            assert self.ours.seed(seed) == self.theirs.seed(seed)
        if options is not None:
            self.ours.set_options(options)
            self.theirs.set_options(options)
        assert_same(self.ours.reset(), self.theirs.reset(), "first observations")
        self.compare_resets()
        self.compare_masks()

    def steps(self, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.ours.action_space.seed(seed)
        for number in range(count):
            masks = self.ours.read_masks()
            actions = np.array(
                [
                    random_legal_action(self.ours.action_space, None if masks is None else masks[index], rng)
                    for index in range(self.ours.num_envs)
                ]
            )
            self.compare(self.ours.step(actions.copy()), self.theirs.step(actions.copy()), f"step {number}")
            np.testing.assert_array_equal(self.ours.slots.actions, actions, "an env changes only its own copy")

    def compare(self, ours: Any, theirs: Any, where: str) -> None:
        assert_same(ours[0], theirs[0], f"{where}: observations")
        assert_same(ours[1], theirs[1], f"{where}: rewards")
        assert_same(ours[2], theirs[2], f"{where}: dones")
        self.compare_masks()
        for index, (our, their) in enumerate(zip(ours[3], theirs[3], strict=True)):
            if theirs[2][index]:
                self.ends += 1
                # DummyVecEnv copies infos after the reset, by when the env has changed its list; the times differ.
                assert our.get("live", [0])[-1:] != [-1]
                record = our["episode"]
                assert their.get("episode", record)["r"] == record["r"]
                assert their.get("episode", record)["l"] == record["l"]
                their["terminal_observation"] = in_space(self.ours.observation_space, their["terminal_observation"])
                assert_same(without(our, "live", "episode"), without(their, "live", "episode"), f"{where}, env {index}")
            elif self.keys is None:
                assert_same(our, their, f"{where}, env {index}")
            else:
                assert_same(our, {key: their[key] for key in self.keys if key in their}, f"{where}, env {index}")
        if theirs[2].any():
            self.compare_resets()

    def compare_resets(self) -> None:
        if self.keys is None:
            for our, their in zip(self.ours.reset_infos, self.theirs.reset_infos, strict=True):
                assert_same(without(our, "live"), without(their, "live"), "reset infos")

    def compare_masks(self) -> None:
        if self.ours.masked and self.theirs.has_attr("action_masks"):
            masks = np.stack(self.theirs.env_method("action_masks")).astype(np.bool_)
            assert_same(np.stack(self.ours.env_method("action_masks")), masks, "masks")

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


# --- the same numbers as DummyVecEnv


def test_steps_are_those_of_dummy_vec_env_with_whole_infos():
    twins = Twins(walkers(4), num_workers=2, info_keys=None)
    twins.reset(seed=3)
    twins.steps(500)  # of four envs
    assert twins.ends > 200
    twins.close()


def test_vector_steps_are_those_of_dummy_vec_env():
    twins = Twins(walkers(2, rich=False), num_workers=2)
    twins.reset(seed=11)
    twins.steps(2_000)
    assert twins.ends > 400
    twins.close()


def test_kept_infos_are_those_of_dummy_vec_env():
    twins = Twins(walkers(3), num_workers=2, info_keys=KEYS)
    twins.reset(seed=5)
    twins.steps(500)
    assert twins.ends > 150
    twins.close()


def test_seven_envs_on_three_workers_several_seeds_and_options():
    twins = Twins(walkers(7), num_workers=3, info_keys=None)
    assert [(worker.first, worker.stop) for worker in twins.ours.crew.workers] == [(0, 2), (2, 5), (5, 7)]
    for seed in (0, 1, 2**31 - 8):
        twins.reset(seed=seed)
        twins.steps(100, seed)
    twins.reset()  # unseeded: the streams go on
    twins.steps(50)
    twins.reset(options=[{"length": 2 + index} for index in range(7)])
    assert [info["options"]["length"] for info in twins.ours.reset_infos] == [2, 3, 4, 5, 6, 7, 8]
    twins.steps(50)
    twins.reset(options={"length": 3})
    twins.steps(20)
    twins.reset(seed=5)  # seeds and options are used once
    assert all(info["options"] is None for info in twins.ours.reset_infos)
    twins.steps(20)
    twins.close()


@pytest.mark.parametrize("masks", ["method", "info", "observation"])
@pytest.mark.parametrize(("actions", "dtype"), [("discrete", "int8"), ("multi_discrete", "float32"),
                                                ("multi_binary", "bool")])  # fmt: skip
def test_masks_of_every_convention_come_with_the_step(masks: str, actions: str, dtype: str):
    """Three conventions × three dtypes × three spaces (a Latin square's worth); flat, as sb3-contrib wants them."""
    twins = Twins(walkers(3, actions=actions, masks=masks, dtype=dtype, rich=False), num_workers=2)
    twins.reset(seed=1)
    reference = [Walker(index, actions, masks, dtype) for index in range(3)]
    for number in range(30):
        action_masks = twins.ours.read_masks()
        assert action_masks.dtype == np.bool_
        observations = twins.ours.slots.observations
        states = observations["state"] if masks == "observation" else observations
        for env, state in zip(reference, states, strict=True):
            env.steps = int(state[2])
        assert_same(action_masks, np.stack([env.legal() for env in reference]).astype(np.bool_), f"masks, {number}")
        twins.steps(1, number)
    assert twins.ends
    assert is_masking_supported(twins.ours)
    assert_same(get_action_masks(twins.ours), twins.ours.read_masks())
    twins.close()


def test_envs_without_masks_and_masks_not_asked_for():
    for env_fns, options in ((walkers(2, masks="none"), {}), (walkers(2), {"use_masks": False})):
        env = SharedMemoryVecEnv(env_fns, num_workers=1, **options)
        env.reset()
        assert not env.masked
        assert env.read_masks() is None
        assert not is_masking_supported(env)
        env.close()


def test_the_search_for_masks_costs_no_episode():
    """It resets an env that has no method to ask; a DummyVecEnv's env counts from 1 all the same."""
    for masks in ("none", "info"):
        env = SharedMemoryVecEnv(walkers(3, masks=masks), num_workers=2)
        assert env.reset()[:, 1].tolist() == [1, 1, 1]
        env.close()


OBSERVATIONS = {
    "image": spaces.Box(0, 255, (2, 12, 12), np.uint8),
    "float64": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "scalar": spaces.Box(0, 1, (), np.float32),
    "discrete": spaces.Discrete(7, start=-3),
    "multi_discrete": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 5, 5), np.uint8),
            "odd": spaces.Box(-5, 5, (3,), np.int16),
            "which": spaces.Discrete(4),
            "bits": spaces.MultiBinary(5),
            "heads": spaces.MultiDiscrete([3, 2]),
        }
    ),
}


@pytest.mark.parametrize(
    ("observations", "actions"),
    [("image", "discrete"), ("float64", "box"), ("scalar", "multi_discrete"), ("discrete", "multi_binary"),
     ("multi_discrete", "discrete"), ("multi_binary", "box"), ("dict", "multi_discrete")],
)  # fmt: skip
def test_spaces(observations: str, actions: str):
    space, action_space = OBSERVATIONS[observations], ACTION_SPACES[actions]
    fns = [functools.partial(Sampler, space, action_space) for _ in range(3)]
    ours, theirs = SharedMemoryVecEnv(fns, num_workers=2, info_keys=None), DummyVecEnv(fns)
    assert ours.observation_space == space
    assert ours.action_space == action_space
    ours.seed(4), theirs.seed(4)
    assert_same(ours.reset(), theirs.reset())
    action_space.seed(0)
    for _ in range(7):
        actions_now = np.array([action_space.sample() for _ in range(3)])
        our, their = ours.step(actions_now), theirs.step(actions_now)
        for mine, stock in zip(our[:3], their[:3], strict=True):
            assert_same(mine, stock)
        for index, info in enumerate(our[3]):
            assert_same(info["seen"], their[3][index]["seen"], "the action as the env saw it")
            assert info["TimeLimit.truncated"] == their[3][index]["TimeLimit.truncated"]
            if their[2][index]:
                assert_same(info["terminal_observation"], in_space(space, their[3][index]["terminal_observation"]))
    ours.close()


def test_observations_are_copies_and_slots_are_not():
    env = SharedMemoryVecEnv(walkers(2), num_workers=1)
    given = [env.reset(), *(env.step(np.zeros(2, int))[0] for _ in range(2))]
    kept, rewards = [observations.copy() for observations in given], env.slots.rewards
    for _ in range(3):
        env.step(np.zeros(2, int))
    assert_same(np.stack(given), np.stack(kept))
    assert env.slots.rewards is rewards, "slots stay where they are"
    env.close()


def test_a_reset_without_info_leaves_none_of_the_reset_before():
    class Quieter(Walker):
        def reset(self, **options: Any) -> Any:
            observation, info = super().reset(**options)
            return observation, info if self.episode == 1 else {}

    env = SharedMemoryVecEnv([lambda: Quieter(0)], num_workers=1, info_keys=None)
    env.set_options({"length": 1})
    env.reset()
    assert env.reset_infos[0]["episode_number"] == 1
    env.step([0])
    assert env.reset_infos == [{}]
    env.close()


def test_finished_episodes_and_their_sums():
    env = SharedMemoryVecEnv(walkers(3), num_workers=2)
    env.seed(0)
    env.reset()
    returns, lengths, seen = np.zeros(3), np.zeros(3, int), 0
    for _ in range(60):
        env.step_slots(np.full(3, 2))
        returns += env.slots.rewards
        lengths += 1
        ended = np.flatnonzero(env.slots.terminations | env.slots.truncations)
        assert [episode.env_index for episode in env.slots.finished] == ended.tolist()
        for episode in env.slots.finished:
            index = episode.env_index
            assert episode.length == lengths[index] == episode.final_observation[2]
            assert episode.episode_return == pytest.approx(returns[index], rel=1e-12)
            assert episode.truncated == (index == 1), "env 2 is cut and over at once: over"
            assert episode.info["int"] == lengths[index], "the whole info comes with the end"
            assert not episode.lost
            returns[index], lengths[index], seen = 0.0, 0, seen + 1
    assert seen > 10
    assert env.lost_steps == env.restarts == 0
    env.close()


# --- infos


def test_an_info_that_cannot_travel_is_named_once_and_left_out():
    class Secretive(Walker):
        def step(self, action: Any) -> Any:
            from worker_toys import Opaque

            *answer, info = super().step(action)
            return *answer, {"int": info["int"], "secret": Opaque()}

    env = SharedMemoryVecEnv([lambda: Secretive(0)] * 3, num_workers=2, info_keys=None)
    env.reset()
    with pytest.warns(UserWarning, match="info entries of env 0 cannot be pickled and are left out: secret"):
        env.step(np.zeros(3, int))
    for _ in range(20):  # a second warning would be an error
        *_, infos = env.step(np.zeros(3, int))
        assert all(info["int"] >= 1 and "secret" not in info for info in infos)
    env.close()


def test_a_reset_info_that_cannot_travel_is_named_too():
    class Secretive(Walker):
        def reset(self, **kwargs: Any) -> Any:
            from worker_toys import Opaque

            observation, _ = super().reset(**kwargs)
            return observation, {"episode_number": self.episode, "secret": Opaque()}

    env = SharedMemoryVecEnv([lambda: Secretive(0)] * 2, num_workers=1, info_keys=None)
    with pytest.warns(UserWarning, match="info entries of env 0 cannot be pickled and are left out: secret"):
        env.reset()
    assert env.reset_infos == [{"episode_number": 1}] * 2
    env.close()


def test_an_info_whose_class_is_not_here_is_left_out_with_one_warning():
    class Foreign(Walker):
        def step(self, action: Any) -> Any:
            from worker_toys import OnlyThere

            *answer, info = super().step(action)
            return *answer, {"what": OnlyThere(), **info}

    env = SharedMemoryVecEnv([lambda: Foreign(0)] * 2, num_workers=1, info_keys=("what", "int"))
    env.reset()
    with pytest.warns(UserWarning, match="cannot be read in the trainer .no such class in the trainer."):
        env.step(np.zeros(2, int))
    for _ in range(20):  # a second warning would be an error
        *_, dones, infos = env.step(np.zeros(2, int))
        assert all("what" not in info for info in infos)
        assert all(info["int"] >= 1 for info, done in zip(infos, dones, strict=True) if not done)
    env.close()


def test_an_info_without_news_is_an_empty_dict_of_its_own():
    env = SharedMemoryVecEnv(walkers(3), num_workers=2)
    env.seed(0)
    env.reset()
    *_, dones, infos = env.step(np.zeros(3, int))
    assert not dones.any()
    assert infos == [{}, {}, {}]
    infos[0]["mine"] = 1
    assert infos[1] == {}
    env.close()


def test_a_number_called_perf_is_the_envs_own_affair():
    class Perf(Walker):
        def step(self, action: Any) -> Any:
            *answer, _ = super().step(action)
            return *answer, {"perf": 0.5 if self.number else {"enemy_turn_ms": 2.0}}

    env = SharedMemoryVecEnv([lambda: Perf(0), lambda: Perf(1)], num_workers=1, info_keys=("perf",))
    env.seed(0)
    env.reset()
    *_, infos = env.step(np.zeros(2, int))
    assert infos == [{"perf": {"enemy_turn_ms": 2.0}}, {"perf": 0.5}]
    assert env.times_ns()["opponents"] == 2_000_000
    env.close()


# --- calls into the envs


@pytest.fixture(scope="module")
def calling() -> Iterator[SharedMemoryVecEnv]:
    """Five wrapped envs on two workers."""
    env = SharedMemoryVecEnv([lambda i=i: Stubborn(Hat(Walker(i))) for i in range(5)], num_workers=2)
    env.reset()
    yield env
    env.close()


def test_methods_and_indices(calling: SharedMemoryVecEnv):
    before = [len(calls) for calls in calling.env_method("heard")]
    assert [number for number, _ in calling.env_method("note", 1, key="word")] == [0, 1, 2, 3, 4]
    assert [number for number, _ in calling.env_method("note", indices=[4, 0, -2])] == [4, 0, 3]
    assert [number for number, _ in calling.env_method("note", indices=2)] == [2]
    assert [number for number, _ in calling.env_method("note", indices=np.array([1]))] == [1]
    assert calling.env_method("note", indices=[]) == []
    heard = calling.env_method("heard")
    assert [len(calls) - old for calls, old in zip(heard, before, strict=True)] == [2, 2, 2, 2, 2]
    assert heard[1][before[1]] == ((1,), {"key": "word"})
    assert [number for number, _ in calling.env_method("note", indices=[3, 3])] == [3, 3], "twice if asked twice"
    with pytest.raises(IndexError, match="env index 5 is out of range: there are 5 envs"):
        calling.env_method("note", indices=[5])


def test_attributes_reach_through_wrappers_once_per_worker(calling: SharedMemoryVecEnv):
    assert calling.get_attr("number") == [0, 1, 2, 3, 4]
    assert calling.get_attr("colour", indices=[1]) == ["red"]
    requests = [int(row[0]) for row in calling.crew.control]
    calling.set_attr("level", 7)
    assert [int(row[0]) for row in calling.crew.control] == [number + 1 for number in requests], "one per worker"
    calling.set_attr("level", 9, indices=[0, 4])
    assert calling.env_method("get_wrapper_attr", "level") == [9, 7, 7, 7, 9], "as the env itself sees it"
    calling.set_attr("colour", np.arange(3), indices=0)
    assert calling.get_attr("colour", indices=0)[0].tolist() == [0, 1, 2]


def test_a_value_that_does_not_stick_is_an_error(calling: SharedMemoryVecEnv):
    with pytest.raises(EnvError, match="mood was set to 'good' and reads 'bad'"):
        calling.set_attr("mood", "good")
    calling.set_attr("mood", "bad")


def test_what_is_not_there_is_an_attribute_error(calling: SharedMemoryVecEnv):
    with pytest.raises(AttributeError, match="no_such_thing"):
        calling.get_attr("no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        calling.env_method("no_such_thing")
    assert calling.has_attr("colour")
    assert not calling.has_attr("no_such_thing")


def test_a_call_that_raises_is_named_and_the_env_goes_on(calling: SharedMemoryVecEnv):
    with pytest.raises(EnvError, match="ValueError: the board fell .*worker_toys.py:.* in fail") as caught:
        calling.env_method("fail", ValueError)
    assert "in fail" in str(caught.value.__cause__), "the worker's traceback"
    with pytest.raises(EnvError, match="SystemExit"):
        calling.env_method("fail", SystemExit)
    assert calling.get_attr("number") == [0, 1, 2, 3, 4]


def test_values_that_cannot_travel_are_named_and_the_env_goes_on(calling: SharedMemoryVecEnv):
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        calling.set_attr("level", lambda: 0)
    with pytest.raises(EnvError, match="TypeError: Opaque stays where it is"):
        calling.env_method("opaque")
    with pytest.raises(EnvError, match="cannot be read in the trainer: no such class in the trainer"):
        calling.env_method("only_here")
    calling.set_options([{}, {}, {}, {}, {"length": lambda: 0}])
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        calling.reset()
    calling.set_options(None)
    assert calling.get_attr("number") == [0, 1, 2, 3, 4]
    calling.reset()
    calling.step(np.zeros(5, int))


def test_arguments_that_only_the_trainer_can_load(calling: SharedMemoryVecEnv, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    (tmp_path / "only_at_home.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_at_home

    with pytest.raises(EnvError, match="No module named 'only_at_home'"):
        calling.env_method("note", only_at_home.Thing())
    assert calling.get_attr("number") == [0, 1, 2, 3, 4], "the workers live"


def test_large_arguments_and_answers(calling: SharedMemoryVecEnv):
    large = np.arange(500_000)  # 4 MB, many times what a pipe holds
    calling.set_attr("level", large)
    for found in calling.get_attr("level"):
        assert_same(found, large)
    calling.set_attr("level", 0)


def test_masks_cost_no_call_into_a_worker(calling: SharedMemoryVecEnv):
    calling.reset()
    pids = [worker.process.pid for worker in calling.crew.workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        masks = calling.env_method("action_masks")
        some = calling.env_method("action_masks", indices=[4, 1])
        assert calling.has_attr("action_masks")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert len(masks) == 5
    assert_same(np.stack(masks), calling.read_masks())
    assert_same(np.stack(some), calling.read_masks()[[4, 1]])
    masks[0][:] = False
    assert calling.read_masks()[0].any(), "a copy"


def test_wrappers_are_found(calling: SharedMemoryVecEnv):
    assert calling.env_is_wrapped(Hat) == [True] * 5
    assert calling.env_is_wrapped(gym.Wrapper, indices=[0]) == [True], "a base class counts, as for isinstance"
    assert calling.env_is_wrapped(Monitor, indices=[1, 2]) == [False, False]


def test_pictures(calling: SharedMemoryVecEnv):
    assert [frame[0, 0, 0] for frame in calling.get_images()] == [0, 1, 2, 3, 4]
    assert calling.render().shape[2] == 3
    assert calling.render_mode == "rgb_array"


def test_there_is_no_envs_and_the_message_says_what_to_do_instead(calling: SharedMemoryVecEnv):
    with pytest.raises(AttributeError, match=r"env_method\(name, …\), get_attr\(name\) and set_attr\(name, value\)"):
        _ = calling.envs
    assert not hasattr(calling, "envs")


def test_no_torch_and_one_thread_each(calling: SharedMemoryVecEnv):
    first, *_, last = calling.env_method("process")
    assert first["pid"] != last["pid"]
    for process in (first, last):
        assert process["loaded"] == []
        assert set(process["threads"].values()) == {"1"}
        assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} <= set(process["threads"])


# --- order of calls


def test_steps_out_of_turn(calling: SharedMemoryVecEnv):
    calling.reset()
    with pytest.raises(RuntimeError, match="step_wait.. without step_async"):
        calling.step_wait()
    calling.step_async(np.zeros(5, int))
    with pytest.raises(RuntimeError, match="while a step is pending: call step_wait.. first"):
        calling.step_async(np.zeros(5, int))
    calling.step_wait()


def test_a_call_while_a_step_is_pending_does_not_disturb_it():
    twins = Twins(walkers(3), num_workers=2, info_keys=None)
    twins.reset(seed=8)
    for number in range(40):
        actions = np.full(3, number % 5)
        twins.ours.step_async(actions)
        if number % 2:
            assert twins.ours.get_attr("number") == [0, 1, 2]
        if number % 4 == 3:
            twins.ours.set_attr("level", number, indices=[number % 3])
        twins.compare(twins.ours.step_wait(), twins.theirs.step(actions), f"step {number}")
    twins.ours.step_async(actions)
    twins.reset(seed=9)  # drops the step
    twins.steps(20)
    twins.close()


@pytest.mark.parametrize("actions", [[0], np.zeros(4, int), np.zeros((5, 2), int), 0])
def test_a_wrong_number_of_actions_is_refused(calling: SharedMemoryVecEnv, actions: Any):
    with pytest.raises(ValueError, match=r"actions of shape .* for 5 envs: expected \(5,\)"):
        calling.step(actions)
    calling.step([0, 0, 0, 0, 0])


def test_after_close(tmp_path: Path):
    env = SharedMemoryVecEnv(walkers(3), num_workers=2)
    env.reset()
    env.env_method("write_when_closed", str(tmp_path / "closed"))
    env.close()
    env.close()
    assert sorted((tmp_path / "closed").read_text().split()) == ["0", "1", "2"], "each env is closed, once"
    for use in (env.reset, lambda: env.step(np.zeros(3, int)), lambda: env.get_attr("level"),
                lambda: env.env_method("note"), env.step_wait, lambda: env.step_slots(np.zeros(3, int))):  # fmt: skip
        with pytest.raises(EnvError, match="this SharedMemoryVecEnv is closed: build a new one"):
            use()
    assert env.slots.observations.shape == (3, 4), "what was read stays readable"


def test_a_vec_env_that_is_dropped_leaves_nothing():
    env = SharedMemoryVecEnv(walkers(2), num_workers=2)
    env.reset()
    pids = [worker.process.pid for worker in env.crew.workers]
    handle = env.crew._block._handle
    del env
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


# --- refusals


@pytest.mark.parametrize(
    ("env_fns", "options", "message"),
    [
        ([], {}, "needs at least one env function"),
        (walkers(1), {"on_env_error": "ignore"}, "on_env_error='ignore': expected 'raise' or 'restart'"),
        ([lambda: Walker(0), lambda: Walker(1, "multi_discrete")], {"num_workers": 2}, "the envs differ: env 0 has"),
        ([lambda: Walker(0), lambda: Walker(1, masks="none")], {"num_workers": 2}, "the envs differ: env 0 has"),
        ([lambda: Walker(0), lambda: Walker(1, "multi_discrete")], {"num_workers": 1}, "the envs differ: env 0 has"),
        ([lambda: Sampler(spaces.Text(3), spaces.Discrete(2))], {}, "found Text"),
        ([lambda: Sampler(spaces.Tuple([spaces.Discrete(2)]), spaces.Discrete(2))], {}, "found Tuple"),
        ([lambda: Sampler(spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})}), spaces.Discrete(2))], {},
         "found Dict"),
        ([lambda: Sampler(spaces.Discrete(2), spaces.Dict({"b": spaces.Discrete(2)}))], {}, "found Dict"),
        ([lambda: 1 / 0], {}, "ZeroDivisionError: division by zero"),
        ([lambda: __import__("sys").exit("no licence")], {}, "SystemExit: no licence"),
        ([lambda: 5], {}, "'int' object has no attribute"),
        ([lambda: os._exit(9)], {}, "worker 0 did not start: it ended with exit code 9"),
    ],
)  # fmt: skip
def test_refused(env_fns: EnvFns, options: dict[str, Any], message: str):
    before = processes_left()
    with pytest.raises(EnvSpecError, match=message):
        SharedMemoryVecEnv(env_fns, **options)
    assert [child for child in processes_left() if child not in before] == []


# --- under stock code


def test_stock_ppo_learns_the_same_in_it_as_in_dummy_vec_env():
    models = []
    for make in (lambda fns: SharedMemoryVecEnv(fns, num_workers=2), DummyVecEnv):
        env = make([lambda: gym.make("CartPole-v1")] * 4)
        model = stable_baselines3.PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu")
        models.append(model.learn(300))
        env.close()
    for ours, theirs in zip(models[0].policy.parameters(), models[1].policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrap", [lambda env: VecNormalize(env), lambda env: VecFrameStack(env, 3), VecMonitor],
                         ids=["VecNormalize", "VecFrameStack", "VecMonitor"])  # fmt: skip
def test_under_stock_wrappers(wrap: Callable[[Any], Any]):
    ours, theirs = wrap(SharedMemoryVecEnv(walkers(3), num_workers=2)), wrap(DummyVecEnv(walkers(3)))
    ours.seed(0), theirs.seed(0)
    assert_same(ours.reset(), theirs.reset())
    ends = 0
    for _ in range(60):
        our, their = ours.step(np.full(3, 2)), theirs.step(np.full(3, 2))
        for mine, stock in zip(our[:3], their[:3], strict=True):
            assert_same(mine, stock)
        for index in np.flatnonzero(their[2]):
            ends += 1
            assert_same(our[3][index]["terminal_observation"], their[3][index]["terminal_observation"])
            if isinstance(ours, VecMonitor):
                assert without(our[3][index]["episode"], "t") == without(their[3][index]["episode"], "t")
    assert ends > 10
    assert_same(np.stack(ours.env_method("action_masks")), np.stack(theirs.env_method("action_masks")))
    ours.close()


def test_with_monitor_inside():
    fns = [lambda i=i: Monitor(ActionMasker(Walker(i, masks="none"), lambda env: env.unwrapped.legal()))
           for i in range(3)]  # fmt: skip
    twins = Twins(fns, num_workers=2, info_keys=None)
    twins.reset(seed=2)
    twins.steps(60)
    assert twins.ends > 10
    assert twins.ours.env_is_wrapped(Monitor) == [True] * 3
    twins.close()


def test_maskable_ppo_collects_from_the_slots_as_stock_does_from_dummy_vec_env():
    """A policy that took an illegal action, or other masks than the state's, would part from stock at once."""
    models = []
    for maker, make in ((fasttrain.MaskablePPO, lambda fns: SharedMemoryVecEnv(fns, num_workers=2)),
                        (sb3_contrib.MaskablePPO, DummyVecEnv)):  # fmt: skip
        env = make(walkers(4, rich=False))
        model = maker("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
        model.learn(128)
        models.append(model)
        env.close()
    ours, theirs = (model.rollout_buffer for model in models)
    for name in ("observations", "actions", "action_masks"):  # stock lays the steps of one env after another
        mine, stock = np.asarray(getattr(ours, name)), getattr(theirs, name)
        np.testing.assert_array_equal(mine.swapaxes(0, 1).reshape(stock.shape), stock, err_msg=name)
    for mine, stock in zip(models[0].policy.parameters(), models[1].policy.parameters(), strict=True):
        torch.testing.assert_close(mine, stock)


# --- cost


def cost_of_a_step(env: SharedMemoryVecEnv, with_infos: bool = False) -> tuple[int, int]:
    """Of 20 steps in the trainer: the most bytes that one needed at a time, the most blocks that one left behind."""
    actions, most_bytes, most_blocks = np.zeros(env.num_envs, np.int64), 0, 0
    for _ in range(3):
        env.step_slots(actions)
    tracemalloc.start()
    try:
        for _ in range(20):
            before = tracemalloc.take_snapshot()
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            env.step_slots(actions)
            kept = env.infos() if with_infos else None
            most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[1] - held)
            changes = tracemalloc.take_snapshot().compare_to(before, "lineno")
            most_blocks = max(most_blocks, sum(change.count_diff for change in changes if change.count_diff > 0))
            del kept, changes, before
    finally:
        tracemalloc.stop()
    return most_bytes, most_blocks


def test_a_step_of_1024_envs_makes_no_object_per_env():
    space = spaces.Box(-1, 1, (2,), np.float32)

    class Quiet(Sampler):
        def step(self, action: Any) -> Any:
            return self.observation, 1.0, False, False, {"what": 1}

        def reset(self, **kwargs: Any) -> Any:
            self.observation = np.zeros(2, np.float32)
            return self.observation, {}

    env = SharedMemoryVecEnv([lambda: Quiet(space, spaces.Discrete(2))] * 1024, num_workers=2, use_masks=False)
    env.reset()
    bytes_held, blocks = cost_of_a_step(env)
    assert bytes_held < 16 * 1024, "two temporary arrays (N,) of at most 8 bytes an env"
    assert blocks < 100
    # The measure can tell: an info per env, as SB3 asks for it, is a dict of 64 bytes each.
    bytes_held, blocks = cost_of_a_step(env, with_infos=True)
    assert bytes_held > 64 * 1024
    assert blocks > 900
    env.close()
