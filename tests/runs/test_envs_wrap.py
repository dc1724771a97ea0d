from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from conftest import RunCommand, configured
from fasttrain.runs.envs import build_vec_env, wrapped
from fasttrain.runs.models import statistics_of
from fasttrain.saving.archives import read_arrays
from fasttrain.spec.config import Config
from fasttrain.vec.base import SlotAdapter, slots_of
from fasttrain.vec.native import NativeVecEnv
from fasttrain.vec.stock import ActionLogVecEnv
from toys import RandomEnv, ToyGame


def normalised(*arguments: str) -> Config:
    return configured("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", *arguments)


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
    assert type(build_vec_env(normalised(), 2, 0)) is ActionLogVecEnv


def test_frames_are_stacked_inside_and_the_slots_are_those_of_the_outermost_env():
    env = build_vec_env(normalised("env.normalize=[obs]", "env.frame_stack=3"), 2, 0)
    assert isinstance(env, VecNormalize)
    assert isinstance(env.venv, VecFrameStack)
    env.reset()
    assert np.shape(env.get_original_obs()) == (2, 12)
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


def test_integers_are_kept_as_fractions_and_of_a_dict_the_numbers_alone_are_normalised():
    space = spaces.Box(0, 9, (3,), np.int64)
    env = wrapped(env_of(space), normalised("env.normalize=[obs]"))
    assert env.observation_space == spaces.Box(-10, 10, (3,), np.float32)
    assert wrapped(env_of(space), normalised("env.normalize=[reward]")).observation_space == space
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


def test_a_run_leaves_the_statistics_beside_every_model(fasttrain: RunCommand):
    assert statistics_of(Path("a/model.zip")) == Path("a/vecnormalize.npz")
    assert statistics_of(Path("a/best_model.zip"), pickled=True) == Path("a/best_model_vecnormalize.pkl")
    done = fasttrain(
        "+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "env.normalize=[obs,reward]", "num_envs=4",
        "total_timesteps=256", "algo.rollout_size=128", "batch_size=64", "eval.episodes=6", "eval_every=128",
        "eval_async=false", "checkpoint_every=128", "checkup=off",
    ).ok()  # fmt: skip
    folder = done.folder
    models = sorted(folder.rglob("*.zip"))
    half, whole = (f"checkpoints/step_{steps:012d}/model.zip" for steps in (128, 256))
    names = [model.relative_to(folder).as_posix() for model in models]
    assert names == ["best_model.zip", half, whole, "model.zip"]
    final = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])
    counted = [VecNormalize.load(str(statistics_of(model, True)), final).ret_rms.count for model in models]
    assert counted[1] < counted[2] == counted[3]
    assert not any(b"fasttrain" in statistics_of(model, True).read_bytes() for model in models), "they load without it"
    plain = read_arrays(folder / "vecnormalize.npz", 10**6)
    assert plain["rewards.count"] == counted[3]
    assert plain["observations.mean"].shape == (4,)
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] == quality["mean_length"], "rewards of the evaluation are the env's own"

    def greedy(*more: str) -> Any:
        return fasttrain("eval", f"run={folder}", *more).ok().json("eval.json")["quality"]["greedy"]

    as_trained = greedy()
    assert as_trained == {key: quality[key] for key in as_trained}
    np.savez(folder / "vecnormalize.npz", **{**plain, "observations.mean": plain["observations.mean"] + 5.0})
    assert greedy()["mean_reward"] != quality["mean_reward"], "it decides"
    (folder / "vecnormalize.npz").unlink()
    fasttrain("eval", f"run={folder}").refused(
        "no vecnormalize.npz beside it, only vecnormalize.pkl, a pickle; --trust loads it"
    )
    assert greedy("--trust") == as_trained
    (folder / "vecnormalize.pkl").unlink()
    fasttrain("eval", f"run={folder}").refused(
        "was trained with env.normalize, but no vecnormalize.npz lies beside its mod"
    )


PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "env_libraries.md").read_text(encoding="utf-8")
SHORT = ("total_timesteps=384", "num_envs=4", "algo.rollout_size=128", "batch_size=32", "algo.n_epochs=1",
         "eval.episodes=4", "env.max_episode_steps=40")  # fmt: skip
NO_LIMITS = (-float("inf"), float("inf"))


def command_of(library: str) -> list[str]:
    """What the page says to type, without the word fasttrain."""
    section = PAGE.partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^fasttrain (\+.*)$", section, flags=re.MULTILINE)
    return shlex.split(line)


LIBRARIES = {
    "MiniGrid": ("minigrid", (147,), spaces.Discrete(7), (0, 1)),
    "Box2D": ("Box2D", (24,), spaces.Box(-1, 1, (4,)), NO_LIMITS),
    "MuJoCo": ("mujoco", (11,), spaces.Box(-1, 1, (3,)), (0, 40 * 20)),  # healthy: 1 a step, and how fast it falls
    "EnvPool": ("envpool", (8,), spaces.Discrete(4), NO_LIMITS),
}


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("library", re.findall(r"^## (\w+)$", PAGE, flags=re.MULTILINE))
def test_the_command_of_the_page_trains(library: str, fasttrain: RunCommand):
    module, shape, actions, (lowest, highest) = LIBRARIES[library]
    pytest.importorskip(module, reason=f"{module} is not installed")
    done = fasttrain(*command_of(library), *SHORT).ok()
    quality, episodes = done.json("summary.json")["quality"], done.episodes()
    assert episodes
    for value, length in [*episodes, (quality["mean_reward"], quality["mean_length"])]:
        assert lowest <= value <= highest
        assert 1 <= length <= 40
    model = PPO.load(done.folder / "model.zip", device="cpu")
    assert (model.observation_space.shape, model.action_space, model.num_timesteps) == (shape, actions, 384)
    assert (done.folder / "vecnormalize.npz").exists() == (library in {"Box2D", "MuJoCo"})


@pytest.mark.filterwarnings("ignore")
def test_a_mission_is_read_or_refused_in_one_line(fasttrain: RunCommand):
    pytest.importorskip("minigrid", reason="minigrid is not installed")
    run = ("+profile=speed", "env.id=minigrid:MiniGrid-Empty-5x5-v0", "algo=ppo", *SHORT)
    fasttrain(*run).refused("observes MissionSpace(", "(env.wrappers)")
    fasttrain(*run, "env.wrappers=[minigrid.wrappers:ImgObsWrapper]").refused(
        "Box(0, 255, (7, 7, 3), uint8) is too small for NatureCNN; add gymnasium.wrappers:Flatten"
    )
    done = fasttrain(*run, "env.wrappers=[minigrid.wrappers:FlatObsWrapper]").ok()
    (width,) = PPO.load(done.folder / "model.zip", device="cpu").observation_space.shape or ()
    assert width > 147, "the view and the mission's letters"


@pytest.mark.filterwarnings("ignore")
def test_supersuit_skips_frames_in_workers(fasttrain: RunCommand):
    for module in ("pettingzoo", "supersuit"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    skips = "env.wrappers=[{wrapper: 'supersuit:frame_skip_v0', num_frames: 4}]"
    done = fasttrain(
        "+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=shared", "workers=2", skips, *SHORT
    ).ok()
    episodes = done.episodes()
    assert episodes
    for value, length in episodes:  # 1 a frame, up to 40 frames; the last step may be cut short
        assert 4 * (length - 1) < value <= 4 * length
        assert length <= 10
