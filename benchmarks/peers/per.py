"""Prioritized replay: rounds of what an update needs, and the libraries that are measured beside ours.

A round draws 256 transitions with their weights and sets 256 priorities; a measurement is the median of 500 rounds.
This file runs in environments that have NumPy and one of the libraries, not fasttrain.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, ALPHA, BETA, ROUNDS = 256, 0.6, 0.4, 500
Round = tuple[Callable[[], Any], Callable[[Any, Any], Any]]  # sample() → drawn; update(drawn, errors (B,))


def first_errors(size: int) -> Any:
    """TD errors (size,) that all begin with."""
    return np.random.default_rng(0).random(size) + 0.1


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


def rounds(make: Callable[[int, bool], Round], size: int, storage: bool, count: int = ROUNDS) -> dict[str, Any]:
    """Medians over so many rounds in this process."""
    begun = time.perf_counter()
    sample, update = make(size, storage)
    ready = time.perf_counter()
    rng, spent = np.random.default_rng(1), []
    for _ in range(count):
        errors = rng.random(BATCH) * 2  # outside of what is timed: they are the update's
        before = time.perf_counter()
        drawn = sample()
        between = time.perf_counter()
        update(drawn, errors)
        spent.append((between - before, time.perf_counter() - between))
    sample_s, update_s = (statistics.median(half) for half in zip(*spent, strict=True))
    return {
        "rate": 1 / statistics.median(a + b for a, b in spent),
        "samples_per_update": BATCH,
        "startup_s": ready - begun,
        "sample_us": 1e6 * sample_s,
        "update_us": 1e6 * update_s,
    }


if __name__ == "__main__":
    library, size, storage = json.loads(sys.argv[1])
    print(json.dumps(rounds({"cpprb": cpprb, "torchrl": torchrl}[library], size, storage)))
