"""What a comparison says on the terminal."""

from __future__ import annotations

import io
import math

from rich.console import Console

from fasttrain.studies.compare import cell_text, sentence, show_comparison
from fasttrain.studies.judge import Row
from fasttrain.studies.statistics import Comparison, Interval, Ratio, compare

GATE = {"metric": "win_rate", "curve_of": "win rate", "threshold": 0.4, "min_speed_up": 1.1, "min_pairs": 5}


def row(comparison: Comparison | None, speed_up: Ratio | None, faster: bool | None) -> Row:
    names = ("steps_per_s", "env_steps", "updates", "reward_per_hour", "win_rate", "draw_rate", "mean_reward",
             "score_diff", "mean_turns", "tail", "sample_efficiency", "elo")  # fmt: skip
    figures = {name: Interval(0.5, 0.4, 0.6) if name in ("win_rate", "steps_per_s") else None for name in names}
    return Row(
        "speed", {}, figures, {"won [b]": 1.0}, Interval(math.inf, 3.0, math.inf), None, speed_up, comparison, faster
    )


def test_verdicts_are_sentences():
    good = compare(dict.fromkeys(range(5), 0.5), dict.fromkeys(range(5), 0.52), 0.03)
    assert sentence(row(good, Ratio(2.0, 1.9, 2.1, 5), True), GATE) == (
        "speed: PASS, 2.00× [1.90, 2.10] as fast; win rate +2 [+2, +2] points, margin 3 (5 seeds)"
    )
    few = compare({0: 0.5}, {0: 0.5}, 0.03)
    said = sentence(row(few, Ratio(1.05, -math.inf, math.inf, 1), False), GATE)
    assert "NOT ENOUGH SEEDS, 1.05× as fast, less than the 1.1× that trade-offs are worth" in said
    assert "+0 [?, ?] points" in said
    assert said.endswith("; take at least 5 seeds")
    assert sentence(row(None, None, None), GATE) == "speed: no seed finished that the baseline finished too"
    said = sentence(row(None, Ratio(2.0, 1.9, 2.1, 5), True), GATE)
    assert said.startswith("speed: no verdict, 2"), "eval.episodes=0"
    assert said.endswith("as fast; no win rate of a seed is known on both sides")


def test_numbers_with_intervals():
    assert cell_text(Interval(0.613, 0.6, 0.62), 100, "{:.1f}") == "61.3 [60.0, 62.0]"
    assert cell_text(Interval(12.0, 8.0, math.inf), form="{:.0f}") == "12 [8, never]"
    assert cell_text(Interval(2.0, -math.inf, math.inf)) == "2"
    assert (cell_text(None), cell_text(Interval(math.nan, 1.0, 2.0))) == ("-", "nan [1, 2]")
    assert Ratio(2.0, 1.0, 3.0, 5).text() == "2.00× [1.00, 3.00]"


def test_tables_leave_out_what_no_env_tells_and_text_stays_text():
    stream = io.StringIO()
    good = compare(dict.fromkeys(range(5), 0.5), dict.fromkeys(range(5), 0.52), 0.03)
    rows = [row(None, None, None), row(good, Ratio(2.0, 1.9, 2.1, 5), True)]
    show_comparison(Console(file=stream, width=140), rows, GATE)
    text = stream.getvalue()
    assert "won [b] 100 %" in text
    assert "win rate %" in text
    assert "score diff." not in text
    assert "seconds to 0.4" in text
    assert "never" in text
