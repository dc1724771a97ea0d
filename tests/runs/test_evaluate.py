from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv
from untouched import untouched

import pig_games
from conftest import RunCommand, configured
from fasttrain.envs.retrace import Retrace
from fasttrain.errors import ConfigError, EnvError
from fasttrain.runs.envs import build_vec_env
from fasttrain.runs.evaluate import evaluate, load_run, mean_interval, summarise
from fasttrain.saving.env_state import own_random_state
from fasttrain.spec.config import Config
from fasttrain.spec.infos import SCORES, InfoReader, candidate_entries
from fasttrain.spec.reading import has_monitor_wrapper
from fasttrain_engines.vec_env import DaemonVecEnv
from plain_env import PlainEnv


class Countdown(PlainEnv):
    def __init__(self, length: int) -> None:
        self.length = length

    def told(self) -> dict[str, Any]:
        return {"is_success": self.length == 1} if self.time == self.length else {}


def countdowns(lengths: list[int]) -> DummyVecEnv:
    def make(length: int) -> Callable[[], Countdown]:
        return lambda: Countdown(length)

    return DummyVecEnv([make(length) for length in lengths])


@pytest.fixture
def policy() -> PPO:
    return PPO("MlpPolicy", countdowns([1]), n_steps=2, batch_size=2, device="cpu")


def test_every_env_plays_its_share_so_short_episodes_are_not_favoured(policy: PPO):
    result = evaluate(policy, countdowns([1, 9]), episodes=10, deterministic=True, seed=0)
    assert result["episodes"] == 10
    assert result["mean_reward"] == 5.0  # (5 × 1 + 5 × 9) / 10; the first ten to end would give 1.8
    assert result["win_rate"] == 0.5
    assert result["mean_length"] == 5.0
    assert result["end_reason"] == {"terminated": 1.0}


def test_an_env_that_has_played_its_episodes_makes_no_further_step():
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=3")
    model = PPO("MlpPolicy", "CartPole-v1", device="cpu", seed=1)
    found, stepped = [], []
    for rests in (False, True):
        env = build_vec_env(dataclasses.replace(config, vec_env="dummy"), 3, 0)
        bases = [each.unwrapped for each in env.unwrapped.envs]  # type: ignore[attr-defined]
        counts = dict.fromkeys(map(id, bases), 0)
        for base in bases:
            step = base.step

            def counted(action: Any, base: Any = base, step: Any = step, counts: Any = counts) -> Any:
                counts[id(base)] += 1
                return step(action)

            base.step = counted  # type: ignore[method-assign]
        found.append(evaluate(model, env, 30, False, 7, rests=rests))
        stepped.append([*counts.values()])
        assert all(isinstance(each, Retrace) for each in env.unwrapped.envs)  # type: ignore[attr-defined]
        env.close()
    assert found[0] == found[1]
    assert sum(stepped[1]) == round(30 * found[1]["mean_length"]) < sum(stepped[0])
    assert max(stepped[1]) == max(stepped[0])


def test_the_training_random_state_is_untouched_by_an_evaluation_and_by_one_that_fails(policy: PPO):
    with untouched(policy):
        evaluate(policy, countdowns([2]), episodes=4, deterministic=False, seed=5)
    with untouched(), pytest.raises(AttributeError), own_random_state(9):
        torch.rand(3).nothing_such  # noqa: B018


def test_summary_of_games():
    finished = [
        (2.0, 10, {"is_win": True, "is_draw": False, "score_diff": 30, "end_reason": "won", "turn": 5}),
        (0.0, 12, {"is_win": False, "is_draw": True, "vp_diff": -10, "end_reason": "lost", "turn": 3}),
        (1.0, 14, {"is_win": False, "is_draw": False, "score_diff": -20, "end_reason": "lost", "turn": 4}),
    ]
    result = summarise(finished)
    assert (result["mean_reward"], result["score_diff"], result["mean_turns"]) == (1.0, 0.0, 4.0)
    assert result["win_rate"] == result["draw_rate"] == pytest.approx(1 / 3)
    assert result["end_reason"] == {"lost": pytest.approx(2 / 3), "won": pytest.approx(1 / 3)}
    half = stats.t.ppf(0.975, 2) * 1.0 / np.sqrt(3)
    assert result["ci95"]["mean_reward"] == pytest.approx([1 - half, 1 + half])


def test_summary_of_episodes_that_say_nothing():
    result = summarise([(1.0, 1, {"TimeLimit.truncated": True}), (1.0, 1, {})])
    assert result["end_reason"] == {"truncated": 0.5, "terminated": 0.5}
    assert (result["draw_rate"], result["ci95"]["mean_reward"], mean_interval(np.array([4.0]))) == (None, None, None)


def test_sampled_evaluation_depends_on_its_own_seed_only(policy: PPO):
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")])
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(random.randrange(1000))
        model = PPO("MlpPolicy", env, n_steps=2, batch_size=2, seed=4, device="cpu")
        results.append(evaluate(model, env, 5, False, seed)["mean_reward"])
    assert results[0] == results[1] != results[2]


def test_episodes_that_are_one_and_the_same_are_counted_once(policy: PPO):
    found = evaluate(policy, countdowns([3, 3]), episodes=10, deterministic=True, seed=0)
    assert (found["episodes"], found["distinct_episodes"], found["win_rate"]) == (10, 1, 0.0)
    assert {*found["ci95"].values()} == {None}
    two = evaluate(policy, countdowns([1, 9]), episodes=10, deterministic=True, seed=0)
    assert two["distinct_episodes"] == 2
    assert two["ci95"]["mean_reward"] is not None
    cartpole = DummyVecEnv([lambda: gym.make("CartPole-v1", max_episode_steps=3)])  # one return, other starts
    balanced = evaluate(PPO("MlpPolicy", cartpole, n_steps=2, batch_size=2, device="cpu"), cartpole, 4, True, seed=0)
    assert "distinct_episodes" not in balanced
    assert balanced["ci95"]["mean_reward"] is None


def test_a_run_of_another_version_is_read_or_refused_by_name(tmp_path: Path):
    stored = dataclasses.asdict(configured("env.id=CartPole-v1", "algo=ppo"))
    model = PPO("MlpPolicy", "CartPole-v1", device="cpu", n_steps=8, batch_size=8)
    model.save(tmp_path / "model.zip")

    def load(config: dict[str, Any]) -> Config:
        (tmp_path / "plan.json").write_text(json.dumps({"config": config}), encoding="utf-8")
        return load_run(tmp_path)[0]

    older = load({key: value for key, value in stored.items() if key not in ("pin_memory", "use_amp")})
    assert (older.pin_memory, older.use_amp) == ("off", "off")
    with pytest.raises(ConfigError, match=r"run=.*: its plan.json does not fit this version .*unknown key 'younger'"):
        load({**stored, "younger": 1})
    for of_before in ({"minutes": 5.0, "horizon_minutes": 5.0}, {"env": {**stored["env"], "own": {}}}):
        with pytest.raises(ConfigError, match=r"is of an older version .*(horizon_m|env.own).*init_from=.* begins a"):
            load({**stored, **of_before})


def test_eval_command_repeats_the_runs_own_evaluation(fasttrain: RunCommand):
    trained = fasttrain(
        "+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=256", "total_timesteps=256",
        "algo.n_epochs=1", "eval.episodes=8",
    )  # fmt: skip
    greedy = fasttrain("eval", f"run={trained.folder}").ok().json("eval.json")["quality"]["greedy"]
    summary = trained.json("summary.json")["quality"]
    assert greedy == {key: summary[key] for key in greedy}
    more = fasttrain("eval", f"run={trained.folder}", "eval.episodes=12")
    assert more.json("eval.json")["quality"]["greedy"]["episodes"] == 12
    fasttrain("eval", f"run={trained.folder}", "num_envs=3").refused("num_envs would do nothing")


WRAPPED = "env.wrappers=[stable_baselines3.common.monitor:Monitor,lives:LifeByLife]"
RUN = ("env.entry_point=lives:Lives", "algo=ppo", "num_envs=2", "total_timesteps=128", "algo.n_steps=32",
       "batch_size=32", "algo.n_epochs=1", "eval.episodes=6", "checkup=off")  # fmt: skip


@pytest.mark.parametrize(
    ("where", "wrappers", "game"),
    [
        (["vec_env=dummy"], WRAPPED, (24.0, 12)),
        (["vec_env=shared"], WRAPPED, (24.0, 12)),
        (["vec_env=dummy", "engine=stock"], WRAPPED, (24.0, 12)),
        (["vec_env=dummy"], "env.wrappers=[lives:LifeByLife]", (4.0, 4)),
    ],
)
def test_games_count_and_lives_teach(where: list[str], wrappers: str, game: tuple[float, int], fasttrain: RunCommand):
    """Without a Monitor a life is what there is."""
    done = fasttrain("engine=fast", *RUN, wrappers, *where).ok()
    quality = done.json("summary.json")["quality"]
    assert (quality["episodes"], quality["mean_reward"], quality["mean_length"]) == (6, *game)
    assert done.episodes() == [game] * done.json("summary.json")["episodes"] == [game] * (2 * (64 // game[1]))


def test_the_atari_group_has_one():
    config = configured("env=atari", "env.id=ALE/Breakout-v5", "algo=ppo", "+profile=speed")
    assert has_monitor_wrapper(config)
    assert config.env.frame_stack == 4
    assert (config.algo.rollout_size, config.algo.learning_rate) == (1024, 2.5e-4)
    assert not has_monitor_wrapper(configured("env.id=CartPole-v1", "algo=ppo"))


@pytest.mark.filterwarnings("ignore")
def test_pong_is_played(fasttrain: RunCommand):
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    pytest.importorskip("cv2", reason="opencv is not installed")
    done = fasttrain("+profile=speed", "env=atari", "algo=ppo", "num_envs=2", "vec_env=dummy", "total_timesteps=64",
                     "algo.n_steps=32", "batch_size=32", "algo.n_epochs=1", "eval.episodes=2", "checkup=off",
                     "env.max_episode_steps=400").ok()  # fmt: skip
    quality = done.json("summary.json")["quality"]
    assert quality["mean_reward"] <= 0
    assert quality["mean_length"] > 100  # frames


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_refused_decision_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A policy whose state counts its decisions in the episode, in games whose engine refuses every third action."""
    monkeypatch.chdir(pig_games.ENGINES)
    env = DaemonVecEnv("pig:Pig", {}, 3, pig_games.settings("--fault", "refuse=0.6"), 2, 1, tmp_path)
    seen, first = 0, []

    class Counting:
        def predict(
            self, observations: Any, state: Any, episode_start: Any, deterministic: bool, action_masks: Any
        ) -> Any:
            nonlocal seen
            if state is not None and not first:
                first.append(env.again.any())
            state = (np.zeros((1, 3, 2)),) if state is None else state
            made = np.where(episode_start, 0, state[0][0, :, 0])
            assert made.tolist() == env._lengths.tolist()
            seen = max(seen, int(made.max()))
            return pig_games.prudent(observations, action_masks), (np.tile(made[None, :, None] + 1, (1, 1, 2)),)

    try:
        found = evaluate(Counting(), env, 9, deterministic=True, seed=5)  # type: ignore[arg-type]
        assert found["episodes"] == 9
        assert env.times().refused > 5
        assert seen > 5
        assert first[0], "in the very first step one was"
    finally:
        env.close()


KEYS = InfoReader("victory", ("vp", "damage"), "how")
ENDS = [
    (1.0, 10, {"victory": True, "vp": 9, "damage": np.float32(2.5), "how": "time", "episode": {}}),
    (3.0, 20, {"victory": 0, "vp": 11, "damage": 3.5, "how": "fell"}),
]


def test_the_users_names_are_read_as_the_usual_ones_with_means_and_intervals():
    told = KEYS.read(ENDS[1][2])
    assert (told["is_win"], told["end_reason"], told[SCORES]) == (False, "fell", {"vp": 11.0, "damage": 3.5})
    assert told["victory"] == 0
    assert SCORES not in ENDS[1][2]
    found = summarise(ENDS, KEYS)
    assert (found["win_rate"], found["vp"], found["damage"]) == (0.5, 10.0, 3.0)
    assert found["scores"] == ["vp", "damage"]
    low, high = found["ci95"]["vp"]
    assert (low + high) / 2 == pytest.approx(10.0)
    assert high - 10 == pytest.approx(12.706, abs=1e-3), "Student's with one degree of freedom"
    assert found["end_reason"] == {"time": 0.5, "fell": 0.5}
    assert "untold" not in found


def test_keys_of_the_user_that_no_info_has_and_infos_that_say_nothing():
    found = summarise(ENDS, InfoReader("won", ("vp", "how"), "why"))
    assert found["untold"]["missing"] == ["env.result.win=won", "env.result.end=why", "env.result.scores=[how]"]
    assert found["untold"]["held"] == ["victory (0)", "vp (11)", "damage (3.5)", "how (fell)"]
    assert (found["scores"], found["win_rate"]) == (["vp"], None)
    assert summarise(ENDS)["untold"] == {"missing": [], "held": candidate_entries(ENDS[1][2])}
    assert "untold" not in summarise([(1.0, 3, {"TimeLimit.truncated": True, "episode": {}})]), "nothing to name"
    assert "untold" not in summarise([(1.0, 3, {"is_success": True, "vp": 3})])
    assert candidate_entries({"board": np.zeros(3), "text": "x" * 99, "episode": 3}) == [f"text ({'x' * 19}…)"]


@pytest.mark.parametrize("validates", [True, False])  # a setting of torch: which error it raises for NaN
def test_an_observation_that_is_not_finite_is_named_not_torchs_distribution(
    monkeypatch: pytest.MonkeyPatch, validates: bool
):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", validates)
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2)
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=8)
    broken = env.envs[1].step
    env.envs[1].step = lambda action: (np.full(4, np.nan), *broken(action)[1:])  # type: ignore[method-assign]
    with pytest.raises(EnvError, match="the observation of env 1 is not finite"):
        evaluate(model, env, 2, deterministic=False, seed=3)
