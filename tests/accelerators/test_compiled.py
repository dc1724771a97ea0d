"""Micro-batches give the gradient of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from accelerated import a_batch, filled, loss_terms, masked_model, one_step, weights
from fasttrain.accelerators.compiled import Coefficients
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.ppo import PPO
from fasttrain.algos.step import micro_batches, normalized
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)


@pytest.mark.parametrize("parts", [2, 3, 7, 50, 90])
def test_gradients_and_statistics_are_those_of_the_whole(parts: int):
    model = filled(masked_model(EngineSettings(), ent_coef=0.01, clip_range_vf=0.1))
    model.rollout_buffer.storage._log_probs += 0.3 * torch.randn(16, 5)  # so that ratios are clipped
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


def test_training_ends_at_the_same_weights():
    ends = []
    for parts in (1, 3):
        model = masked_model(EngineSettings(gradient_accumulation=parts))
        ends.append(weights(model.learn(240)))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


def test_target_kl_stops_before_the_step():
    model = filled(masked_model(EngineSettings(gradient_accumulation=4), target_kl=1e-12, learning_rate=0.1))
    steps: list[None] = []
    model.policy.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    model.train()
    assert len(steps) == 1
    assert model._n_updates == 1


def test_dict_observations_are_cut_too():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)})
    env = seeded_vec(lambda: RandomEnv(space, spaces.Discrete(3)))
    model = PPO("MultiInputPolicy", env, n_steps=8, batch_size=16, n_epochs=1, device="cpu", seed=0)
    model.use_engine(EngineSettings(gradient_accumulation=3))
    model.learn(64)
    for parts, sizes in ((3, [6, 5, 5]), (1, [16]), (20, [1] * 16)):
        found = [part for part, _ in micro_batches(a_batch(model, 16), parts)]
        assert [len(part.observations["a"]) for part in found] == sizes


def test_advantages_are_normalised_over_the_whole_minibatch():
    model = filled(masked_model(EngineSettings()))
    batch = a_batch(model)
    advantages = normalized(batch, True).advantages
    assert abs(advantages.mean().item()) < 1e-6
    assert advantages.std().item() == pytest.approx(1, abs=1e-5)
    assert normalized(batch, False) is batch


def test_scalars_on_the_device_give_the_loss_of_numbers():
    model = filled(masked_model(EngineSettings()))
    batch, head = a_batch(model), view_of(model.policy, model.action_space)
    numbers = Coefficients(0.2, 0.1, 0.01, 0.5)
    plain = loss_terms(head, batch, numbers)
    scalars = loss_terms(head, batch, Coefficients(*map(torch.tensor, numbers)))
    torch.testing.assert_close(plain, scalars)
