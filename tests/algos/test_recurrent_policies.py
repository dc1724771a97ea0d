"""The masked recurrent policies: every method takes masks, and they hold for one call."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.algos import recurrent_policies
from fasttrain.algos.recurrent_policies import MaskableRecurrentActorCriticPolicy

BOX = spaces.Box(-1, 1, (3,), np.float32)
ONLY = torch.tensor([[False, False, True, False]] * 5)


def parts() -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    policy = MaskableRecurrentActorCriticPolicy(BOX, spaces.Discrete(4), lambda _: 1e-3, lstm_hidden_size=4)
    zeros = torch.zeros(1, 5, 4)
    return policy, torch.rand(5, 3), RNNStates((zeros, zeros), (zeros, zeros)), torch.zeros(5)


def test_every_method_draws_and_rates_by_the_masks_of_its_call():
    policy, seen, states, starts = parts()
    actions, _, log_probs, _ = policy(seen, states, starts, action_masks=ONLY)
    assert actions.tolist() == [2] * 5
    assert log_probs.tolist() == [0.0] * 5
    drawn = policy(seen, states, starts)[0]
    assert len({*drawn.tolist()} | {*policy(seen, states, starts)[0].tolist()}) > 1  # the masks are forgotten
    distribution, _ = policy.get_distribution(seen, states.pi, starts, ONLY)
    assert distribution.distribution.probs[:, 2].tolist() == [1.0] * 5
    assert policy.evaluate_actions(seen, actions, states, starts, ONLY)[2].tolist() == [0.0] * 5
    assert policy.evaluate_actions(seen, actions, states, starts)[2].min() > 1.0
    assert policy.predict(seen.numpy(), action_masks=ONLY.numpy())[0].tolist() == [2] * 5


def test_masks_are_forgotten_after_an_error_too():
    policy, seen, states, starts = parts()
    with pytest.raises(RuntimeError):
        policy(seen, states, starts, action_masks=ONLY[:, :3])
    assert len({*policy(seen, states, starts)[0].tolist(), *policy(seen, states, starts)[0].tolist()}) > 1


def test_the_file_needs_nothing_of_fasttrain():
    names = {getattr(value, "__module__", "") or "" for value in vars(recurrent_policies).values()}
    assert not {name for name in names if name.startswith("fasttrain")} - {recurrent_policies.__name__}


@pytest.mark.parametrize(
    ("module", "name"),
    [("recurrent_policies", "MaskableRecurrentActorCriticPolicy"), ("q_networks", "DuelingDQNPolicy")],
)
def test_zips_of_before_find_their_classes_where_these_are_now(module: str, name: str):
    written = pickle.dumps(getattr(import_module(f"fasttrain.algos.{module}"), name), protocol=0)
    assert pickle.loads(written.replace(b"fasttrain.algos.", b"fasttrain.engines.")).__name__ == name
