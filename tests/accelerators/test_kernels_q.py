"""KernelQEngine: which policies it fits, and that policy and optimizer are the kernels' own memory at every moment."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.dqn.policies import DQNPolicy

from fasttrain.accelerators import kernels_recurrent
from fasttrain.accelerators.kernels_q import KernelQEngine, kernel_calls
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.q_networks import BranchingDQNPolicy, DuelingDQNPolicy, TorchQEngine
from fasttrain.errors import EnvError
from q_blocks import make_batches, trained

BOX, TWO = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)


def make_policy(
    kind: Any = DQNPolicy, space: spaces.Space[Any] = BOX, action: spaces.Space[Any] = TWO, **kwargs: Any
) -> Any:
    torch.manual_seed(0)
    return kind(space, action, lambda _: 1e-3, **kwargs)


def eager_step(policy: Any, seed: int) -> None:
    """One update by torch, on numbers of no meaning."""
    generator = torch.Generator().manual_seed(seed)
    policy.optimizer.zero_grad()
    policy.q_net(torch.randn(8, 4, generator=generator)).square().mean().backward()
    policy.optimizer.step()


@pytest.mark.parametrize("kind", [DQNPolicy, DuelingDQNPolicy])
def test_moving_changes_no_number(kind: Any):
    policy = make_policy(kind, net_arch=[7, 33])
    eager_step(policy, 0)
    before, optimizer = copy.deepcopy(policy.state_dict()), copy.deepcopy(policy.optimizer.state_dict())
    kernels = KernelQEngine(policy, EngineSettings())
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for index, state in policy.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, optimizer["state"][index][name], rtol=0, atol=0)
    kernels.flat.values.zero_()
    for view in kernels.flat.views_of(kernels.flat.values):
        view += 1.0
    assert kernels.flat.values.max() == 1.0, "no two parameters share a place"
    assert all(bool((parameter == 1.0).all()) for parameter in policy.q_net.parameters())


FIVE, SUB_ACTIONS = spaces.Discrete(5), spaces.MultiDiscrete([3, 5, 2])


@pytest.mark.parametrize(
    ("kind", "action"),
    [(DQNPolicy, FIVE), (DuelingDQNPolicy, FIVE), (BranchingDQNPolicy, SUB_ACTIONS), (DuelingDQNPolicy, SUB_ACTIONS)],
)
def test_values_and_actions_are_those_of_the_policy(kind: Any, action: Any):
    policy = make_policy(kind, action=action, net_arch=[7, 33])
    observations = np.random.default_rng(0).standard_normal((141, 4)).astype(np.float32)
    masks = np.random.default_rng(1).random((141, 5 if action is FIVE else 10)) < 0.5
    masks[:, [0] if action is FIVE else [0, 3, 8]] = True  # whoever calls the engine opens masks that allow nothing
    kernels = KernelQEngine(policy, EngineSettings())
    with torch.no_grad():
        expected = policy.q_net(torch.from_numpy(observations)).numpy()
    np.testing.assert_allclose(kernels.q_values(observations)[0], expected, atol=1e-5)
    np.testing.assert_array_equal(kernels.act(observations, None).actions, policy.predict(observations)[0])
    assert len(kernels.act(observations[:0], None).actions) == 0
    legal = TorchQEngine(policy, EngineSettings()).act(observations, masks).actions
    np.testing.assert_array_equal(kernels.act(observations, masks).actions, legal)


def test_what_is_not_finite_is_not_acted_on():
    kernels = KernelQEngine(make_policy(), EngineSettings())
    with pytest.raises(EnvError, match="the observation of env 0, 1 is not finite"):
        kernels.act(np.full((2, 4), np.nan, np.float32), None)
    kernels.flat.values.fill_(torch.nan)
    with pytest.raises(EnvError, match="Q-values. is not finite although its inputs are: parameter q_net.q_net.0"):
        kernels.act(np.zeros((2, 4), np.float32), None)


def test_torch_and_the_kernels_take_turns():
    """Updates by torch and by the kernels on the same policy, against torch alone: values, moments and step count."""
    policy, reference = make_policy(), make_policy()
    kernels, rival = KernelQEngine(policy, EngineSettings()), copy.deepcopy(reference)
    before = policy.q_net(torch.ones(1, 4)).detach().clone()
    trained(KernelQEngine(reference, EngineSettings()), make_batches(4, 2, 2, 9))  # the first two steps of both
    trained(kernels, make_batches(4, 2, 2, 9))
    assert (policy.q_net(torch.ones(1, 4)) != before).all(), "the module sees what the kernels wrote"
    for name, value in reference.state_dict().items():
        rival.state_dict()[name].copy_(value)
    rival.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    for seed in range(3):
        eager_step(policy, seed)
        eager_step(rival, seed)
    assert kernels.fits(policy), "torch's optimizer works in place"
    trained(kernels, make_batches(4, 2, 2, 9, seed=1))
    trained(KernelQEngine(rival, EngineSettings()), make_batches(4, 2, 2, 9, seed=1))
    for ours, theirs in zip(policy.parameters(), rival.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert {float(state["step"]) for state in policy.optimizer.state.values()} == {7.0}


def test_a_module_is_loaded_in_place_and_an_optimizer_is_not():
    policy, other = make_policy(), make_policy()
    kernels = KernelQEngine(policy, EngineSettings())
    eager_step(other, 1)
    policy.load_state_dict(other.state_dict())
    assert kernels.fits(policy)
    torch.testing.assert_close(kernels.flat.views_of(kernels.flat.values)[0], other.q_net.q_net[0].weight.detach())
    policy.optimizer.load_state_dict(other.optimizer.state_dict())
    assert not kernels.fits(policy)
    again = KernelQEngine(policy, EngineSettings())
    assert again.fits(policy)
    torch.testing.assert_close(
        policy.optimizer.state[policy.q_net.q_net[0].weight]["exp_avg"],
        other.optimizer.state[other.q_net.q_net[0].weight]["exp_avg"],
    )


REPLACED: dict[str, Any] = {
    "data": lambda policy: setattr(policy.q_net.q_net[0].weight, "data", policy.q_net.q_net[0].weight.data.clone()),
    "head": lambda policy: policy.q_net.q_net.__setitem__(-1, torch.nn.Linear(64, 2)),
    "target": lambda policy: setattr(policy, "q_net_target", policy.make_q_net()),
    "optimizer": lambda policy: setattr(policy, "optimizer", torch.optim.Adam(policy.q_net.parameters())),
    "state": lambda policy: policy.optimizer.state.clear(),
    "type": lambda policy: policy.double(),
}


@pytest.mark.parametrize("part", REPLACED)
def test_what_is_not_served_any_more(part: str):
    policy = make_policy()
    kernels = KernelQEngine(policy, EngineSettings())
    assert kernels.fits(policy)
    assert not kernels.fits(copy.deepcopy(policy))
    REPLACED[part](policy)
    assert not kernels.fits(policy)


def test_a_copy_has_memory_of_its_own():
    policy = make_policy(DuelingDQNPolicy)
    kernels = KernelQEngine(policy, EngineSettings())
    trained(kernels, make_batches(4, 2, 2, 9))
    copied = copy.deepcopy(policy)
    seen = torch.ones(1, 4)
    before, state = copied.q_net(seen).clone(), copy.deepcopy(copied.optimizer.state_dict())
    trained(kernels, make_batches(4, 2, 4, 9))
    assert (copied.q_net(seen) == before).all()
    assert torch.equal(copied.optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    values = policy.q_net(seen).clone()
    eager_step(copied, 0)
    assert (policy.q_net(seen) == values).all()


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_torchs_faster_adams_write_to_the_right_places(how: str):
    """torch 2.13's fused Adam takes every parameter for contiguous; so these must be."""
    policy, reference = make_policy(net_arch=[7, 33]), make_policy(net_arch=[7, 33])
    kernels = KernelQEngine(policy, EngineSettings())
    for each in (policy, reference):
        each.optimizer.param_groups[0][how] = True
        for seed in range(3):
            eager_step(each, seed)
    assert kernels.fits(policy)
    for ours, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_listing_the_kernels_draws_nothing():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    assert [call.name for call in kernel_calls()] == ["act_rows", "train_updates", "follow"]
    names = ["act_rows", "compress", "train_epoch", "follow"]
    assert [call.name for call in kernels_recurrent.kernel_calls()] == names
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize(
    ("field", "value"), [("rows", 50), ("rows", -1), ("next_rows", 40), ("actions", 2), ("actions", -1)]
)
def test_nothing_is_done_with_rows_that_are_not_there(field: str, value: int):
    policy = make_policy()
    block, before = make_batches(4, 2, 2, 9), copy.deepcopy(policy.state_dict())
    wrong = np.full_like(getattr(block, field), value)
    kernels = KernelQEngine(policy, EngineSettings())
    with pytest.raises(IndexError):
        trained(kernels, block._replace(**{field: wrong}))
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert int(policy.optimizer.state[policy.q_net.q_net[0].weight]["step"]) == 0
