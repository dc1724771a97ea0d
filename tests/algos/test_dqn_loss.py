"""A subclass's own loss: its terms are added, logged, and computed by the plain path whatever was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.buffers import ReplayBuffer

import fasttrain
from fasttrain.algos.dqn import Evaluated
from fasttrain.algos.engine import EngineSettings
from fasttrain.errors import ConfigError
from toys import ToyGame

SETTINGS: dict[str, Any] = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 400, "seed": 0}


class Conservative(fasttrain.DQN):
    """As the docstring of DQN has it."""

    def loss(self, batch: Any, evaluated: Evaluated) -> dict[str, torch.Tensor]:
        every = evaluated.q_values.logsumexp(1, keepdim=True)
        return super().loss(batch, evaluated) | {"cql_loss": (every - evaluated.current).mean()}


class FarTarget(fasttrain.DQN):
    def evaluate(self, batch: Any) -> Evaluated:
        evaluated = super().evaluate(batch)
        return evaluated._replace(target=evaluated.target + 5.0)


def trained(kind: Any = fasttrain.DQN, settings: Any = "torch", **changes: Any) -> Any:
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model = kind("MlpPolicy", env, engine=settings, device="cpu", **{**SETTINGS, **changes})
    return model.learn(150)


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.q_net.parameters()])


@pytest.mark.parametrize("kind", [Conservative, FarTarget])
def test_an_overridden_method_is_computed_under_kernels_as_without(kind: Any):
    plain, ours, fused = trained(), trained(kind), trained(kind, "kernels")
    torch.testing.assert_close(weights_of(fused), weights_of(ours), rtol=0, atol=1e-5)  # Adam by torch's fused kernel
    assert (weights_of(ours) - weights_of(plain)).abs().max() > 1e-3
    assert fused.engine.kind == "torch"
    name = "loss" if kind is Conservative else "evaluate"
    assert f"{kind.__name__}.{name} is overridden: compiled kernels compute DQN's" in fused.engine.unsupported_reason


@pytest.mark.parametrize("prioritized", [None, {}])
def test_every_term_is_logged_beside_the_sum(prioritized: Any):
    logged = trained(Conservative, prioritized=prioritized).logger.name_to_value
    td_loss, cql_loss = (logged[f"train/{name}"] for name in ("td_loss", "cql_loss"))
    assert cql_loss > 0
    assert logged["train/loss"] == pytest.approx(td_loss + cql_loss, rel=1e-6)
    assert set(trained().logger.name_to_value) & {"train/td_loss", "train/cql_loss"} == set()


def test_a_method_replaced_on_a_model_stops_its_kernels():
    model = trained(settings="kernels")
    assert model.engine.kind == "kernels"
    model.loss = lambda batch, evaluated: {"mine": evaluated.current.square().mean()}
    model.train(3, 16)
    assert model.engine.kind == "torch"
    logged = model.logger.name_to_value
    assert logged["train/mine"] == logged["train/loss"]


def test_torch_compile_leaves_an_overridden_loss_alone():
    with pytest.warns(UserWarning, match="torch.compile: Conservative.loss is overridden; training goes on"):
        model = trained(Conservative, EngineSettings(compile_mode="default"))
    assert model.engine.warmup_s == 0
    assert "train/cql_loss" in model.logger.name_to_value


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
    model = trained()
    model.loss = lambda batch, evaluated: terms(evaluated.current.mean())
    with pytest.raises(ConfigError, match=rf"DQN\.loss returned {told}"):
        model.train(1, 16)


def test_a_term_of_some_batches_is_averaged_over_these():
    model, seen = trained(), list[float]()

    def loss(batch: Any, evaluated: Evaluated) -> dict[str, torch.Tensor]:
        terms = {"td_loss": (evaluated.current - evaluated.target).square().mean()}
        if len(seen) % 2:
            terms["now_and_then"] = evaluated.q_values.mean()
        seen.append(evaluated.q_values.mean().item())
        return terms

    model.loss = loss
    model.train(4, 16)
    assert model.logger.name_to_value["train/now_and_then"] == pytest.approx(np.mean(seen[1::2]))


def test_a_foreign_buffer_does_not_pass_by_an_overridden_loss():
    class Foreign(ReplayBuffer):
        """SB3's own update would serve it."""

    with pytest.raises(ConfigError, match="Conservative.loss is overridden with replay_buffer_class=Foreign"):
        trained(Conservative, replay_buffer_class=Foreign)


def test_a_zip_of_before_holds_the_kind_of_the_loss_by_another_name(tmp_path: Any):
    model = trained(loss="mse")
    model.__dict__["loss"] = model.__dict__.pop("loss_kind")
    model.save(tmp_path / "model.zip")
    again = fasttrain.DQN.load(tmp_path / "model.zip", env=fasttrain.NativeVecEnv(ToyGame(5), seed=0), device="cpu")
    assert again.loss_kind == "mse"
    again.learn(100)
