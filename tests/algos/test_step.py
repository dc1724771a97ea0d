"""One optimizer step: clipping, Adam's flags, a step that is taken only where numbers are finite."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accelerated import Careful, Conservative, WithTerm, filled, masked_model, one_step, toy_dqn, toy_sac
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.ppo import PPO
from fasttrain.algos.step import TorchStep, faster_adam, micro_batches, step_clipped
from fasttrain.buffers.rollout import RolloutBatch
from fasttrain.errors import ConfigError

PARTS = {"gradient_accumulation": 2}


def parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((64, 30), (64,), (5, 64), (5,))]


def set_gradients(tensors: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


def test_adams_flags_are_put_back_and_those_of_the_users_stay():
    optimizer = torch.optim.Adam(parameters(0))
    before = optimizer.state_dict()["param_groups"]
    with faster_adam(optimizer, True):
        assert optimizer.param_groups[0]["fused"]
    assert optimizer.state_dict()["param_groups"] == before
    with pytest.raises(ZeroDivisionError), faster_adam(optimizer, False):
        raise ZeroDivisionError
    assert optimizer.state_dict()["param_groups"] == before
    with faster_adam(own := torch.optim.Adam(parameters(0), foreach=True), True):
        assert not own.param_groups[0]["fused"], "a flag of the user's own stays"
    with faster_adam(other := torch.optim.RMSprop(parameters(0)), True):
        assert "fused" not in other.param_groups[0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("where", "value"), [("gradient", torch.nan), ("loss", torch.inf)])
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
    batch = RolloutBatch({"a": torch.zeros(7, 2)}, *columns, None)
    parts = list(micro_batches(batch, 3))
    assert [len(part.observations["a"]) for part, _ in parts] == [len(part.returns) for part, _ in parts] == [3, 2, 2]
    mean = sum(share * part.returns.mean() for part, share in parts)
    assert float(mean) == pytest.approx(float(batch.returns.mean()))
    assert [len(part.returns) for part, _ in micro_batches(batch, 9)] == [1] * 7


@pytest.mark.parametrize("parts", [2, 7, 90])
def test_micro_batches_give_gradients_and_statistics_of_the_whole(parts: int):
    model = filled(masked_model(EngineSettings(), ent_coef=0.01, clip_range_vf=0.1))
    model.rollout_buffer.storage.log_probs[:] += 0.3 * torch.randn(16, 5).numpy()  # so that ratios are clipped
    whole, expected = one_step(model)
    model.use_engine(EngineSettings(gradient_accumulation=parts))
    summed, found = one_step(model)
    assert ((summed - whole).norm() / whole.norm()).item() < 1e-4
    for name, term in expected.terms.items():
        np.testing.assert_allclose(found.terms[name], term, rtol=1e-4, atol=1e-6, err_msg=name)


def test_one_backward_per_part_and_one_step_per_minibatch(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(EngineSettings(gradient_accumulation=4)))
    steps, backwards, rows = [], [], []
    model.policy.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    model.policy.action_net.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    original = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda loss: backwards.append(original(loss)))
    model.train()
    assert len(steps) == 2 * 4 == model.engine.gradient_updates
    assert len(backwards) == 4 * len(steps)
    assert set(rows) == {5}
    stopped = filled(masked_model(EngineSettings(gradient_accumulation=4), target_kl=1e-12, learning_rate=0.1))
    assert stopped.update().steps == 1


@pytest.mark.parametrize(
    ("changes", "flag"),
    [({}, "foreach"), ({"pin_memory": True}, "foreach"), ({"fused_adam": True}, "fused"), (PARTS, "fused")],
)
@pytest.mark.parametrize("make", [masked_model, lambda settings: toy_dqn(engine=settings)], ids=["ppo", "dqn"])
def test_adam_steps_by_stocks_operations_or_by_its_fused_kernel(make: Any, changes: Any, flag: str):
    settings = EngineSettings(**changes)
    engine = make(settings).engine
    (group,) = engine.policy.optimizer.param_groups
    before = dict(group)
    with TorchStep(engine, 1.0).stepping():
        assert {name for name in ("foreach", "fused") if group[name]} == {flag}
    assert dict(group) == before
    assert engine.fits(engine.policy)
    assert not engine.fits(make(settings).policy)
    assert not engine.fits(engine.policy.to("meta")), "made for the CPU"


def test_the_gradient_scaler_is_part_of_a_checkpoint():
    half = EngineSettings(amp_dtype=torch.float16)
    model = filled(masked_model(half))
    model.engine_now().scaler._init_scale = 1e30
    model.train()
    assert model.engine.skipped_steps > 0
    state, arrays = model.engine.state()
    other, plain = masked_model(half), masked_model(EngineSettings())
    other.engine.load(state, arrays, other)
    assert other.engine.scaler.state_dict() == model.engine.scaler.state_dict()
    plain.engine.load(state, arrays, plain)
    assert (plain.engine.scaler, plain.engine.state()[0]["scaler"]) == (None, None)


def test_steps_are_watched_where_there_is_a_guard_or_a_scaler():
    for settings, guarded, watched in (
        (EngineSettings(), True, 1),
        (EngineSettings(), False, 0),
        (EngineSettings(amp_dtype=torch.float16), False, 1),
    ):
        model = filled(masked_model(settings))
        model.engine.guard = model.engine.guard if guarded else None
        _, done = one_step(model)
        assert (len(done.norms), done.blamed) == (watched, "")


def test_the_first_gradient_that_is_not_finite_is_blamed():
    model = filled(masked_model(EngineSettings()))
    hook = model.policy.value_net.bias.register_hook(lambda gradient: gradient * torch.inf)
    model.policy.action_net.bias.register_hook(lambda gradient: hook.remove() or gradient)
    _, done = one_step(model)
    assert done.blamed == "the gradient of parameter value_net.bias"
    assert done.skipped == 1


def ppo(kind: Any = PPO) -> Any:
    return kind("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, n_epochs=1, seed=0, device="cpu")


@pytest.mark.parametrize(
    ("model", "own"),
    [(lambda: ppo(WithTerm), {"far"}), (lambda: toy_dqn(Conservative), {"td_loss", "cql_loss"}),
     (lambda: toy_dqn(Conservative, prioritized={}), {"td_loss", "cql_loss"}),
     (lambda: toy_sac(Careful), {"critic_loss", "cql_loss", "actor_loss", "bc_loss", "ent_coef_loss", "ent_coef"})],
    ids=["ppo", "dqn", "prioritized", "sac"],
)  # fmt: skip
def test_every_term_is_logged_beside_the_sum(model: Any, own: set[str]):
    logged = model().learn(64).logger.name_to_value
    assert {f"train/{name}" for name in own} <= {*logged}
    assert all(logged[f"train/{name}"] > 0 for name in own & {"far", "bc_loss"})
    if "td_loss" in own:
        assert logged["train/cql_loss"] > 0
        assert logged["train/loss"] == pytest.approx(logged["train/td_loss"] + logged["train/cql_loss"], rel=1e-6)
        assert not {"train/td_loss", "train/cql_loss"} & set(toy_dqn().learn(64).logger.name_to_value)


@pytest.mark.parametrize(("make", "sizes"), [(ppo, ()), (toy_dqn, (4, 16))])
def test_a_term_of_some_minibatches_is_averaged_over_these(make: Any, sizes: tuple[int, ...]):
    model, calls = make().learn(64), list[None]()

    def loss(batch: Any, evaluated: Any) -> dict[str, torch.Tensor]:
        calls.append(None)
        terms = {"own": evaluated[0].square().mean()}
        return terms if len(calls) % 2 else terms | {"rare": 0.0 * terms["own"] + len(calls)}

    model.loss = loss
    model.train(*sizes)
    assert (len(calls), model.logger.name_to_value["train/rare"]) == (4, 3.0)


NONE, TAKEN = "not a dict of named scalar tensors", "that name is taken"
ACTOR, CRITIC = (toy_sac, "actor_loss"), (toy_sac, "critic_loss")


@pytest.mark.parametrize(
    ("make", "seam", "terms", "told"),
    [
        (ppo, "loss", lambda value: {"far": value.expand(32, 2)}, r"the term 'far': it is a tensor of shape \(32, 2\)"),
        (ppo, "loss", lambda value: {"far": 0.5}, "the term 'far': it is float, not a scalar tensor"),
        (ppo, "loss", lambda value: {"approx_kl": value}, f"the term 'approx_kl': {TAKEN}"),
        (toy_dqn, "loss", lambda value: value, rf"tensor\(.*, {NONE}"),
        (toy_dqn, "loss", lambda value: {}, f"{{}}, {NONE}"),
        (toy_dqn, "loss", lambda value: {"td_loss": value, "own": torch.ones(3)}, r"the term 'own': .* shape \(3,\)"),
        (toy_dqn, "loss", lambda value: {"loss": value}, f"the term 'loss': {TAKEN}"),
        (toy_dqn, "loss", lambda value: {"own": value.detach()}, "terms without a gradient"),
        (*CRITIC, lambda value: {}, f"{{}}, {NONE}"),
        (*CRITIC, lambda value: {"actor_loss": value}, f"the term 'actor_loss': {TAKEN}"),
        (*CRITIC, lambda value: {"own": value.detach()}, "terms without a gradient"),
        (*ACTOR, lambda value: {"critic_loss": value}, f"the term 'critic_loss': {TAKEN}"),
        (*ACTOR, lambda value: {"ent_coef": value}, f"the term 'ent_coef': {TAKEN}"),
    ],
)
def test_terms_that_cannot_be_minimised_are_told(make: Any, seam: str, terms: Any, told: str):
    model = make().learn(64)
    setattr(model, seam, lambda batch, evaluated: terms(evaluated[0].mean()))
    with pytest.raises(ConfigError, match=rf"{type(model).__name__}\.{seam} returned {told}"):
        model.train(*() if make is ppo else (1, 16))
