from __future__ import annotations

import pytest

from fasttrain_report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [(256648.019, "256,648"), (2.2617, "2.26"), (0.00390625, "0.00391"), (-12.34, "−12.3"), (1.2e-7, "1.20e-07"),
     (0, "0"), (65.0, "65"), (999.96, "1000"), (None, "–"), ("", "–"), (float("nan"), "–"), (float("inf"), "–"),
     (True, "–"), ([], "–")],
)  # fmt: skip
def test_number(value: object, text: str):
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (250, "250"), (1250, "1,250"), (15_000, "15k"), (1.5e6, "1.5M"), (-2e9, "−2G")]
)
def test_ticks(value: float, text: str):
    assert words.compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.958, "3.96 s"), (59.96, "1 min 00 s"), (754, "12 min 34 s"), (3725, "1 h 02 min"), (None, "–")],
)
def test_seconds(value: float | None, text: str):
    assert words.seconds(value) == text


def test_sizes_values_and_labels():
    assert (words.size(563_376_128), words.size(2_905_309_184)) == ("563 MB", "2.9 GB")
    found = [words.value_text(value) for value in (True, None, 1024, 0.0003, [64, 64], "auto")]
    assert found == ["true", "–", "1,024", "0.0003000", "[64, 64]", "auto"]
    assert len(words.label("n" * 100)) == words.LABEL_CHARACTERS
    assert words.label("_hidden") == "\u2009_hidden"
    assert words.label("") == "–"


def test_figures_of_a_games_own():
    assert words.metric_of("win_rate") is words.METRICS["win_rate"]
    forms = {name: words.metric_of(name).form for name in ("gold", "hit_rate", "round_s", "steps_per_s")}
    assert list(forms.values()) == [words.number, words.percent, words.seconds, words.number]
    assert (words.metric_of("hit_rate").title, words.metric_of("round_s").title) == ("hit rate", "round")
