from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.runs import stopping
from fasttrain.runs.stopping import Stopping, stopping_for
from fasttrain.spec.groups import StopConfig

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
        if (found := rules.reason(0.0, 0)) is not None:
            assert found.by == "plateau"
            return share
    return None


def rising(share: np.ndarray) -> np.ndarray:
    return share


# Episodes of a run; scatter of returns ÷ rise of their mean over all of it. As LunarLander, CartPole, Skull King (2)
KINDS = [(1000, 0.25), (3000, 0.5), (10_000, 1.0), (30_000, 1.0)]


@pytest.mark.parametrize(("episodes", "noise"), KINDS)
def test_a_noisy_rise_is_no_plateau_and_a_saturated_run_stops_soon(episodes: int, noise: float):
    assert [stop_of(rising, noise, episodes, seed=seed) for seed in range(20)] == [None] * 20
    stops = [stop_of(lambda share: np.minimum(1.0, share / 0.3), noise, episodes, seed=seed) for seed in range(15)]
    found = [stop for stop in stops if stop is not None]
    assert len(found) >= 12
    assert min(found) > 0.4
    assert np.median(found) < 0.75


def test_what_never_learns_collapses_or_starts_late():
    stops = [stop_of(np.zeros_like, 1.0, 10_000, seed=seed) for seed in range(20)]
    assert sum(stop is not None for stop in stops) >= 18
    assert min(stop for stop in stops if stop is not None) > 0.2, "not before its patience"
    assert stop_of(np.zeros_like, 1.0, 400) is None, "too few episodes decide nothing"
    collapsed = stop_of(lambda share: np.where(share < 0.4, share, 0.1), 0.05, 10_000)
    assert collapsed is not None
    assert 0.55 < collapsed < 0.75

    def late(share: np.ndarray) -> np.ndarray:
        """No reward for the first 30 %, and not a bit of noise there: a sparse reward."""
        return np.where(share < 0.3, 0.0, (share - 0.3) / 0.7)

    assert stop_of(late, 0.0, 10_000, patience=0.4) is None
    early = stop_of(late, 0.0, 10_000, patience=0.2)
    assert early is not None
    assert 0.2 < early < 0.3
    noisy = [stop_of(late, 0.5, 10_000, patience=0.4, seed=seed) for seed in range(20)]
    assert sum(stop is not None for stop in noisy) <= 1


def test_the_share_of_rising_runs_that_are_stopped(monkeypatch: pytest.MonkeyPatch):
    """The hard ones: returns scatter by once and twice of all that is learned, over few episodes."""
    runs = [(1.0, 6000), (2.0, 20_000)]

    def share_stopped() -> float:
        stops = [stop_of(rising, noise, episodes, seed=seed) for noise, episodes in runs for seed in range(50)]
        return sum(stop is not None for stop in stops) / len(stops)

    assert share_stopped() <= 0.10  # of 600 seeds 7 %
    monkeypatch.setattr(stopping, "_is_flat", lambda *_: True)
    assert share_stopped() > 0.5, "comparing the best blocks alone is not enough"


def test_at_reward_takes_the_last_hundred_episodes_and_minutes_count():
    rules = Stopping(StopConfig(at_reward=195.0), TOTAL)
    for step in range(200):
        rules.add(step, 400.0, learned=False)
    assert rules.reason(0.0, 0) is None, "before the first update it is chance"
    for step in range(99):
        rules.add(step, 400.0)
    assert rules.reason(0.0, 0) is None, "of 99 episodes there is no mean of 100"
    rules.add(99, -50_000.0)
    assert rules.reason(0.0, 0) is None
    for step in range(100):
        rules.add(100 + step, 195.21 if step < 99 else 195.2)
    found = rules.reason(0.0, 0)
    assert found == ("reward", "mean return of the last 100 episodes reached 195.2 (stop.at_reward=195)")
    rules = Stopping(StopConfig(max_minutes=1.5), TOTAL)
    assert rules.reason(89.9, 0) is None
    found = rules.reason(90.6, 0)
    assert found is not None
    assert (found.by, found.text) == ("time", "1.51 minutes of training are over (stop.max_minutes=1.5)")


def test_rules_that_mean_nothing_are_refused():
    assert stopping_for(configured("stop.patience=0.5")).active
    assert not stopping_for(configured()).active
    with pytest.raises(ConfigError, match="stop.patience=0.2 with opponent=self"):
        stopping_for(configured("stop.patience=0.2", "opponent=self", "env=skirmish"))


PPO = ("algo=ppo", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=1")


@pytest.mark.parametrize(
    ("arguments", "by", "told"),
    [
        (["+profile=speed", *PPO, "stop.at_reward=10"], "reward", "mean return of the last 100 episodes reached "),
        (["+profile=speed", "algo=dqn", "warmup_steps=100", "stop.at_reward=10"], "reward", "(stop.at_reward=10)"),
        (["+profile=baseline", *PPO, "stop.at_reward=10"], "reward", "(stop.at_reward=10)"),
        (["+profile=speed", *PPO, "stop.max_minutes=0.003"], "time", "of training are over (stop.max_minutes=0.003)"),
        (["+profile=speed", *PPO, "total_timesteps=1024", "stop.at_reward=1000"], "horizon", "mean reward"),
    ],
)
def test_a_run_ends_by_a_rule_or_at_its_horizon(fasttrain: RunCommand, arguments: list[str], by: str, told: str):
    done = fasttrain("env.id=CartPole-v1", "vec_env=dummy", "num_envs=4", "eval.episodes=2", "total_timesteps=200000",
                     "checkup=off", *arguments).ok()  # fmt: skip
    summary = done.json("summary.json")
    assert (summary["status"], summary["stopped_by"]) == ("done", by)
    assert summary["env_steps"] < 50_000
    assert told in done.out
    assert (f"stopped at {summary['env_steps']:,} steps: " in done.out) == (by != "horizon")
    assert (done.folder / "model.zip").is_file()
    last = done.json("perf.json")["windows"][-1]
    assert all(last[key] == summary[key] for key in ("env_steps", "wall_s", "updates"))


def test_a_run_ends_at_the_first_rollouts_end_after_at_steps_and_goes_on(fasttrain: RunCommand):
    typed = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "total_timesteps=512", "algo.rollout_size=128",
             "batch_size=64", "num_envs=2", "vec_env=dummy", "eval.episodes=2", "checkup=off")  # fmt: skip
    run = fasttrain(*typed, "stop.at_steps=100").ok()
    ends = [run.json("summary.json")["stopped_by"]]
    for at in ("300", "null"):
        fasttrain("resume", f"run={run.folder}", f"stop.at_steps={at}").ok()
        ends.append(run.json("summary.json")["stopped_by"])
        if at == "300":
            assert sorted(path.name for path in (run.folder / "checkpoints").iterdir())[-1] == "step_000000000384"
    assert ends == ["steps", "steps", "horizon"]
    assert run.episodes() == fasttrain(*typed).ok().episodes()
