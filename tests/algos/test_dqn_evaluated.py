"""Values of a Q-network, the TD target and the TD loss: legal next actions alone count, and in which float."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fasttrain
from fasttrain.algos.devices import Precision
from fasttrain.algos.dqn import Evaluated
from fasttrain.algos.engine import network_values
from toys import ToyGame

SETTINGS: dict[str, Any] = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 400, "seed": 0}


def toy_model(**changes: Any) -> Any:
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    return fasttrain.DQN("MlpPolicy", env, device="cpu", **{**SETTINGS, **changes})


@pytest.mark.parametrize("double_q", [False, True])
def test_the_target_looks_at_legal_next_actions_only(double_q: bool):
    model = toy_model(double_q=double_q)
    model.learn(200)
    batch = model.replay_buffer.sample(64)
    masks = batch.next_action_masks
    assert masks is not None
    assert not masks.all()
    with torch.no_grad():
        online, target = model.q_net(batch.next_observations), model.q_net_target(batch.next_observations)
    ranked = torch.where(masks, online if double_q else target, -torch.inf)
    best = target.gather(1, ranked.argmax(dim=1, keepdim=True))
    expected = batch.rewards + (1 - batch.dones) * 0.99 * best
    evaluated = model.evaluate(batch)
    torch.testing.assert_close(evaluated.target, expected)
    assert not evaluated.target.requires_grad
    torch.testing.assert_close(evaluated.q_values, model.q_net(batch.observations))
    torch.testing.assert_close(evaluated.current, evaluated.q_values.gather(1, batch.actions))


@pytest.mark.parametrize(("kind", "expected"), [("huber", (0.125 + 3 * 1.5) / 2), ("mse", (0.25 + 3 * 4.0) / 2)])
def test_the_td_loss_by_hand(kind: str, expected: float):
    model = toy_model(loss=kind)
    model.learn(100)
    batch = model.replay_buffer.sample(2)._replace(weights=torch.tensor([[1.0], [3.0]]))
    current = torch.tensor([[1.5], [1.0]])
    terms = model.loss(batch, Evaluated(current, current, torch.tensor([[1.0], [3.0]])))
    assert list(terms) == ["td_loss"]
    assert terms["td_loss"].item() == pytest.approx(expected)


def test_values_leave_autocast_as_float32():
    model = toy_model()
    model.learn(100)
    observations = model.replay_buffer.sample(16).observations
    found = network_values(model.q_net, observations, Precision("cpu", torch.bfloat16))
    exact = network_values(model.q_net, observations, None)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02)
