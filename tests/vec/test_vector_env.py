"""VectorEnv: a whole Gymnasium VectorEnv, with the answers of SyncVectorEnv bit for bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from vec_toys import Leaving, Table, Telling

import fasttrain_vec
from fasttrain.envs.masks import random_legal_action
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_vec import EnvError, EnvSpecError, VectorEnv
from worker_toys import GO, Chaos, Hat, Opaque, Walker, action_of, chaos_envs, processes_left, walkers

pytestmark = pytest.mark.usefixtures("forked_workers")
EnvFns = list[Callable[[], gym.Env[Any, Any]]]
Made = Callable[..., VectorEnv]


@pytest.fixture
def made() -> Iterator[Made]:
    """Vector envs with two workers, closed at the end."""
    envs: list[VectorEnv] = []

    def make(env_fns: EnvFns, **options: Any) -> VectorEnv:
        envs.append(VectorEnv(env_fns, **{"num_workers": 2, **options}))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def cart_poles(count: int) -> EnvFns:
    return [lambda: gym.make("CartPole-v1")] * count


def tables(count: int) -> EnvFns:
    return [lambda number=number: Table(number) for number in range(count)]


def assert_same(ours: Any, theirs: Any) -> None:
    assert data_equivalence(ours, theirs, exact=True), f"{ours}\n{theirs}"


@pytest.mark.parametrize(
    ("env_fns", "options"),
    [(cart_poles(5), None), (tables(7), {"level": 2}), (walkers(4, masks="info", rich=False), None)],
    ids=["CartPole", "Dict", "masks"],
)
@pytest.mark.parametrize("seed", [7, [5, None, 3, 1, 9, 2, 4]], ids=["one", "list"])
def test_steps_are_those_of_sync_vector_env(made: Made, env_fns: EnvFns, options: Any, seed: Any):
    ours, theirs = made(env_fns), SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    seeds = seed if isinstance(seed, int) else [1 if one is None else one for one in seed][: len(env_fns)]
    ours.action_space.seed(3)
    ended = 0
    for _ in range(2):
        assert_same(told(ours.reset(seed=seeds, options=options)), theirs.reset(seed=seeds, options=options))
        for _ in range(150):
            actions = ours.action_space.sample()
            answer = told(ours.step(actions))
            assert_same(answer, theirs.step(actions))
            assert ours.observation_space.contains(answer[0])
            ended += int((answer[2] | answer[3]).sum())
    assert ended > 30
    assert ours.np_random_seed == theirs.np_random_seed


def told(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The answer without the masks, which SyncVectorEnv leaves out."""
    answer[-1].pop("action_masks", None), answer[-1].pop("_action_masks", None)
    return answer


def test_spaces_and_what_gymnasium_asks_of_a_vector_env(made: Made):
    env, theirs = made(tables(3)), SyncVectorEnv(tables(3), autoreset_mode=AutoresetMode.SAME_STEP)
    assert (env.num_envs, env.num_workers, env.closed) == (3, 2, False)
    assert isinstance(env, gym.vector.VectorEnv)
    assert env.single_observation_space == Table.observation_space
    assert env.single_action_space == Table.action_space
    assert env.observation_space == theirs.observation_space == batch_space(Table.observation_space, 3)
    assert env.action_space == theirs.action_space
    assert env.metadata == theirs.metadata == {**Table.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    assert env.render_mode == theirs.render_mode
    wrapped, plain = RecordEpisodeStatistics(env), RecordEpisodeStatistics(theirs)
    assert_same(wrapped.reset(seed=1), plain.reset(seed=1))
    for _ in range(12):
        ours, other = wrapped.step(actions := wrapped.action_space.sample()), plain.step(actions)
        if "final_info" in other[4]:
            for info in (ours[4], other[4]):
                info.get("episode", {}).pop("t", None)  # seconds
        assert_same(ours[:4], other[:4])
        assert_same(ours[4].get("episode", {}), other[4].get("episode", {}))


@pytest.mark.parametrize(
    ("masks", "actions", "dtype"),
    [("method", "discrete", "bool"), ("info", "multi_discrete", "int8"), ("observation", "multi_binary", "float32")],
)
def test_masks_are_those_of_the_present_states(made: Made, masks: str, actions: str, dtype: str):
    kind = {"actions": actions, "masks": masks, "dtype": dtype, "rich": False}
    env, rng = made(walkers(3, **kind)), np.random.default_rng(0)
    infos = env.reset(seed=0)[1]
    for _ in range(20):
        assert infos["action_masks"].dtype == np.bool_
        assert infos["_action_masks"].all()
        np.testing.assert_array_equal(infos["action_masks"], np.stack(env.call("legal")))
        before, kept = infos["action_masks"], infos["action_masks"].copy()
        infos = env.step(np.array([random_legal_action(env.single_action_space, mask, rng) for mask in before]))[4]
        np.testing.assert_array_equal(before, kept)
    assert "action_masks" not in made(walkers(2, **kind), use_masks=False).reset()[1]


def test_chosen_infos_arrive_at_every_step_and_the_others_at_the_end(made: Made):
    env = made(tables(3), info_keys=("turn", "text", "sometimes"))
    env.reset(seed=0)
    for step in range(1, 6):
        infos = env.step(np.zeros((3, 2), np.int64))[4]
        assert "draw" not in infos
        going = [1, 2] if step == 5 else [0, 1, 2]
        assert infos["turn"][going].tolist() == [step] * len(going)
        assert infos["turn"].dtype == np.int64
        assert infos["_sometimes"].tolist() == [number in going and step % 3 == number for number in range(3)]
    assert infos["final_info"]["nested"]["deep"]["number"].tolist() == [0, 0, 0]
    assert infos["_final_info"].tolist() == [True, False, False]
    assert infos["final_obs"][0]["turn"] == 5


def test_observations_are_copies_unless_asked_otherwise(made: Made):
    copies, views = made(walkers(2)), made(walkers(2), copy=False)
    first, seen = copies.reset(seed=1)[0], views.reset(seed=1)[0]
    np.testing.assert_array_equal(first, seen)
    kept = first.copy()
    for env in (copies, views):
        env.step([0, 0])
        env.step([0, 0])
    np.testing.assert_array_equal(first, kept)
    assert (seen[:, 2] != kept[:, 2]).all(), "the second step writes where the reset did"


def test_an_info_that_gymnasium_cannot_batch_is_its_error_and_one_that_cannot_travel_a_warning(made: Made):
    uneven: EnvFns = [lambda size=size: Telling(array=np.zeros(size)) for size in (2, 3)]
    for env in (made(uneven), SyncVectorEnv(uneven)):
        with pytest.raises(ValueError, match="could not broadcast input array from shape"):
            env.reset()
    with pytest.warns(UserWarning, match="info entries of env 0 cannot be pickled and are left out: opaque"):
        assert made([lambda: Telling(opaque=Opaque(), fine=1)] * 2).reset()[1]["fine"].tolist() == [1, 1]


def test_an_env_that_raises_is_an_error_or_replaced(made: Made):
    env = made(chaos_envs(4))
    env.reset(seed=50)
    with pytest.raises(EnvError, match=r"env 2 \(worker 1, seed 52, last action 3\) failed at its step 1: RuntimeErr"):
        env.step([GO, GO, action_of("raise"), GO])
    env = made(chaos_envs(4), on_env_error="restart")
    before = env.reset(seed=50)[0]
    after, rewards, terminations, truncations, infos = env.step([GO, GO, action_of("nan_reward"), GO])
    assert rewards.tolist() == [1, 1, 0, 1]
    assert not terminations.any()
    assert truncations.tolist() == infos["_final_info"].tolist() == [False, False, True, False]
    np.testing.assert_array_equal(infos["final_obs"][2], before[2])
    assert infos["final_info"]["lost"][2] == "the env or its worker failed and was replaced"
    assert infos["episode"][2] == after[2, 1] > before[2, 1], "the info of the new episode"
    assert env.restarts == 1
    assert env.step([GO] * 4)[1].tolist() == [1, 1, 1, 1]


def test_an_env_that_asks_for_it_is_replaced_anyhow(made: Made):
    env = made([lambda: Leaving(0), lambda: Chaos(1)])
    env.reset()
    assert env.step([GO, GO])[3].tolist() == [True, False]
    assert env.restarts == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_worker_that_dies_or_hangs_is_an_error_or_replaced(made: Made, fault: str):
    limit = {"step_timeout_s": 1.0 if fault == "hang" else 60.0}
    told = {"kill": "it was killed by SIGKILL, stepping", "hang": "it did not answer in time"}[fault]
    actions = [GO, GO, GO, action_of(fault)]
    env = made(chaos_envs(4), **limit)
    env.reset(seed=50)
    with pytest.raises(EnvError, match=rf"env 3 \(worker 1, seed 53, last action {actions[3]}\) failed: {told}"):
        env.step(actions)
    env = made(chaos_envs(4), on_env_error="restart", **limit)
    before = env.reset(seed=50)[0]
    _, rewards, _, truncations, infos = env.step(actions)
    assert rewards.tolist() == [1, 1, 0, 0]
    assert truncations.tolist() == infos["final_info"]["_lost"].tolist() == [False, False, True, True]
    np.testing.assert_array_equal(np.stack(infos["final_obs"][2:]), before[2:])
    assert env.step([GO] * 4)[0][:, 2].tolist() == [2, 2, 1, 1]


def test_calls_and_attributes(made: Made):
    env = made([lambda number=number: Hat(Walker(number)) for number in range(3)])
    assert env.call("note", 1, word="x") == ((0, 1), (1, 1), (2, 1))
    assert env.call("number") == env.get_attr("number") == (0, 1, 2)
    env.set_attr("colour", "blue")
    assert env.get_attr("colour") == ("blue",) * 3
    env.set_attr("level", [4, 5, 6])
    assert env.get_attr("level") == (4, 5, 6)
    assert [frame[0, 0, 0] for frame in env.render()] == [0, 1, 2]
    with pytest.raises(AttributeError, match="a call to env 0 .*no attribute 'height'"):
        env.get_attr("height")
    with pytest.raises(EnvError, match="KeyError: 'the board fell'"):
        env.call("fail", KeyError)
    with pytest.raises(ValueError, match="2 values of 'level' for 3 envs"):
        env.set_attr("level", [1, 2])
    with pytest.raises(ValueError, match=r"call step\(\) of the vector env"):
        env.call("step", 0)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda env: env.step([0]), ValueError, r"actions of shape \(1,\): expected \(2,\)"),
        (lambda env: env.step([0.5, 1.0]), TypeError, r"actions of float64: Discrete\(5\) needs integers"),
        (lambda env: [env._crew.post_step(), env.step([0, 0])], RuntimeError, "interrupted the last step: call reset"),
        (lambda env: env.reset(seed=[1]), ValueError, "1 seeds for 2 envs"),
        (lambda env: env.reset(options={"reset_mask": np.ones(2, bool)}), ValueError, "resets an env when its episode"),
    ],
)
def test_refused(made: Made, call: Callable[[VectorEnv], Any], kind: type[Exception], message: str):
    env = made(walkers(2))
    env.reset(seed=0)
    with pytest.raises(kind, match=message):
        call(env)
    env.reset()
    env.step([0, 0])


def test_it_may_be_closed_twice_or_only_dropped(made: Made):
    before = processes_left()
    with pytest.raises(EnvSpecError, match="VectorEnv needs at least one env function"):
        VectorEnv([])
    env = made(walkers(2, rich=False))
    env.reset()
    env.close()
    env.close()
    for use in (env.reset, lambda: env.step([0, 0]), env.render):
        with pytest.raises(EnvError, match="this VectorEnv is closed"):
            use()
    VectorEnv(walkers(2), num_workers=1).reset()
    gc.collect()
    assert [process for process in processes_left() if process not in before] == []


SCRIPT = """
import sys, gymnasium, numpy as np, fasttrain_vec
def loaded(): return sorted({name.split(".")[0] for name in sys.modules} & {BLOCKED})
class Told(gymnasium.Wrapper):
    def loaded(self): return loaded()
if __name__ == "__main__":
    env = fasttrain_vec.VectorEnv([lambda: Told(gymnasium.make("CartPole-v1"))] * 3, num_workers=2)
    env.reset(seed=0)
    for _ in range(50):
        infos = env.step(np.ones(3, np.int64))[4]
    print(sorted(infos), loaded(), env.call("loaded"))
    env.close()
"""


def test_it_needs_neither_torch_nor_numba_nor_sb3(tmp_path: Path):
    blocked = ("torch", "numba", "llvmlite", "stable_baselines3", "sb3_contrib", "scipy", "hydra", "matplotlib")
    for name in blocked:
        (tmp_path / f"{name}.py").write_text("raise ImportError(f'{__name__} is not here')\n")
    (tmp_path / "script.py").write_text(SCRIPT.replace("{BLOCKED}", repr(set(blocked))))
    paths = os.pathsep.join([str(tmp_path), str(Path(fasttrain_vec.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.endswith(" [] ([], [], [])\n")


def test_public_names():
    assert fasttrain_vec.SharedMemoryVecEnv is SharedMemoryVecEnv
    assert all(getattr(fasttrain_vec, name) for name in fasttrain_vec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        fasttrain_vec.Nothing  # noqa: B018
