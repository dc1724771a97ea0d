from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.runs import stopping
from fasttrain.runs.stopping import Stopping, stopping_for
from fasttrain.spec.config import StopConfig

TOTAL = 1_000_000


def stop_of(
    curve: Callable[[np.ndarray], np.ndarray], noise: float, episodes: int, patience: float = 0.2, seed: int = 0
) -> float | None:
    """Where, as a share of the horizon, a plateau ends a training whose mean return follows `curve` over 0..1."""
    shares = np.arange(1, episodes + 1) / episodes
    returns = curve(shares) + noise * np.random.default_rng(seed).standard_normal(episodes)
    rules = Stopping(StopConfig(patience=patience), TOTAL)
    for share, value in zip(shares.tolist(), returns.tolist(), strict=True):
        rules.add(round(share * TOTAL), value)
        if (found := rules.reason(0.0)) is not None:
            assert found.by == "plateau"
            return share
    return None


def rising(share: np.ndarray) -> np.ndarray:
    return share


def saturated(share: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, share / 0.3)


def late(share: np.ndarray) -> np.ndarray:
    """No reward for the first 30 %, and not a bit of noise there: a sparse reward."""
    return np.where(share < 0.3, 0.0, (share - 0.3) / 0.7)


# Episodes of a run; scatter of returns ÷ rise of their mean over all of it. As LunarLander, CartPole, Skull King (2)
KINDS = [(1000, 0.25), (3000, 0.5), (10_000, 1.0), (30_000, 1.0)]


@pytest.mark.parametrize(("episodes", "noise"), KINDS)
def test_a_slow_noisy_rise_is_no_plateau(episodes: int, noise: float):
    stops = [stop_of(rising, noise, episodes, seed=seed) for seed in range(25)]
    assert sum(stop is not None for stop in stops) == 0, stops


def test_the_share_of_rising_runs_that_are_stopped(monkeypatch: pytest.MonkeyPatch):
    """The hard ones: returns scatter by once and twice of all that is learned, over few episodes."""
    runs = [(1.0, 6000), (2.0, 20_000)]

    def share_stopped() -> float:
        stops = [stop_of(rising, noise, episodes, seed=seed) for noise, episodes in runs for seed in range(50)]
        return sum(stop is not None for stop in stops) / len(stops)

    assert share_stopped() <= 0.10  # of 600 seeds 7 %
    monkeypatch.setattr(stopping, "_is_flat", lambda *_: True)
    assert share_stopped() > 0.5, "comparing the best blocks alone is not enough"


@pytest.mark.parametrize(("episodes", "noise"), KINDS)
def test_a_saturated_run_is_stopped_soon_after_its_patience(episodes: int, noise: float):
    stops = [stop_of(saturated, noise, episodes, seed=seed) for seed in range(20)]
    found = [stop for stop in stops if stop is not None]
    assert len(found) >= 16
    assert min(found) > 0.4
    assert np.median(found) < 0.75


def test_what_never_learns_is_stopped_but_not_before_its_patience():
    stops = [stop_of(np.zeros_like, 1.0, 10_000, seed=seed) for seed in range(20)]
    assert sum(stop is not None for stop in stops) >= 18
    assert min(stop for stop in stops if stop is not None) > 0.2


def test_a_flat_start_takes_a_patience_longer_than_itself():
    assert stop_of(late, 0.0, 10_000, patience=0.4) is None
    early = stop_of(late, 0.0, 10_000, patience=0.2)
    assert early is not None
    assert 0.2 < early < 0.3
    noisy = [stop_of(late, 0.5, 10_000, patience=0.4, seed=seed) for seed in range(20)]
    assert sum(stop is not None for stop in noisy) <= 1


def test_a_collapse_is_a_plateau():
    stop = stop_of(lambda share: np.where(share < 0.4, share, 0.1), 0.05, 10_000)
    assert stop is not None
    assert 0.55 < stop < 0.75


def test_too_few_episodes_decide_nothing():
    assert stop_of(np.zeros_like, 1.0, 400) is None


def test_at_reward_takes_the_last_hundred_episodes():
    rules = Stopping(StopConfig(at_reward=195.0), TOTAL)
    for step in range(200):
        rules.add(step, 400.0, learned=False)
    assert rules.reason(0.0) is None, "before the first update it is chance"
    for step in range(99):
        rules.add(step, 400.0)
    assert rules.reason(0.0) is None, "of 99 episodes there is no mean of 100"
    rules.add(99, -50_000.0)
    assert rules.reason(0.0) is None
    for step in range(100):
        rules.add(100 + step, 195.21 if step < 99 else 195.2)
    found = rules.reason(0.0)
    assert found is not None
    assert found.by == "reward"
    assert found.text == "mean return of the last 100 episodes reached 195.2 (stop.at_reward=195)"


def test_minutes():
    rules = Stopping(StopConfig(max_minutes=1.5), TOTAL)
    assert rules.reason(89.9) is None
    found = rules.reason(90.6)
    assert found is not None
    assert (found.by, found.text) == (
        "time",
        "1.51 minutes of training are over (stop.max_minutes=1.5)",
    )


def test_without_rules_nothing_is_active():
    assert not Stopping(StopConfig(), TOTAL).active


def test_rules_that_mean_nothing_are_refused():
    assert stopping_for(configured("stop.patience=0.5")).active
    assert not stopping_for(configured()).active
    with pytest.raises(ConfigError, match="stop.patience=0.2 with opponent=self"):
        stopping_for(configured("stop.patience=0.2", "opponent=self", "env=skirmish"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("stop.max_minutes=0", "stop.max_minutes=0.0: must be at least 0.001"),
        ("stop.patience=0", "stop.patience=0.0: must lie between 0.01 and 1"),
        ("stop.patience=1.5", "stop.patience=1.5: must lie between 0.01 and 1"),
        ("stop.at_reward=much", "stop.at_reward=much: expected a number"),
        ("stop.at_rewards=1", "at_reward"),
    ],
)
def test_wrong_values_are_bad_input(fasttrain: RunCommand, wrong: str, told: str):
    done = fasttrain("+profile=speed", wrong, "total_timesteps=100")
    assert done.exit_code == 2
    assert told in done.err
    assert "Traceback" not in done.err


CARTPOLE = ("env.id=CartPole-v1", "num_envs=4", "eval.episodes=4", "total_timesteps=200000")
PPO = ("algo=ppo", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=1")


def finished(fasttrain: RunCommand, *arguments: str) -> tuple[dict, str]:
    """The summary of a run that ended well, and what it printed."""
    done = fasttrain(*CARTPOLE, *arguments)
    assert done.exit_code == 0, done.err
    summary = done.json("summary.json")
    assert summary["status"] == "done"
    assert (done.folder / "model.zip").is_file()
    windows = done.json("perf.json")["windows"]
    assert windows[-1]["env_steps"] == summary["env_steps"]
    assert windows[-1]["wall_s"] == summary["wall_s"]
    assert windows[-1]["updates"] == summary["updates"]
    return summary, done.out


@pytest.mark.parametrize(
    "engine",
    [
        ("+profile=speed", *PPO),
        ("+profile=speed", "algo=dqn", "warmup_steps=100"),
        ("+profile=baseline", "vec_env=dummy", *PPO),
    ],
)
def test_a_run_ends_at_its_reward(fasttrain: RunCommand, engine: tuple[str, ...]):
    summary, out = finished(fasttrain, *engine, "stop.at_reward=10")
    assert summary["stopped_by"] == "reward"
    assert summary["episodes"] >= 100
    assert summary["env_steps"] < 50_000
    assert f"stopped at {summary['env_steps']:,} steps: mean return of the last 100 episodes reached " in out
    assert "(stop.at_reward=10)" in out


def test_a_run_ends_after_its_minutes(fasttrain: RunCommand):
    summary, out = finished(fasttrain, "+profile=speed", *PPO, "stop.max_minutes=0.005", "stop.at_reward=10000")
    assert summary["stopped_by"] == "time"
    assert summary["wall_s"] >= 0.3
    assert "minutes of training are over (stop.max_minutes=0.005)" in out


def test_a_run_ends_at_its_plateau(fasttrain: RunCommand):
    """Without a learning rate worth the name nothing rises."""
    frozen = ("algo.learning_rate=1e-12", "stop.patience=0.1")
    summary, out = finished(fasttrain, "+profile=speed", *PPO, *frozen)
    assert summary["stopped_by"] == "plateau"
    assert 20_000 < summary["env_steps"] < 200_000
    assert "the mean return no longer rises: at best " in out


def test_a_run_that_nothing_stops_ends_at_its_horizon(fasttrain: RunCommand):
    # one kind of envs: the vector form, which auto may choose, does not count the rows that only reset
    arguments = ("vec_env=dummy", "total_timesteps=4096", "stop.at_reward=1000")
    summary, out = finished(fasttrain, "+profile=speed", *PPO, *arguments)
    assert summary["stopped_by"] == "horizon"
    assert summary["env_steps"] == 4096
    assert isinstance(summary["reward_per_hour"], float)
    assert "stopped at" not in out
