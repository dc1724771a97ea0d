"""Drawn transitions for updates of a Q-network in compiled kernels, and those updates, for several test files."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.dqn import QWork
from fasttrain.batch import QBatches


def make_batches(
    inputs: int, dims: Any, updates: int, batch: int, masked: bool = False, weighted: bool = False, seed: int = 0
) -> QBatches:
    """Random rows of 50 transitions; of the masked next states about one in ten has no legal action."""
    rng = np.random.default_rng(seed)
    shape, choices = (updates, batch), np.atleast_1d(dims)
    actions = int(choices.sum())
    masks = (rng.random((*shape, actions)) < 0.5) & (rng.random((*shape, 1)) < 0.9)

    def normal(*sizes: int) -> Any:
        return rng.standard_normal(sizes).astype(np.float32)

    return QBatches(
        normal(50, inputs), normal(40, inputs), rng.integers(0, choices, (50, len(choices))),
        rng.integers(0, 50, shape), rng.integers(0, 40, shape), normal(*shape),
        rng.uniform(0.5, 1.0, shape).astype(np.float32), (rng.random(shape) < 0.2).astype(np.float32),
        masks if masked else np.zeros((0, 0, 0), np.bool_),
        rng.uniform(0.1, 1.0, shape).astype(np.float32) if weighted else np.zeros((0, 0), np.float32),
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
