"""Prioritized replay: ours, what numpy alone offers in O(N), and other libraries (benchmarks/peers/per.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.peers.per import ALPHA, BATCH, ROUNDS, Round, first_errors, naive, rounds
from benchmarks.work import OURS, Work, works_of

LIBRARIES = {"cpprb": ("cpprb", "cpprb"), "TorchRL": ("TorchRL, replay", "torchrl")}


def ours(size: int, storage: bool) -> Round:
    """Our buffer with all pages written, as after `size` steps, which would take minutes."""
    from gymnasium import spaces

    from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
    from fasttrain.buffers.sum_tree import set_kernel

    box = spaces.Box(-1, 1, (4 if storage else 1,), np.float32)
    buffer: Any = PrioritizedReplayBuffer(size, box, spaces.Discrete(2), "cpu", 1, alpha=ALPHA)
    for name in ("observations", "next_observations", "actions", "rewards"):
        getattr(buffer, name)[:] = 1
    for name in ("dones", "timeouts"):
        getattr(buffer, name)[:] = 0
    buffer.full, buffer.generation = True, size
    tree = buffer.tree
    set_kernel(tree.nodes, tree.starts, tree.capacity, np.arange(size), np.ones(size))
    buffer.update_priorities(np.arange(size), first_errors(size))
    sample = buffer.sample if storage else buffer.draw_weighted
    return lambda: sample(BATCH), lambda drawn, errors: buffer.update_priorities(
        drawn.indices, errors, drawn.generation
    )


def work(name: str, size: int, storage: bool) -> Work:
    few = max(10, min(ROUNDS, 10**8 // size))  # numpy in O(N) needs milliseconds for one
    return Work(
        name,
        f"Prioritized replay, 256 of {size:,} drawn and rated, {'with storage' if storage else 'by the tree alone'}.",
        {
            OURS: partial(rounds, ours, size, storage),
            "numpy, O(N)": partial(rounds, naive, size, storage, few),
            **{
                label: partial(peers.run, peer, [library, size, storage])
                for label, (peer, library) in LIBRARIES.items()
            },
        },
        unit="rounds/s",
        equal=("samples_per_update",),
        peers=frozenset(LIBRARIES),
        target="T5" if size == 10**6 else "",
    )


WORKS = works_of(
    work("per-storage-1e6", 10**6, True),
    *(work(f"per-tree-1e{digits}", 10**digits, False) for digits in (4, 5, 6, 7)),
)
