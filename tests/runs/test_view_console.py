from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from conftest import configured
from fasttrain.perf.report import EnvTimes, PerfWindow
from fasttrain.runs.evaluate import summarise
from fasttrain.runs.view import make_console, say, show_perf, show_plan, show_quality
from fasttrain.spec.checks import FLAGS, EnvFacts, Machine
from fasttrain.spec.plan import resolve

POSIX = pytest.mark.skipif(not hasattr(os, "openpty"), reason="POSIX terminals")


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=140)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plan_shows_requested_effective_and_why(console: Console):
    show_plan(console, resolve(configured("+profile=speed"), {}, EnvFacts(True, None), Machine(2, False, False)))
    text = text_of(console)
    assert "the game has a batched native form" in text
    assert "requested" in text
    assert "trade-off" in text
    assert "this CPU has no bf16 units" in text, "a fast path that ended off"
    assert "prefetch" not in text


@pytest.mark.parametrize(
    ("effective", "why"),
    [
        ({"engine": "stock"}, "timed from outside of SB3"),
        ({"engine": "fast", "fused_update": "on"}, "in compiled kernels the optimizer too"),
    ],
)
def test_perf_shows_phases_and_says_where_they_cannot_be_told_apart(
    console: Console, effective: dict[str, str], why: str
):
    window = PerfWindow(
        env_steps=1000, updates=2, phases_ns={"train": 10**9, "other": 10**6}, envs=EnvTimes(), cpu_share=None,
        gpu_share=None, memory_bytes=0,
    )  # fmt: skip
    show_perf(console, window, effective)
    text = text_of(console)
    assert "[PERF] 999 steps/s over 1,000 env steps in 1.0 s, 2 updates" in text
    assert "train_ms: forward and backward together" in text
    assert why in text
    assert "the update is the wall" in text


def test_quality_with_and_without_wins(console: Console):
    ci95 = {"mean_reward": [1.0, 3.0], "win_rate": [0.2, 0.4], "score_diff": None}
    result = {"episodes": 1000, "mean_reward": 2.0, "win_rate": 0.3, "score_diff": None, "mean_length": 65.0,
              "end_reason": {"won": 0.3, "lost": 0.7}, "ci95": ci95}  # fmt: skip
    show_quality(console, {"greedy": result})
    text = text_of(console)
    assert "30.0 % [20.0, 40.0]" in text
    assert "2 [1, 3]" in text
    assert "won 30 %, lost 70 %" in text
    assert "draws" not in text


def test_draws_are_shown_where_there_are_any(console: Console):
    ci95 = {"mean_reward": [1.0, 3.0], "win_rate": [0.2, 0.4], "score_diff": [1.0, 2.0]}
    result = {"episodes": 1000, "mean_reward": 2.0, "win_rate": 0.3, "draw_rate": 0.125, "score_diff": 1.5,
              "mean_length": 65.0, "end_reason": {}, "ci95": ci95}  # fmt: skip
    show_quality(console, {"greedy": result, "sampled": {**result, "draw_rate": None}})
    text = text_of(console)
    assert "draws" in text
    assert "12.5 %" in text
    assert "1.5 [1.0, 2.0]" in text


def test_without_a_terminal_tables_are_wide_and_plain():
    console = make_console()
    assert console.is_terminal or (console.width == 140 and console.no_color)


def test_an_envs_words_do_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    finished = [(1.0, 3, {"end_reason": "[/red]\x1b[2J[bold]\n\u202ewon\ud800"})] * 2
    show_quality(make_console(), {"greedy": summarise(finished)})
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "[/red]" in told
    assert "[bold]" in told


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


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_cut_in_a_word_however_narrow_the_terminal(width: int):
    narrow, wide = (
        Console(file=io.StringIO(), width=each, force_terminal=True, no_color=True) for each in (width, 400)
    )
    window = PerfWindow(
        env_steps=3_014_656, updates=11_776, phases_ns={"action": 3 * 10**9, "train": 10**10, "other": 10**6},
        envs=EnvTimes(opponents_ns=10**9), cpu_share=None, gpu_share=None, memory_bytes=0,
    )  # fmt: skip
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


@pytest.mark.parametrize("width", [60, 80, 140])
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


def test_a_line_in_a_file_is_never_folded():
    console = Console(file=io.StringIO(), width=60)
    say(console, "  word" * 40 + " [bold]")
    assert text_of(console) == "  word" * 40 + " [bold]\n"
