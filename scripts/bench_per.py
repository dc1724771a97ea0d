"""Works of benchmark.py about prioritized replay: ours, what numpy alone offers in O(N), and other libraries.

One round is what an update needs of it: draw 256 transitions with their weights, and set 256 priorities. `per-tree-1eK`
keeps 10^K priorities and next to nothing else; `per-storage-1e6` also gathers transitions of 4 floats. A measurement
is the median of 500 rounds. cpprb and TorchRL with --peers, each in its own virtual environment (bench_peers.py),
skipped with the reason where that cannot be made.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bench_peers

BATCH, ALPHA, BETA = 256, 0.6, 0.4
ROUNDS = 500
UNIT = "rounds of sample and update per second"
Round = tuple[Callable[[], Any], Callable[[Any, Any], Any]]  # sample() → drawn; update(drawn, errors (B,))
PEERS = {
    "cpprb": bench_peers.Peer("", ("cpprb==11.0.0",), ("numpy",)),
    # Its own torch (4.8 GB with CUDA): no binary of TorchRL loads with the one of constraints.txt, and without its
    # binary it has no PER.
    "TorchRL": bench_peers.Peer("", ("torchrl==0.13.3", "torch==2.12.0"), ()),
}


def first_errors(size: int) -> Any:
    """TD errors (size,) that the contestants begin with: the same for all."""
    return np.random.default_rng(0).random(size) + 0.1


# --- the contestants: (capacity, with storage or not) → the two halves of a round


def ours(size: int, storage: bool) -> Round:
    from fasttrain.buffers.prioritized import PrioritizedReplayBuffer

    width = 4 if storage else 1
    buffer = _filled(PrioritizedReplayBuffer, size, width, alpha=ALPHA, beta=BETA)
    buffer.update_priorities(np.arange(size), first_errors(size))
    sample = buffer.sample if storage else buffer.draw_weighted
    return lambda: sample(BATCH), lambda drawn, errors: buffer.update_priorities(
        drawn.indices, errors, drawn.generation
    )


def _filled(kind: Any, size: int, width: int, **options: Any) -> Any:
    """Of our class: all pages written, as after `size` steps, which would take minutes."""
    from gymnasium import spaces

    from fasttrain.buffers.sum_tree import set_kernel

    buffer = kind(size, spaces.Box(-1, 1, (width,), np.float32), spaces.Discrete(2), "cpu", 1, **options)
    for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards):
        array[:] = 1
    for array in (buffer.dones, buffer.timeouts):
        array[:] = 0
    buffer.full, buffer.generation = True, size
    tree = buffer.tree
    set_kernel(tree.nodes, tree.starts, tree.capacity, np.arange(size), np.ones(size))
    return buffer


def naive(size: int, storage: bool) -> Round:
    """numpy.random.choice over all probabilities."""
    priorities = (first_errors(size) + 1e-6) ** ALPHA
    arrays = [np.ones((size, 4), np.float32), np.ones((size, 4), np.float32)]
    arrays += [np.ones((size, 1), np.int64), np.ones((size, 1), np.float32), np.zeros((size, 1), np.float32)]

    def sample() -> Any:
        probabilities = priorities / priorities.sum()
        indices = np.random.choice(size, BATCH, p=probabilities)
        weights = (size * probabilities[indices]) ** -BETA
        taken = [array[indices] for array in arrays] if storage else None
        return indices, (weights / weights.max()).astype(np.float32), taken

    def update(drawn: Any, errors: Any) -> None:
        priorities[drawn[0]] = (np.abs(errors) + 1e-6) ** ALPHA

    return sample, update


def cpprb(size: int, storage: bool) -> Round:
    """Its buffer either way; without storage it keeps one flag a transition, as it wants at least one."""
    from cpprb import PrioritizedReplayBuffer

    fields: dict[str, Any] = {"done": {}}
    if storage:
        fields = {"obs": {"shape": 4}, "next_obs": {"shape": 4}, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    buffer = PrioritizedReplayBuffer(size, fields, alpha=ALPHA)
    rows = {name: np.ones((size, field.get("shape", 1))) for name, field in fields.items()}
    buffer.add(**rows, priorities=first_errors(size))
    return lambda: buffer.sample(BATCH, beta=BETA), lambda drawn, errors: buffer.update_priorities(
        drawn["indexes"], errors
    )


def torchrl(size: int, storage: bool) -> Round:
    """Its PrioritizedSampler, alone or in a TensorDictReplayBuffer."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    widths = {"obs": 4, "next_obs": 4, "action": 1, "reward": 1, "done": 1} if storage else {"done": 1}
    sampler = PrioritizedSampler(size, alpha=ALPHA, beta=BETA)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=BATCH)
    buffer.extend(TensorDict({name: torch.ones(size, width) for name, width in widths.items()}, [size]))
    buffer.update_priority(torch.arange(size), torch.from_numpy(first_errors(size)).float())

    def sample() -> Any:
        return buffer.sample()["index"] if storage else sampler.sample(buffer._storage, BATCH)[0]

    update = buffer.update_priority if storage else sampler.update_priority
    return sample, lambda index, errors: update(torch.as_tensor(index), torch.from_numpy(errors).float())


CONTESTANTS = {"fasttrain": ours, "numpy, O(N)": naive, "cpprb": cpprb, "TorchRL": torchrl}


def measure(contestant: str, size: int, storage: bool) -> dict[str, Any]:
    """Medians of one contestant in this process. numpy in O(N) gets fewer rounds: it needs milliseconds for one."""
    begun = time.perf_counter()
    sample, update = CONTESTANTS[contestant](size, storage)
    ready = time.perf_counter()
    rng, spent = np.random.default_rng(1), []
    for _ in range(ROUNDS if contestant != "numpy, O(N)" else max(10, min(ROUNDS, 10**8 // size))):
        errors = rng.random(BATCH) * 2  # outside of what is timed: they are the update's
        before = time.perf_counter()
        drawn = sample()
        between = time.perf_counter()
        update(drawn, errors)
        spent.append((between - before, time.perf_counter() - between))
    sample_s, update_s = (statistics.median(half) for half in zip(*spent, strict=True))
    return {
        "rate": 1 / statistics.median(a + b for a, b in spent),
        "unit": UNIT,
        "env_steps": 0,
        "updates": "rate",
        "samples_per_update": BATCH,
        "startup_s": ready - begun,
        "sample_us": 1e6 * sample_s,
        "update_us": 1e6 * update_s,
    }


def peer(name: str, size: int, storage: bool) -> dict[str, Any]:
    """`measure` in the peer's environment, or why not."""
    return bench_peers.run_script(name, PEERS[name], [str(Path(__file__)), json.dumps([name, size, storage])])


def _work(size: int, storage: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        **{name: lambda name=name: measure(name, size, storage) for name in CONTESTANTS if name not in PEERS},
        **{name: lambda name=name: peer(name, size, storage) for name in PEERS},
    }  # fmt: skip


PEERS_ONLY = set(PEERS)
PER_WORKS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "per-storage-1e6": _work(10**6, True),
    **{f"per-tree-1e{digits}": _work(10**digits, False) for digits in (6, 4, 5, 7)},
}


if __name__ == "__main__":  # in a peer's environment
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
