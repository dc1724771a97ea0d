"""95 % confidence intervals: Student's for a mean, Wilson's for a proportion."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


def student(values: NDArray[np.float64]) -> tuple[Any, Any]:
    """Mean over the first axis, and half the width of the mean's interval, which is infinite for a single value."""
    from scipy.special import stdtrit  # imported here, because this takes 0.3 s

    count, mean = len(values), values.mean(axis=0)
    return mean, stdtrit(count - 1, 0.975) * values.std(axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.inf


def wilson(hits: Any, trials: Any) -> tuple[Any, Any]:
    """Both ends of Wilson's score interval (E. B. Wilson, 1927), as scipy's `binomtest` gives it."""
    centre = (hits + Z**2 / 2) / (trials + Z**2)
    half = Z / (trials + Z**2) * np.sqrt(hits * (trials - hits) / trials + Z**2 / 4)
    return np.where(hits > 0, centre - half, 0.0), np.where(hits < trials, centre + half, 1.0)
