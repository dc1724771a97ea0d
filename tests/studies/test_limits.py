"""The arithmetic of limits, by hand: seconds per env step are 4, 1, 5 millionths for envs, policy, update."""

from __future__ import annotations

import pytest

from fasttrain_studies.limits import Flow, Rates, composed_limit, expected_s, gain_of, limit_s, most_gain

RATES = Rates(env=4e-6, policy=1e-6, update=5e-6, replay=2e-6, transport=3e-6, logging=0.5e-6, storing=1.5e-6)


@pytest.mark.parametrize(
    ("flow", "seconds"),
    [
        (Flow(), 10),  # in sequence the parts add up, and what lies within them does not
        (Flow(groups=True, cores=4, env_cores=2), 4 + 5),  # the policy's 1 lies within the envs' 4
        (Flow(groups=True, cores=2, env_cores=2), 4.5 + 5),  # (4 · 2 + 1) core-seconds on 2 cores
        (Flow(groups=True, cores=1, env_cores=1), 5 + 5),  # one core: nothing overlaps
        (Flow(groups=True, cores=1, env_cores=0.1), 4 + 5),  # envs that wait leave the core to the policy
    ],
)
def test_what_overlaps_takes_the_longest_but_shares_the_cores(flow: Flow, seconds: float):
    assert limit_s(RATES, flow) == pytest.approx(1e-6 * seconds)
    assert composed_limit(RATES, flow) == pytest.approx(1e6 / seconds)


def test_what_was_not_measured_takes_no_time_and_stays_missing():
    assert limit_s(RATES, Flow(), whole=True) == pytest.approx(12e-6)
    assert limit_s(Rates(env=2e-6), Flow()) == pytest.approx(2e-6)
    assert composed_limit(Rates(), Flow()) == float("inf")
    assert Rates(env=1.0).scaled({"env": 2.0, "policy": 3.0}) == Rates(env=2.0)


def test_a_change_leaves_what_the_run_takes_besides_and_cannot_beat_the_new_limit():
    present = 13e-6  # 1 µs more than the model knows of
    halved = RATES.scaled({"update": 0.5, "unknown": 9.0})
    assert halved.update == pytest.approx(2.5e-6)
    assert halved.env == RATES.env
    after = expected_s(present, (RATES, Flow()), (halved, Flow()))
    assert after == pytest.approx(10.5e-6)
    assert gain_of(present, after) == pytest.approx(13 / 10.5 - 1)
    quick = RATES.scaled({"env": 0.1})
    assert expected_s(9e-6, (RATES, Flow()), (quick, Flow())) == pytest.approx(limit_s(quick, Flow()))


def test_no_change_to_a_part_gains_more_than_its_absence():
    assert most_gain(5e-6, 10e-6) == pytest.approx(1.0)
    assert most_gain(None, 10e-6) == 0.0
    assert most_gain(11e-6, 10e-6) == float("inf")
