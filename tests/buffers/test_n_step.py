"""n-step windows against numbers by hand; against SB3 they are tested in tests/parity."""

from __future__ import annotations

import numpy as np

from fasttrain.buffers.n_step import n_step_kernel, powers_of


def test_a_window_by_hand():
    """gamma 0.5, n 3. Env 0 ends in row 2 by the rules; env 1 in row 1 by time; row 3 is the newest."""
    rewards = np.array([[1, 1], [2, 2], [4, 4], [8, 8]], np.float32)
    dones = np.array([[0, 0], [0, 1], [1, 0], [0, 0]], np.float32)
    timeouts = np.array([[0, 0], [0, 1], [0, 0], [0, 0]], np.float32)
    rows, envs = np.array([0, 1, 2, 3, 0, 2]), np.array([0, 0, 0, 0, 1, 1])
    last = np.zeros(6, np.int64)
    returns, discounts, ends = np.zeros((3, 6), np.float32)
    n_step_kernel(rows, envs, rewards, dones, timeouts, 3, powers_of(0.5, 3), last, returns, discounts, ends)
    assert last.tolist() == [2, 2, 2, 3, 1, 3]
    assert returns.tolist() == [1 + 1 + 1, 2 + 2, 4, 8, 1 + 1, 4 + 4]
    assert discounts.tolist() == [0.125, 0.25, 0.5, 0.5, 0.25, 0.25]
    assert ends.tolist() == [1, 1, 1, 0, 0, 0]
