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
from fasttrain.algos.engine import EngineSettings, RolloutRow
from fasttrain.threads import ThreadChoice


def test_acting_draws_legal_actions_with_the_policys_probabilities():
    policy = make_policy(5, 6, [8, 8], torch.nn.Tanh, 3)
    kernels = KernelEngine(policy, EngineSettings())
    kernels.pack()
    observation = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    mask = np.array([True, False, True, True, False, True])
    count = 40_000
    observations, masks = np.tile(observation, (count, 1)), np.tile(mask, (count, 1))
    torch.manual_seed(0)
    acted = kernels.act(observations, masks)
    actions, values, log_probs = acted.stored.actions, acted.stored.values, acted.stored.log_probs
    np.testing.assert_array_equal(acted.actions, actions.numpy())
    with torch.no_grad():
        expected_values, expected_log_probs, _ = policy.evaluate_actions(
            torch.from_numpy(observations), actions, action_masks=torch.from_numpy(masks)
        )
        probs = policy.get_distribution(torch.from_numpy(observations[:1]), mask).distribution.probs[0].double().numpy()
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    drawn = np.bincount(actions.numpy(), minlength=6)
    assert drawn[~mask].sum() == 0
    expected = probs[mask] / probs[mask].sum() * count
    assert stats.chisquare(drawn[mask], expected).pvalue > 1e-3


@pytest.mark.parametrize("count", [1, 63, 300])
def test_values_alone(count: int):
    policy = make_policy(5, 6, [8, 8], torch.nn.Tanh, 3)
    kernels = KernelEngine(policy, EngineSettings(threads=2))
    kernels.pack()
    observations = torch.randn(count, 5)
    state = torch.get_rng_state()
    values = kernels.values(observations.numpy())
    assert torch.equal(state, torch.get_rng_state())
    expected = policy.predict_values(observations).detach().flatten()
    torch.testing.assert_close(torch.from_numpy(values), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_second", [[True, True], [False, False]], ids=["legal", "empty head"])
def test_acting_with_sub_actions(of_second: list[bool]):
    policy = make_policy(5, spaces.MultiDiscrete([3, 2, 4]), [8, 8], torch.nn.Tanh, 3)
    kernels = KernelEngine(policy, EngineSettings())
    kernels.pack()
    count = 60_000
    observations = np.tile(np.random.default_rng(0).standard_normal(5).astype(np.float32), (count, 1))
    mask = np.array([True, False, True, *of_second, False, False, True, True])
    masks = np.tile(mask, (count, 1))
    torch.manual_seed(1)
    acted = kernels.act(observations, masks)
    actions, values, log_probs = acted.stored.actions, acted.stored.values, acted.stored.log_probs
    np.testing.assert_array_equal(acted.actions, actions.numpy())
    assert actions.shape == (count, 3)
    with torch.no_grad():
        expected_values, expected_log_probs, _ = policy.evaluate_actions(
            torch.from_numpy(observations), actions, action_masks=torch.from_numpy(masks)
        )
        dist = policy.get_distribution(torch.from_numpy(observations[:1]), mask)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    for k, part in enumerate(dist.distributions):
        probs, drawn = part.probs[0].double().numpy(), np.bincount(actions[:, k].numpy(), minlength=part.probs.shape[1])
        legal = probs > 0
        assert drawn[~legal].sum() == 0
        if legal.sum() > 1:
            assert stats.chisquare(drawn[legal], probs[legal] / probs[legal].sum() * count).pvalue > 1e-3


def test_acting_follows_the_weights_and_torchs_seed():
    policy = make_policy(5, 6, [8], torch.nn.Tanh, 3)
    kernels = KernelEngine(policy, EngineSettings())
    observations = np.random.default_rng(0).standard_normal((50, 5)).astype(np.float32)

    def drawn(seed: int) -> tuple[list[int], list[float]]:
        kernels.pack()
        torch.manual_seed(seed)
        acted = kernels.act(observations, None)
        return acted.actions.tolist(), acted.stored.values.flatten().tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1)[0] != drawn(2)[0]
    before = drawn(1)[1]
    with torch.no_grad():
        policy.value_net.bias += 1.0
    assert drawn(1)[1] == pytest.approx([value + 1.0 for value in before], abs=1e-5)


def test_threads_change_no_draw(monkeypatch: pytest.MonkeyPatch):
    policy = make_policy(30, 12, [32, 32], torch.nn.Tanh, 5)
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((300, 30)).astype(np.float32)
    masks = rng.random((300, 12)) < 0.7
    masks[:, 0] = True

    def drawn(threads: int, on_threads: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(ThreadChoice, "next", lambda _: on_threads)
        kernels = KernelEngine(policy, EngineSettings(threads=threads))
        kernels.pack()
        torch.manual_seed(1)
        return [*kernels.act(observations, masks).stored[:5]]  # nothing is remembered

    alone = drawn(1, False)
    for beside in (drawn(2, True), drawn(2, False)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, beside, strict=True))


def test_masks_need_not_be_contiguous():
    policy = make_policy(5, 20, [8], torch.nn.Tanh, 3)
    kernels = KernelEngine(policy, EngineSettings())
    kernels.pack()
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
