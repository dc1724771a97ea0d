from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest
from rich.console import Console

from conftest import configured
from fasttrain.perf.report import EnvTimes, PerfWindow
from fasttrain.runs.evaluate import summarise
from fasttrain.runs.view import FittingTable, make_console, say, show_perf, show_plan, show_quality
from fasttrain.spec.checks import FLAGS, EnvFacts, Machine
from fasttrain.spec.plan import resolve

POSIX = pytest.mark.skipif(not hasattr(os, "openpty"), reason="POSIX terminals")


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=140)


def window_of(env_steps: int, updates: int, phases_ns: dict[str, int], **times: int) -> PerfWindow:
    nothing: dict[str, Any] = {"cpu_share": None, "gpu_share": None, "memory_bytes": 0}
    return PerfWindow(env_steps=env_steps, updates=updates, phases_ns=phases_ns, envs=EnvTimes(**times), **nothing)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("effective", "why"),
    [
        ({"engine": "stock"}, "measured from outside of SB3"),
        ({"engine": "fast", "fused_update": "on"}, "in compiled kernels the optimizer too"),
    ],
)
def test_plan_and_perf_say_why_and_what_cannot_be_told_apart(console: Console, effective: dict[str, str], why: str):
    show_plan(console, resolve(configured("+profile=speed"), {}, EnvFacts(True, None), Machine(2, False, False)))
    show_perf(console, window_of(1000, 2, {"train": 10**9, "other": 10**6}), effective)
    text = text_of(console)
    for part in (
        "the game has a native batch", "requested", "trade-off", "this CPU has no bf16 units",
        "[PERF] 999 steps/s over 1,000 env steps in 1.0 s, 2 updates", "train_ms: forward and backward together", why,
        "the update is the bottleneck",
    ):  # fmt: skip
        assert part in text
    assert "prefetch" not in text
    assert re.search(r"batch_size +null +1,024", text)
    assert "None" not in text


@pytest.mark.parametrize("draws", [None, 0.125])
def test_quality_with_and_without_draws(console: Console, draws: float | None):
    ci95 = {"mean_reward": [1.0, 3.0], "win_rate": [0.2, 0.4], "score_diff": [1.0, 2.0]}
    result = {"episodes": 1000, "mean_reward": 2.0, "win_rate": 0.3, "draw_rate": draws, "score_diff": 1.5,
              "mean_length": 65.0, "end_reason": {"won": 0.3, "lost": 0.7}, "ci95": ci95}  # fmt: skip
    show_quality(console, {"greedy": result, "sampled": {**result, "draw_rate": None}})
    text = text_of(console)
    for part in ("30.0 % [20.0, 40.0]", "2 [1, 3]", "1.5 [1.0, 2.0]", "won 30 %, lost 70 %"):
        assert part in text
    assert ("draws" in text) == ("12.5 %" in text) == (draws is not None)


def test_an_envs_words_do_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    finished = [(1.0, 3, {"end_reason": "[/red]\x1b[2J[bold]\n\u202ewon\ud800"})] * 2
    show_quality(make_console(), {"greedy": summarise(finished)})
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "[/red]" in told
    assert "[bold]" in told
    make_console().print("a :Dog: [red]")
    say(make_console(), "  word" * 40 + " [bold]")
    assert capsys.readouterr().out == "a :Dog: [red]\n" + "  word" * 40 + " [bold]\n", "in a file it is never folded"


@pytest.mark.parametrize("kind", ["pipe", pytest.param("terminal", marks=POSIX)])
def test_a_reader_that_goes_away_ends_the_output_and_not_the_program(kind: str):
    code = (
        "from fasttrain.runs.view import make_console\n"
        "console = make_console()\n"
        "for number in range(2000): console.print('x' * 100)\n"
        "import sys; sys.stderr.write('went on')"
    )
    ours, theirs = os.pipe() if kind == "pipe" else os.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        os.read(ours, 100)
        os.close(ours)
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(60)) == ("went on", 0)


def test_what_a_library_prints_can_be_kept_apart_while_the_program_goes_on_telling(capsys: pytest.CaptureFixture[str]):
    console, kept = make_console(), io.StringIO()
    with redirect_stdout(kept):
        sys.stdout.write("of the library\n")
        say(console, "of the program")
    assert (kept.getvalue(), capsys.readouterr().out) == ("of the library\n", "of the program\n")


@pytest.mark.parametrize("width", [60, 80])
def test_nothing_is_cut_in_a_word_however_narrow_the_terminal(width: int):
    narrow, wide = (
        Console(file=io.StringIO(), width=each, force_terminal=True, no_color=True) for each in (width, 400)
    )
    phases = {"action": 3 * 10**9, "train": 10**10, "other": 10**6}
    window = window_of(3_014_656, 11_776, phases, opponents_ns=10**9)
    ci95 = {"mean_reward": [3.03, 3.21], "win_rate": [0.64, 0.68], "score_diff": [44.7, 58.0]}
    result = {"episodes": 2000, "mean_reward": 3.12, "win_rate": 0.66, "draw_rate": 0.02, "score_diff": 51.4,
              "mean_length": 65.0, "end_reason": {"won": 0.6, "lost": 0.4}, "ci95": ci95}  # fmt: skip
    for console in (narrow, wide):
        plan = resolve(configured("+profile=speed"), {}, EnvFacts(True, None), Machine(2, False, False))
        show_plan(console, plan)
        show_perf(console, window, {"fused_update": "on"})
        show_quality(console, {"greedy": result, "sampled": result})
        say(console, "a line of many words that says what was saved where, and how much of it: 66.1 % " * 3)
    lines = unstyled(text_of(narrow)).splitlines()
    assert all(len(line) <= width for line in lines)
    words = set(unstyled(text_of(narrow)).split())
    known = set(unstyled(text_of(wide)).split()) | {"·", "/s", "alone", "ms/1,000", "draws", "score", "difference"}
    assert words <= known, "a piece of a word"
    assert not any(line.strip().startswith("%") for line in lines)


@pytest.mark.parametrize("width", [60, 140])
def test_the_plan_tells_each_source_however_narrow_the_terminal(width: int):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo")
    sources = {flag.name: "profile speed" for flag in FLAGS}
    plan = resolve(config, sources, EnvFacts(False, 20e-6), Machine(2, False, False))
    show_plan(console, plan)
    of_profile = [row for row in plan.notable() if row.source == "profile speed"]
    told = " ".join(unstyled(text_of(console)).split())
    assert told.count("profile speed") == len(of_profile) > 5


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def shown(width: int, table: FittingTable) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture
def table() -> FittingTable:
    made = FittingTable(["flag", "effective", "source", "why"], right=["effective"], plain=["why"])
    made.add_row("num_envs", "256", "default", "the game's own number in this tier of all its numbers [bold]")
    made.add_row("engine", "1,024", "", "")
    return made


def test_columns_stand_beside_each_other_where_there_is_room_else_below(table: FittingTable) -> None:
    assert shown(140, table) == [
        "flag      effective  source   why",
        "num_envs        256  default  the game's own number in this tier of all its numbers [bold]",
        "engine        1,024",
    ]
    assert shown(75, table)[1].startswith("num_envs        256  default  the game's own"), "there is room to fold it"
    assert shown(60, table) == [
        "flag      effective  source",
        "num_envs        256  default",
        "  the game's own number in this tier of all its numbers",
        "    [bold]",
        "engine        1,024",
    ]
    assert shown(24, table)[:3] == ["flag      effective", "num_envs        256", "  source default · the"]
    for width in (20, 40, 60, 80, 200):
        words = " ".join(shown(width, table)).split()
        assert {"num_envs", "256", "default", "1,024", "engine", "numbers", "[bold]"} <= set(words)
        assert all(len(line) <= width for line in shown(width, table))
