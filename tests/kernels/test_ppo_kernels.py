"""The fused kernels against autograd over the plain update: gradients, whole updates, acting."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy

from accelerated import minibatch_terms
from fasttrain.accelerators.kernels import ROWS_PER_THREAD, KernelEngine
from fasttrain.accelerators.layout import make_layout
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import action_dims, view_of
from fasttrain.algos.step import PPOWork, Terms
from fasttrain.buffers.rollout import RolloutBatch, RolloutRow, RolloutStorage
from fasttrain_kernels.actor_critic import train_epoch
from fasttrain_kernels.ppo import NUM_STATISTICS, AdamSettings, LossSettings, Training
from fasttrain_kernels.threads import Team

TERMS = ("policy_gradient_loss", "value_loss", "entropy_loss", "clip_fraction", "approx_kl")
LOSS = LossSettings(
    clip_range=0.2, clip_range_vf=-1.0, ent_coef=0.01, vf_coef=0.5, normalize_advantage=True, target_kl=-1.0
)


def make_policy(
    inputs: int, actions: int | spaces.Space[Any], arch: Any, activation: type[torch.nn.Module], seed: int
) -> Any:
    torch.manual_seed(seed)
    box = spaces.Box(-10.0, 10.0, (inputs,), np.float32)
    space = spaces.Discrete(actions) if isinstance(actions, int) else actions
    policy = MaskableActorCriticPolicy(box, space, lambda _: 1e-3, net_arch=arch, activation_fn=activation)
    for parameter in policy.parameters():  # biases and heads of SB3's initialisation are too small to test anything
        torch.nn.init.normal_(parameter, std=0.4)
    return policy


def make_storage(policy: Any, steps: int, envs: int, seed: int, sparse: float = 0.5) -> RolloutStorage:
    """A filled storage whose old log-probabilities are near the policy's own, so that some ratios are clipped."""
    rng = np.random.default_rng(seed)
    space, dims = policy.observation_space, action_dims(policy.action_space)
    storage = RolloutStorage(
        steps,
        envs,
        space,
        policy.action_space,
        device=torch.device("cpu"),
        gamma=0.9,
        gae_lambda=0.8,
        mask_width=sum(dims),
    )
    head = view_of(policy, policy.action_space)
    for _ in range(steps):
        observations = rng.standard_normal((envs, *space.shape)).astype(np.float32)
        observations[rng.random(observations.shape) < sparse] = 0.0
        masks = rng.random((envs, sum(dims))) < 0.5
        for first, size in zip(np.cumsum([0, *dims]), dims, strict=False):
            masks[np.arange(envs), first + rng.integers(size, size=envs)] = True
        masks[0, : dims[0]] = False  # no legal choice: rated as sb3-contrib rates it
        with torch.no_grad():
            chosen, values, log_probs = head.act(torch.from_numpy(observations), torch.from_numpy(masks))
        noise = torch.from_numpy(rng.normal(0, 0.3, envs).astype(np.float32))
        rewards = rng.standard_normal(envs).astype(np.float32)
        row = RolloutRow(
            torch.from_numpy(observations), chosen, values + noise[:, None], log_probs + noise, torch.from_numpy(masks)
        )
        storage.add(row, rewards, rng.random(envs) < 0.1)
    storage.compute_returns_and_advantages(torch.zeros(envs), np.zeros(envs, np.bool_))
    return storage


def work_of(loss: LossSettings) -> PPOWork:
    """The same loss as engines are asked for it."""
    clip_range_vf = None if loss.clip_range_vf < 0 else loss.clip_range_vf
    return PPOWork(1, None, loss.clip_range, clip_range_vf, loss.ent_coef, loss.vf_coef, loss.normalize_advantage,
                   max_grad_norm=0.5, target_kl=None)  # fmt: skip


def autograd(policy: Any, storage: RolloutStorage, order: np.ndarray, loss: LossSettings) -> tuple[Any, Terms]:
    """Gradient of every parameter in float64, from the same rows."""
    double = copy.deepcopy(policy).double()
    rows = torch.from_numpy(order)
    total = storage.num_steps * storage.num_envs

    def pick(array: Any) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(total, *array.shape[2:])[rows]
        return tensor.double() if tensor.is_floating_point() else tensor

    actions = pick(storage.actions)
    if isinstance(policy.action_space, spaces.Discrete):
        actions = actions.flatten()
    batch = RolloutBatch(
        pick(storage.observations), actions, pick(storage.values), pick(storage.log_probs), pick(storage.advantages),
        pick(storage.returns), pick(storage.masks),
    )  # fmt: skip
    head = view_of(double, double.action_space)
    double.extract_features = lambda observations, *_: observations.double()  # SB3's casts to float32
    found = minibatch_terms(work_of(loss), head, batch)
    found["loss"].backward()
    return [parameter.grad for parameter in double.parameters()], found


def fused_gradients(
    policy: Any, storage: RolloutStorage, order: np.ndarray, loss: LossSettings, threads: int, on_threads: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    kernels = KernelEngine(policy, EngineSettings(threads=threads))
    kernels.pack()
    scratch = kernels._scratch_for(threads * ROWS_PER_THREAD)
    rows = kernels._rows_of_rollout(storage)
    flat, adam = kernels.parameters.numpy(), AdamSettings(0.0, 0.9, 0.999, 1e-8, 1.0)  # which leaves them as they are
    training = Training(flat, np.zeros_like(flat), np.zeros_like(flat), kernels.layout, rows, loss, adam, scratch)
    out = np.zeros((1, NUM_STATISTICS)), False, np.full(1, -1)
    Team().run(train_epoch, threads if on_threads else 1, order, len(order), 1, training, None, *out)
    gradient = torch.from_numpy(scratch.gradients[0])
    views = {id(place.parameter): place.of(gradient) for place in make_layout(policy)[1]}
    return [views[id(parameter)].numpy() for parameter in policy.parameters()], scratch.statistics[0] / len(order)


def assert_gradients(
    policy: Any, batch: int, seed: int, threads: int, loss: LossSettings = LOSS, on_threads: bool = False
) -> None:
    storage, order = make_storage(policy, 10, 9, seed), np.random.default_rng(seed).permutation(90)[:batch]
    expected, found = autograd(policy, storage, order, loss)
    ours, means = fused_gradients(policy, storage, order, loss, threads, on_threads)
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in expected))
    worst = max(np.abs(gradient - wanted.numpy()).max() for gradient, wanted in zip(ours, expected, strict=True))
    assert worst <= 1e-5 * norm, f"{worst / norm:.1e} of the gradient's norm"
    reference = np.array([float(found[name].detach()) for name in TERMS]) * [1, 1, -1, 1, 1]
    np.testing.assert_allclose(means[:5], reference, rtol=1e-4, atol=1e-5)


@given(
    inputs=st.integers(1, 20),
    actions=st.one_of(
        st.integers(1, 9),
        st.lists(st.integers(2, 5), min_size=1, max_size=4).map(spaces.MultiDiscrete),
        st.integers(1, 4).map(spaces.MultiBinary),
    ),
    pi=st.lists(st.integers(1, 21), min_size=1, max_size=3),
    vf=st.lists(st.integers(1, 21), min_size=1, max_size=3),
    activation=st.sampled_from([torch.nn.Tanh, torch.nn.ReLU, torch.nn.ELU, torch.nn.LeakyReLU]),
    batch=st.integers(2, 90),
    threads=st.integers(1, 3),
    clip_range_vf=st.sampled_from([-1.0, 0.1]),
    normalize=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_gradients_equal_autograds(
    inputs: int, actions: Any, pi: list[int], vf: list[int], activation: type[torch.nn.Module], batch: int,
    threads: int, clip_range_vf: float, normalize: bool, seed: int,
):  # fmt: skip
    policy = make_policy(inputs, actions, {"pi": pi, "vf": vf}, activation, seed)
    loss = LOSS._replace(clip_range_vf=clip_range_vf, normalize_advantage=normalize)
    assert_gradients(policy, batch, seed, threads, loss, on_threads=seed % 2 == 0)


@pytest.mark.parametrize("arch", [[128, 96, 48], [300], [1024, 520]])
def test_gradients_of_wider_nets(arch: list[int]):
    """All kinds of tiles and strips, and blocks with rows to spare."""
    assert_gradients(make_policy(50, 40, arch, torch.nn.Tanh, 1), 77, seed=1, threads=2)
