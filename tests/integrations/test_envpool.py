"""EnvPool behind the slots: Gymnasium's dynamics, final observations, episode statistics and ends."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from conftest import RunCommand
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain_integrations import envpool
from fasttrain_integrations.envpool import EnvPoolVecEnv

REASON = "EnvPool is not installed: pip install fasttrain[envpool] (700 MB, Python 3.11 up)"
needs_envpool = pytest.mark.skipif(find_spec("envpool") is None, reason=REASON)


class Twins:
    """Gymnasium CartPoles that are put into the state each pool env is in: CartPole observes its whole state."""

    def __init__(self, num_envs: int) -> None:
        self.envs = [gymnasium.make("CartPole-v1").unwrapped for _ in range(num_envs)]
        for env in self.envs:
            env.reset(seed=0)

    def step(self, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = []
        for env, state, action in zip(self.envs, states, actions, strict=True):
            env.state = tuple(state.tolist())
            env.steps_beyond_terminated = None
            rows.append(env.step(int(action)))
        seen, rewards, terminated, *_ = zip(*rows, strict=True)
        return np.stack(seen), np.array(rewards), np.array(terminated)


@needs_envpool
@pytest.mark.parametrize(("max_episode_steps", "limit"), [(None, 500), (9, 9)])
def test_cartpole_is_gymnasiums_for_thousands_of_steps(max_episode_steps: int | None, limit: int) -> None:
    num_envs = 8
    env = EnvPoolVecEnv("CartPole-v1", num_envs, max_episode_steps)
    env.seed(3)
    states = env.reset()
    twins, lengths, counts = Twins(num_envs), np.zeros(num_envs, int), {"cut": 0, "ended": 0, "both": 0}
    for _ in range(2000):
        # Balancing by the pole's lean and speed reaches the limit; every seventh env tumbles instead.
        actions = (states[:, 2] + 0.3 * states[:, 3] + 0.05 * states[:, 0] + 0.1 * states[:, 1] > 0).astype(int)
        actions[::7] = 1
        expected, rewards, terminated = twins.step(states, actions)
        env.step_slots(actions)
        slots, lengths = env.slots, lengths + 1
        np.testing.assert_array_equal(slots.terminations, terminated)
        np.testing.assert_array_equal(slots.truncations, lengths == limit)
        np.testing.assert_array_equal(slots.rewards, rewards)
        going_on = ~(slots.terminations | slots.truncations)
        np.testing.assert_allclose(slots.observations[going_on], expected[going_on], atol=1e-5)
        assert [episode.env_index for episode in slots.finished] == np.flatnonzero(~going_on).tolist()
        for episode in slots.finished:
            index = episode.env_index
            np.testing.assert_allclose(episode.final_observation, expected[index], atol=1e-5)
            assert (episode.length, episode.episode_return) == (lengths[index], lengths[index])
            assert episode.truncated == (not terminated[index])
            assert np.abs(slots.observations[index]).max() <= 0.05, "a first observation of the next episode"
            both = terminated[index] and lengths[index] == limit
            counts["both" if both else "cut" if episode.truncated else "ended"] += 1
            lengths[index] = 0
        states = np.array(slots.observations)
    assert counts["cut"] > 10
    assert counts["ended"] > 10
    assert limit > 9 or counts["both"] > 0, "ended by the rules in the step of the limit"


@needs_envpool
def test_infos_of_an_ended_episode_are_those_sb3_expects() -> None:
    env = EnvPoolVecEnv("CartPole-v1", 2, 4)
    env.seed(0)
    env.reset()
    for _ in range(3):
        assert env.step(np.zeros(2, np.int64))[3] == [{}, {}]
    observations, _, dones, infos = env.step(np.zeros(2, np.int64))
    assert dones.all()
    for index, info in enumerate(infos):
        assert info["TimeLimit.truncated"] is True
        assert (info["episode"]["r"], info["episode"]["l"], info["elapsed_step"]) == (4.0, 4, 4)
        assert not np.array_equal(info["terminal_observation"], observations[index])


def first_states(env: EnvPoolVecEnv, resets: int) -> list[Any]:
    return [np.array(env.reset()).tolist() for _ in range(resets)]


@needs_envpool
def test_seeds() -> None:
    one, same, other = (EnvPoolVecEnv("CartPole-v1", 3) for _ in range(3))
    one.seed(5)
    same.seed(5)
    other.seed(6)
    states = first_states(one, 3)
    assert first_states(same, 3) == states
    assert len({str(rows) for rows in states}) == 3, "a reset without a new seed continues the stream"
    assert other.reset().tolist()[:2] == states[0][1:], "env i is seeded with seed + i"
    one.seed(5)
    assert first_states(one, 3) == states
    unseeded = [EnvPoolVecEnv("CartPole-v1", 1).reset().tolist() for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    one.seed(2**32 - 1)
    one.reset()


@needs_envpool
@pytest.mark.parametrize(
    ("env_id", "observation", "action"),
    [
        ("CartPole-v1", None, spaces.Discrete(2)),
        ("LunarLander-v3", spaces.Box(-np.inf, np.inf, (8,)), spaces.Discrete(4)),
        ("BipedalWalker-v3", spaces.Box(-np.inf, np.inf, (24,)), spaces.Box(-1, 1, (4,))),
        ("FrozenLake-v1", spaces.Discrete(16), spaces.Discrete(4)),
        ("Pong-v5", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6)),
    ],
)
def test_spaces_and_steps_of_each_family(env_id: str, observation: Any, action: Any) -> None:
    env = EnvPoolVecEnv(env_id, 3)
    assert observation is None or env.observation_space == observation
    assert env.action_space == action
    env.seed(1)
    env.reset()
    before = np.array(env.slots.observations)
    for _ in range(5):
        seen, rewards, _, _ = env.step(np.stack([env.action_space.sample() for _ in range(3)]))
    assert np.shape(seen) == (3, *(env.observation_space.shape or ()))
    assert rewards.dtype == np.float32
    assert seen[0] in env.observation_space
    assert env_id == "FrozenLake-v1" or not np.array_equal(before, np.asarray(seen))


@needs_envpool
def test_the_rows_of_a_step_come_in_the_order_of_the_envs() -> None:
    env = EnvPoolVecEnv("CartPole-v1", 16, options={"num_threads": 3})
    env.reset()
    for step in range(500):
        info = env._pool.step(np.full(16, step % 2))[4]
        assert info["env_id"].tolist() == list(range(16))


@needs_envpool
def test_options_reach_the_pool() -> None:
    env = EnvPoolVecEnv("Pong-v5", 2, options={"stack_num": 2, "num_threads": 1})
    assert env.observation_space.shape == (2, 84, 84)
    env.reset()
    assert env._pool.config["num_threads"] == 1


@needs_envpool
@pytest.mark.parametrize("taken", [1, 2, 0])
def test_the_number_of_threads_is_the_fastest_of_three(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(envpool, "usable_cores", lambda: 2)
    monkeypatch.setattr(envpool, "fastest", lambda steps: [tried.extend(steps), steps[taken](), taken][-1])
    env = EnvPoolVecEnv("CartPole-v1", 4)
    env.reset()
    env.seed(1)
    env.reset()  # a new pool, and no second choice
    EnvPoolVecEnv("CartPole-v1", 1).reset()  # one env has one thread
    assert tried == [1, 2, 0]
    assert env._pool.config["num_threads"] == taken


def test_a_disturbed_turn_does_not_make_a_number_of_threads_slow() -> None:
    now, turns = [0.0], {1: [2.0, 2.0, 2.0], 2: [9.0, 1.0, 1.0], 0: [3.0, 3.0, 0.5]}

    def step(key: int) -> None:
        now[0] += turns[key].pop(0)

    assert envpool.fastest({key: partial(step, key) for key in turns}, lambda: now[0]) == 2
    assert turns == {1: [], 2: [], 0: []}


@needs_envpool
def test_lives_as_episodes_leave_the_limit_to_the_pool() -> None:
    env = EnvPoolVecEnv("Breakout-v5", 2, 60, {"episodic_life": True})
    env.seed(0)
    env.reset()
    ends: list[list[Any]] = [[], []]
    for step in range(200):
        env.step_slots(np.full(2, step % 2))  # fire and wait: a ball is lost every 24 steps
        for episode in env.slots.finished:
            ends[episode.env_index].append((episode.length, episode.truncated, episode.info["lives"]))
    assert ends[0][:4] == [(24, False, 4), (24, False, 3), (12, True, 3), (24, False, 4)], "the limit counts the game"


@needs_envpool
def test_what_c_plus_plus_envs_cannot_do_is_said() -> None:
    env = EnvPoolVecEnv("CartPole-v1", 2)
    assert not env.has_attr("opponents_ns")
    assert not env.masked
    assert env.env_is_wrapped(gymnasium.Wrapper) == [False, False]
    with pytest.raises(RuntimeError, match="before the first reset"):
        env.step(np.zeros(2, np.int64))
    for name, *given in (("env_method", "set_level", 3), ("set_attr", "level", 3), ("set_options", {"a": 1})):
        with pytest.raises(EnvError, match="EnvPool"):
            getattr(env, name)(*given)
    env.reset()
    env.close()


@needs_envpool
@pytest.mark.parametrize(
    ("env_id", "options", "text"),
    [
        ("CartPol-v1", {}, r"env\.id=CartPol-v1 of EnvPool: no such task; did you mean .*'CartPole-v1'"),
        ("Zzzz", {}, r"no such task; envpool\.list_all_envs\(\) has all"),
        ("Pong-v5", {"frame_skp": 2}, "unknown env.kwargs.frame_skp; did you mean 'frame_skip'.; EnvPool accepts: "),
        ("CartPole-v1", {"reward_threshold": "x"}, "EnvPool does not accept .*'reward_threshold': 'x'.*TypeError"),
        ("CartPole-v1", {"num_envs": 3}, "env.kwargs.num_envs is set by fasttrain; use num_envs instead"),
        ("CartPole-v1", {"max_episode_steps": 3}, "use env.max_episode_steps instead"),
    ],
)
def test_bad_names_and_options(env_id: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(EnvSpecError, match=text):
        EnvPoolVecEnv(env_id, 2, options=options)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(EnvSpecError, match=r'pip install "fasttrain\[envpool\]"'):
        EnvPoolVecEnv("CartPole-v1", 2)


@needs_envpool
def test_a_training_from_the_command_line(fasttrain: RunCommand) -> None:
    done = fasttrain(
        "+profile=speed", "env.id=CartPole-v1", "env.backend=envpool", "algo=ppo", "total_timesteps=960",
        "eval.episodes=6", "env.max_episode_steps=8", "algo.rollout_size=480", "batch_size=48",
    ).ok()  # fmt: skip
    row = next(row for row in done.json("plan.json")["flags"] if row["flag"] == "vec_env")
    assert (row["effective"], row["reason"]) == ("native", "EnvPool steps all envs in its own threads")
    assert done.json("summary.json")["quality"]["mean_length"] <= 8
    again = fasttrain("eval", f"run={done.folder}").ok()
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert greedy["mean_reward"] == done.json("summary.json")["quality"]["mean_reward"]
