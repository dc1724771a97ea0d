"""The Q-learning kernels against autograd and torch's Adam: gradients, errors, whole updates, greedy actions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.dqn.policies import DQNPolicy
from torch.nn import functional

from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.q_networks import BranchingDQNPolicy, DuelingDQNPolicy, best_values, chosen_values, greedy
from fasttrain.batch import QBatches
from fasttrain_kernels.q import QSettings
from fasttrain_kernels.threads import ThreadChoice
from q_blocks import make_batches, trained

PARTS = (slice(0, 2), slice(2, 6))  # of six updates, in two calls


def make_policy(
    inputs: int, dims: Any, arch: list[int], dueling: bool = False, activation: Any = torch.nn.ReLU, seed: int = 0
) -> Any:
    """Online and target net with different weights, large enough to test something. `dims`: choices, or a list."""
    torch.manual_seed(seed)
    plain = BranchingDQNPolicy if isinstance(dims, list) else DQNPolicy
    space = spaces.MultiDiscrete(dims) if isinstance(dims, list) else spaces.Discrete(dims)
    box = spaces.Box(-10.0, 10.0, (inputs,), np.float32)
    policy = (DuelingDQNPolicy if dueling else plain)(
        box, space, lambda _: 1e-3, net_arch=arch, activation_fn=activation
    )
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return policy


def q_values(net: Any, observations: torch.Tensor) -> torch.Tensor:
    """The net's own layers in the observations' precision: SB3's features are float32."""
    net.extract_features = lambda seen, _: seen
    return net(observations)


def torch_loss(policy: Any, batches: QBatches, update: int, settings: QSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss and absolute errors (B,), as SB3's DQN.train computes them, in the policy's precision."""
    precision = next(policy.parameters()).dtype

    def pick(array: Any, index: Any) -> Any:
        tensor = torch.from_numpy(array[index])
        return tensor.to(precision) if tensor.is_floating_point() else tensor

    rows, next_rows = batches.rows[update], batches.next_rows[update]
    rewards, discounts, dones = (pick(a, update) for a in (batches.rewards, batches.discounts, batches.dones))
    masks = pick(batches.next_masks, update) if len(batches.next_masks) else None
    weights = pick(batches.weights, update) if len(batches.weights) else torch.ones_like(rewards)
    dims = action_dims(policy.action_space)
    with torch.no_grad():
        seen = pick(batches.next_observations, next_rows)
        after = q_values(policy.q_net_target, seen)
        future = best_values(after, masks, dims)
        if settings.double:
            future = chosen_values(after, greedy(q_values(policy.q_net, seen), masks, dims), dims)
            if masks is not None:
                stuck = torch.stack([~part.any(1) for part in masks.split(dims, 1)], 1)
                future = future.masked_fill(stuck, 0.0)
        targets = rewards + (1 - dones) * discounts * future.mean(1)
    current = q_values(policy.q_net, pick(batches.observations, rows))
    current = chosen_values(current, pick(batches.actions, rows), dims)
    kind = functional.smooth_l1_loss if settings.huber else functional.mse_loss
    losses = kind(current, targets[:, None].expand_as(current), reduction="none")
    return (weights[:, None] * losses).mean(), (current - targets[:, None]).abs().mean(1).detach()


def fused_gradients(policy: Any, batches: QBatches, settings: QSettings) -> tuple[list[Any], float, Any]:
    """Of the first update, by which the policy's weights are others than those of a copy afterwards."""
    kernels, loss = KernelQEngine(policy, EngineSettings(threads=2)), "huber" if settings.huber else "mse"
    losses, errors, _ = trained(kernels, batches, double=settings.double, loss=loss, max_grad_norm=1e9)
    (scratch,) = kernels._scratch.values()
    return kernels.flat.views_of(torch.from_numpy(scratch.gradient)), losses[0], errors[0]


def worst_error(policy: Any, batches: QBatches, settings: QSettings) -> float:
    """The largest error of a gradient's entry, relative to the gradient's norm, after checks of loss and errors."""
    reference = copy.deepcopy(policy).double()
    expected_loss, expected_errors = torch_loss(reference, batches, 0, settings)
    expected_loss.backward()
    found, loss, errors = fused_gradients(policy, batches, settings)
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(errors, expected_errors.numpy(), rtol=1e-4, atol=1e-4)
    expected = [parameter.grad for parameter in reference.q_net.parameters()]
    norm = float(torch.sqrt(sum((gradient**2).sum() for gradient in expected)))
    worst = max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True))
    return worst / max(norm, 0.1)  # a TD error near zero has lost digits, and with it the gradient


@given(
    inputs=st.integers(1, 40),
    dims=st.one_of(st.integers(1, 33), st.lists(st.integers(1, 12), min_size=1, max_size=5)),
    arch=st.lists(st.integers(1, 33), min_size=1, max_size=4),
    activation=st.sampled_from([torch.nn.Tanh, torch.nn.ReLU, torch.nn.ELU, torch.nn.LeakyReLU]),
    batch=st.integers(1, 150),
    dueling=st.booleans(),
    double=st.booleans(),
    huber=st.booleans(),
    masked=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_gradients_equal_autograds(
    inputs: int, dims: Any, arch: list[int], activation: Any, batch: int, dueling: bool, double: bool, huber: bool,
    masked: bool, weighted: bool, seed: int,
):  # fmt: skip
    policy = make_policy(inputs, dims, arch, dueling, activation, seed)
    batches = make_batches(inputs, dims, 1, batch, masked, weighted, seed)
    assert worst_error(policy, batches, QSettings(double, huber, dueling)) <= 1e-5


@pytest.mark.parametrize(
    ("arch", "dueling"),
    [([128, 96, 48], True), ([300], False), ([256, 256], True), ([7, 33], False), ([600, 520], False)],
)
def test_gradients_of_wider_nets(arch: list[int], dueling: bool):
    """All kinds of tiles, several blocks, and blocks with rows to spare."""
    policy = make_policy(50, 40, arch, dueling, torch.nn.Tanh, seed=1)
    batches = make_batches(50, 40, 1, 301, masked=True, seed=1)
    assert worst_error(policy, batches, QSettings(True, True, dueling)) <= 1e-5


@pytest.mark.parametrize(
    ("dueling", "dims", "max_grad_norm"), [(False, 5, 10.0), (True, 5, 0.05), (True, [3, 4, 2], 10.0)]
)
def test_several_updates_equal_torchs_adam(dueling: bool, dims: Any, max_grad_norm: float):
    """Errors of an update are those before it; the target net stays; the optimizer's state is that of torch."""
    policy, batches = make_policy(7, dims, [33, 9], dueling, seed=3), make_batches(7, dims, 6, 20, True, True, seed=3)
    reference, kernels = copy.deepcopy(policy), KernelQEngine(policy, EngineSettings())
    settings = QSettings(True, True, dueling)
    expected = []
    for update in range(6):
        loss, errors = torch_loss(reference, batches, update, settings)
        reference.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.q_net.parameters(), max_grad_norm)
        reference.optimizer.step()
        expected.append((loss.item(), errors.numpy()))
    blocks = [QBatches(*batches[:3], *(array[part] for array in batches[3:])) for part in PARTS]
    (losses, errors, _), (more, more_errors, _) = (
        trained(kernels, block, double=True, max_grad_norm=max_grad_norm) for block in blocks
    )
    np.testing.assert_allclose([*losses, *more], [loss for loss, _ in expected], rtol=1e-4)
    np.testing.assert_allclose([*errors, *more_errors], [error for _, error in expected], rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(policy.q_net.parameters(), reference.q_net.parameters(), strict=True):
        state, other = policy.optimizer.state[ours], reference.optimizer.state[theirs]
        assert state["step"] == other["step"] == 6
        torch.testing.assert_close(state["exp_avg"], other["exp_avg"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(state["exp_avg_sq"], other["exp_avg_sq"], rtol=1e-3, atol=1e-6)


def test_threads_change_nothing_but_the_order_of_sums(monkeypatch: pytest.MonkeyPatch):
    batches = make_batches(9, 5, 6, 301, masked=True, weighted=True)

    def learned(parts: int, on_threads: bool) -> list[Any]:
        monkeypatch.setattr(ThreadChoice, "next", lambda _: on_threads)
        policy = make_policy(9, 5, [33, 9])
        results = trained(KernelQEngine(policy, EngineSettings(threads=parts)), batches, double=True)
        return [*results, *(parameter.detach().numpy() for parameter in policy.parameters())]

    alone, together = learned(4, False), learned(4, True)
    for one, other, whole in zip(alone, together, learned(1, False), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("field", ["observations", "next_observations", "rewards"])
def test_what_is_not_finite_reaches_the_loss_and_does_not_stay(field: str):
    policy, batches = make_policy(3, 4, [8, 8]), make_batches(3, 4, 1, 9, masked=True)
    batches.next_masks[:] = True
    batches.dones[:] = 0.0
    spoilt = getattr(batches, field).copy()
    spoilt[:] = np.nan
    kernels, before = KernelQEngine(policy, EngineSettings()), copy.deepcopy(policy)
    assert not np.isfinite(trained(kernels, batches._replace(**{field: spoilt}))[0]).any()
    policy.load_state_dict(before.state_dict())
    kernels.flat.arrays[1].fill(0)
    kernels.flat.arrays[2].fill(0)
    assert np.isfinite(trained(kernels, batches)[0]).all()
    assert all(bool(parameter.isfinite().all()) for parameter in policy.parameters())
