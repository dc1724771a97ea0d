"""Every key of `env.` and `action_repeat` has its effect in the envs of a run, or is refused with the way out."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.runs.envs import build_vec_env, check_native_options, env_facts
from fasttrain.spec.config import Config

IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
NUMBERS = spaces.Box(-1, 1, (3,))


class Line(gymnasium.Env[Any, Any]):
    """Observes and pays the number of the step; never ends by itself."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any] | None = None) -> None:
        self.observation_space = spaces.Box(0, 1e6, (1,)) if space is None else space
        self.time = 0

    def _see(self) -> Any:
        return np.full(self.observation_space.shape, self.time, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._see(), float(self.time), False, False, {}


class Tenfold(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 10 * reward


class PlusOne(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return reward + 1


class OldLine:
    """The same in the old interface."""

    observation_space, action_space = spaces.Box(0, 1e6, (1,)), spaces.Discrete(2)

    def reset(self) -> Any:
        return np.zeros(1, np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        return np.ones(1, np.float32), 7.0, False, {}


def on_line(*arguments: str, name: str = "Line") -> Config:
    return configured(f"env.entry_point={__name__}:{name}", "algo=ppo", "vec_env=dummy", *arguments)


def played(*arguments: str, name: str = "Line", steps: int = 4) -> tuple[list[Any], list[float], list[bool]]:
    env = build_vec_env(on_line(*arguments, name=name), 1, 0)
    rows = [np.asarray(env.reset())[0].tolist()]
    rewards, dones = [], []
    for _ in range(steps):
        observations, reward, done, infos = env.step(np.zeros(1, np.int64))
        rows.append(np.asarray(infos[0]["terminal_observation"] if done[0] else observations[0]).tolist())  # type: ignore[index, call-overload]
        rewards.append(float(reward[0]))
        dones.append(bool(done[0]))
    env.close()
    return rows, rewards, dones


def test_without_options_nothing_lies_between():
    assert played() == ([[0], [1], [2], [3], [4]], [1, 2, 3, 4], [False] * 4)


def test_max_episode_steps():
    assert played("env.max_episode_steps=3")[2] == [False, False, True, False]


def test_wrappers_are_applied_in_order():
    wrappers = [f"{__name__}:{name}" for name in ("Tenfold", "PlusOne")]
    assert played(f"env.wrappers=[{','.join(wrappers)}]")[1] == [11, 21, 31, 41]
    assert played(f"env.wrappers=[{','.join(reversed(wrappers))}]")[1] == [20, 30, 40, 50]
    assert played("env.wrappers=[gymnasium.wrappers:FlattenObservation]")[1] == [1, 2, 3, 4]


def test_api():
    assert played(name="OldLine")[1] == [7, 7, 7, 7]


def test_action_repeat_counts_decisions():
    rows, rewards, dones = played("action_repeat=3", "env.max_episode_steps=7")
    assert rows == [[0], [3], [6], [7], [3]]
    assert rewards == [6, 15, 7, 6]
    assert dones == [False, False, True, False]


def test_frame_stack_shows_the_latest_last_and_the_final_observation_whole():
    rows, _, dones = played("env.frame_stack=3", "env.max_episode_steps=3")
    assert dones == [False, False, True, False]
    assert rows == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 1]]


class FirstImage(Line):
    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (3, 36, 36), np.uint8))


class LastImage(Line):
    def __init__(self) -> None:
        super().__init__(IMAGE)


@pytest.mark.parametrize(("name", "shape"), [("FirstImage", (6, 36, 36)), ("LastImage", (36, 36, 6))])
def test_frames_are_stacked_along_the_channels(name: str, shape: tuple[int, ...]):
    env = build_vec_env(on_line("env.frame_stack=2", name=name), 1, 0)
    assert env.observation_space.shape == shape
    env.reset()
    seen = np.asarray(env.step(np.zeros(1, np.int64))[0])[0]
    old, new = np.split(seen, 2, axis=shape.index(6))
    assert (old.max(), new.min()) == (0, 1)


def test_a_stacked_and_repeated_run_trains_and_is_evaluated_again(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=speed", f"env.entry_point={__name__}:Line", "algo=ppo", "vec_env=dummy", "env.frame_stack=2",
        "action_repeat=5", "env.max_episode_steps=12", f"env.wrappers=[{__name__}:Tenfold]", "total_timesteps=480",
        "algo.rollout_size=480", "batch_size=48", "eval.episodes=4",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert (quality["mean_length"], quality["mean_reward"]) == (3.0, 780.0)
    again = fasttrain("eval", f"run={done.folder}")
    assert again.exit_code == 0, again.err
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert (greedy["mean_length"], greedy["mean_reward"]) == (3.0, 780.0)


NATIVE = ("vec_env=native",)
POOL = ("env=gym", "env.id=CartPole-v1", "env.backend=envpool", "algo=ppo")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*NATIVE, "env.max_episode_steps=9"), "env.max_episode_steps=9 does not go with the native batch of fasttr"),
        ((*NATIVE, "env.wrappers=[a:B]"), r"env.wrappers=\['a:B'\] does not go with .* take vec_env=dummy or shared$"),
        (("vec_env=auto", "action_repeat=2"), "action_repeat=2 does not go with the native batch .*vec_env=dummy"),
        ((*POOL, "action_repeat=2"), "action_repeat=2 does not go with env.backend=envpool.*env.backend=gymnasium$"),
        ((*POOL, "env.masks=legal"), "env.masks=legal does not go with env.backend=envpool"),
        (("vec_env=auto", "env.masks=legal"), "env.masks=legal does not go with the native batch .*vec_env=dummy"),
        ((*POOL, "env.wrappers=[a:B]"), r"env.wrappers=\['a:B'\] does not go with env.backend=envpool"),
        (
            ("env.entry_point=a:B", "env.backend=envpool", "algo=ppo"),
            "env.entry_point=a:B does not go with env.backend=envpool",
        ),
        ((*POOL, "algo=maskable_ppo"), "env.id=CartPole-v1 of EnvPool has no action masks: take algo=ppo or dqn"),
    ],
)  # fmt: skip
def test_a_compiled_batch_refuses_what_it_cannot_do(arguments: tuple[str, ...], text: str):
    with pytest.raises(ConfigError, match=text):
        env_facts(configured(*arguments))


def test_the_same_options_go_with_the_games_python_form():
    config = configured("vec_env=dummy", "action_repeat=2", "env.max_episode_steps=9")
    assert env_facts(config).step_s is None
    env = build_vec_env(config, 1, 0)
    env.reset()
    masks = env.env_method("action_masks")[0]
    env.step(np.array([masks.argmax()]))
    env.close()


def test_a_compiled_batch_takes_what_lies_around_it():
    check_native_options(configured("vec_env=native", "env.frame_stack=2", "env.normalize=[obs,reward]"))
    check_native_options(configured(*POOL, "env.max_episode_steps=9", "env.frame_stack=2"))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("env.max_episode_steps=0", "^env.max_episode_steps=0: must be at least 1$"),
        ("env.frame_stack=0", "^env.frame_stack=0: must be at least 1$"),
        ("env.normalize=[observations]", r"^env.normalize\[0\]=observations: not one of obs, reward"),
        ("env.normalize=obs", "^env.normalize=obs: expected a list"),
        (
            "env.backend=pool",
            "^env.backend=pool: not one of gymnasium, vector, daemons, envpool, pettingzoo; did you mean 'envpool'",
        ),
        ("env.wrappers=a:B", "^env.wrappers=a:B: expected a list"),
        ("action_repeat=0", "^action_repeat=0: must be at least 1$"),
    ],
)
def test_values_that_no_env_takes(override: str, text: str):
    with pytest.raises(ConfigError, match=text):
        configured("env.id=CartPole-v1", override)
