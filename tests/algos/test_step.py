"""One optimizer step: clipping, Adam's flags, a step that is taken only where numbers are finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fasttrain.algos.step import clip_gradients, faster_adam, gradient_norm, micro_batches, step_clipped
from fasttrain.buffers.rollout import RolloutBatch
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)


def parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((64, 30), (64,), (5, 64), (5,))]


def set_gradients(tensors: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_that_of_torch(max_norm: float):
    ours, theirs = parameters(0), parameters(0)
    for tensors in (ours, theirs):
        set_gradients(tensors, 1)
    gradients = [tensor.grad for tensor in ours]
    norm = gradient_norm(gradients)
    clip_gradients(gradients, max_norm, norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(("fused", "tolerance"), [(False, 0.0), (True, 1e-6)])
def test_adam_takes_the_same_hundred_steps(fused: bool, tolerance: float):
    ours, theirs = parameters(0), parameters(0)
    fast, stock = (torch.optim.Adam(tensors, lr=3e-4, eps=1e-5) for tensors in (ours, theirs))
    for step in range(100):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        with faster_adam(fast, fused):
            fast.step()
        stock.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    stock.load_state_dict(copy.deepcopy(fast.state_dict()))
    assert fast.state_dict()["param_groups"] == stock.state_dict()["param_groups"]


def test_adam_flags_are_put_back():
    optimizer = torch.optim.Adam(parameters(0))
    before = optimizer.state_dict()["param_groups"]
    with faster_adam(optimizer, True):
        assert optimizer.param_groups[0]["fused"]
    assert optimizer.state_dict()["param_groups"] == before
    with pytest.raises(ZeroDivisionError), faster_adam(optimizer, False):
        raise ZeroDivisionError
    assert optimizer.state_dict()["param_groups"] == before


def test_flags_of_the_users_own_and_other_optimizers_stay():
    own = torch.optim.Adam(parameters(0), foreach=True)
    with faster_adam(own, True):
        assert not own.param_groups[0]["fused"]
    other = torch.optim.RMSprop(parameters(0))
    with faster_adam(other, True):
        assert "fused" not in other.param_groups[0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, on_device: bool, where: str, value: float
):
    """Bit by bit: weights, Adam's averages and its number of steps. On a device nothing is read."""
    monkeypatch.setattr("fasttrain.algos.step.reading_waits", lambda _: on_device)
    if on_device:
        monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host waited"))
    ours = parameters(0)
    adam = torch.optim.Adam(ours, fused=True)
    loss = torch.tensor(1.0)
    set_gradients(ours, 1)
    assert torch.isfinite(step_clipped(adam, ours, 0.5, None, loss))
    before = copy.deepcopy((ours, [*adam.state.values()]))
    set_gradients(ours, 2)
    if where == "gradient":
        ours[2].grad[1, 1] = value
    norm = step_clipped(adam, ours, 0.5, None, torch.tensor(value) if where == "loss" else loss)
    assert not torch.isfinite(norm)
    tensors = [*ours, *(tensor for state in adam.state.values() for tensor in state.values())]
    kept = [*before[0], *(tensor for state in before[1] for tensor in state.values())]
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
    assert not hasattr(adam, "found_inf")
    set_gradients(ours, 3)
    step_clipped(adam, ours, 0.5, None, loss)
    assert not torch.equal(ours[0], before[0][0])
    assert {float(state["step"]) for state in adam.state.values()} == {2.0}


def test_gradients_of_several_types_are_clipped_together():
    ours = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    theirs = copy.deepcopy(ours)
    for tensors in (ours, theirs):
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, 3.0)
    step_clipped(torch.optim.SGD(ours, lr=1.0), ours, 0.5, None, torch.tensor(0.0))
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_parts_of_a_batch_weigh_as_much_as_their_rows():
    columns = (torch.arange(7.0) for _ in range(5))
    batch = RolloutBatch(torch.zeros(7, 2), *columns, None)
    parts = list(micro_batches(batch, 3))
    assert [len(part.returns) for part, _ in parts] == [3, 2, 2]
    mean = sum(share * part.returns.mean() for part, share in parts)
    assert float(mean) == pytest.approx(float(batch.returns.mean()))
    assert [len(part.returns) for part, _ in micro_batches(batch, 9)] == [1] * 7
