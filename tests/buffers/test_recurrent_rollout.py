"""The rollout of a recurrent policy: minibatches with stock's rows, how they are cut into sequences and laid side by
side, and sequences that end at a gap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.buffers import recurrent
from fasttrain.buffers.recurrent import Memory, RecurrentStorage, cuts
from fasttrain.buffers.rollout import RolloutRow
from fasttrain.buffers.stock import as_stock

STEPS, ENVS, LAYERS, UNITS = 7, 3, 2, 4
BOX = spaces.Box(-1, 1, (2,), np.float32)
DICT = spaces.Dict({"box": BOX, "number": spaces.Discrete(3)})


def filled(space: spaces.Space[Any] = BOX, own_critic: bool = True, **more: Any) -> tuple[Any, Any]:
    """Ours and stock's, with the same random contents; returns are unique."""
    keyed = isinstance(space, spaces.Dict)
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "device": torch.device("cpu")}
    shape = (LAYERS, UNITS)
    ours = RecurrentStorage(
        STEPS, ENVS, space, spaces.MultiDiscrete([3, 2]), state_shape=shape, own_critic=own_critic, **settings, **more
    )
    kind: Any = RecurrentDictRolloutBuffer if keyed else RecurrentRolloutBuffer
    stock = kind(STEPS, space, spaces.MultiDiscrete([3, 2]), (STEPS, LAYERS, ENVS, UNITS), n_envs=ENVS, **settings)
    assert isinstance(as_stock(ours), kind)
    rng = np.random.default_rng(1)
    for step in range(STEPS):
        seen: Any = rng.random((ENVS, 2)).astype(np.float32)
        seen = {"box": seen, "number": rng.integers(0, 3, (ENVS, 1))} if keyed else seen
        actions = rng.integers(0, 2, (ENVS, 2))
        starts = rng.random(ENVS) < 0.3 if step else np.ones(ENVS, np.bool_)
        values, log_probs, rewards = (rng.random(ENVS).astype(np.float32) for _ in range(3))
        parts = [torch.from_numpy(rng.random((LAYERS, ENVS, UNITS)).astype(np.float32)) for _ in range(4)]
        states = RNNStates((parts[0], parts[1]), (parts[2], parts[3]) if own_critic else (parts[0], parts[1]))
        given = torch.from_numpy(values)[:, None], torch.from_numpy(log_probs)
        stock.add(seen, actions, rewards, starts, *given, lstm_states=states)
        tensors = {key: torch.from_numpy(part) for key, part in seen.items()} if keyed else torch.from_numpy(seen)
        ours.add(RolloutRow(tensors, torch.from_numpy(actions), *given, None, states), rewards, starts)
    last, dones = np.array([0.1, 0.2, 0.3], np.float32), np.array([True, False, False])
    stock.compute_returns_and_advantage(torch.from_numpy(last), dones)
    ours.compute_returns_and_advantages(last, dones)
    return ours, stock


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in other)
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return torch.equal(one.float().reshape(-1), other.float().reshape(-1))


@pytest.mark.parametrize(("space", "own_critic"), [(BOX, True), (DICT, False)], ids=["box", "dict, no own critic"])
@pytest.mark.parametrize("size", [1, 5, 8, None])
def test_padded_minibatches_are_stocks(space: spaces.Space[Any], own_critic: bool, size: int | None):
    ours, stock = filled(space, own_critic)
    for epoch in range(2):
        np.random.seed(epoch)
        wanted = list(stock.get(size))
        np.random.seed(epoch)
        found = list(ours.minibatches(size))
        np.random.seed(epoch)
        assert len(found) == len(wanted) == len(list(as_stock(ours).get(size)))
        for batch, other in zip(found, wanted, strict=True):
            kept = other.mask > 0
            assert same(batch.observations, other.observations)
            assert same(batch.actions, other.actions)
            assert same(batch.sequences.states, other.lstm_states)
            assert same(batch.sequences.episode_starts, other.episode_starts)
            assert torch.equal(batch.sequences.rows, torch.nonzero(kept).flatten())
            for name, theirs in (("old_values", "old_values"), ("old_log_probs", "old_log_prob"),
                                 ("advantages", "advantages"), ("returns", "returns")):  # fmt: skip
                assert same(getattr(batch, name), getattr(other, theirs)[kept])


@pytest.mark.parametrize("size", [1, 5, 8, None])
def test_grouped_minibatches_have_the_same_rows_in_sequences(size: int | None):
    ours, _ = filled()
    np.random.seed(2)
    padded = list(ours.minibatches(size))
    np.random.seed(2)
    for batch, other in zip(ours.minibatches(size, "grouped"), padded, strict=True):
        assert sorted(batch.returns.tolist()) == sorted(other.returns.tolist())
        assert len(batch.observations) == len(batch.returns)
        place = {value: tuple(np.argwhere(ours.returns == value)[0]) for value in batch.returns.numpy()}
        covered = 0
        for group in batch.sequences.groups:
            steps, count = group.shape
            table = np.full(steps * count, -1.0, np.float32)
            table[group.places.numpy()] = batch.returns[group.rows].numpy()
            table = table.reshape(steps, count)
            for number in range(count):
                column = [place[value] for value in table[:, number] if value in place]
                assert [(step - column[0][0], env) for step, env in column] == [
                    (at, column[0][1]) for at in range(len(column))
                ]
                assert not any(ours.episode_starts[at] for at in column[1:])
                begun = ours.episode_starts[column[0]]
                state = batch.sequences.states.vf[1][:, group.sequences][:, number].numpy()
                stored = as_stock(ours).cell_states_vf[column[0][0], :, column[0][1]]
                assert np.array_equal(state, np.zeros_like(stored) if begun else stored)
                covered += len(column)
        assert covered == len(batch.returns)


def test_a_row_that_is_left_out_ends_its_sequence():
    ours, _ = filled()
    ours.episode_starts[:] = 0
    ours.leave_out(3, [1])
    batch = next(iter(ours.minibatches(None)))
    assert len(batch.returns) == STEPS * ENVS - 1
    # One sequence each of two envs, two of the other, and where the data was split.
    assert batch.sequences.states.pi[0].shape[1] in (4, 5)
    ahead = [ours.draw_order().tolist() for _ in range(3)]
    assert all(sorted(order) == sorted(set(range(21)) - {3 * ENVS + 1}) for order in ahead)


def test_rows_of_two_envs_are_never_one_sequence():
    ours, _ = filled()
    ours.episode_starts[:] = 0
    for step in range(STEPS):  # the first env's rows end with step 2, the next one's begin with step 3
        ours.leave_out(step, [0] if step > 2 else [1])
    order = ours.rows
    begins = ours.begins(order)
    envs = order % ENVS
    assert (envs[1:] != envs[:-1]).sum() == ENVS - 1
    assert begins[1:][envs[1:] != envs[:-1]].all()
    ours.reset()
    with pytest.raises(RuntimeError, match="only 0 of 7 steps are stored"):
        ours.draw_order()


def test_the_share_of_padding_is_counted_without_a_draw(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent, "cuts", lambda lengths: [1, len(lengths)] if len(lengths) > 2 else [len(lengths)])
    ours, _ = filled()
    ours.episode_starts[:] = 0
    ours.episode_starts[2, 0] = ours.episode_starts[4, 1] = 1
    before = np.random.get_state()[1].tolist()
    # Minibatches of 7 are an env each: of 2 and 5 steps, of 4 and 3, of 7: 21 rows in 25 places.
    assert ours.padding(7) == pytest.approx((5 / 3, 1 - 21 / 25, 1 - 21 / 25))
    # 5 sequences of 2, 5, 4, 3 and 7 steps: padded to 35, or 7 alone and the others to 5.
    assert ours.padding(None) == pytest.approx((5, 1 - 21 / 35, 1 - 21 / 27))
    assert np.random.get_state()[1].tolist() == before


def test_groups_end_where_padding_would_cost_more_than_steps():
    cost = 2
    assert cuts(np.array([5, 5, 5]), cost) == [3]  # one group of 25; any cut costs its steps again
    # One group of 10 × (2 + 4) = 60; the long one apart: 10 × 3 + 2 × 5 = 40.
    assert cuts(np.array([10, 2, 2, 2]), cost) == [1, 4]
    assert cuts(np.array([3, 2]), cost) == [2]  # 3 × 4 = 12; apart 9 + 6 = 15
    assert cuts(np.array([7]), cost) == [1]
    assert cuts(np.array([100, 20, 20, 1, 1, 1, 1]), 1) == [1, 3, 7]


def test_memory_of_some_envs():
    part = torch.arange(6.0).view(1, 3, 2)
    memory = Memory(RNNStates((part, part + 10), (part + 20, part + 30)), np.array([True, False, True])).copied()
    some = memory.of(np.array([2, 0]))
    assert some.states.pi[0].tolist() == [[[4.0, 5.0], [0.0, 1.0]]]
    assert some.episode_starts.tolist() == [True, True]
    memory.put(np.array([1]), RNNStates(*(tuple(torch.full((1, 1, 2), -1.0) for _ in range(2)) for _ in range(2))))
    assert memory.states.vf[1].tolist() == [[[30.0, 31.0], [-1.0, -1.0], [34.0, 35.0]]]
    assert part.min() == 0.0  # copied
    some = memory.of(slice(0, 1))
    memory.put(slice(0, 1), RNNStates(*(tuple(torch.zeros(1, 1, 2) for _ in range(2)) for _ in range(2))))
    assert some.states.vf[1].tolist() == [[[30.0, 31.0]]]  # a copy, of a slice too
    within = Memory.within(memory.states, [1])
    assert (within.states.pi[0].tolist(), within.episode_starts.tolist()) == ([[[-1.0, -1.0]]], [False])
