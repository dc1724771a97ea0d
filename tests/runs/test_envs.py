from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.runs import envs as times
from fasttrain.runs.envs import build_vec_env, check_native_options, engines_of, env_facts, env_times
from fasttrain.spec.config import Config
from messages import assert_says, wrong_inputs
from plain_env import PlainEnv


class Line(PlainEnv):
    """Observes and pays the number of the step; never ends by itself."""

    length = 0

    def __init__(self, space: spaces.Space[Any] | None = None) -> None:
        self.observation_space = space or spaces.Box(0, 1e6, (1,))

    def seen(self) -> Any:
        return np.full(self.observation_space.shape or (), self.time, self.observation_space.dtype)

    def paid(self, action: Any) -> float:
        return float(self.time)


class Tenfold(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 10 * reward


class PlusOne(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return reward + 1


def on_line(*arguments: str, name: str = "Line") -> Config:
    return configured(f"env.entry_point={__name__}:{name}", "algo=ppo", "vec_env=dummy", *arguments)


def played(*arguments: str) -> tuple[list[Any], list[float], list[bool]]:
    env = build_vec_env(on_line(*arguments), 1, 0)
    rows = [np.asarray(env.reset())[0].tolist()]
    rewards, dones = [], []
    for _ in range(4):
        observations, reward, done, infos = env.step(np.zeros(1, np.int64))
        rows.append(np.asarray(infos[0]["terminal_observation"] if done[0] else observations[0]).tolist())  # type: ignore[index, call-overload]
        rewards.append(float(reward[0]))
        dones.append(bool(done[0]))
    env.close()
    return rows, rewards, dones


WRAPPERS = "env.wrappers=[{0}:{1},{0}:{2}]"
FOUR = [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("arguments", "rows", "rewards", "ends"),
    [
        ([], FOUR, [1, 2, 3, 4], None),
        (["env.max_episode_steps=3"], [[0], [1], [2], [3], [1]], [1, 2, 3, 1], 2),
        ([WRAPPERS.format(__name__, "Tenfold", "PlusOne")], FOUR, [11, 21, 31, 41], None),
        ([WRAPPERS.format(__name__, "PlusOne", "Tenfold")], FOUR, [20, 30, 40, 50], None),
        (["env.wrappers=[gymnasium.wrappers:FlattenObservation]"], FOUR, [1, 2, 3, 4], None),
        (["action_repeat=3", "env.max_episode_steps=7"], [[0], [3], [6], [7], [3]], [6, 15, 7, 6], 2),
        (["env.frame_stack=3", "env.max_episode_steps=3"],
         [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 1]], [1, 2, 3, 1], 2),
    ],
)  # fmt: skip
def test_options_have_their_effect(arguments: list[str], rows: list[list[int]], rewards: list[float], ends: int | None):
    """The last frame of a stack is the latest, and an episode's final observation is whole."""
    assert played(*arguments) == (rows, rewards, [step == ends for step in range(4)])


class FirstImage(Line):
    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (3, 36, 36), np.uint8))


class LastImage(Line):
    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (36, 36, 3), np.uint8))


@pytest.mark.parametrize(("name", "shape"), [("FirstImage", (6, 36, 36)), ("LastImage", (36, 36, 6))])
def test_frames_are_stacked_along_the_channels(name: str, shape: tuple[int, ...]):
    env = build_vec_env(on_line("env.frame_stack=2", name=name), 1, 0)
    env.reset()
    seen = np.asarray(env.step(np.zeros(1, np.int64))[0])[0]
    assert env.observation_space.shape == seen.shape == shape
    old, new = np.split(seen, 2, axis=shape.index(6))
    assert (old.max(), new.min()) == (0, 1)


def test_a_stacked_and_repeated_run_trains_and_is_evaluated_again(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=speed", f"env.entry_point={__name__}:Line", "algo=ppo", "vec_env=dummy", "env.frame_stack=2",
        "action_repeat=5", "env.max_episode_steps=12", f"env.wrappers=[{__name__}:Tenfold]", "total_timesteps=96",
        "algo.rollout_size=96", "batch_size=48", "eval.episodes=4", "checkup=off",
    ).ok()  # fmt: skip
    again = fasttrain("eval", f"run={done.folder}").ok().json("eval.json")["quality"]["greedy"]
    for quality in (done.json("summary.json")["quality"], again):
        assert (quality["mean_length"], quality["mean_reward"]) == (3.0, 780.0)


@pytest.mark.parametrize("typed", wrong_inputs("settings that no batch has"))
def test_a_compiled_batch_refuses_what_it_cannot_do(typed: str):
    with pytest.raises(ConfigError) as told:
        env_facts(configured(*typed.split()))
    assert_says("settings that no batch has", typed, str(told.value))


def test_the_same_options_go_with_the_games_python_form_and_others_around_a_batch():
    config = configured("vec_env=dummy", "action_repeat=2", "env.max_episode_steps=9", "num_envs=1")
    assert env_facts(config).step_s is None
    env = build_vec_env(config, 1, 0)
    env.reset()
    env.step(np.array([env.env_method("action_masks")[0].argmax()]))
    env.close()
    check_native_options(configured("vec_env=native", "env.frame_stack=2", "env.normalize=[obs,reward]"))
    check_native_options(
        configured(
            "env.id=CartPole-v1", "env.backend=envpool", "algo=ppo", "env.max_episode_steps=9", "env.frame_stack=2"
        )
    )


def test_an_env_that_has_any_attribute_counts_no_time():
    env: Any = SimpleNamespace(unwrapped=None, get_attr=lambda _: [print, 5, None])
    assert env_times(env, configured(), 0, counted=True).opponents_ns == 5


PARTS = (("engine", 1000), ("queue", 1250))


class Games:
    """Stands for an ExternalVecEnv."""

    def __init__(self) -> None:
        self.unwrapped = self

    def env_times(self) -> dict[str, Any]:
        return {"games": PARTS, "restarts": 2, "lost_steps": 7}


def test_games_with_engines_and_self_play_tell_of_their_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(times, "ExternalVecEnv", Games)
    env: Any = Games()
    found = env_times(env, configured("schedule=first_ready"), 3, counted=False)
    assert found.games == PARTS
    assert (found.opponents_ns, found.restarts, found.lost_steps, found.in_step) == (3, 2, 7, False)
    env = SimpleNamespace(unwrapped=None)
    assert engines_of(env) is None
    assert env_times(env, configured(), 3, counted=False).games == ()
    monkeypatch.setattr(times, "SelfPlayVecEnv", SimpleNamespace)
    env = SimpleNamespace(inner=Games(), opponents_ns=11)
    found = env_times(env, configured("schedule=lockstep"), 0, counted=True)
    assert (found.opponents_ns, found.in_step) == (11, True), "the trainer counts it, and games wait for each other"
    assert engines_of(env) is env.inner


MASKER = "wrapper: 'sb3_contrib.common.wrappers:ActionMasker', action_mask_fn"
BY_METHOD = ("env.entry_point=hunt:Hunt", f"env.wrappers=[{{{MASKER}: legal}}]")
BY_FUNCTION = ("env.id=hunt:Hunt-v0", f"env.wrappers=[{{{MASKER}: 'hunt:legal'}}]")
AROUND = (
    "env.entry_point=hunt:Hunt",
    f"env.wrappers=[{{{MASKER}: legal}}, {{wrapper: 'gymnasium.wrappers:TimeLimit', max_episode_steps: 6}}, "
    "'stable_baselines3.common.atari_wrappers:ClipRewardEnv', 'gymnasium.wrappers:RecordEpisodeStatistics']",
    "env.frame_stack=2",
    "env.normalize=[obs]",
)
RUN = ("algo=maskable_ppo", "total_timesteps=192", "algo.n_steps=24", "batch_size=24", "algo.n_epochs=1",
       "eval.episodes=4", "checkup=off")  # fmt: skip
WAYS = {
    "dummy": ("+profile=speed", "vec_env=dummy"),
    "shared": ("+profile=speed", "vec_env=shared", "workers=2"),
    "groups": ("+profile=speed", "vec_env=shared", "workers=2", "schedule=first_ready"),
    "stock": ("+profile=baseline", "vec_env=dummy"),
    "subproc": ("+profile=baseline", "vec_env=subproc"),
}


@pytest.fixture(autouse=True)
def _hunt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("way", "named"),
    [("dummy", BY_FUNCTION), ("shared", AROUND), ("groups", BY_METHOD), ("stock", AROUND), ("subproc", BY_METHOD)],
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_masks_reach_the_policy(way: str, named: tuple[str, ...], fasttrain: RunCommand, forked_stock_workers: None):
    done = fasttrain(*WAYS[way], *named, *RUN, f"num_envs={2 if way == 'subproc' else 4}").ok()
    quality = done.json("summary.json")["quality"]
    mean, length = (6.0, 6) if named is AROUND else (24.0, 8)
    assert (quality["mean_reward"], quality["mean_length"]) == (mean, length)
    assert done.episodes() == [(mean, length)] * (192 // length)


def test_masks_reach_dqn(fasttrain: RunCommand):
    done = fasttrain(*WAYS["shared"], *BY_FUNCTION, "algo=dqn", "num_envs=4", "total_timesteps=128", "warmup_steps=32",
                     "eval.episodes=4", "checkup=off").ok()  # fmt: skip
    assert done.json("summary.json")["quality"]["mean_reward"] == 24.0


def test_a_name_that_only_the_innermost_env_has_is_told(fasttrain: RunCommand):
    fasttrain("+profile=speed", "env.id=hunt:Hunt-v0", BY_METHOD[1], *RUN).refused(
        "'OrderEnforcing' object has no attribute 'legal'"
    )
    fasttrain("+profile=speed", BY_FUNCTION[0], BY_FUNCTION[1].replace("hunt:legal", "hunt:legl"), *RUN).refused(
        "ActionMasker, action_mask_fn=hunt:legl: module 'hunt' has no 'legl'; did you mean 'legal'?"
    )
