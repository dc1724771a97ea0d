"""The DQN update by hand: its target and its loss; tests/accelerators/test_kernels.py compares it with kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelerated import toy_dqn
from fasttrain.algos.dqn import Evaluated
from fasttrain.errors import EnvError


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


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_counts_rates_and_log(engine: str):
    model = toy_dqn(engine=engine, learning_rate=lambda left: 1e-3 * left, learning_starts=10_000).learn(200)
    model._current_progress_remaining = 0.25
    model.train(4, 16)
    assert model.engine.gradient_updates == 4
    assert model.logger.name_to_value["train/n_updates"] == 4
    assert model.policy.optimizer.state[next(model.q_net.parameters())]["step"] == 4
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)


def test_a_loss_that_is_not_finite_is_an_error():
    model = toy_dqn(engine="kernels").learn(60)
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    model.replay_buffer.rewards[:] = np.inf
    with pytest.raises(EnvError, match="at step .*: the loss is not finite .* lower the learning rate"):
        model.train(1, 16)
