from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fasttrain.intervals import student, wilson


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (7, 10), (0, 10), (10, 10), (1, 2000), (713, 2000)])
def test_wilson_interval_is_scipys(successes: int, trials: int):
    scipys = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    found = wilson(successes, trials)
    assert found == pytest.approx([scipys.low, scipys.high], rel=1e-12, abs=1e-15)
    assert (found[0] == 0.0) == (successes == 0)
    assert (found[1] == 1.0) == (successes == trials)


def test_student_is_of_the_first_axis_and_knows_nothing_of_one():
    mean, half = student(np.array([[1.0, 2.0], [3.0, 2.0]]))
    assert mean.tolist() == [2.0, 2.0]
    assert half == pytest.approx([12.7062, 0.0], rel=1e-4)
    assert student(np.array([4.0])) == (4.0, math.inf)
