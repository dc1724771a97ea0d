"""Drawn transitions for updates of a Q-network in compiled kernels, and those updates, for several test files."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.buffers.prefetch import FlatBlock
from fasttrain.engines.engine import QRule, QWork
from fasttrain.engines.heads import action_dims
from fasttrain.engines.kernels_q import KernelQEngine


def random_block(policy: Any, updates: int = 2, batch: int = 9, seed: int = 0) -> FlatBlock:
    """Thirty random transitions of a policy with Discrete actions; few of them end."""
    rng = np.random.default_rng(seed)
    size, count = (updates, batch), int(policy.action_space.n)
    observations = rng.standard_normal((30, int(np.prod(policy.observation_space.shape)))).astype(np.float32)
    rewards = rng.standard_normal(size).astype(np.float32)
    rows = rng.integers(0, 29, size)
    actions = rng.integers(0, count, (30, 1))
    ends: Any = rewards > 1.0
    return FlatBlock(
        observations, observations, actions, rows, rows + 1, rewards, np.full_like(rewards, 0.9), ends, None
    )


def trained(
    engine: KernelQEngine,
    block: FlatBlock,
    *,
    double: bool = False,
    loss: str = "huber",
    max_grad_norm: float = 10.0,
    guarded: bool = False,
) -> tuple[Any, Any, Any]:
    """The block's updates: losses (U,), TD errors (U, B), gradient norms (U,)."""
    dims = tuple(action_dims(engine.policy.action_space))
    rule = QRule(dims, gamma=0.99, double=double, loss=loss, rated=block.weights is not None)
    return engine.train(block, QWork(len(block.rows), block.rows.shape[-1], rule, max_grad_norm), guarded)
