"""A rollout cut into chunks: which rows a minibatch has, where sequences begin, and what a burn-in runs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.buffers import recurrent
from fasttrain.buffers.recurrent import RecurrentStorage
from fasttrain.buffers.sequences import burn_in_lengths

STEPS, ENVS, UNITS = 12, 3, 2
STARTS = ((0, 0), (0, 2), (6, 0), (5, 1))  # (step, env); env 1's episode is older than the rollout


def filled(chunk_steps: int | None = 4, burn_in: int = 0, left_out: tuple[tuple[int, int], ...] = ()) -> Any:
    """Of (T, N) rows: each observation and return is its row's number, each state that plus one."""
    ours = RecurrentStorage(
        STEPS, ENVS, spaces.Box(0, 99, (1,), np.float32), spaces.Discrete(2), gamma=0.9, gae_lambda=0.8,
        device=torch.device("cpu"), state_shape=(1, UNITS), own_critic=False, chunk_steps=chunk_steps, burn_in=burn_in,
    )  # fmt: skip
    for step in range(STEPS):
        rows = torch.arange(ENVS, dtype=torch.float32)[:, None] + step * ENVS
        state = (rows + 1).expand(ENVS, UNITS)[None]
        starts = np.array([(step, env) in STARTS for env in range(ENVS)])
        both = (state, state)
        ours.add(rows, torch.zeros(ENVS, dtype=torch.int64), np.zeros(ENVS, np.float32), starts, rows[:, 0], rows[:, 0],
                 None, RNNStates(both, both))  # fmt: skip
        for place in [place for place in left_out if place[0] == step]:
            ours.leave_out(step, [place[1]])
    ours.compute_returns_and_advantages(np.zeros(ENVS, np.float32), np.zeros(ENVS, np.bool_))
    return ours


def rows_of(batch: Any) -> list[int]:
    return [int(value) for value in batch.old_values]


def starting(batch: Any) -> list[float]:
    """The first number of each sequence's states, in their order."""
    found: list[float] = batch.sequences.states.pi[0][0, :, 0].tolist()
    return found


def in_chunks(storage: Any, order: list[int]) -> list[list[int]]:
    return np.array(order).reshape(-1, storage.chunk_steps).tolist()


@pytest.mark.parametrize("laid", ["padded", "grouped", "packed"])
def test_a_minibatch_is_whole_chunks_of_shuffled_envs(laid: Any):
    storage = filled()
    np.random.seed(1)
    orders = []
    for _ in range(4):
        batches = list(storage.sequences(12, laid))
        assert [len(batch.old_values) for batch in batches] == [12, 12, 12]
        for batch in batches:
            rows = rows_of(batch)
            firsts = [row for row in rows if row // ENVS % 4 == 0]
            assert len(firsts) == 3
            assert sorted(rows) == sorted(row + ENVS * step for row in firsts for step in range(4))
        orders.append([row for batch in batches for row in rows_of(batch)])
        assert sorted(orders[-1]) == list(range(STEPS * ENVS)), "each row once an epoch"
    assert len({*map(tuple, orders)}) == 4, "shuffled anew"
    np.random.seed(1)
    chunks = in_chunks(storage, storage.draw_order().tolist())
    assert all(np.diff(chunk).tolist() == [ENVS] * 3 and chunk[0] // ENVS in (0, 4, 8) for chunk in chunks)
    envs = [chunk[0] % ENVS for chunk in chunks]
    assert envs != sorted(envs), "envs too"


def test_sequences_begin_with_chunks_and_episodes_from_what_is_stored_there():
    storage = filled()
    batch = next(iter(storage.sequences(None, "padded")))
    wanted = {0, 1, 2, 12, 13, 14, 24, 25, 26, 6 * ENVS, 5 * ENVS + 1}  # steps 0, 4 and 8, and two episodes
    assert sorted(state - 1 for state in starting(batch)) == sorted(wanted)
    batch = next(iter(storage.sequences(None, "grouped")))
    zero = {0, 2, 6 * ENVS, 5 * ENVS + 1}
    assert sorted(starting(batch)) == sorted([0.0] * 4 + [row + 1.0 for row in wanted - zero])
    assert sorted({group.shape for group in batch.sequences.groups})[-1][0] == 4, "none is longer than a chunk"


def test_one_chunk_of_the_whole_rollout_is_stocks_order_where_that_begins_at_an_env():
    one, stock = filled(chunk_steps=STEPS), filled(chunk_steps=None)
    np.random.seed(next(seed for seed in range(999) if np.random.RandomState(seed).randint(STEPS * ENVS) == 0))
    wanted = stock.draw_order()
    assert wanted.tolist() == [step * ENVS + env for env in range(ENVS) for step in range(STEPS)]
    assert sorted(map(tuple, in_chunks(one, one.draw_order().tolist()))) == sorted(
        map(tuple, wanted.reshape(ENVS, STEPS).tolist())
    )
    assert one.begins(wanted).tolist() == stock.begins(wanted).tolist()


def test_rows_that_are_left_out_are_drawn_nowhere_and_end_their_sequences():
    left_out = ((5, 0), (6, 1), (7, 1), (8, 2), (9, 2))
    storage = filled(left_out=left_out)
    gone = {step * ENVS + env for step, env in left_out}
    for seed in range(20):
        np.random.seed(seed)
        rows = [row for batch in storage.sequences(8, "packed") for row in rows_of(batch)]
        assert sorted(rows) == sorted({*range(STEPS * ENVS)} - gone)
    # Env 1's chunk ends early, after step 5, and that of env 2 begins late, at step 10; then env 0's with a hole.
    order = np.array([4 * ENVS + 1, 5 * ENVS + 1, 6 * ENVS + 2, 7 * ENVS + 2, 4 * ENVS, 6 * ENVS, 7 * ENVS])
    storage.episode_starts[:] = 0
    assert storage.begins(order).tolist() == [True, False, True, False, True, True, False]


def test_how_far_a_burn_in_goes_back():
    starts = np.zeros((6, 2), np.float32)
    starts[2, 0] = 1
    left_out = np.zeros((6, 2), np.bool_)
    left_out[1, 1] = True
    begin = np.array([0, 2, 4, 6, 8, 10, 3, 5, 11])  # env 0's steps 0 to 5; env 1's steps 1, 2 and 5
    assert burn_in_lengths(begin, starts, None, 3).tolist() == [0, 1, 0, 1, 2, 3, 1, 2, 3]
    assert burn_in_lengths(begin, starts, left_out, 3).tolist() == [0, 1, 0, 1, 2, 3, 1, 0, 3]
    assert burn_in_lengths(begin, starts, left_out, 1).tolist() == [0, 1, 0, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("laid", ["padded", "grouped", "packed"])
def test_a_burn_in_is_the_steps_before_with_what_is_stored_where_it_begins(laid: Any):
    storage = filled(burn_in=3)
    np.random.seed(3)
    for batch in storage.sequences(12, laid):
        before = batch.sequences.burn_in
        firsts = [row for row in rows_of(batch) if row // ENVS % 4 == 0 or divmod(row, ENVS) in STARTS]
        late = [row for row in firsts if row >= ENVS and divmod(row, ENVS) not in STARTS]
        # Of the chunks that begin at step 8, env 0's has two steps of its episode before it, the others three.
        lengths = {row: 2 if row == 8 * ENVS else 3 for row in late}
        if not late:
            assert before is None
            continue
        assert before.sizes.tolist() == [sum(length > step for length in lengths.values()) for step in range(3)
                                         if any(length > step for length in lengths.values())]  # fmt: skip
        seen, found, begun = before.observations[:, 0].tolist(), [], 0
        for size in before.sizes.tolist():
            found.append(seen[begun : begun + size])
            begun += size
        for number in range(len(late)):
            walk = [step[number] for step in found if number < len(step)]
            assert np.diff(walk).tolist() == [ENVS] * (len(walk) - 1)
            row = int(walk[-1]) + ENVS
            assert len(walk) == lengths.pop(row)
            zero = divmod(int(walk[0]), ENVS) in STARTS
            assert before.states.pi[0][0, number, 0] == (0 if zero else walk[0] + 1)
            place = int(before.places[number])
            assert batch.sequences.states.vf[1][0, place, 0] == row + 1, "the state that it takes the place of"
        assert not lengths
    assert all(batch.sequences.burn_in is None for batch in filled().sequences(12, laid))


def test_the_share_of_padding_is_counted_without_a_draw(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent, "cuts", lambda lengths: [1, len(lengths)] if len(lengths) > 2 else [len(lengths)])
    np.random.seed(7)
    before = np.random.get_state()[1].tolist()
    # Minibatches of 12 are an env each: of 6 and 6 steps, of 5 and 7, of 12: 36 rows in 38 places.
    assert filled(chunk_steps=None).padding(12) == pytest.approx((5 / 3, 1 - 36 / 38, 1 - 36 / 38))
    # 5 sequences of 6, 6, 5, 7 and 12 steps: padded to 60, or 12 alone and the others to 7.
    assert filled(chunk_steps=None).padding(None) == pytest.approx((5, 1 - 36 / 60, 1 - 36 / 40))
    # 9 chunks of 4, two of them cut in 2 + 2 and in 1 + 3.
    assert filled(chunk_steps=4).padding(None)[:2] == pytest.approx((11, 1 - 36 / 44))
    assert np.random.get_state()[1].tolist() == before
