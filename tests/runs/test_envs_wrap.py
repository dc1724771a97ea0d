"""`env.normalize`: running statistics while training, the same and unchanging ones in evaluation and on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from conftest import RunCommand, configured
from fasttrain.runs.envs import build_vec_env, wrapped
from fasttrain.runs.models import statistics_of
from fasttrain.saving.archives import read_arrays
from fasttrain.spec.config import Config
from fasttrain.vec.base import SlotAdapter, slots_of
from fasttrain.vec.native import NativeVecEnv
from fasttrain.vec.stock import NotedVecEnv
from toys import RandomEnv, ToyGame

CARTPOLE = ("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")


def normalised(*arguments: str) -> Config:
    return configured(*CARTPOLE, *arguments)


def env_of(space: spaces.Space[Any]) -> DummyVecEnv:
    return DummyVecEnv([lambda: RandomEnv(space, spaces.Discrete(2))] * 2)  # type: ignore[list-item]


@pytest.mark.parametrize(("what", "obs", "reward"), [("obs", True, False), ("reward", False, True)])
def test_what_is_named_is_normalised_and_nothing_else(what: str, obs: bool, reward: bool):
    env = build_vec_env(normalised(f"env.normalize=[{what}]", "algo.gamma=0.8"), 2, 0)
    assert isinstance(env, VecNormalize)
    assert (env.norm_obs, env.norm_reward, env.gamma, env.training) == (obs, reward, 0.8, True)
    env.reset()
    for _ in range(50):
        observations, rewards, _, _ = env.step(np.zeros(2, np.int64))
    assert (np.abs(np.asarray(observations)).max() > 1.0) == obs
    assert (rewards.tolist() != [1.0, 1.0]) == reward
    assert type(build_vec_env(normalised(), 2, 0)) is NotedVecEnv


def test_frames_are_stacked_inside_so_that_the_replay_buffer_gets_whole_observations():
    env = build_vec_env(normalised("env.normalize=[obs]", "env.frame_stack=3"), 2, 0)
    assert isinstance(env, VecNormalize)
    assert isinstance(env.venv, VecFrameStack)
    env.reset()
    assert np.shape(env.get_original_obs()) == (2, 12)


def test_evaluation_takes_the_statistics_as_they_are():
    config = normalised("env.normalize=[obs,reward]")
    training = build_vec_env(config, 2, 0)
    assert isinstance(training, VecNormalize)
    training.reset()
    for _ in range(30):
        training.step(np.array([0, 1]))
    played = build_vec_env(config, 3, 7, training)
    assert isinstance(played, VecNormalize)
    before = training.obs_rms.mean.copy()  # type: ignore[union-attr]
    first = played.reset()
    raw = played.get_original_obs()
    np.testing.assert_array_equal(first, training.normalize_obs(raw))
    assert played.step(np.zeros(3, np.int64))[1].tolist() == [1.0, 1.0, 1.0]
    for env in (training, played):
        np.testing.assert_array_equal(env.obs_rms.mean, before)  # type: ignore[union-attr]
    assert training.training
    assert training.norm_reward


def test_integers_are_kept_as_fractions():
    space = spaces.Box(0, 9, (3,), np.int64)
    env = wrapped(env_of(space), normalised("env.normalize=[obs]"))
    assert env.observation_space == spaces.Box(-10, 10, (3,), np.float32)
    assert wrapped(env_of(space), normalised("env.normalize=[reward]")).observation_space == space


def test_of_a_dict_the_numbers_alone():
    parts: dict[str, spaces.Space[Any]] = {
        "seen": spaces.Box(-50, 50, (2,)),
        "count": spaces.Box(0, 9, (2,), np.int16),
        "seat": spaces.Discrete(3),
        "board": spaces.Box(0, 255, (36, 36, 1), np.uint8),
    }
    env = wrapped(env_of(spaces.Dict(parts)), normalised("env.normalize=[obs]"))
    wanted = {**parts, "count": spaces.Box(-10, 10, (2,), np.float32)}
    assert env.observation_space == spaces.Dict(wanted)
    env.reset()
    seen: Any = env.step(np.zeros(2, np.int64))[0]
    assert seen["board"].dtype == np.uint8
    assert seen["board"].max() > 10
    assert np.abs(seen["seen"]).max() <= 10
    assert seen["count"].dtype == np.float32


def test_the_slots_are_those_of_the_outermost_env():
    env = wrapped(NativeVecEnv(ToyGame(3)), normalised("env.normalize=[obs]", "env.frame_stack=2"))
    source = slots_of(env)
    assert isinstance(source, SlotAdapter)
    source.reset()
    masks = source.read_masks()
    assert masks is not None
    source.step_slots(masks.argmax(axis=1))
    assert np.shape(source.slots.observations) == (3, 6)
    assert np.abs(np.asarray(source.slots.observations)).max() <= 10
    assert env.has_attr("opponents_ns")


RUN = ("+profile=speed", "env.id=CartPole-v1", "vec_env=dummy", "env.normalize=[obs,reward]", "eval.episodes=6",
       "eval_every=480", "checkpoint_every=480")  # fmt: skip


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_leaves_the_statistics_beside_every_model(fasttrain: RunCommand, algo: str):
    small = ("algo.rollout_size=480", "batch_size=48") if algo == "ppo" else ("warmup_steps=100", "eval_async=false")
    done = fasttrain(*RUN, f"algo={algo}", "total_timesteps=960", *small)
    assert done.exit_code == 0, done.err
    models = sorted(done.folder.rglob("*.zip"))
    names = [model.relative_to(done.folder).as_posix() for model in models]
    half, whole = (f"checkpoints/step_{steps:012d}/model.zip" for steps in (480, 960))
    assert names == ["best_model.zip", half, whole, "model.zip"]
    final = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])
    counted = [VecNormalize.load(str(statistics_of(model, True)), final).ret_rms.count for model in models]
    assert counted[1] < counted[2] == counted[3]
    plain = read_arrays(done.folder / "vecnormalize.npz", 10**6)
    assert plain["rewards.count"] == counted[3]
    assert plain["observations.mean"].shape == (4,)
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] == quality["mean_length"], "rewards of the evaluation are the env's own"
    (PPO if algo == "ppo" else DQN).load(done.folder / "model.zip", device="cpu")

    again = fasttrain("eval", f"run={done.folder}")
    assert again.exit_code == 0, again.err
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert greedy == {key: quality[key] for key in greedy}

    (done.folder / "vecnormalize.npz").unlink()
    refused = fasttrain("eval", f"run={done.folder}")
    assert refused.exit_code == 2
    assert "no vecnormalize.npz beside it, only vecnormalize.pkl, a pickle; --trust loads it" in refused.err
    trusted = fasttrain("eval", f"run={done.folder}", "--trust").json("eval.json")["quality"]["greedy"]
    assert trusted == greedy
    other = VecNormalize.load(str(statistics_of(models[-1], True)), final)
    other.obs_rms.mean = other.obs_rms.mean + 5.0  # type: ignore[union-attr]
    for pickled in (False, True):
        if pickled:
            other.save(str(done.folder / "vecnormalize.pkl"))
        else:
            arrays = {**plain, "observations.mean": plain["observations.mean"] + 5.0}
            np.savez(done.folder / "vecnormalize.npz", **arrays)
        changed = fasttrain("eval", f"run={done.folder}", *(["--trust"] if pickled else []))
        assert changed.json("eval.json")["quality"]["greedy"]["mean_reward"] != greedy["mean_reward"], "it decides"
        (done.folder / "vecnormalize.npz").unlink(missing_ok=True)

    (done.folder / "vecnormalize.pkl").unlink()
    gone = fasttrain("eval", f"run={done.folder}")
    assert gone.exit_code == 2
    assert "trained with env.normalize, but no vecnormalize.npz lies beside its model" in gone.err


def test_the_statistics_load_where_fasttrain_is_not_installed(fasttrain: RunCommand, tmp_path: Path):
    done = fasttrain(
        *RUN, "algo=ppo", "total_timesteps=480", "algo.rollout_size=480", "batch_size=48", "eval_async=false"
    )
    code = (
        "import sys, gymnasium\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'fasttrain': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize\n"
        "env = DummyVecEnv([lambda: gymnasium.make('CartPole-v1')])\n"
        f"print(VecNormalize.load({str(done.folder / 'vecnormalize.pkl')!r}, env).reset().shape)\n"
    )
    alone = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert alone.stdout == "(1, 4)\n", alone.stderr


def test_a_model_without_normalisation_has_no_statistics(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "total_timesteps=480",
                     "algo.rollout_size=480", "batch_size=48", "eval.episodes=2")  # fmt: skip
    assert not list(done.folder.rglob("*vecnormalize*"))
    assert statistics_of(Path("a/model.zip")) == Path("a/vecnormalize.npz")
    assert statistics_of(Path("a/best_model.zip"), pickled=True) == Path("a/best_model_vecnormalize.pkl")
