from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import progress as status
from fasttrain.runs.progress import EVALUATING, STATUS, LearningCurve, Moments, Progress, StatusFile, clock_text
from fasttrain.runs.state import curve_state


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says."""
    now = [100.0]
    monkeypatch.setattr("fasttrain.runs.progress.time.perf_counter", lambda: now[0])
    return now


@pytest.fixture
def progress(now: list[float]) -> Progress:
    made = Progress(total_timesteps=4000, clock=PhaseClock(), started=90.0)
    made.env_steps, made.updates = 1000, 5
    return made


def test_rates_and_eta(progress: Progress):
    assert (progress.steps_per_s, progress.eta_s) == (100.0, 30.0)
    progress.max_s = 25.0
    assert progress.eta_s == 15.0
    progress.max_s = 5.0
    assert progress.eta_s == 0.0
    progress.env_steps, progress.max_s = 5000, None
    assert progress.eta_s == 0.0
    assert sum(progress.shares().values()) == pytest.approx(1.0)
    assert [clock_text(seconds) for seconds in (7, 754, 3723, 59.6)] == ["0:07", "12:34", "1:02:03", "1:00"]


def test_eta_is_that_of_the_last_minute(now: list[float]):
    now[0] = 0.0
    slowing = Progress(total_timesteps=10_000, clock=PhaseClock(), started=0.0, updates=1)
    for second in range(600):
        now[0] = float(second)
        slowing.env_steps += 10 if second < 300 else 1
        slowing.mark()
    assert slowing.steps_per_s == pytest.approx(5.5, rel=0.01)
    assert slowing.eta_s == pytest.approx(10_000 - 3300)
    assert len(slowing._marks) < 65


def test_collecting_before_the_first_update_is_not_in_the_rate_of_learning(now: list[float]):
    now[0] = 0.0
    dqn, etas = Progress(total_timesteps=120_000, clock=PhaseClock(), started=0.0), []
    for half_second in range(9):
        now[0] = half_second / 2
        dqn.env_steps += 10_000 if half_second < 4 else 500
        dqn.mark()
        etas.append(dqn.eta_s)
        dqn.updates = max(0, half_second - 2)
    assert etas[3] == pytest.approx(80_000 / (40_000 / 1.5)), "of collecting, as nothing else is known"
    assert etas[4:] == [None, *[(120_000 - steps) / 1000 for steps in (41_000, 41_500, 42_000, 42_500)]]


def test_episodes_and_wins(progress: Progress):
    assert progress.mean_return is None
    assert progress.win_rate is None
    progress.add_episode(1.0, {})
    assert progress.win_rate is None, "an env that does not say has no win rate"
    progress.add_episode(3.0, {"is_win": True})
    progress.add_episode(2.0, {"is_success": False})
    assert progress.mean_return == 2.0
    assert progress.win_rate == 0.5
    assert progress.episodes == 3


def test_line_says_it_all(progress: Progress):
    assert progress.mean_terms() == {}
    progress.add_episode(1.5, {"is_win": True, "is_draw": False, "ticks": 70, "reward_terms": {"vp": 1.0, "win": 1.0}})
    line = progress.line()
    assert line.startswith(
        "1,000/4,000 steps 25 % · 100 steps/s · 0.1 episodes/s · 7 ticks/s · ETA 0:30 · reward 1.5 · win 100.0 % · env "
    )
    progress.add_episode(
        1.5, {"is_win": False, "is_draw": True, "vp_diff": 4, "reward_terms": {"vp": 2.0, "win": -1.0}}
    )
    assert "win 50.0 %, draw 50.0 % · score +4 · env" in progress.line()
    assert progress.mean_terms() == {"vp": 1.5, "win": 0.0}


def test_the_line_says_what_reward_gains_per_hour(progress: Progress, now: list[float]):
    assert progress.trend() == ""
    progress.started = 0.0
    for episode in range(1000):
        now[0] = 36.0 * episode
        progress.env_steps = 4 * episode
        progress.add_episode(episode * 0.012, {})
    assert progress.trend() == " +1.2/h"
    assert " · reward 5.99 +1.2/h · env" in progress.line()


def test_moments_are_those_of_numpy():
    values = np.random.default_rng(0).normal(1e6, 2.0, 500)
    moments = Moments()
    assert moments.error == np.inf
    for value in values.tolist():
        moments.add(value)
    assert (moments.count, moments.mean) == (500, pytest.approx(values.mean()))
    assert moments.error == pytest.approx(values.std(ddof=1) / np.sqrt(500))


def curve_of(
    rewards: np.ndarray, seconds_each: float = 1.0, total: int = 100_000, steps_each: int = 100
) -> LearningCurve:
    curve = LearningCurve(total)
    for number, reward in enumerate(rewards.tolist(), start=1):
        curve.add(number * steps_each, number * seconds_each, reward)
    return curve


def test_the_slope_is_that_of_the_recent_quarter_where_it_means_something():
    episodes = np.arange(1000)
    rewards = np.where(episodes < 700, 0.0, (episodes - 700) * 0.1) + np.random.default_rng(0).normal(0, 1.0, 1000)
    slope = curve_of(rewards).slope_per_hour()
    assert slope == pytest.approx(0.1 * 3600, rel=0.05), "0.1 per episode of one second"
    noise = np.random.default_rng(1)
    assert LearningCurve(1000).slope_per_hour() is None
    assert curve_of(np.arange(300.0)).slope_per_hour() is None, "75 episodes are too few"
    assert curve_of(np.arange(400.0)).slope_per_hour() == pytest.approx(3600.0)
    level = [curve_of(noise.normal(5, 1.0, 1000)).slope_per_hour() for _ in range(40)]
    assert sum(slope is not None for slope in level) <= 6, "noise around a level is no slope"
    assert curve_of(np.arange(1000.0), total=10**8).slope_per_hour() is None, "one stretch has no slope"


def test_reward_per_hour_is_last_fifth_minus_first_fifth_and_memory_is_bounded():
    rewards = np.repeat([1.0, 7.0, 2.0, 9.0, 4.0], 200)
    # Middles of the fifths: 800 episodes of 9 s, that is two hours, apart.
    assert curve_of(rewards, seconds_each=9.0).reward_per_hour() == pytest.approx((4 - 1) / 2, rel=0.01)
    stopped = curve_of(np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 20), seconds_each=45.0)
    assert stopped.reward_per_hour() == pytest.approx(4.0, rel=0.02), "of what was trained alone"
    assert LearningCurve(1000).reward_per_hour() is None
    assert curve_of(np.ones(40), total=4000).reward_per_hour() is None
    assert curve_of(np.ones(60), total=6000).reward_per_hour() == 0.0
    curve = LearningCurve(1_000_000)
    for number in range(50_000):
        curve.add(number * 20, float(number), 0.0)
    assert len(curve_state(curve)["stretches"]) == 1000


@pytest.fixture
def file(tmp_path: Path) -> StatusFile:
    progress = Progress(4000, PhaseClock(), env_steps=1000)
    progress.add_episode(float("nan"), {})
    return StatusFile(tmp_path, progress, lambda: "one\nline \x1b[31m")


def content(folder: Path) -> Any:
    return json.loads((folder / STATUS).read_text())


def test_status_says_what_the_live_line_knows(file: StatusFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file.write()
    said = content(tmp_path)
    assert (said["phase"], said["env_steps"], said["total_timesteps"]) == ("training", 1000, 4000)
    assert (said["reward"], said["win_rate"], said["pid"]) == (None, None, os.getpid())
    assert said["eta_s"] > 0 < said["steps_per_s"]
    assert said["said"] == "one line \N{REPLACEMENT CHARACTER}[31m"
    assert os.listdir(tmp_path) == [STATUS], "nothing half written is left"
    with file.doing(EVALUATING):
        assert content(tmp_path)["phase"] == "evaluating"
        assert content(tmp_path)["eta_s"] is None
    file.write()
    assert (content(tmp_path)["phase"], content(tmp_path)["reward"]) == ("training", None)
    (tmp_path / STATUS).unlink()
    monkeypatch.setattr(status, "write_whole", Mock(side_effect=OSError(28, "No space left on device")))
    file.now("done")
    assert not (tmp_path / STATUS).exists()


def test_a_tick_writes_at_most_every_two_seconds(file: StatusFile, tmp_path: Path, now: list[float]):
    now[0] = 10.0
    assert file.tick(10.0) == 12.0
    (tmp_path / STATUS).unlink()
    assert file.tick(11.9) == 12.0
    assert not (tmp_path / STATUS).exists()
    now[0] = 12.0
    assert file.tick(12.0) == 14.0
    assert (tmp_path / STATUS).exists()


def test_a_slow_disk_is_written_to_less_often(file: StatusFile, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, *[0.0] * 2, 0.5, 0.5])

    def slow(*_: Any) -> None:
        monkeypatch.setattr(status.time, "perf_counter", lambda: 0.5)

    monkeypatch.setattr(status.time, "perf_counter", lambda: next(clock, 0.5))
    monkeypatch.setattr(status, "write_whole", slow)
    assert file.tick(0.0) == pytest.approx(500.0), "half a second is a thousandth of 500"
