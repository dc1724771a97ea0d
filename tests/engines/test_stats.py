from __future__ import annotations

import numpy as np
import pytest

from fasttrain_engines.stats import BIASED, PARTS, GameTimes, Histogram, Tally, advice, merged, summary, summary_lines


@pytest.mark.parametrize("scale_ms", [0.02, 5.0, 3000.0])
def test_percentiles_are_within_five_percent(scale_ms: float):
    drawn = scale_ms * np.random.default_rng(3).lognormal(0, 1, 5000)
    drawn = np.maximum(drawn, 0.01)
    histogram = Histogram()
    for one in drawn:
        histogram.add(one * 1e6)
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = float(np.quantile(drawn, share, method="inverted_cdf"))
        assert histogram.percentile_ms(share) == pytest.approx(exact, rel=0.05)


def test_a_histogram_has_ends():
    histogram = Histogram()
    assert histogram.as_dict() == {"p50": None, "p95": None, "p99": None}
    for ns in (0, 1, 1e30):
        histogram.add(ns)
    assert len(histogram.counts) == 2
    assert histogram.percentile_ms(0.5) == pytest.approx(0.01, rel=0.05)


def tally(lost: dict[str, int], busy: float = 0.5, cpu: float = 0.1) -> Tally:
    one = Tally()
    one.games.add(1e9)
    one.decisions.add(5e6)
    one.steps = 20
    one.lost.update(lost)
    one.lost_steps.update({cause: 3 * count for cause, count in lost.items()})
    one.restarts["recycled"] += 1
    one.daemons = [{"daemon": 0, "busy_share": busy, "cpu_share": cpu, "memory_mb": 10.0}]
    return one


def test_tallies_add_up_and_stay_themselves():
    first, second = tally({"timeout": 1}), tally({"timeout": 2, "closed": 1})
    both = merged([first, second])
    assert both.lost == {"timeout": 3, "closed": 1}
    assert both.lost_steps == {"timeout": 9, "closed": 3}
    assert (both.steps, sum(both.games.counts.values()), both.restarts["recycled"], len(both.daemons)) == (40, 2, 2, 2)
    assert (first.lost, len(first.daemons)) == ({"timeout": 1}, 1)


TIMES = GameTimes(engine_ns=80_000_000, network_ns=4_000_000, decode_ns=6_000_000, queue_ns=8_000_000,
                  idle_ns=2_000_000, decisions=18,
                  forced=2, games=1, lost=1, restarts=1)  # fmt: skip


def test_times_between_two_moments():
    assert TIMES.since(TIMES) == GameTimes()
    assert TIMES.since(GameTimes(decisions=8, engine_ns=1)).decisions == 10
    assert sum(TIMES.parts_ns.values()) == 100_000_000


def test_the_summary_is_per_decision():
    found = summary(tally({"timeout": 2}), TIMES, 2.0)
    assert [found[f"{name}_ms"] for name in PARTS] == [4.0, 0.2, 0.3, 0.4, 0.1]
    assert (found["decisions_per_s"], found["games_per_s"], found["mean_decisions"]) == (9.0, 0.5, 20.0)
    assert found["lost_games"] == {"timeout": {"games": 2, "mean_decisions": 3.0}}
    assert (found["busy_share"], found["memory_mb"]) == (0.5, 10.0)
    empty = summary(Tally(), GameTimes(), 0.0)
    assert (empty["decisions_per_s"], empty["busy_share"], empty["mean_decisions"]) == (None, None, None)


@pytest.mark.parametrize(
    ("parts", "busy", "cpu", "says", "tried"),
    [
        ((1, 0, 0, 9), 0.1, 0.1, "wait for the policy longer", []),
        ((1, 0, 0, 2, 7), 0.1, 0.1, "wait for engines to restart", []),
        ((9, 0, 0, 1), 0.99, 1.9, "compute on 1.9 of 2 cores", []),
        ((9, 0, 0, 1), 0.95, 0.95, "Each daemon computes", ["daemons.count=2", "daemons.games_per_daemon=auto"]),
        ((9, 0, 0, 1), 0.95, 0.1, "mostly wait", ["num_envs=16", "daemons.count=1", "daemons.games_per_daemon=16"]),
    ],
)
def test_advice_names_what_limits(parts: tuple[int, ...], busy: float, cpu: float, says: str, tried: list[str]):
    times = GameTimes(*(1_000_000 * part for part in parts), decisions=1)
    law, overrides = advice(summary(tally({}, busy, cpu), times, 1.0), games=8, daemons=1, cores=2)
    assert law.startswith("8 games ÷ 10 ms a decision = 800 decisions/s")
    assert says in law
    assert overrides == tried


@pytest.mark.parametrize(("after", "causes", "warns"), [(0, 0, False), (5, 1, False), (6, 1, True), (2, 2, True)])
def test_lost_games_warn_where_they_are_many_or_long(after: int, causes: int, warns: bool):
    one = Tally()
    for _ in range(99):
        one.games.add(2e9)
        one.decisions.add(1e6)
    one.steps = 99 * 5
    if after:
        one.lost["timeout"], one.lost_steps["timeout"] = causes, causes * after
    one.daemons = [{"daemon": 0, "seconds": 1.0, "busy_share": 0.5, "cpu_share": 0.1, "memory_mb": 30.0}]
    lines = summary_lines(summary(one, GameTimes(decisions=100, games=99), 2.0))
    assert lines[0] == "engines: 1, busy 50 %, 30 MB; 99 games (49.5/s), 100 decisions (50/s)"
    assert lines[1].startswith("a decision took 1.0")
    assert "a game took 2,0" in lines[1]
    assert (lines[-1] == BIASED) == warns
    lost = f"{causes} games were lost after {after} decisions in the mean (timeout {causes}); finished ones have 5"
    assert (lost in lines) == bool(after)


def test_shares_are_those_of_the_time_between():
    before, now = Tally(), Tally()
    before.daemons = [{"daemon": 0, "seconds": 10.0, "busy_share": 0.2, "cpu_share": 0.5, "memory_mb": 1.0}]
    now.daemons = [
        {"daemon": 0, "seconds": 14.0, "busy_share": 0.4, "cpu_share": 0.1, "memory_mb": 3.0},
        {"daemon": 1, "seconds": 2.0, "busy_share": 0.5, "cpu_share": 0.5, "memory_mb": 2.0},
    ]
    old, new = now.daemons_since(before)
    assert old["busy_share"] == pytest.approx((5.6 - 2.0) / 4)
    assert (old["cpu_share"], old["memory_mb"]) == (0.0, 3.0), "another process, which begins at nothing"
    assert (new["seconds"], new["busy_share"]) == (2.0, 0.5)
