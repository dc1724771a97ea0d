"""Heads and engine of policies that remember: which of them serves a policy, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.recurrent import PaddedView, RecurrentEngine, UnpaddedView, must_be_padded
from fasttrain.buffers.recurrent import Memory
from fasttrain.errors import ConfigError, EnvError

BOX = spaces.Box(-1, 1, (3,), np.float32)
ROUNDING = EngineSettings(fused_adam=True)


def policy_of(kind: Any = RecurrentActorCriticPolicy, **settings: Any) -> Any:
    torch.manual_seed(1)
    return kind(BOX, spaces.Discrete(2), lambda _: 1e-3, lstm_hidden_size=4, **settings)


class Own(RecurrentActorCriticPolicy):
    def evaluate_actions(self, *arguments: Any) -> Any:
        return super().evaluate_actions(*arguments)


class Dropping(torch.nn.Dropout):
    pass


@pytest.mark.parametrize(
    ("policy", "padded"),
    [
        (policy_of, False),
        (lambda: policy_of(Own), True),
        (lambda: policy_of(activation_fn=Dropping), True),
        (lambda: policy_of(n_lstm_layers=2, lstm_kwargs={"dropout": 0.1}), True),
    ],
)
def test_a_policy_of_ones_own_is_served_by_its_own_methods(policy: Any, padded: bool):
    built = policy()
    assert must_be_padded(built) is padded
    assert isinstance(RecurrentEngine(built, ROUNDING).new_view(), UnpaddedView) is not padded
    exact = RecurrentEngine(built, EngineSettings()).new_view()
    assert type(exact) is PaddedView


@pytest.mark.parametrize(
    "settings", [{"amp_dtype": torch.bfloat16}, {"compile_mode": "default"}, {"gradient_accumulation": 2}]
)
def test_settings_that_do_not_go_with_memory_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="a policy that remembers computes in float32, uncompiled"):
        RecurrentEngine(policy_of(), EngineSettings(**settings))


def memory_of(policy: Any, count: int, starts: list[bool]) -> Memory:
    part = torch.randn(1, count, 4)
    states: Any = ((part, part + 1), (part + 2, part + 3))
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    return Memory(RNNStates(*states), np.array(starts))


def test_acting_gives_the_states_after_and_keeps_those_before():
    policy = policy_of()
    memory = memory_of(policy, 3, [False, True, False])
    seen = np.random.default_rng(0).random((3, 3)).astype(np.float32)
    both = []
    for settings in (EngineSettings(), ROUNDING):
        torch.manual_seed(5)
        engine = RecurrentEngine(policy, settings)
        both.append((engine.act(seen, None, memory), engine.values(seen, memory)))
    (acted, values), (other, other_values) = both
    assert np.array_equal(acted.actions, other.actions)
    assert np.abs(values - other_values).max() < 1e-6
    for one, two in zip((*acted.memory.pi, *acted.memory.vf), (*other.memory.pi, *other.memory.vf), strict=True):
        assert float((one - two).abs().max()) < 1e-6
    for acting in (acted, other):
        assert acting.stored is not None
        assert acting.stored.memory is memory.states  # as they were, before the reset
    begun = memory_of(policy, 3, [True, True, True])
    alone = RecurrentEngine(policy, ROUNDING).values(seen, begun)
    assert alone[1] == pytest.approx(values[1], abs=1e-6)  # an episode that begins has no past
    assert abs(alone[0] - values[0]) > 1e-4


def test_an_output_that_is_not_finite_is_told():
    policy = policy_of()
    with torch.no_grad():
        policy.action_net.weight[0, 0] = np.nan
    engine = RecurrentEngine(policy, EngineSettings())
    with pytest.raises(EnvError, match=r"parameter action_net.weight is not"):
        engine.act(np.zeros((2, 3), np.float32), None, memory_of(policy, 2, [True, True]))
