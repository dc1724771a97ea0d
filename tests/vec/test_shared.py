"""SharedMemoryVecEnv: a whole SB3 VecEnv, with the trajectories of DummyVecEnv bit for bit."""

from __future__ import annotations

import os
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.envs.masks import random_legal_action
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.shared import SharedMemoryVecEnv
from toys import single_thread
from worker_toys import Hat, OnlyThere, Opaque, Sampler, Stubborn, Walker, processes_left, walkers

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
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
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

    def __init__(self, ours: SharedMemoryVecEnv, env_fns: EnvFns, info_keys: Any = ()) -> None:
        self.ours, self.theirs, self.keys, self.ends = ours, DummyVecEnv(env_fns), info_keys, 0

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
        rng, space = np.random.default_rng(seed), self.ours.action_space
        space.seed(seed)
        for number in range(count):
            masks = self.ours.read_masks()
            every = range(self.ours.num_envs)
            actions = np.array([random_legal_action(space, None if masks is None else masks[i], rng) for i in every])
            self.compare(self.ours.step(actions.copy()), self.theirs.step(actions.copy()), f"step {number}")
            np.testing.assert_array_equal(self.ours.slots.actions, actions, "an env changes only its own copy")

    def compare(self, ours: Any, theirs: Any, where: str) -> None:
        for name, our, their in zip(("observations", "rewards", "dones"), ours, theirs, strict=False):
            assert_same(our, their, f"{where}: {name}")
        self.compare_masks()
        for index, (our, their) in enumerate(zip(ours[3], theirs[3], strict=True)):
            if theirs[2][index]:
                self.ends += 1
                # DummyVecEnv copies infos after the reset, by when the env has changed its list; the times differ.
                assert our.get("live", [0])[-1:] != [-1]
                record = our["episode"]
                their_record = their.get("episode", record)
                assert (their_record["r"], their_record["l"]) == (record["r"], record["l"])
                their["terminal_observation"] = in_space(self.ours.observation_space, their["terminal_observation"])
                our, their = without(our, "live", "episode"), without(their, "live", "episode")
            elif self.keys is not None:
                their = {key: their[key] for key in self.keys if key in their}
            assert_same(our, their, f"{where}, env {index}")
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


@pytest.fixture
def made() -> Iterator[Callable[..., SharedMemoryVecEnv]]:
    """Makes vector envs of two workers, which are closed after the test."""
    envs: list[SharedMemoryVecEnv] = []

    def make(env_fns: EnvFns, num_workers: int = 2, **options: Any) -> SharedMemoryVecEnv:
        envs.append(SharedMemoryVecEnv(env_fns, num_workers=num_workers, **options))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


Made = Callable[..., SharedMemoryVecEnv]


def twins_of(made: Made, env_fns: EnvFns, num_workers: int = 2, **options: Any) -> Twins:
    return Twins(made(env_fns, num_workers, **options), env_fns, options.get("info_keys", ()))


@pytest.mark.parametrize(
    ("env_fns", "steps", "info_keys"),
    [(walkers(4), 120, None), (walkers(2, rich=False), 500, ()), (walkers(3), 120, KEYS)],
    ids=["whole infos", "no infos", "some keys"],
)
def test_steps_are_those_of_dummy_vec_env(made: Made, env_fns: EnvFns, steps: int, info_keys: Any):
    twins = twins_of(made, env_fns, info_keys=info_keys)
    twins.reset(seed=3)
    twins.steps(steps)
    assert twins.ends > 40
    assert is_masking_supported(twins.ours)
    assert_same(get_action_masks(twins.ours), twins.ours.read_masks())


def test_seven_envs_on_three_workers_several_seeds_and_options(made: Made):
    twins = twins_of(made, walkers(7), num_workers=3, info_keys=None)
    for seed in (0, 2**31 - 8):
        twins.reset(seed=seed)
        twins.steps(20, seed)
    twins.reset()  # unseeded: the streams go on
    twins.steps(20)
    twins.reset(options=[{"length": 2 + index} for index in range(7)])
    assert [info["options"]["length"] for info in twins.ours.reset_infos] == [2, 3, 4, 5, 6, 7, 8]
    twins.steps(20)
    twins.reset(options={"length": 3})
    twins.steps(8)
    twins.reset(seed=5)  # seeds and options are used once
    assert all(info["options"] is None for info in twins.ours.reset_infos)


@pytest.mark.parametrize(("masks", "use_masks"), [("none", True), ("method", False)])
def test_envs_without_masks_and_masks_not_asked_for(made: Made, masks: str, use_masks: bool):
    env = made(walkers(2, masks=masks), 1, use_masks=use_masks)
    assert env.reset()[:, 1].tolist() == [1, 1], "the search for masks costs no episode"
    assert (env.masked, env.read_masks(), is_masking_supported(env)) == (False, None, False)


def test_observations_are_copies_and_slots_are_not(made: Made):
    env = made(walkers(2), 1)
    given = [env.reset(), *(env.step(np.zeros(2, int))[0] for _ in range(2))]
    kept, rewards = [observations.copy() for observations in given], env.slots.rewards
    for _ in range(3):
        env.step(np.zeros(2, int))
    assert_same(np.stack(given), np.stack(kept))
    assert env.slots.rewards is rewards, "slots stay where they are"


def test_a_reset_without_info_leaves_none_of_the_reset_before(made: Made):
    class Quieter(Walker):
        def reset(self, **options: Any) -> Any:
            observation, info = super().reset(**options)
            return observation, info if self.episode == 1 else {}

    env = made([lambda: Quieter(0)], 1, info_keys=None)
    env.set_options({"length": 1})
    env.reset()
    assert env.reset_infos[0]["episode_number"] == 1
    env.step([0])
    assert env.reset_infos == [{}]


def test_finished_episodes_and_their_sums(made: Made):
    env = made(walkers(3))
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


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_info_that_cannot_travel_is_named_once_and_left_out(made: Made, where: str):
    class Secretive(Walker):
        def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
            secret = {"secret": Opaque()} if where == ("step" if self.steps else "reset") else {}
            return {"int": self.steps, **secret}

    env = made([lambda: Secretive(0)] * 3, info_keys=None)
    if where == "step":
        env.reset()
    with pytest.warns(UserWarning, match="info entries of env 0 cannot be pickled and are left out: secret"):
        env.step(np.zeros(3, int)) if where == "step" else env.reset()
    for _ in range(20):  # a second warning would be an error
        *_, infos = env.step(np.zeros(3, int))
        assert all(info["int"] >= 1 and "secret" not in info for info in infos)
        assert all(info == {"int": 0} for info in env.reset_infos)


def test_an_info_whose_class_is_not_here_is_left_out_with_one_warning(made: Made):
    class Foreign(Walker):
        def step(self, action: Any) -> Any:
            *answer, info = super().step(action)
            return *answer, {"what": OnlyThere(), **info}

    env = made([lambda: Foreign(0)] * 2, 1, info_keys=("what", "int"))
    env.reset()
    with pytest.warns(UserWarning, match="cannot be read in the trainer .no such class in the trainer."):
        env.step(np.zeros(2, int))
    for _ in range(20):
        *_, dones, infos = env.step(np.zeros(2, int))
        assert all("what" not in info for info in infos)
        assert all(info["int"] >= 1 for info, done in zip(infos, dones, strict=True) if not done)


def test_a_number_called_perf_is_the_envs_own_affair(made: Made):
    class Perf(Walker):
        def step(self, action: Any) -> Any:
            *answer, _ = super().step(action)
            return *answer, {"perf": 0.5 if self.number else {"enemy_turn_ms": 2.0}}

    env = made([lambda: Perf(0), lambda: Perf(1)], 1, info_keys=("perf",))
    env.seed(0)
    env.reset()
    *_, infos = env.step(np.zeros(2, int))
    assert infos[0] is not infos[1]
    assert infos == [{"perf": {"enemy_turn_ms": 2.0}}, {"perf": 0.5}]
    assert env.times_ns()["opponents"] == 2_000_000


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
    for indices, numbers in (
        ([4, 0, -2], [4, 0, 3]), (2, [2]), (np.array([1]), [1]), ([], []), ([3, 3], [3, 3]), (-1, [4]),
        (np.int64(1), [1]), (range(1, 3), [1, 2]),
    ):  # fmt: skip
        assert [number for number, _ in calling.env_method("note", indices=indices)] == numbers
    heard = calling.env_method("heard")
    assert [len(calls) - old for calls, old in zip(heard, before, strict=True)] == [2, 4, 3, 4, 3]
    assert heard[1][before[1]] == ((1,), {"key": "word"})
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
    with pytest.raises(EnvError, match="mood was set to 'good', but now is 'bad'"):
        calling.set_attr("mood", "good")
    calling.set_attr("mood", "bad")


def test_what_is_not_there_is_an_attribute_error(calling: SharedMemoryVecEnv):
    for ask in (calling.get_attr, calling.env_method):
        with pytest.raises(AttributeError, match="no_such_thing"):
            ask("no_such_thing")
    assert calling.has_attr("colour")
    assert not calling.has_attr("no_such_thing")
    with pytest.raises(AttributeError, match=r"env_method\(name, …\), get_attr\(name\) and set_attr\(name, value\)"):
        _ = calling.envs


def test_calls_that_fail_are_named_and_the_envs_go_on(calling: SharedMemoryVecEnv, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    (tmp_path / "only_at_home.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_at_home

    for told, name, *arguments in (
        ("ValueError: the board fell .*worker_toys.py:.* in fail", "fail", ValueError),
        ("SystemExit", "fail", SystemExit),
        ("TypeError: Opaque stays where it is", "opaque"),
        ("cannot be read in the trainer: no such class in the trainer", "only_here"),
        ("No module named 'only_at_home'", "note", only_at_home.Thing()),
    ):
        with pytest.raises(EnvError, match=told) as caught:
            calling.env_method(name, *arguments)
        assert name != "fail" or "in fail" in str(caught.value.__cause__), "the worker's traceback"
        assert calling.get_attr("number") == [0, 1, 2, 3, 4]
    calling.set_options([{"thing": only_at_home.Thing()}] * 5)
    with pytest.raises(EnvError, match="reset.. failed: .*No module named 'only_at_home'"):
        calling.reset()
    calling.set_options(None)


def test_values_that_cannot_travel_are_named_and_the_env_goes_on(calling: SharedMemoryVecEnv):
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        calling.set_attr("level", lambda: 0)
    calling.set_options([{}, {}, {}, {}, {"length": lambda: 0}])
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        calling.reset()
    calling.set_options(None)
    assert calling.get_attr("number") == [0, 1, 2, 3, 4]
    calling.reset()
    calling.step(np.zeros(5, int))


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
    assert_same(np.stack(masks), calling.read_masks())
    assert_same(np.stack(some), calling.read_masks()[[4, 1]])
    masks[0][:] = False
    assert calling.read_masks()[0].any(), "a copy"


def test_wrappers_and_pictures(calling: SharedMemoryVecEnv):
    assert calling.env_is_wrapped(Hat) == [True] * 5
    assert calling.env_is_wrapped(gym.Wrapper, indices=[0]) == [True], "a base class counts, as for isinstance"
    assert calling.env_is_wrapped(Monitor, indices=[1, 2]) == [False, False]
    assert [frame[0, 0, 0] for frame in calling.get_images()] == [0, 1, 2, 3, 4]
    assert calling.render().shape[2] == 3
    assert calling.render_mode == "rgb_array"


def test_steps_out_of_turn_and_a_wrong_number_of_actions(calling: SharedMemoryVecEnv):
    calling.reset()
    with pytest.raises(RuntimeError, match="step_wait.. without step_async"):
        calling.step_wait()
    for actions in ([0], np.zeros(4, int), np.zeros((5, 2), int), 0):
        with pytest.raises(ValueError, match=r"actions of shape .* for 5 envs: expected \(5,\)"):
            calling.step(actions)
    calling.step_async([0] * 5)
    with pytest.raises(RuntimeError, match="while a step is pending: call step_wait.. first"):
        calling.step_async(np.zeros(5, int))
    calling.step_wait()


def test_a_call_while_a_step_is_pending_does_not_disturb_it(made: Made):
    twins = twins_of(made, walkers(3), info_keys=None)
    twins.reset(seed=8)
    for number in range(16):
        actions = np.full(3, number % 5)
        twins.ours.step_async(actions)
        if number % 2:
            assert twins.ours.get_attr("number") == [0, 1, 2]
        if number % 4 == 3:
            twins.ours.set_attr("level", number, indices=[number % 3])
        twins.compare(twins.ours.step_wait(), twins.theirs.step(actions), f"step {number}")
    twins.ours.step_async(actions)
    twins.theirs.step(actions)
    twins.reset(seed=9)  # drops the step
    twins.steps(10)


def test_after_close(made: Made, tmp_path: Path):
    env = made(walkers(3))
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


@pytest.mark.parametrize(
    ("env_fns", "options", "message"),
    [
        ([], {}, "needs at least one env function"),
        (walkers(1), {"num_workers": 0}, "num_workers=0: give at least 1, or None"),
        (walkers(1), {"on_env_error": "ignore"}, "on_env_error='ignore': expected 'raise' or 'restart'"),
        ([lambda: Walker(0), lambda: Walker(1, "multi_discrete")], {"num_workers": 2}, "the envs differ: env 0 has"),
        ([lambda: Walker(0), lambda: Walker(1, masks="none")], {"num_workers": 2}, "the envs differ: env 0 has"),
        ([lambda: Walker(0), lambda: Walker(1, "multi_discrete")], {"num_workers": 1}, "the envs differ: env 0 has"),
        ([lambda: Sampler(spaces.Text(3), spaces.Discrete(2))], {}, "found Text"),
        ([lambda: sys.exit("no licence")], {}, "SystemExit: no licence"),
        ([lambda: 5], {}, "the function of env 0 returned 5; return an env"),
        ([lambda: os._exit(9)], {}, "worker 0 did not start: it ended with exit code 9"),
    ],
)
def test_refused(env_fns: EnvFns, options: dict[str, Any], message: str):
    before = processes_left()
    with pytest.raises(EnvSpecError, match=message):
        SharedMemoryVecEnv(env_fns, **options)
    assert [child for child in processes_left() if child not in before] == []


def test_with_monitor_inside(made: Made):
    fns = [lambda i=i: Monitor(ActionMasker(Walker(i, masks="none"), lambda env: env.unwrapped.legal()))
           for i in range(3)]  # fmt: skip
    twins = twins_of(made, fns, info_keys=None)
    twins.reset(seed=2)
    twins.steps(40)
    assert twins.ends > 5
    assert twins.ours.env_is_wrapped(Monitor) == [True] * 3


def test_maskable_ppo_collects_from_the_slots_as_stock_does_from_dummy_vec_env(made: Made):
    """A policy that took an illegal action, or other masks than the state's, would part from stock at once."""
    models = []
    for maker, make in ((fasttrain.MaskablePPO, made), (sb3_contrib.MaskablePPO, DummyVecEnv)):
        env = make(walkers(4, rich=False))
        model = maker("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
        models.append(model.learn(128))
    ours, theirs = (model.rollout_buffer for model in models)
    for name in ("observations", "actions", "action_masks"):  # stock lays the steps of one env after another
        mine, stock = np.asarray(getattr(ours, name)), getattr(theirs, name)
        np.testing.assert_array_equal(mine.swapaxes(0, 1).reshape(stock.shape), stock, err_msg=name)
    for mine, stock in zip(models[0].policy.parameters(), models[1].policy.parameters(), strict=True):
        torch.testing.assert_close(mine, stock)


def cost_of_a_step(env: SharedMemoryVecEnv, with_infos: bool = False) -> int:
    """The most bytes that one of five steps needed in the trainer at a time."""
    actions, most_bytes = np.zeros(env.num_envs, np.int64), 0
    tracemalloc.start()
    try:
        for number in range(8):
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            env.step_slots(actions)
            kept = env.infos() if with_infos else None
            if number > 2:
                most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[1] - held)
            del kept
    finally:
        tracemalloc.stop()
    return most_bytes


def test_a_step_of_1024_envs_makes_no_object_per_env(made: Made):
    space = spaces.Box(-1, 1, (2,), np.float32)

    class Quiet(Sampler):
        def step(self, action: Any) -> Any:
            return self.observation, 1.0, False, False, {"what": 1}

        def reset(self, **kwargs: Any) -> Any:
            self.observation = np.zeros(2, np.float32)
            return self.observation, {}

    env = made([lambda: Quiet(space, spaces.Discrete(2))] * 1024, use_masks=False)
    env.reset()
    assert cost_of_a_step(env) < 16 * 1024, "two temporary arrays (N,) of at most 8 bytes an env"
    # The measure can tell: an info per env, as SB3 asks for it, is a dict of 64 bytes each.
    assert cost_of_a_step(env, with_infos=True) > 64 * 1024
