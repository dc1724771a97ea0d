"""A diagonal Gaussian's actions, log-probabilities and slopes in compiled code, against torch's Normal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from fasttrain_kernels.ppo import HALF_LOG_2_PI, add_log_std_slopes, draw_point, rate_point

MEANS, LOG_STDS = np.array([0.5, -2.0, 3.0], np.float32), np.array([0.1, -1.5, 0.9], np.float32)
POINT = np.array([0.7, -2.1, -1.0], np.float32)


@njit
def rated(log_stds, point, probs, slope, entropy_share, out):
    found = rate_point(log_stds, point, probs)
    add_log_std_slopes(slope, entropy_share, log_stds, probs, out)
    return found


@njit
def drawn(log_stds, normals, means, point):
    return draw_point(log_stds, normals, means, point)


def test_slopes_are_autograds():
    probs, slopes = np.full((4, 3), 9.0, np.float32), np.full(3, 0.25, np.float32)
    probs[1] = MEANS
    log_prob, entropy = rated(LOG_STDS, POINT, probs, np.float32(-1.5), np.float32(0.2), slopes)
    means, log_stds = (torch.from_numpy(array.copy()).requires_grad_() for array in (MEANS, LOG_STDS))
    normal = torch.distributions.Normal(means, log_stds.exp())
    expected, nats = normal.log_prob(torch.from_numpy(POINT)).sum(), normal.entropy().sum()
    assert (log_prob, entropy) == (pytest.approx(expected.item(), rel=1e-5), pytest.approx(nats.item(), rel=1e-6))
    (-1.5 * expected - 0.2 * nats).backward()
    np.testing.assert_allclose(-1.5 * (probs[3] - probs[0]) + 0.2 * probs[2], means.grad, rtol=1e-5)
    np.testing.assert_allclose(slopes - 0.25, log_stds.grad, rtol=1e-5)


def test_what_is_drawn_has_the_log_probability_that_is_told():
    normals, point = np.array([0.3, -1.0, 2.0], np.float32), np.zeros(3, np.float32)
    told = drawn(LOG_STDS, normals, MEANS, point)
    np.testing.assert_allclose(point, MEANS + np.exp(LOG_STDS) * normals, rtol=1e-6)
    normal = torch.distributions.Normal(torch.from_numpy(MEANS), torch.from_numpy(LOG_STDS).exp())
    assert told == pytest.approx(normal.log_prob(torch.from_numpy(point)).sum().item(), rel=1e-5)
    assert pytest.approx(0.5 * np.log(2 * np.pi)) == HALF_LOG_2_PI
