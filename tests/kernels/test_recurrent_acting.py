"""How a policy with LSTMs acts in compiled kernels: as the policy itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.accelerators.kernels_recurrent import SequenceKernelEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.recurrent import RecurrentEngine
from fasttrain.algos.recurrent_policies import MaskableRecurrentActorCriticPolicy
from fasttrain.buffers.recurrent import Memory
from fasttrain_kernels.actor_critic import act_rows
from fasttrain_kernels.recurrent import lay_out
from fasttrain_kernels.threads import LINE, NEXT, PIECES, new_team
from recurrent_cases import BOX, CASES, masks_of, memory_of, policy_of, seen_of


def test_a_second_thread_acts_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch):
    policy, rng, count = policy_of(), np.random.default_rng(4), 300
    engine, called = SequenceKernelEngine(policy, EngineSettings(kind="kernels", threads=2)), []

    def alone(_choice: Any, _threads: int, kernel: Any, *arguments: Any) -> Any:
        called.append(arguments)
        return kernel(*arguments, new_team(), 0)

    monkeypatch.setattr(engine, "_call", alone)
    engine.begin()
    engine.act(seen_of(BOX, rng, count), None, memory_of(policy, rng, count, 0.3))
    values = called[0][-1][2]
    expected = values.copy()
    scratch, cells, team = engine._scratch[2], engine._cells[2], new_team(2)
    of_first = [each[0] for each in (scratch.activations, scratch.probs, cells.rows, cells.sums, cells.bias)]
    for each in of_first:
        each[:] = 7
    values[:] = 0
    team[PIECES], team[NEXT + LINE] = 5, 2  # the blocks are open, from 0 on for one thread, from 2 on for the other
    act_rows(*called[0], team, 1)
    np.testing.assert_array_equal(values, expected)
    assert all((each == 7).all() for each in of_first)


@pytest.mark.parametrize("name", CASES)
def test_acting_gives_the_policys_values_and_states(name: str):
    kind, settings = CASES[name]
    policy, rng = policy_of(kind, **settings), np.random.default_rng(1)
    count = 150  # more than a block of rows
    seen, masks = seen_of(policy.observation_space, rng, count), masks_of(policy, rng, count)
    memory = memory_of(policy, rng, count, 0.3)
    engine = SequenceKernelEngine(policy, EngineSettings(kind="kernels"))
    engine.begin()
    acted = engine.act(seen, masks, memory)
    reference = RecurrentEngine(policy, EngineSettings())
    theirs = reference.act(seen, masks, memory)
    stored = acted.stored
    assert stored is not None
    assert stored.lstm_states is memory.states  # as they were, before the reset
    torch.testing.assert_close(stored.values, theirs.stored.values, rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        (*acted.lstm_states.pi, *acted.lstm_states.vf), (*theirs.lstm_states.pi, *theirs.lstm_states.vf), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.values(seen, memory), reference.values(seen, memory), rtol=1e-5, atol=1e-5)
    starts = torch.from_numpy(memory.episode_starts.astype(np.float32))
    tensors = {key: torch.from_numpy(part) for key, part in seen.items()} if isinstance(seen, dict) else None
    given = {} if masks is None else {"action_masks": masks}
    distribution, _ = policy.get_distribution(
        torch.from_numpy(seen) if tensors is None else tensors, memory.states.pi, starts, **given
    )
    expected = distribution.log_prob(stored.actions)
    torch.testing.assert_close(stored.log_probs, expected.detach(), rtol=1e-4, atol=1e-4)


def test_draws_have_the_policys_probabilities():
    policy, rng, count = policy_of(MaskableRecurrentActorCriticPolicy), np.random.default_rng(3), 40_000
    one = memory_of(policy, rng, 1, 0.0)
    seen, mask = seen_of(BOX, rng, 1), np.array([[True, False, True, True]])
    many = Memory(RNNStates(*((h.expand(1, count, -1), c.expand(1, count, -1)) for h, c in one.states)),
                  np.zeros(count, np.bool_))  # fmt: skip
    engine = SequenceKernelEngine(policy, EngineSettings(kind="kernels"))
    engine.begin()
    torch.manual_seed(0)
    acted = engine.act(np.tile(seen, (count, 1)), np.tile(mask, (count, 1)), many)
    distribution, _ = policy.get_distribution(torch.from_numpy(seen), one.states.pi, torch.zeros(1), mask)
    probs = distribution.distribution.probs[0].detach().double().numpy()
    shares = np.bincount(acted.actions, minlength=4) / count
    np.testing.assert_allclose(shares, probs, atol=4 * np.sqrt(0.25 / count))
    assert shares[1] == 0


def test_states_that_do_not_lie_row_by_row_are_read_right():
    policy, rng = policy_of(), np.random.default_rng(5)
    seen, memory = seen_of(BOX, rng, 3), memory_of(policy, rng, 3, 0.0)
    turned = Memory(RNNStates(*(tuple(part.mT.contiguous().mT for part in pair) for pair in memory.states)),
                    memory.episode_starts)  # fmt: skip
    engine = SequenceKernelEngine(policy, EngineSettings(kind="kernels"))
    engine.begin()
    expected = engine.act(seen, None, memory).lstm_states
    compiled = len(act_rows.signatures)
    after = engine.act(seen, None, turned).lstm_states
    assert len(act_rows.signatures) == compiled, "for other arrays it would be compiled anew"
    for one, other in zip((*after.pi, *after.vf), (*expected.pi, *expected.vf), strict=True):
        assert torch.equal(one, other)


def test_the_last_sequence_ends_with_the_minibatch():
    begins, places = np.array([True, False, True, False]), np.zeros((5, 6), np.int64)
    assert lay_out.py_func(begins, 0, 4, np.arange(4), places, np.zeros(4, np.int64)) == (2, 2, 4)
