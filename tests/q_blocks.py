"""Drawn transitions for updates of a Q-network in compiled kernels, and those updates, for several test files."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.dqn import QWork
from fasttrain.batch import QBatches


def random_block(policy: Any, updates: int = 2, batch: int = 9, seed: int = 0) -> QBatches:
    """Thirty random transitions of a policy with Discrete actions; few of them end."""
    rng = np.random.default_rng(seed)
    size, count = (updates, batch), int(policy.action_space.n)
    observations = rng.standard_normal((30, int(np.prod(policy.observation_space.shape)))).astype(np.float32)
    rewards = rng.standard_normal(size).astype(np.float32)
    rows = rng.integers(0, 29, size)
    actions = rng.integers(0, count, (30, 1))
    ends = (rewards > 1.0).astype(np.float32)
    return QBatches(
        observations, observations, actions, rows, rows + 1, rewards, np.full_like(rewards, 0.9), ends,
        np.zeros((0, 0, 0), np.bool_), np.zeros((0, 0), np.float32),
    )  # fmt: skip


def trained(
    engine: KernelQEngine,
    batches: QBatches,
    *,
    double: bool = False,
    loss: str = "huber",
    max_grad_norm: float = 10.0,
    guarded: bool = False,
) -> tuple[Any, Any, Any]:
    """The updates: losses (U,), TD errors (U, B), gradient norms (U,)."""
    work = QWork(len(batches.rows), batches.rows.shape[-1], double, loss, 0.99, max_grad_norm)
    return engine.train(batches, work, guarded)
