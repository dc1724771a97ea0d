from __future__ import annotations

import pytest

from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.progress import Progress, clock_text


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Progress:
    now = [100.0]
    monkeypatch.setattr("fasttrain.runs.progress.time.perf_counter", lambda: now[0])
    made = Progress(total_timesteps=4000, clock=PhaseClock(), started=90.0)
    made.env_steps, made.updates = 1000, 5
    return made


def test_rates_and_eta(progress: Progress):
    assert progress.steps_per_s == 100.0
    assert progress.eta_s == 30.0
    progress.env_steps = 5000
    assert progress.eta_s == 0.0


def test_eta_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("fasttrain.runs.progress.time.perf_counter", lambda: now[0])
    slowing = Progress(total_timesteps=10_000, clock=PhaseClock(), started=0.0)
    for second in range(600):
        now[0] = float(second)
        slowing.env_steps += 10 if second < 300 else 1
        slowing.mark()
    assert slowing.steps_per_s == pytest.approx(5.5, rel=0.01)
    assert slowing.eta_s == pytest.approx(10_000 - 3300)
    assert len(slowing._marks) < 65


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
    progress.add_episode(1.5, {"is_win": True, "ticks": 70})
    line = progress.line()
    assert line.startswith(
        "1,000/4,000 steps 25 % · 100 steps/s · 0.1 episodes/s · 7 ticks/s · ETA 0:30 · reward 1.5 · win 100.0 % · env "
    )


def test_draws_and_scores_where_there_are_any(progress: Progress):
    progress.add_episode(1.5, {"is_win": True, "is_draw": False, "vp_diff": 4})
    assert "win 100.0 % · score +4 · env" in progress.line()
    progress.add_episode(1.5, {"is_win": False, "is_draw": True, "score_diff": -1})
    assert "win 50.0 %, draw 50.0 % · score +1.5 · env" in progress.line()


def test_the_line_says_what_reward_gains_per_hour_where_that_is_known(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
):
    assert progress.trend() == ""
    now = [0.0]
    monkeypatch.setattr("fasttrain.runs.progress.time.perf_counter", lambda: now[0])
    progress.started = 0.0
    for episode in range(1000):
        now[0] = 36.0 * episode
        progress.env_steps = 4 * episode
        progress.add_episode(episode * 0.012, {})
    assert progress.trend() == " +1.2/h"
    assert " · reward 5.99 +1.2/h · env" in progress.line()


def test_minutes_shorten_the_eta(progress: Progress):
    progress.max_s = 25.0
    assert progress.eta_s == 15.0
    progress.max_s = 5.0
    assert progress.eta_s == 0.0


def test_reward_terms_are_means_per_episode(progress: Progress):
    assert progress.mean_terms() == {}
    progress.add_episode(1.0, {"reward_terms": {"vp": 1.0, "win": 1.0}})
    progress.add_episode(1.0, {"reward_terms": {"vp": 2.0, "win": -1.0}})
    assert progress.mean_terms() == {"vp": 1.5, "win": 0.0}


def test_shares_sum_to_one(progress: Progress):
    assert sum(progress.shares().values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (754, "12:34"), (3723, "1:02:03"), (59.6, "1:00")])
def test_clock_text(seconds: float, text: str):
    assert clock_text(seconds) == text
