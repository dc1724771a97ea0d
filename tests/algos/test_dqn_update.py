"""The DQN update: its values, target and loss, terms of a subclass, and kernels that give the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import fasttrain
from accelerated import toy_dqn
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.devices import Precision
from fasttrain.algos.dqn import Evaluated
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.q_networks import DuelingDQNPolicy, network_values
from fasttrain.errors import ConfigError, EnvError
from toys import RandomEnv, ToyGame, seeded_vec

SETTINGS: dict[str, Any] = {
    "learning_starts": 10_000,  # `train` is called by hand
    "batch_size": 32,
    "learning_rate": 1e-3,
    "seed": 0,
    "device": "cpu",
    "policy_kwargs": {"net_arch": [16, 16]},
}


@pytest.mark.parametrize("double_q", [False, True])
def test_the_target_looks_at_legal_next_actions_only(double_q: bool):
    model = toy_dqn(double_q=double_q).learn(100)
    batch = model.replay_buffer.sample(64)
    masks = batch.next_action_masks
    assert masks is not None
    assert not masks.all()
    with torch.no_grad():
        online, target = model.q_net(batch.next_observations), model.q_net_target(batch.next_observations)
    ranked = torch.where(masks, online if double_q else target, -torch.inf)
    best = target.gather(1, ranked.argmax(dim=1, keepdim=True))
    evaluated = model.evaluate(batch)
    torch.testing.assert_close(evaluated.target, batch.rewards + (1 - batch.dones) * 0.99 * best)
    assert not evaluated.target.requires_grad
    torch.testing.assert_close(evaluated.q_values, model.q_net(batch.observations))
    torch.testing.assert_close(evaluated.current, evaluated.q_values.gather(1, batch.actions))


@pytest.mark.parametrize(("kind", "expected"), [("huber", (0.125 + 3 * 1.5) / 2), ("mse", (0.25 + 3 * 4.0) / 2)])
def test_the_td_loss_by_hand(kind: str, expected: float):
    model = toy_dqn(loss=kind).learn(50)
    batch = model.replay_buffer.sample(2)._replace(weights=torch.tensor([[1.0], [3.0]]))
    current = torch.tensor([[1.5], [1.0]])
    terms = model.loss(batch, Evaluated(current, current, torch.tensor([[1.0], [3.0]])))
    assert list(terms) == ["td_loss"]
    assert terms["td_loss"].item() == pytest.approx(expected)


def test_values_leave_autocast_as_float32():
    model = toy_dqn().learn(50)
    observations = model.replay_buffer.sample(16).observations
    found = network_values(model.q_net, observations, Precision("cpu", torch.bfloat16))
    exact = network_values(model.q_net, observations, None)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02)


class Conservative(fasttrain.DQN):
    """As the docstring of DQN has it."""

    def loss(self, batch: Any, evaluated: Evaluated) -> dict[str, torch.Tensor]:
        every = evaluated.q_values.logsumexp(1, keepdim=True)
        return super().loss(batch, evaluated) | {"cql_loss": (every - evaluated.current).mean()}


class FarTarget(fasttrain.DQN):
    def evaluate(self, batch: Any) -> Evaluated:
        evaluated = super().evaluate(batch)
        return evaluated._replace(target=evaluated.target + 5.0)


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.q_net.parameters()])


@pytest.mark.parametrize(("kind", "name"), [(Conservative, "loss"), (FarTarget, "evaluate")])
def test_an_overridden_method_is_computed_under_kernels_as_without(kind: Any, name: str):
    plain, ours, fused = (  # each trained before the next is made: they share torch's random stream
        toy_dqn(each, engine=engine).learn(100)
        for each, engine in ((fasttrain.DQN, "torch"), (kind, "torch"), (kind, "kernels"))
    )
    torch.testing.assert_close(weights_of(fused), weights_of(ours), rtol=0, atol=1e-5)  # Adam by torch's fused kernel
    assert (weights_of(ours) - weights_of(plain)).abs().max() > 1e-3
    assert fused.engine.kind == "torch"
    assert f"{kind.__name__}.{name} is overridden: compiled kernels compute DQN's" in fused.engine.unsupported_reason


@pytest.mark.parametrize("prioritized", [None, {}])
def test_every_term_is_logged_beside_the_sum(prioritized: Any):
    logged = toy_dqn(Conservative, prioritized=prioritized).learn(60).logger.name_to_value
    td_loss, cql_loss = (logged[f"train/{name}"] for name in ("td_loss", "cql_loss"))
    assert cql_loss > 0
    assert logged["train/loss"] == pytest.approx(td_loss + cql_loss, rel=1e-6)
    assert not {"train/td_loss", "train/cql_loss"} & set(toy_dqn().learn(60).logger.name_to_value)


def test_a_method_replaced_on_a_model_stops_its_kernels():
    model = toy_dqn(engine="kernels").learn(60)
    assert model.engine.kind == "kernels"
    model.loss = lambda batch, evaluated: {"mine": evaluated.current.square().mean()}
    model.train(3, 16)
    assert model.engine.kind == "torch"
    logged = model.logger.name_to_value
    assert logged["train/mine"] == logged["train/loss"]


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        (lambda loss: loss, r"tensor\(.*, not a dict of named scalar tensors"),
        (lambda loss: {}, "{}, not a dict of named scalar tensors"),
        (lambda loss: {"td_loss": loss, "own": torch.ones(3)}, r"the term 'own': it is a tensor of shape \(3,\), not"),
        (lambda loss: {"own": 0.5}, "the term 'own': it is float, not a scalar tensor"),
        (lambda loss: {"loss": loss}, "the term 'loss': that name is taken"),
        (lambda loss: {"own": loss.detach()}, "terms without a gradient"),
    ],
)
def test_terms_that_cannot_be_minimised_are_told(terms: Any, told: str):
    model = toy_dqn().learn(30)
    model.loss = lambda batch, evaluated: terms(evaluated.current.mean())
    with pytest.raises(ConfigError, match=rf"DQN\.loss returned {told}"):
        model.train(1, 16)


def test_a_term_of_some_batches_is_averaged_over_these():
    model, seen = toy_dqn().learn(30), list[float]()

    def loss(batch: Any, evaluated: Evaluated) -> dict[str, torch.Tensor]:
        terms = {"td_loss": (evaluated.current - evaluated.target).square().mean()}
        if len(seen) % 2:
            terms["now_and_then"] = evaluated.q_values.mean()
        seen.append(evaluated.q_values.mean().item())
        return terms

    model.loss = loss
    model.train(4, 16)
    assert model.logger.name_to_value["train/now_and_then"] == pytest.approx(np.mean(seen[1::2]))


def toys() -> Any:
    return fasttrain.NativeVecEnv(ToyGame(5), seed=0)


def filled(engine: Any, policy: Any = "MlpPolicy", env: Any = toys, **changes: Any) -> Any:
    """A model that has played 200 random steps and whose target net is another one than the online net."""
    torch.manual_seed(5)
    model = fasttrain.DQN(policy, env(), **{**SETTINGS, **changes}).learn(200)
    with torch.no_grad():
        for parameter in model.q_net_target.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.use_engine(engine)
    np.random.seed(1)
    return model


def assert_same_update(updates: int = 3, before: Any = lambda model: None, **options: Any) -> Any:
    """By torch and by kernels; one batch each: a block of several draws its random numbers in another order."""
    eager, fused = (filled(engine, **options) for engine in ("torch", "kernels"))
    for model in (eager, fused):
        before(model)
        np.random.seed(1)
        for _ in range(updates):
            model.train(1, 32)
        assert isinstance(model.engine, KernelQEngine) == (model is fused)
    for (name, value), other in zip(eager.policy.state_dict().items(), fused.policy.state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, rtol=0, atol=2e-6, msg=name)
    assert fused.logger.name_to_value["train/loss"] == pytest.approx(eager.logger.name_to_value["train/loss"], rel=1e-4)
    return eager, fused


@pytest.mark.parametrize(
    ("double_q", "loss", "n_steps", "prioritized"),
    [(False, "huber", 1, None), (True, "huber", 3, {"beta": 0.5}), (True, "mse", 1, {}), (False, "mse", 3, None)],
)
def test_kernels_and_torch_give_the_same_update(double_q: bool, loss: str, n_steps: int, prioritized: Any):
    eager, fused = assert_same_update(double_q=double_q, loss=loss, n_steps=n_steps, prioritized=prioritized)
    if prioritized is not None:
        np.testing.assert_allclose(fused.replay_buffer.priorities, eager.replay_buffer.priorities, rtol=1e-3)


BOX = spaces.Box(-1, 1, (4,), np.float32)
SUB_ACTIONS = spaces.MultiDiscrete([3, 4, 2])
KEYED = spaces.Dict([("z", spaces.Box(-1, 1, (2, 3), np.float32)), ("a", spaces.Box(-5, 5, (2,), np.int64)),
                     ("hand", spaces.MultiBinary(4))])  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "seen", "acting"),
    [
        ("MlpPolicy", BOX, SUB_ACTIONS),
        (DuelingDQNPolicy, BOX, SUB_ACTIONS),
        ("MultiInputPolicy", KEYED, spaces.Discrete(3)),
    ],
    ids=["sub-actions", "dueling", "keys"],
)
def test_other_spaces_have_kernels_too(policy: Any, seen: Any, acting: Any):
    env = lambda: seeded_vec(lambda: RandomEnv(seen, acting))  # noqa: E731
    eager, fused = assert_same_update(policy=policy, env=env)
    assert fused.engine.dueling == (policy is DuelingDQNPolicy)
    shown = eager.replay_buffer.sample(9).observations
    host = {key: part.numpy() for key, part in shown.items()} if seen is KEYED else shown.numpy()
    with torch.no_grad():
        expected = eager.q_net(shown)
    np.testing.assert_allclose(fused.engine.q_values(host)[0], expected, rtol=0, atol=1e-4)


def test_kernels_discount_by_the_gamma_of_the_model():
    """Not by that of a one-step buffer, as in stock; it may be changed while training goes on."""
    assert_same_update(1, before=lambda model: setattr(model, "gamma", 0.3), gamma=0.9)


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_counts_rates_and_log(engine: str):
    model = filled(engine, learning_rate=lambda left: 1e-3 * left)
    model._current_progress_remaining = 0.25
    model.train(4, 16)
    assert model.engine.gradient_updates == 4
    assert model.logger.name_to_value["train/n_updates"] == 4
    assert model.policy.optimizer.state[next(model.q_net.parameters())]["step"] == 4
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)


def test_a_loss_that_is_not_finite_is_an_error():
    model = filled("kernels")
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    model.replay_buffer.rewards[:] = np.inf
    with pytest.raises(EnvError, match="at step .*: the loss is not finite .* lower the learning rate"):
        model.train(1, 16)


def test_a_step_that_overflowed_is_skipped_and_counted():
    model = filled(EngineSettings(amp_dtype=torch.float16))
    model.engine_now().precision.scaler._init_scale = 1e30
    before = [parameter.detach().clone() for parameter in model.q_net.parameters()]
    model.train(3, 16)
    assert (model.engine.skipped_steps, model.engine.gradient_updates) == (3, 0)
    assert model.logger.name_to_value["train/skipped_steps"] == 3
    assert all(map(torch.equal, model.q_net.parameters(), before))
