from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import view as module
from fasttrain.runs.envs import build_vec_env
from fasttrain.runs.progress import Progress
from fasttrain.runs.view import Activity, LiveView, activity, moves


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


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_panel_fits_and_says_the_same_however_narrow(progress: Progress, width: int, monkeypatch: pytest.MonkeyPatch):
    if width == 200:
        monkeypatch.setattr(progress.curve, "slope_per_hour", lambda: -3456.0)
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
    if width == 200:
        assert any("reward 1.5 -3,456/h" in line for line in lines)
    if width >= 60:
        assert any("env 0 %  act 0 %  update 0 %  rest 100 %" in line for line in lines)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come at once instead of after seconds."""
    monkeypatch.setattr(module, "SILENT_S", 0.01)
    monkeypatch.setattr(module, "MOVING_EVERY_S", 0.01)


class Noted(io.StringIO):
    """A file that says when something came."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self.came, self._encoding = threading.Event(), encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        text.encode(self._encoding)
        written = super().write(text)
        if text.strip():
            self.came.set()
        return written


def terminal(width: int, encoding: str = "utf-8") -> tuple[Console, Noted]:
    file = Noted(encoding)
    return Console(file=file, width=width, force_terminal=True, _environ={"TERM": "xterm"}), file


def plain(width: int = 140) -> tuple[Console, Noted]:
    file = Noted()
    return Console(file=file, width=width), file


def drawn(file: Noted) -> list[str]:
    """What was drawn, line by line, without the codes that move the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_a_line_in_a_log_says_what_and_how_long(hurried: None) -> None:
    console, file = plain()
    with activity(console, "studying"), activity(console, "compiling kernels") as doing:
        doing.now("3 of 12: act_rows")
        file.came.clear()
        while "act_rows" not in file.getvalue():
            assert file.came.wait(30)
            file.came.clear()
    assert "compiling kernels: 3 of 12: act_rows, 0:00" in file.getvalue().splitlines(), "of the innermost"


@pytest.mark.parametrize("width", [60, 200])
def test_on_a_terminal_a_line_moves_and_fits(hurried: None, width: int) -> None:
    console, file = terminal(width)
    with suppress(KeyboardInterrupt), activity(console, "evaluating") as doing:
        doing.now("x" * 300)
        file.came.clear()
        assert file.came.wait(30)
        raise KeyboardInterrupt
    lines = drawn(file)
    assert all(len(line) < width for line in lines)
    assert lines[-1].endswith("xx…, 0:00")
    assert file.getvalue().endswith("\x1b[2K"), "nothing of it stays"
    assert "\x1b[?25h" in file.getvalue(), "the cursor is there again"


def test_what_is_asked_is_asked_whenever_it_is_drawn(hurried: None, tmp_path: Path) -> None:
    console, file = terminal(80)
    with activity(console, "cell 0", ask=(tmp_path / "log.txt").read_text):
        pass
    assert "cell 0, 0:00" in drawn(file)[0], "a log that is not there yet is no error"
    console, file = terminal(80)
    answers: Iterator[str] = iter(f"line {number}" for number in range(10**6))
    with activity(console, "cell 1", ask=lambda: next(answers)):
        file.came.clear()
        assert file.came.wait(30)
    assert all(re.search(r"cell 1: line \d+, 0:00$", line) for line in drawn(file))
    assert len({line.split("cell")[1] for line in drawn(file)}) > 1


def test_below_the_live_view_of_a_training_which_moves_by_itself(hurried: None) -> None:
    console, file = terminal(80)
    view = LiveView(Progress(1000, PhaseClock()), console, "ppo on X", panel=True)
    view._draws = 0.0
    with view:
        view.tick()
        with activity(console, "evaluating"):
            file.came.clear()
            assert file.came.wait(30)
    shown = "\n".join(drawn(file))
    assert re.search(r"0/1,000.*\n.*updates\n.*\n. ppo on X, 0:00\n. evaluating, 0:00\n", shown)
    assert not console._live_stack


def test_letters_that_the_terminal_lacks_are_not_used(hurried: None) -> None:
    console, file = terminal(80, "ascii")
    with activity(console, "evaluating"):
        file.came.clear()
        assert file.came.wait(30)
    assert drawn(file)


def test_a_dumb_terminal_gets_lines() -> None:
    assert not moves(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}))
    assert not moves(Console(file=io.StringIO(), _environ={"TERM": "xterm"}))
    assert moves(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm", "NO_COLOR": "1"}))
    assert not moves(Console(quiet=True, force_terminal=True, _environ={"TERM": "xterm"})), "prints would be lost"


def test_how_long_it_will_take_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fasttrain.runs.view.time.monotonic", lambda: now[0])
    doing = Activity("evaluating")
    doing.count(0, 2000, "episodes")
    assert doing.line() == "evaluating: 0 of 2,000 episodes, 0:00"
    now[0] = 110.0
    doing.count(500, 2000, "episodes")
    assert doing.line() == "evaluating: 500 of 2,000 episodes, 0:10, ETA 0:30"
    assert doing.line(34) == "evaluating: 500 o…, 0:10, ETA 0:30"
    doing.count(500, 2000, "sampled episodes")  # another half begins
    assert doing.line() == "evaluating: 500 of 2,000 sampled episodes, 0:10"
    doing.now("closing")
    assert doing.line() == "evaluating: closing, 0:10"


def test_envs_are_counted_as_they_are_built() -> None:
    told: list[str] = []
    build_vec_env(configured("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy"), 2, 0, tell=told.append).close()
    assert told == ["env 1 of 2", "env 2 of 2"]
