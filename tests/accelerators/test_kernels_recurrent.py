"""Kernels for recurrent policies: who is served, and that they act and learn as the torch engine does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import fasttrain
from accelerated import updated_by
from fasttrain.accelerators.eligible import policy_reason
from fasttrain.accelerators.kernels import zeros
from fasttrain.accelerators.kernels_recurrent import SequenceKernelEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.recurrent import RecurrentEngine
from fasttrain.algos.step import PPOWork
from fasttrain_kernels.threads import ThreadChoice
from recurrent_cases import CASES, WORK, policy_of, rollout_of


def updated(engine_class: Any, policy: Any, storage: Any, work: PPOWork, threads: int = 1, **settings: Any) -> Any:
    """A copy of the policy after the update, and what the update came to."""
    learner = copy.deepcopy(policy)
    kind = "kernels" if engine_class is SequenceKernelEngine else "torch"
    engine = engine_class(learner, EngineSettings(kind=kind, threads=threads, **settings))
    np.random.seed(0)
    return learner, updated_by(engine, storage, work)


def check_same(one: Any, other: Any, before: Any, bound: float = 1e-4) -> None:
    """The two moved as far, up to `bound` of the way that each parameter went."""
    trio = zip(one.named_parameters(), other.parameters(), before.parameters(), strict=True)
    for (name, mine), theirs, begun in trio:
        way = float((theirs - begun).detach().abs().max())
        assert way > 0, name
        assert float((mine - theirs).detach().abs().max()) < bound * way + 1e-7, name


WORKS: dict[str, dict[str, Any]] = {
    **{name: {} for name in CASES},
    "clipped values": {"clip_range_vf": 0.1},
    "advantages as they are": {"normalize_advantage": False},
    "stopped": {"target_kl": 0.25, "batch_size": 13},
    "one minibatch": {"batch_size": None},
    "single rows": {"batch_size": 1, "normalize_advantage": False, "n_epochs": 1},
}


@pytest.mark.parametrize("name", WORKS)
def test_an_update_is_the_torch_engines(name: str):
    kind, settings = CASES.get(name, CASES["two LSTMs"])
    policy, work = policy_of(kind, **settings), WORK._replace(**WORKS[name])
    assert policy_reason(policy) is None
    storage = rollout_of(policy, *((16, 11) if name in CASES else (9, 6)), left_out=name == "bits")
    learned, done = updated(SequenceKernelEngine, policy, storage, work)
    expected, there = updated(RecurrentEngine, policy, storage, work)
    check_same(learned, expected, policy)
    assert {*done.terms} == {*there.terms}
    for term, found in done.terms.items():
        np.testing.assert_allclose(found, there.terms[term], rtol=2e-4, atol=2e-5, err_msg=term)
    np.testing.assert_allclose(done.norms, there.norms, rtol=1e-4)  # that is not seen in steps clipped to one length
    assert (done.steps, done.epochs, done.stopped) == (there.steps, there.epochs, there.stopped)
    assert done.stopped == (name == "stopped")


def test_threads_change_nothing_but_the_order_of_sums(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of()
    storage, work = rollout_of(policy, 20, 40), WORK._replace(batch_size=603)  # parts of 150 and of 151 rows
    storage.episode_starts[::2] = 1  # so that sequences begin at every border
    alone, _ = updated(SequenceKernelEngine, policy, storage, work)
    found = []
    for on_threads in (True, False):  # 4 parts of a minibatch in either case
        monkeypatch.setattr(ThreadChoice, "next", lambda _, mode=on_threads: mode)
        found.append(updated(SequenceKernelEngine, policy, storage, work, threads=4)[0])
    for one, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one, other)
    check_same(found[0], alone, policy)


def test_each_part_of_a_minibatch_is_computed_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of()
    monkeypatch.setattr("fasttrain.accelerators.kernels_recurrent.empty", zeros)  # so that what is not written is known
    engine = SequenceKernelEngine(copy.deepcopy(policy), EngineSettings(kind="kernels", threads=4))
    engine.update(rollout_of(policy, 20, 30), WORK._replace(batch_size=None))
    for name, each in engine._cells[4]._asdict().items():
        assert each.reshape(4, -1).any(axis=1).all(), name


def test_after_a_step_that_was_not_taken_all_goes_on_as_in_the_torch_engine():
    policy = policy_of()
    storage, work = rollout_of(policy, 7, 3), WORK._replace(n_epochs=1, batch_size=16)
    np.random.seed(0)
    storage.observations.reshape(21, -1)[storage.draw_order()[:16]] = np.nan  # rows of the first minibatch
    learned, done = updated(SequenceKernelEngine, policy, storage, work)
    expected, there = updated(RecurrentEngine, policy, storage, work, fused_adam=True)  # stock's loop refuses NaN
    assert (done.steps, done.skipped) == (there.steps, there.skipped) == (1, 1)
    check_same(learned, expected, policy)


def test_working_memory_grows_with_the_minibatches_and_is_kept_once():
    policy = policy_of()
    engine = SequenceKernelEngine(copy.deepcopy(policy), EngineSettings(kind="kernels"))
    for steps in (8, 12, 10):
        engine.update(rollout_of(policy, steps, 3), WORK._replace(batch_size=None))
    assert [cells.order.shape for cells in engine._cells.values()] == [(1, 36)]


def test_the_model_takes_them_where_they_know_every_layer():
    def engine_of(**kwargs: Any) -> Any:
        return fasttrain.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", engine="kernels", device="cpu",
                                      policy_kwargs={"lstm_hidden_size": 16, **kwargs}).engine  # fmt: skip

    assert type(engine_of()) is SequenceKernelEngine
    assert type(engine_of(n_lstm_layers=2)) is RecurrentEngine
