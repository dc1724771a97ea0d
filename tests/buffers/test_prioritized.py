"""PrioritizedReplayBuffer: frequencies, weights, recycled slots, threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fasttrain.buffers.prioritized import LEAST, PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.sum_tree import set_kernel
from fasttrain.errors import ConfigError

NUMBER = spaces.Box(-np.inf, np.inf, (1,), np.float64)


def made(size: int = 8, envs: int = 1, **options: Any) -> PrioritizedReplayBuffer:
    return PrioritizedReplayBuffer(size * envs, NUMBER, spaces.Discrete(1 << 40), "cpu", envs, **options)


def put(buffer: ReplayStorage, steps: int = 1, start: int = 0) -> None:
    """Transition k (counted over steps and envs) says k in everything it holds."""
    for step in range(start, start + steps):
        said = np.arange(step * buffer.n_envs, (step + 1) * buffer.n_envs)
        buffer.put(said[:, None], said[:, None] + 0.5, said, said, np.zeros(buffer.n_envs))


def assert_leaves_add_up(buffer: PrioritizedReplayBuffer) -> None:
    tree = buffer.tree
    fresh = type(tree)(tree.capacity)
    set_kernel(fresh.nodes, fresh.starts, tree.capacity, np.arange(tree.capacity), buffer.priorities.reshape(-1))
    np.testing.assert_array_equal(tree.nodes, fresh.nodes)


def test_a_new_transition_has_the_highest_priority_seen():
    buffer = made(alpha=0.5, eps=1e-3)
    put(buffer, 3)
    assert buffer.priorities[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    buffer.update_priorities(np.array([1, 2]), np.array([-4.0, 0.25]))
    np.testing.assert_allclose(buffer.priorities[:3, 0], [1, 4.001**0.5, 0.251**0.5], rtol=1e-15)
    buffer.update_priorities(np.array([1]), torch.tensor([[0.25]]))
    put(buffer, 1, 3)
    np.testing.assert_allclose(buffer.priorities[:4, 0], [1, 0.251**0.5, 0.251**0.5, 4.001**0.5], rtol=1e-15)


@pytest.mark.parametrize(("envs", "alpha"), [(1, 0.6), (3, 1.0), (3, 0.0)])
def test_frequencies_are_those_of_the_priorities(envs: int, alpha: float):
    buffer = made(20, envs, alpha=alpha)
    put(buffer, 27)
    errors = np.random.default_rng(0).random(20 * envs) * 5 + 0.2
    buffer.update_priorities(np.arange(20 * envs), errors)
    np.random.seed(0)
    indices = buffer.draw_weighted(50, batches=2000).indices
    shares = (errors + buffer.eps) ** alpha
    counts = np.bincount(indices, minlength=20 * envs)
    assert chisquare(counts, shares / shares.sum() * len(indices)).pvalue > 1e-3


def test_draws_are_stratified():
    """One of each of B equal parts of the mass: with as many equal priorities as draws, each slot exactly once."""
    buffer = made(64)
    put(buffer, 64)
    for _ in range(20):
        assert buffer.draw_weighted(64).indices.tolist() == list(range(64))


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_weights_are_those_of_the_formula(beta: float):
    buffer = made(30, 2, beta=beta)
    put(buffer, 30)
    buffer.update_priorities(np.arange(60), np.random.default_rng(0).random(60) * 3)
    batch = buffer.sample(32)
    probabilities = buffer.priorities.reshape(-1) / buffer.priorities.sum()
    weights = (60 * probabilities[batch.indices]) ** -beta
    assert batch.weights.shape == (32, 1)
    assert batch.weights.dtype == torch.float32
    np.testing.assert_allclose(batch.weights[:, 0], weights / weights.max(), rtol=1e-6)
    assert batch.weights.max() == 1


def test_several_batches_at_once_are_each_a_batch_and_come_from_the_global_stream():
    buffer = made(30)
    put(buffer, 30)
    buffer.update_priorities(np.arange(30), np.random.default_rng(0).random(30) * 3)
    np.random.seed(1)
    together = buffer.draw_weighted(8, batches=5)
    np.random.seed(1)
    apart = [buffer.draw_weighted(8) for _ in range(5)]
    np.testing.assert_array_equal(together.indices, np.concatenate([draw.indices for draw in apart]))
    np.testing.assert_array_equal(together.weights, np.concatenate([draw.weights for draw in apart]))


def test_beta_is_annealed():
    buffer = made(beta=0.4, beta_final=0.9)
    assert buffer.beta == 0.4
    for remaining, beta in ((1.0, 0.4), (0.5, 0.65), (0.0, 0.9)):
        buffer.anneal(remaining)
        assert buffer.beta == pytest.approx(beta)


def test_a_batch_is_what_uniform_storage_has_there_with_n_steps_too():
    options = {"n_steps": 3, "gamma": 0.9, "mask_width": 40}
    buffer = made(10, 2, **options)
    uniform = ReplayStorage(20, NUMBER, spaces.Discrete(1 << 40), "cpu", 2, **options)
    rng = np.random.default_rng(0)
    for _ in range(14):
        row = rng.random((2, 1)), rng.random((2, 1)), rng.integers(0, 9, 2), rng.random(2), rng.random(2) < 0.2
        masks = rng.random((2, 40)) < 0.5
        for each in (buffer, uniform):
            each.put(*row, None, masks)
    batch = buffer.sample(64)
    plain = uniform.gather(batch.indices // 2, batch.indices % 2)
    for name in ("observations", "actions", "next_observations", "dones", "rewards", "discounts", "next_action_masks"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name


def test_a_late_update_of_a_recycled_slot_is_dropped():
    buffer = made(4, alpha=1.0, eps=1e-9)
    put(buffer, 4)
    before = buffer.draw_weighted(4)
    assert before.indices.tolist() == [0, 1, 2, 3]
    put(buffer, 2, 4)
    assert buffer.update_priorities(before.indices, np.full(4, 0.5), before.generation) == 2
    np.testing.assert_allclose(buffer.priorities[:, 0], [1, 1, 0.5, 0.5])
    after = buffer.generation
    assert buffer.update_priorities([0, 0, 3], [0.1, 0.2, 0.3], np.array([before.generation, after, after])) == 2
    np.testing.assert_allclose(buffer.priorities[:, 0], [0.2, 1, 0.5, 0.3])
    put(buffer, 2, 6)
    assert buffer.update_priorities(before.indices, np.full(4, 0.1), before.generation) == 0
    assert buffer.update_priorities(before.indices, np.full(4, 0.1)) == 4


@settings(max_examples=40)
@given(
    st.integers(2, 12),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.sampled_from(["put", "draw", "update", "reset"]), max_size=80),
)
def test_versions_as_counted_per_slot(size: int, envs: int, lean: bool, doings: list[str]):
    """Against one counter of writes per slot; every second slot of `lean` rings loses its observation to the next."""
    buffer = made(size, envs, optimize_memory_usage=lean, handle_timeout_termination=not lean)
    writes, drawn, steps = np.zeros((size, envs), int), [], 0
    for doing in doings:
        if doing == "put":
            writes[buffer.pos] += 1
            put(buffer, 1, steps)
            steps += 1
            if lean and buffer.full:
                writes[buffer.pos] += 1
        elif doing == "reset":
            buffer.reset()
            writes += 1
        elif doing == "draw" and buffer.size():
            draw = buffer.draw_weighted(5)
            drawn.append((draw, writes.reshape(-1)[draw.indices]))
        elif doing == "update" and drawn:
            draw, versions = drawn.pop(0)
            kept = buffer.update_priorities(draw.indices, np.full(5, 0.5), draw.generation)
            assert kept == (versions == writes.reshape(-1)[draw.indices]).sum()
        assert_leaves_add_up(buffer)
        assert (buffer.priorities > 0).sum() == envs * (buffer.size() - (lean and buffer.full))


def test_extreme_errors_leave_every_transition_drawable():
    buffer = made(4, alpha=100.0, eps=1e-12)
    put(buffer, 4)
    buffer.update_priorities([0, 1, 2], [0.0, 1e-9, 1e300])
    assert buffer.priorities[:2, 0].tolist() == [LEAST, LEAST]
    assert np.isfinite(buffer.tree.total())
    assert torch.isfinite(buffer.sample(8).weights).all()
    assert buffer.update_priorities([0], [1.0]) == 1


def test_a_copy_has_priorities_and_generation_and_reset_empties_it():
    buffer = made(4)
    put(buffer, 6)
    buffer.update_priorities([1], [3.0])
    for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        np.testing.assert_array_equal(other.priorities, buffer.priorities)
        put(other, 1, 6)
        assert other.generation == buffer.generation + 1
        assert other.priorities[2, 0] == buffer.priorities.max()
        assert other.lock is not buffer.lock
    draw = buffer.draw_weighted(4)
    buffer.reset()
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1)
    put(buffer, 1)
    assert buffer.update_priorities(draw.indices, np.ones(4), draw.generation) == 0
    assert buffer.sample(3).indices.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [{"alpha": -0.1}, {"alpha": np.inf}, {"beta": 1.1}, {"beta_final": -1}, {"eps": 0.0}, {"eps": np.nan}],
)
def test_settings_that_cannot_be_are_refused(options: dict):
    with pytest.raises(ConfigError, match=next(iter(options))):
        made(**options)


def test_misuse_is_refused_and_changes_nothing():
    buffer = made(6)
    with pytest.raises(ValueError, match="empty"):
        buffer.draw(1)
    put(buffer, 3)
    before = buffer.priorities
    for index in (-1, 3, 6):
        with pytest.raises(IndexError, match=f"slot {index} holds no transition: 3 are stored"):
            buffer.update_priorities([0, index], [9.0, 9.0])
    for error in (np.nan, np.inf):
        with pytest.raises(ValueError, match="slot 1 is .*diverged"):
            buffer.update_priorities([0, 1], [9.0, error])
    with pytest.raises(ValueError, match="must be equal"):
        buffer.update_priorities([0, 1], [9.0])
    with pytest.raises(ValueError, match="generation must be"):
        buffer.update_priorities([0, 1, 2], [9.0] * 3, np.array([1, 2]))
    np.testing.assert_array_equal(buffer.priorities, before)


def test_three_threads_leave_no_torn_row_and_a_sound_tree(busy_threads: None):
    """15,000 operations: one thread writes, one draws, one sets priorities of what was drawn."""
    buffer, faults = made(50, 2, n_steps=2, gamma=1.0), []
    put(buffer, 50)
    counts, rng = {"write": 50, "read": 0, "update": 0}, np.random.default_rng(0)

    def write() -> None:
        put(buffer, 1, counts["write"])

    def read() -> None:
        batch = buffer.sample(32)
        said, rewards = batch.observations[:, 0], batch.rewards[:, 0]
        # The second step of a window is of the same env one row later, unless the first is the newest row.
        single = rewards == said.float()
        assert torch.equal(rewards, torch.where(single, said, 2 * said + 2).float())
        assert torch.equal(batch.next_observations[:, 0], torch.where(single, said + 0.5, said + 2.5))
        assert (batch.actions[:, 0] == said).all()
        assert (said.numpy() % 100 == batch.indices).all()
        if counts["read"] % 20 == 0:
            with buffer.lock:
                assert_leaves_add_up(buffer)

    def update() -> None:  # long enough that others want to come in between
        drawn = buffer.draw_weighted(4000)
        buffer.update_priorities(drawn.indices, rng.random(4000) * 2, drawn.generation)

    def keep_on(name: str, work: Callable[[], None]) -> None:
        try:
            while sum(counts.values()) < 15_000 and not faults:
                work()
                counts[name] += 1
        except Exception as fault:
            faults.append(fault)

    works = {"write": write, "read": read, "update": update}
    threads = [threading.Thread(target=keep_on, args=item) for item in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert faults == []
    assert not any(thread.is_alive() for thread in threads)
    assert min(counts.values()) > 10
    assert_leaves_add_up(buffer)
    assert (buffer.priorities > 0).all()
