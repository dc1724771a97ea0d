"""The fused acting kernel against the policy's own probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats
from test_ppo_kernels import make_policy

from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.buffers.rollout import RolloutRow
from fasttrain_kernels.threads import ThreadChoice


def kernels_of(inputs: int, actions: Any, arch: list[int], seed: int = 3, **settings: Any) -> KernelEngine:
    kernels = KernelEngine(make_policy(inputs, actions, arch, torch.nn.Tanh, seed), EngineSettings(**settings))
    kernels.pack()
    return kernels


@pytest.mark.parametrize(
    ("actions", "mask"),
    [
        (6, [1, 0, 1, 1, 0, 1]),
        (spaces.MultiDiscrete([3, 2, 4]), [1, 0, 1, 1, 1, 0, 0, 1, 1]),
        (spaces.MultiDiscrete([3, 2, 4]), [1, 0, 1, 0, 0, 0, 0, 1, 1]),  # a head without a legal choice
    ],
    ids=str,
)
def test_acting_draws_legal_actions_with_the_policys_probabilities(actions: Any, mask: list[int]):
    kernels, count = kernels_of(5, actions, [8, 8]), 20_000
    policy = kernels.policy
    observation = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    observations, masks = np.tile(observation, (count, 1)), np.tile(np.array(mask, np.bool_), (count, 1))
    torch.manual_seed(1)
    acted = kernels.act(observations, masks)
    drawn, values, log_probs = acted.stored.actions, acted.stored.values, acted.stored.log_probs
    np.testing.assert_array_equal(acted.actions, drawn.numpy())
    with torch.no_grad():
        expected_values, expected_log_probs, _ = policy.evaluate_actions(
            torch.from_numpy(observations), drawn, action_masks=torch.from_numpy(masks)
        )
        found = policy.get_distribution(torch.from_numpy(observations[:1]), masks[:1])
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    parts = found.distributions if hasattr(found, "distributions") else [found.distribution]
    for part, chosen in zip(parts, drawn.reshape(count, -1).T, strict=True):
        probs = part.probs[0].double().numpy()
        counts, legal = np.bincount(chosen.numpy(), minlength=len(probs)), probs > 0
        assert counts[~legal].sum() == 0
        if legal.sum() > 1:
            assert stats.chisquare(counts[legal], probs[legal] / probs[legal].sum() * count).pvalue > 1e-3


@pytest.mark.parametrize("count", [1, 63, 300])
def test_values_alone(count: int):
    kernels = kernels_of(5, 6, [8, 8], threads=2)
    observations = torch.randn(count, 5)
    state = torch.get_rng_state()
    values = kernels.values(observations.numpy())
    assert torch.equal(state, torch.get_rng_state())
    expected = kernels.policy.predict_values(observations).detach().flatten()
    torch.testing.assert_close(torch.from_numpy(values), expected, rtol=1e-5, atol=1e-6)


def test_threads_change_no_draw(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((300, 30)).astype(np.float32)
    masks = rng.random((300, 12)) < 0.7
    masks[:, 0] = True

    def drawn(threads: int, on_threads: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(ThreadChoice, "next", lambda _: on_threads)
        kernels = kernels_of(30, 12, [32, 32], seed=5, threads=threads)
        torch.manual_seed(1)
        return [*kernels.act(observations, masks).stored[:5]]  # nothing is remembered

    alone = drawn(1, False)
    for beside in (drawn(2, True), drawn(2, False)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, beside, strict=True))


def test_masks_need_not_be_contiguous():
    kernels = kernels_of(5, 20, [8])
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((50, 5)).astype(np.float32)
    masks = rng.random((20, 50)) < 0.3
    masks[3] = True

    def drawn(masks: Any) -> RolloutRow:
        torch.manual_seed(0)
        return kernels.act(observations, masks).stored

    transposed = masks.T
    assert not transposed.flags.c_contiguous
    for ours, theirs in zip(drawn(transposed)[:5], drawn(np.ascontiguousarray(transposed))[:5], strict=True):
        assert torch.equal(ours, theirs)
    assert transposed[np.arange(50), drawn(transposed).actions.numpy()].all()
