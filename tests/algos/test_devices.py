"""Low precision is inside the networks and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from accelerated import a_batch, box_model, filled, masked_model, one_step, toy_dqn, weights
from fasttrain import DQN, PPO
from fasttrain.algos.devices import Precision, as_float32, convolutions
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.step import step_clipped

BF16 = EngineSettings(amp_dtype=torch.bfloat16)
FP16 = EngineSettings(amp_dtype=torch.float16)


def linear_dtypes(policy: Any) -> set[torch.dtype]:
    """Filled, from now on, with what the products inside the policy give."""
    seen: set[torch.dtype] = set()
    for module in policy.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype), prepend=True)
    return seen


@pytest.mark.parametrize(
    ("make", "settings", "expected"),
    [(masked_model, BF16, torch.bfloat16), (box_model, BF16, torch.bfloat16),
     (masked_model, EngineSettings(), torch.float32)],
)  # fmt: skip
def test_networks_compute_in_the_dtype_asked_for(make: Any, settings: EngineSettings, expected: torch.dtype):
    model = make(settings)
    seen = linear_dtypes(model.policy)
    filled(model)
    if make is masked_model:
        seen.clear()  # the values after the last step were float32, as all bootstraps are
        model.engine_now().act(np.zeros((2, 3), np.float32), None)
        assert seen == {expected}
    seen.clear()
    model.train()
    assert seen == {expected}
    assert {parameter.dtype for parameter in model.policy.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("make", [masked_model, box_model])
def test_what_leaves_the_networks_is_float32_and_so_are_gradients_nearly(make: Any):
    model = filled(make(EngineSettings()))
    batch, found = a_batch(model, 80), []
    for precision in (None, Precision("cpu", torch.bfloat16)):
        head = view_of(model.policy, model.action_space, precision)
        values, log_probs, *more = head.evaluate(batch, True)
        outputs = (*head.act(batch.observations, batch.action_masks)[1:], values, log_probs, *more)
        assert {output.dtype for output in outputs if output is not None} == {torch.float32}
        loss = values.square().mean() - log_probs.mean()
        found.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.policy.parameters()))]))
    assert 0 < (found[0] - found[1]).norm() / found[0].norm() < 0.05  # bfloat16 has 8 bits: 0.4 % an operation
    if make is box_model:
        assert model.policy.action_dist.distribution.mean.dtype is torch.float32


def test_networks_are_left_as_they_were():
    model = box_model(BF16)
    precision = Precision("cpu", torch.bfloat16)

    def counts() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.policy.modules()]

    before = counts()
    with precision.inside(model.policy):
        assert counts() != before
    assert counts() == before
    with pytest.raises(RuntimeError), precision.inside(model.policy):
        model.policy(torch.zeros(2, 99))
    assert counts() == before
    assert not torch.is_autocast_enabled("cpu")


def test_only_floats_are_cast():
    whole, half = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float16)
    assert [part.dtype for part in as_float32((whole, half))] == [torch.int64, torch.float32]
    assert as_float32(None) is None


def test_float16_gradients_are_scaled_and_clipped_unscaled(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(FP16, max_grad_norm=0.01))
    scaler = model.engine_now().precision.scaler
    assert scaler._init_scale == 65536.0
    scaler._init_scale, norms = 128.0, []

    def noted(optimizer: torch.optim.Optimizer, parameters: Any, *further: Any) -> torch.Tensor:
        norms.append(torch.cat([parameter.grad.flatten() for parameter in parameters]).norm())
        return step_clipped(optimizer, parameters, *further)

    monkeypatch.setattr("fasttrain.algos.step.step_clipped", noted)
    gradients, _ = one_step(model, max_grad_norm=0.01)
    (scaled,), clipped = norms, gradients.norm()
    assert scaled > 0.1
    torch.testing.assert_close(clipped.item(), 0.01, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [(lambda: filled(masked_model(FP16)), ()), (lambda: toy_dqn(engine=FP16, learning_starts=99).learn(80), (4, 16))],
)
def test_a_step_that_overflowed_is_skipped_and_counted(make: Any, sizes: tuple[int, ...]):
    model = make()
    scaler = model.engine_now().precision.scaler
    scaler._init_scale = 1e30
    before = weights(model)
    model.n_epochs = 1
    model.train(*sizes)
    assert (model.engine.skipped_steps, model.engine.gradient_updates) == (4, 0)
    assert model.logger.name_to_value["train/skipped_steps"] == 4
    assert scaler.get_scale() < 1e30
    assert torch.equal(weights(model), before)


class Viewing(BaseFeaturesExtractor):
    """A network of a user that needs contiguous outputs of its convolution."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, 4 * 9 * 10)
        self.convolution = nn.Conv2d(1, 4, 4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolution(input=images).view(len(images), -1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("kind", "settings"), [(PPO, {"n_steps": 40, "batch_size": 40, "n_epochs": 2}), (DQN, {"learning_starts": 34})]
)
def test_convolutions_in_channels_last_learn_the_same_and_weights_stay_as_in_stock(
    kind: Any, settings: dict[str, Any], channels: int
):
    after = {}
    for channels_last in (False, True):
        env = FakeImageEnv(screen_height=36, screen_width=40, n_channels=channels, channel_first=True)
        env.observation_space.seed(3)
        env.action_space.seed(3)
        engine = EngineSettings(channels_last=channels_last)
        model = kind("CnnPolicy", env, seed=3, engine=engine, policy_kwargs={"optimizer_class": torch.optim.SGD},
                     learning_rate=0.1, **settings)  # fmt: skip
        formats = dict[int, set[bool]]()  # rows → whether channels were last

        def look(_layer: Any, inputs: Any, _output: Any, formats: dict[int, set[bool]] = formats) -> None:
            formats.setdefault(len(inputs[0]), set()).add(inputs[0].stride()[1] == 1)

        layers = convolutions(model.policy)
        for layer in layers:
            layer.register_forward_hook(look)
        model.learn(40)
        assert formats == {1: {False}, (40 if kind is PPO else 32): {channels_last}}, "a single image stays as it is"
        assert all(parameter.is_contiguous() for parameter in model.policy.parameters())
        after[channels_last] = weights(model)
        model.use_engine(EngineSettings())
        assert not any(layer._forward_pre_hooks for layer in layers), "another engine takes its own format"
    torch.testing.assert_close(after[True], after[False], rtol=0, atol=1e-5)


def test_networks_of_users_are_not_changed():
    env = FakeImageEnv(screen_height=36, screen_width=40, channel_first=True)
    model = PPO("CnnPolicy", env, n_steps=40, batch_size=40, engine=EngineSettings(channels_last=True),
                policy_kwargs={"features_extractor_class": Viewing})  # fmt: skip
    assert model.learn(40).num_timesteps == 40
