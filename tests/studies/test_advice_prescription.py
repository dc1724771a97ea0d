"""What the doctor says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from conftest import configured
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.studies import advice as show
from fasttrain.studies.advice import Advice, Candidate, Situation
from fasttrain.studies.limits import Flow, Rates

RATES = Rates(env=4e-6, policy=1e-6, update=5e-6, replay=2e-6, logging=0.5e-6, storing=1e-6)


def found(**changes: Any) -> Situation:
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=dqn")
    machine, facts = Machine(4, False, False, bf16_units="AMX"), EnvFacts(False, None)
    now = Situation(config, {}, ["algo=dqn"], facts, machine, config, RATES, Flow(), trained_s=12.5e-6)
    return now._replace(**changes)


def said(function: Any, *arguments: Any) -> str:
    out = io.StringIO()
    function(Console(file=out, width=200), *arguments)
    return out.getvalue()


def test_the_table_has_each_part_alone_and_its_share():
    text = said(show.parts, found())
    assert "Machine: 4 cores, bfloat16 by AMX, no GPU" in text
    rows = {line[:26].strip(): line[26:].split() for line in text.splitlines()}
    assert rows["stepping the envs"][:3] == ["250,000", "4", "32"]
    assert rows["of it drawing batches"][:3] == ["500,000", "2", "16"]
    assert "of it reaching the workers" not in text
    assert "Limit of this configuration: 100,000 steps/s (envs step, then the policy acts, then updates)" in text
    assert "A short training: 80,000 steps/s, 80 % of the limit" in text


def test_of_a_finished_run_its_own_rate_counts():
    assert "The run: 80,000 steps/s, 80 % of the limit" in said(show.parts, found(trained_s=None, finished_s=12.5e-6))


def test_one_part_alone_has_no_limit():
    text = said(show.parts, found(rates=Rates(env=4e-6), trained_s=None))
    assert "250,000" in text
    assert "Limit" not in text


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        (Flow(groups=True), "the policy acts while envs step, then updates"),
        (Flow(), "envs step, then the policy acts, then updates"),
    ],
)
def test_how_the_parts_go_together(flow: Flow, words: str):
    assert show.flow_words(flow) == words


def test_an_advice_has_class_reason_and_both_gains():
    given = Candidate((("batch_size", 128),), ("update",), "smaller batches")
    text = said(show.advices, [Advice(given, 0.6, real=0.51)], found())
    assert "1. batch_size=128 (trade-off; smaller batches): +60 % expected, +51 % when tried" in text
    assert 'check with: fasttrain compare algo=dqn "candidates=[{name: now, overrides: []}, {name: changed, ' in text
    assert "overrides: [batch_size=128]}]" in text
    exact = Advice(given._replace(changes=(("workers", 4),)), 0.06, error="it broke")
    text = said(show.advices, [exact], found())
    assert "fasttrain compare" not in text
    assert "+6 % expected; trying it failed: it broke" in text


def test_nothing_that_pays_is_said_with_what_is_left():
    text = said(show.advices, [], found())
    assert text.startswith("As fast as this configuration gets; what is left is updates: at most +67 % without any.")
    assert show.what_is_left(found(trained_s=4e-6)) == "updates: all of it"


def test_candidates_of_the_comparison_can_be_read():
    from fasttrain.cli.commands import quoted
    from fasttrain.studies.compare import parse_candidates

    line = show.comparison(["+profile=speed"], ["num_envs=8", "updates_per_step=4"])
    text = line.split('"')[1]
    assert quoted(text).startswith("candidates='")
    names = [(each.name, each.overrides) for each in parse_candidates(text.partition("=")[2])]
    assert names == [("now", ()), ("changed", ("num_envs=8", "updates_per_step=4"))]
