from __future__ import annotations

import io

import pytest
from rich.console import Console

from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.progress import Progress
from fasttrain.runs.view import LiveView


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setattr("fasttrain.runs.progress.time.perf_counter", lambda: 100.0)
    made = Progress(total_timesteps=4000, clock=PhaseClock(), started=90.0)
    made.env_steps, made.updates = 1000, 5
    return made


def test_plain_lines_where_there_is_no_terminal(progress: Progress):
    output = io.StringIO()
    with LiveView(progress, Console(file=output, width=200), "ppo on X", panel=False) as view:
        view.tick()
        assert output.getvalue() == "", "a line every ten seconds, not every step"
    assert output.getvalue() == progress.line() + "\n"


def test_panel_shows_what_reward_gains_per_hour(progress: Progress, monkeypatch: pytest.MonkeyPatch):
    output = io.StringIO()
    console = Console(file=output, width=140)
    progress.add_episode(1.5, {})
    monkeypatch.setattr(progress.curve, "slope_per_hour", lambda: -3456.0)
    console.print(LiveView(progress, console, "ppo on X", panel=True).render())
    assert "reward 1.5 -3,456/h" in output.getvalue()


def test_panel_shows_progress_progress_and_phases(progress: Progress):
    output = io.StringIO()
    console = Console(file=output, width=140)
    progress.add_episode(1.5, {"is_win": True})
    console.print(LiveView(progress, console, "ppo on X", panel=True).render())
    text = output.getvalue()
    for part in ("1,000/4,000", "ETA 0:30", "100 steps/s", "win 100.0 %", "env ", "update "):
        assert part in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_panel_fits_and_says_the_same_however_narrow(progress: Progress, width: int):
    output = io.StringIO()
    console = Console(file=output, width=width)
    progress.total_timesteps, progress.env_steps = 3_000_000, 1_234_567
    progress.add_episode(1.5, {"is_win": True})
    console.print(LiveView(progress, console, "ppo on X", panel=True).render())
    lines = output.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= (5 if width < 60 else 3)
    for part in ("1,234,567/3,000,000", "ETA 0:14", "123,457 steps/s", "5 updates", "win 100.0 %"):
        assert any(part in line for line in lines), part
    if width >= 60:
        assert any("env 0 %  act 0 %  update 0 %  rest 100 %" in line for line in lines)
