"""What a run says of its replay buffer."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.algos.dqn import DQN
from fasttrain.buffers.prefetch import Prefetching
from fasttrain.buffers.replay_storage import ReplayStorage


def replay_dict(model: BaseAlgorithm) -> dict[str, Any] | None:
    """Fill and size of the buffer, and how often prefetched batches were ready; None for other algorithms."""
    if not isinstance(model, DQN) or not isinstance(model.replay_buffer, ReplayStorage):
        return None
    storage, sampler = model.replay_buffer, model._fast.sampler
    facts: dict[str, Any] = {
        "transitions": storage.size() * storage.n_envs,
        "capacity": storage.buffer_size * storage.n_envs,
        "memory_bytes": storage.memory_bytes,
    }
    if isinstance(sampler, Prefetching):
        facts["prefetch"] = {"hits": sampler.hits, "waits": sampler.waits, "wait_s": sampler.wait_ns / 1e9}
    return facts


def replay_words(model: BaseAlgorithm) -> str:
    """For the [PERF] line: `buffer 34% prefetch_hits 120 prefetch_waits 3`, of the whole run so far."""
    facts = replay_dict(model)
    if facts is None:
        return ""
    words = f"buffer {100 * facts['transitions'] / facts['capacity']:.0f}%"
    if (prefetch := facts.get("prefetch")) is not None:
        words += f" prefetch_hits {prefetch['hits']} prefetch_waits {prefetch['waits']}"
    return words


def replay_line(facts: dict[str, Any]) -> str:
    """One line for the console."""
    size = f"{facts['memory_bytes'] / 1e6:,.0f} MB when full"
    line = f"replay buffer: {facts['transitions']:,} of {facts['capacity']:,} transitions, {size}"
    if (prefetch := facts.get("prefetch")) is not None:
        line += f"; prefetched batches: {prefetch['hits']:,} were ready, {prefetch['waits']:,} were waited for "
        line += f"({prefetch['wait_s']:.1f} s)"
    return line
