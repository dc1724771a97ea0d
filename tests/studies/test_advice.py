from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from conftest import configured
from fasttrain.spec.checks import BY_NAME, EnvFacts, Machine
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain_studies import advice as advice_of
from fasttrain_studies.advice import (
    Advice,
    Candidate,
    Situation,
    advise,
    candidates,
    changed_plan,
    logging_advice,
    with_changes,
)
from fasttrain_studies.limits import Flow, Rates

PPO = ("env.id=CartPole-v1", "algo=ppo", "+profile=speed")
DQN = ("env.id=CartPole-v1", "algo=dqn", "+profile=speed")
BASELINE = ("env.id=CartPole-v1", "algo=ppo", "+profile=baseline")
EVEN = Rates(env=4e-6, policy=3e-6, update=3e-6, logging=0.0, storing=0.5e-6)


def situation(
    *arguments: str,
    rates: Rates = EVEN,
    machine: Machine | None = None,
    cpu_share: float = 1.0,
    slowest: float | None = None,
) -> Situation:
    config = configured(*arguments)
    sources = {text.partition("=")[0]: "command line" for text in arguments if text.startswith(("num_", "vec_"))}
    facts, machine = EnvFacts(False, 3e-6, cpu_share), machine or Machine(2, False, False)
    plan = resolve(config, sources, facts, machine)
    present_s = sum(value or 0.0 for value in rates) - (rates.transport or 0.0) - (rates.replay or 0.0)
    return Situation(config, sources, [], facts, machine, plan.config, rates, Flow(), present_s, slowest)


def texts(now: Situation) -> list[str]:
    return [candidate.text for candidate in candidates(now)]


def test_stock_is_told_of_the_engine_first():
    first = candidates(situation(*BASELINE))[0]
    assert first.text == "engine=fast vec_env=auto fused_update=auto torch_threads=auto"
    assert (first.flag_class, first.parts) == ("rounding", ("env", "policy", "update"))
    assert "engine=fast" not in " ".join(texts(situation(*PPO)))


@pytest.mark.parametrize(
    ("arguments", "rates", "expected", "unexpected"),
    [
        ((*PPO, "vec_env=dummy"), Rates(env=9e-6), ["vec_env=shared"], ["algo.n_epochs=5", "batch_size=1024"]),
        ((*BASELINE,), Rates(env=9e-6), ["vec_env=shared"], ["schedule=first_ready"]),
        ((*PPO, "vec_env=shared"), Rates(env=9e-6, transport=6e-6), ["vec_env=dummy"], ["schedule=first_ready"]),
        ((*PPO, "vec_env=shared"), Rates(env=9e-6, transport=1e-6), ["num_envs=24"], ["vec_env=dummy"]),
        ((*PPO,), Rates(policy=9e-6), ["num_envs=24"], ["algo.n_epochs=5"]),
        ((*PPO,), Rates(update=9e-6), ["algo.n_epochs=5", "batch_size=1024"], ["num_envs=24"]),
        ((*DQN,), Rates(update=9e-6, replay=3e-6),
         ["updates_per_step=5", "batch_size=128", "prefetch=on", "num_envs=24 updates_per_step=20"], []),
        ((*PPO, "fused_update=off"), Rates(update=9e-6),
         ["fused_update=on use_amp=off use_compile=off", "torch_threads=2"], ["use_amp=on fused_update=auto"]),
    ],
)  # fmt: skip
def test_changes_are_for_the_part_that_takes_the_time(arguments, rates, expected, unexpected):
    found = texts(situation(*arguments, rates=rates))
    assert set(expected) <= set(found)
    assert not set(unexpected) & set(found)


def test_envs_that_wait_and_workers_that_differ():
    waiting = situation(*PPO, "vec_env=shared", "num_workers=4", rates=Rates(env=9e-6), cpu_share=0.6, slowest=1.5)
    assert {"workers=8", "schedule=first_ready"} <= set(texts(waiting))
    alike = situation(*PPO, "vec_env=shared", rates=Rates(env=9e-6), slowest=1.1)
    assert not {"workers=4", "schedule=first_ready"} & set(texts(alike))


def test_precision_is_for_wide_networks_on_a_machine_that_has_it():
    wide = (*PPO, "algo.net_arch=[256,256]", "use_amp=off", "fused_update=off")
    units = Machine(2, False, False, bf16_units="AMX")
    amp = [c for c in candidates(situation(*wide, rates=Rates(update=9e-6), machine=units)) if "use_amp=on" in c.text]
    assert [c.flag_class for c in amp] == [BY_NAME["use_amp"].flag_class] == ["trade-off"]
    assert "use_amp=on" not in " ".join(texts(situation(*wide, rates=Rates(update=9e-6))))


@pytest.mark.parametrize(
    ("changes", "flag_class"),
    [
        ((("vec_env", "shared"),), "exact"),
        ((("schedule", "first_ready"),), "trade-off"),
        ((("fused_update", "on"), ("use_amp", "off"), ("use_compile", "off")), "rounding"),
        ((("use_amp", "on"), ("fused_update", "auto")), "trade-off"),
        ((("algo.n_epochs", 2),), "trade-off"),
        ((("log_every", 100), ("train_log_to_console", False)), "exact"),
    ],
)
def test_the_class_is_the_strongest_of_what_is_switched_on(changes: tuple[tuple[str, Any], ...], flag_class: str):
    assert Candidate(changes, ("env",), "").flag_class == flag_class


def test_a_change_goes_through_the_plan():
    now = situation(*PPO)
    plan = changed_plan(now, Candidate((("num_envs", 24),), ("env",), ""))
    assert plan.config.num_envs == 24
    assert changed_plan(now, Candidate((("num_envs", 12),), ("env",), "")) is None, "as it is"
    assert changed_plan(now, Candidate((("schedule", "first_ready"),), ("env",), "")) is None, "refused: no workers"

    config = with_changes(configured(*PPO), (("algo.n_epochs", 3), ("num_envs", 7)))
    assert (config.algo.n_epochs, config.num_envs) == (3, 7)  # type: ignore[union-attr]


def test_gains_are_sorted_and_small_ones_left_out():
    now = situation(*PPO, rates=Rates(env=1e-6, policy=1e-6, update=8e-6))  # 10 µs a step
    told: list[str] = []
    update = {"algo.n_epochs=5": 0.5, "batch_size=1024": 0.25}

    def again(plan: RunSpec, candidate: Candidate) -> tuple[Rates, Flow] | None:
        ratio = update.get(candidate.text)
        return None if ratio is None else (now.rates.scaled({"update": ratio}), Flow())

    found = advise(now, again, told.append)
    assert [advice.candidate.text for advice in found] == ["batch_size=1024", "algo.n_epochs=5"]
    assert [advice.expected for advice in found] == pytest.approx([10 / 4 - 1, 10 / 6 - 1])
    assert "measuring next: algo.n_epochs=5" in told


def test_logging_needs_no_second_measurement():
    now = situation(*BASELINE, rates=Rates(env=4e-6, update=4e-6, logging=2e-6))
    (advice,) = logging_advice(now)
    assert advice.candidate.text == "log_every=100 train_log_to_console=false"
    assert advice.expected == pytest.approx(10 / 8.2 - 1)
    assert logging_advice(situation(*BASELINE, rates=Rates(env=9e-6, logging=0.1e-6))) == []
    given = Candidate((("use_amp", "on"),), ("env",), "why")
    stored = advice._replace(candidate=given, expected=0.5, real=0.25).to_dict()
    assert (stored["change"], stored["expected_gain"], stored["real_gain"]) == ("use_amp=on", 0.5, 0.25)


def test_what_limits_games_with_engines_becomes_a_change():
    games = ("env.backend=daemons", "env.entry_point=game:Game", "daemons.command=[engine,'{port}']", "+profile=speed")
    tried = ["daemons.count=4", "daemons.games_per_daemon=auto"]
    now = situation(*games, rates=Rates(env=9e-6))._replace(engines=("Each computes all the time", tried))
    (found,) = [one for one in candidates(now) if one.why == "Little's law"]
    assert found.changes == (("daemons.count", 4), ("daemons.games_per_daemon", "auto"))
    assert (found.overrides, found.flag_class) == (tried, "exact")
    assert found._replace(changes=(("num_envs", 4), ("daemons.count", 2))).flag_class == "trade-off"
    plan = changed_plan(now, found)
    assert plan.config.daemons.count == 4


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
    text = said(advice_of.parts, found())
    assert "Machine: 4 cores, bfloat16 by AMX, no GPU" in text
    rows = {line[:26].strip(): line[26:].split() for line in text.splitlines()}
    assert rows["stepping the envs"][:3] == ["250,000", "4", "32"]
    assert rows["of it drawing batches"][:3] == ["500,000", "2", "16"]
    assert "of it reaching the workers" not in text
    assert "Limit of this configuration: 100,000 steps/s (envs step, then the policy acts, then updates)" in text
    assert "A short training: 80,000 steps/s, 80 % of the limit" in text


def test_of_a_finished_run_its_own_rate_counts_and_one_part_alone_has_no_limit():
    text = said(advice_of.parts, found(rates=Rates(env=4e-6), trained_s=None))
    assert "250,000" in text
    assert "Limit" not in text
    text = said(advice_of.parts, found(trained_s=None, finished_s=12.5e-6, flow=Flow(groups=True)))
    assert "The run: 80,000 steps/s, 80 % of the limit" in text
    assert "(the policy acts while envs step, then updates)" in text


def test_an_advice_has_class_reason_and_both_gains():
    given = Candidate((("batch_size", 128),), ("update",), "smaller batches")
    text = said(advice_of.advices, [Advice(given, 0.6, real=0.51)], found())
    assert "1. batch_size=128 (trade-off; smaller batches): +60 % expected, +51 % when tried" in text
    assert 'check it with: fasttrain compare algo=dqn "candidates=[{name: now, overrides: []}, {name: changed, ' in text
    assert "overrides: [batch_size=128]}]" in text
    exact = Advice(given._replace(changes=(("workers", 4),)), 0.06, error="it broke")
    text = said(advice_of.advices, [exact], found())
    assert "fasttrain compare" not in text
    assert "+6 % expected; the trial failed: it broke" in text


def test_without_advice_the_bottleneck_is_named():
    text = said(advice_of.advices, [], found())
    none = "None of the changes considered makes the run faster. The bottleneck is updates: "
    assert text.startswith(f"{none}at most +67 % if it took no time.")
    assert said(advice_of.advices, [], found(trained_s=4e-6)) == f"{none}all of it.\n"


def test_candidates_of_the_comparison_can_be_read():
    from fasttrain.cli.commands import quoted
    from fasttrain_studies.compare import parse_candidates

    line = advice_of.comparison(["+profile=speed"], ["num_envs=8", "updates_per_step=4"])
    text = line.split('"')[1]
    assert quoted(text).startswith("candidates='")
    names = [(each.name, each.overrides) for each in parse_candidates(text.partition("=")[2])]
    assert names == [("now", ()), ("changed", ("num_envs=8", "updates_per_step=4"))]
    assert "compare env.id=A-v0 " in advice_of.comparison(["env=gym", "env.id=A-v0"], ["num_envs=8"])
    assert "compare env=gym " in advice_of.comparison(["env=gym"], ["num_envs=8"])
