"""The TD loss: legal next actions alone count, and what float it is computed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fasttrain
from fasttrain.engines.devices import Precision
from fasttrain.engines.torch_q import QNetworks, targets, td_loss
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
    torch.testing.assert_close(targets(QNetworks(model.policy), batch, model.work(1, 64).rule), expected)


@pytest.mark.parametrize("prioritized", [None, {}])
def test_errors_are_computed_where_they_are_wanted(prioritized: Any):
    model = toy_model(prioritized=prioritized)
    model.learn(200)
    rule, networks, batch = model.work(1, 16).rule, QNetworks(model.policy), model.replay_buffer.sample(16)
    terms = td_loss(networks, batch, rule)
    if prioritized is None:
        assert terms.errors is None
    else:
        values = networks.values(batch.observations).gather(1, batch.actions)
        expected = (values - targets(networks, batch, rule)).abs()[:, 0]
        torch.testing.assert_close(terms.errors, expected.detach())


def test_values_leave_autocast_as_float32():
    model = toy_model()
    model.learn(100)
    observations = model.replay_buffer.sample(16).observations
    plain = QNetworks(model.policy)
    rough = QNetworks(model.policy, Precision("cpu", torch.bfloat16))
    for name in ("values", "target_values"):
        found, exact = getattr(rough, name)(observations), getattr(plain, name)(observations)
        assert found.dtype == torch.float32
        assert not torch.equal(found, exact)
        torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02)
