"""SAC's kernels: draws at the edge, the lowest critic, threads; tests/accelerators/test_kernels.py has the rest."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.sac.policies import SACPolicy

from compiled import from_python
from fasttrain.accelerators.kernels_sac import KernelSACEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.sac import SACWork
from fasttrain.buffers.replay_storage import ReplayBatch
from fasttrain_kernels.nets import Layout
from fasttrain_kernels.sac import NUM_STATISTICS, draw_rows, lowest_rows, train_update
from fasttrain_kernels.threads import run

lowest_rows = from_python(lowest_rows)


def test_densities_of_actions_at_the_edge_are_torchs():
    """Near ±1 all of 1 - action² is rounding, which a fused multiply-add would make another."""
    means, noise = torch.linspace(-12.0, 12.0, 200)[:, None], torch.zeros(200, 1)
    heads = torch.cat((means, torch.full_like(means, -30.0)), 1)
    actions, slopes, log_probs = (
        np.zeros((200, 1), np.float32),
        np.zeros((200, 1), np.float32),
        np.zeros(200, np.float32),
    )
    draw_rows(heads.numpy(), noise.numpy(), actions, slopes, log_probs)
    theirs = SquashedDiagGaussianDistribution(1).proba_distribution(means, torch.full_like(means, -20.0))
    expected = theirs.log_prob(torch.from_numpy(actions), means)
    torch.testing.assert_close(torch.from_numpy(log_probs), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actions, torch.tanh(means).numpy(), rtol=0, atol=1e-7)


def test_of_equal_critics_the_first_counts_and_what_is_not_finite_is_in_no_way_lost():
    values = np.array([[1.0, 2.0, np.nan, 0.0], [1.0, 1.0, 5.0, 3.0], [4.0, 1.0, 6.0, 0.0]], np.float32)
    one = np.array([[0]], np.int64)
    layout = Layout(1, 1, 0, 0, one[0], one, one, one, one, one[0], 0)
    rows = []
    for n in range(3):
        chosen = np.zeros(4, np.int64)
        rows.append(chosen[: lowest_rows(n, 4, layout, np.ascontiguousarray(values[:, :, None]), chosen)].tolist())
    assert rows == [[0, 2, 3], [1], []]


@pytest.mark.parametrize("batch_size", [150, 331])
def test_the_number_of_threads_changes_no_bit(batch_size: int):
    torch.manual_seed(0)
    seen, acting = spaces.Box(-1.0, 1.0, (19,), np.float32), spaces.Box(-1.0, 1.0, (3,), np.float32)
    policy = SACPolicy(seen, acting, lambda _: 1e-3, net_arch=[24, 16])
    drawn = ReplayBatch(torch.randn(batch_size, 19), torch.rand(batch_size, 3), torch.randn(batch_size, 19),
                        torch.zeros(batch_size, 1), torch.randn(batch_size, 1))  # fmt: skip
    found: list[Any] = []
    for threads in (1, 2, 3):
        engine = KernelSACEngine(copy.deepcopy(policy), EngineSettings(kind="kernels", threads=2))
        work = SACWork(1, batch_size, 0.99, 0.1, 1, -3.0, torch.ones(1), None)
        statistics = np.full(NUM_STATISTICS, np.nan)
        torch.manual_seed(1)
        run(train_update, threads, engine._update(drawn, work, 0), engine._scratch_for(batch_size, 2), statistics)
        assert np.isfinite(statistics).all()
        found.append([statistics.tobytes(), *(each.tobytes() for each in engine._learners)])
    assert found[0] == found[1] == found[2]
