from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import view as module
from fasttrain.runs.envs import build_vec_env
from fasttrain.runs.progress import Progress
from fasttrain.runs.view import Activity, LiveView, activity, make_console, moves


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
    with activity(console, "compiling kernels") as doing:
        doing.now("3 of 12: act_rows")
        assert file.came.wait(30)
    assert file.getvalue() == "compiling kernels: 3 of 12: act_rows, 0:00\n", "one: the next is due in half a minute"


def test_what_is_over_soon_leaves_nothing_in_a_log() -> None:
    console, file = plain()
    with activity(console, "compiling kernels"):
        pass
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", [60, 80, 200])
def test_on_a_terminal_a_line_moves_and_fits(hurried: None, width: int) -> None:
    console, file = terminal(width)
    with activity(console, "evaluating") as doing:
        doing.now("x" * 300)
        file.came.clear()
        assert file.came.wait(30)
    lines = drawn(file)
    assert all(len(line) < width for line in lines)
    assert lines[-1].endswith("xx…, 0:00")
    assert file.getvalue().endswith("\x1b[2K"), "nothing of it stays"


def test_what_is_asked_is_asked_whenever_it_is_drawn(hurried: None) -> None:
    console, file = terminal(80)
    answers: Iterator[str] = iter(f"line {number}" for number in range(10**6))
    with activity(console, "cell 1", ask=lambda: next(answers)):
        file.came.clear()
        assert file.came.wait(30)
    assert all(re.search(r"cell 1: line \d+, 0:00$", line) for line in drawn(file))
    assert len({line.split("cell")[1] for line in drawn(file)}) > 1


def test_a_log_that_is_not_there_yet_is_no_error(hurried: None, tmp_path) -> None:  # type: ignore[no-untyped-def]
    console, file = terminal(80)
    with activity(console, "cell 1", ask=(tmp_path / "log.txt").read_text):
        pass
    assert "cell 1, 0:00" in drawn(file)[0]


def test_activities_within_each_other_share_the_screen(hurried: None) -> None:
    console, file = terminal(80)
    with activity(console, "studying"):
        with activity(console, "training"):
            console.print("said meanwhile")
        file.came.clear()
        assert file.came.wait(30)
    lines = drawn(file)
    assert any("studying" in line for line in lines)
    assert any("training" in line for line in lines)
    assert lines.count("said meanwhile") == 1
    assert not console._live_stack


def test_in_a_log_only_the_innermost_speaks(hurried: None) -> None:
    console, file = plain()
    with activity(console, "studying"), activity(console, "training"):
        assert file.came.wait(30)
    assert "training" in file.getvalue()
    assert "studying" not in file.getvalue()


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


def test_an_error_inside_leaves_the_terminal_as_it_was(hurried: None) -> None:
    console, file = terminal(80)
    with pytest.raises(KeyboardInterrupt), activity(console, "evaluating"):
        raise KeyboardInterrupt
    assert file.getvalue().rstrip("\x1b[12AKG").count("\x1b[?25h") == 1, "the cursor is there again"


def test_a_colour_forced_by_the_environment_moves_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    assert console.is_terminal or not moves(console)


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
