"""Masked recurrent policies, whose masks hold for one call; and a GRU in the LSTM's place, which says, padded as stock
does it and in groups, what a float64 walk through the equations says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates

import fasttrain
from fasttrain.algos import recurrent_policies
from fasttrain.algos.recurrent import PaddedView, RecurrentEngine, UnpaddedView, must_be_padded
from fasttrain.algos.recurrent_policies import GRU, CellActorCriticPolicy, MaskableRecurrentActorCriticPolicy
from fasttrain.errors import ConfigError
from toys import RandomEnv, ToyGymEnv, seeded_vec

BOX = spaces.Box(-1, 1, (3,), np.float32)
ONLY = torch.tensor([[False, False, True, False]] * 5)


def parts() -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    policy = MaskableRecurrentActorCriticPolicy(BOX, spaces.Discrete(4), lambda _: 1e-3, lstm_hidden_size=4)
    zeros = torch.zeros(1, 5, 4)
    return policy, torch.rand(5, 3), RNNStates((zeros, zeros), (zeros, zeros)), torch.zeros(5)


def test_every_method_draws_and_rates_by_the_masks_of_its_call():
    policy, seen, states, starts = parts()

    def forgotten() -> bool:
        return len({int(action) for _ in range(3) for action in policy(seen, states, starts)[0]}) > 1

    actions, _, log_probs, _ = policy(seen, states, starts, action_masks=ONLY)
    assert actions.tolist() == [2] * 5
    assert log_probs.tolist() == [0.0] * 5
    assert forgotten()
    distribution, _ = policy.get_distribution(seen, states.pi, starts, ONLY)
    assert distribution.distribution.probs[:, 2].tolist() == [1.0] * 5
    assert policy.evaluate_actions(seen, actions, states, starts, ONLY)[2].tolist() == [0.0] * 5
    assert policy.evaluate_actions(seen, actions, states, starts)[2].min() > 1.0
    assert policy.predict(seen.numpy(), action_masks=ONLY.numpy())[0].tolist() == [2] * 5
    with pytest.raises(RuntimeError):
        policy(seen, states, starts, action_masks=ONLY[:, :3])
    assert forgotten(), "after an error too"


def test_the_file_needs_nothing_of_fasttrain():
    names = {getattr(value, "__module__", "") or "" for value in vars(recurrent_policies).values()}
    assert not {name for name in names if name.startswith("fasttrain")} - {recurrent_policies.__name__}


def model_of(cell: str, kind: Any = fasttrain.RecurrentPPO, make: Any = None, **settings: Any) -> Any:
    kwargs = {"cell": cell, "lstm_hidden_size": 16, **settings.pop("policy_kwargs", {})}
    usual = {"n_steps": 12, "batch_size": 20, "n_epochs": 1, "ent_coef": 0.01, "seed": 3, "device": "cpu"}
    env = seeded_vec(make or (lambda: RandomEnv(BOX, spaces.Discrete(3), True)))
    return kind("MlpLstmPolicy", env, policy_kwargs=kwargs, **(usual | settings))


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return 1 / (1 + np.exp(-x))


def walked(cell: Any, inputs: NDArray[Any], h: NDArray[Any]) -> NDArray[Any]:
    """Hidden states (T, H) of one layer from the papers' equations in float64, for inputs (T, F)."""
    w = {key: value.detach().double().numpy() for key, value in cell.named_parameters()}
    found = []
    for x in inputs.astype(np.float64):
        of_x = np.split(w["weight_ih_l0"] @ x + w["bias_ih_l0"], 3)
        of_h = np.split(w["weight_hh_l0"] @ h + w["bias_hh_l0"], 3)
        z = sigmoid(of_x[1] + of_h[1])
        h = (1 - z) * np.tanh(of_x[2] + sigmoid(of_x[0] + of_h[0]) * of_h[2]) + z * h
        found.append(h)
    return np.array(found)


def test_a_sequence_at_once_and_step_by_step_is_the_equations():
    torch.manual_seed(1)
    layer, inputs, h, c = GRU(3, 5), torch.randn(21, 1, 3), torch.randn(1, 1, 5), torch.zeros(1, 1, 0)
    at_once, (last, _) = layer(inputs, (h, c))
    expected = walked(layer, inputs[:, 0].numpy(), h[0, 0].double().numpy())
    np.testing.assert_allclose(at_once[:, 0].detach(), expected, atol=2e-6)
    np.testing.assert_allclose(last[0, 0].detach(), expected[-1], atol=2e-6)
    states, stepped = (h, c), []
    for step in inputs:
        found, states = layer(step[None], states)
        stepped.append(found[0, 0].detach())
    np.testing.assert_allclose(torch.stack(stepped), expected, atol=2e-6)


NONE: dict[str, Any] = {"enable_critic_lstm": False}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "own critic": (fasttrain.RecurrentPPO, {}),
    "masked, two layers": (fasttrain.MaskableRecurrentPPO, {"n_lstm_layers": 2}),
    "shared": (fasttrain.RecurrentPPO, {**NONE, "shared_lstm": True}),
    "no memory of the critic": (fasttrain.RecurrentPPO, NONE),
}


@pytest.mark.parametrize("case", CASES)
def test_padded_and_in_groups_it_says_the_same(case: str):
    """Of LSTMs tests/parity/test_masks_and_memory.py shows more."""
    kind, kwargs = CASES[case]
    make = (lambda: ToyGymEnv(0)) if kind is fasttrain.MaskableRecurrentPPO else None
    model = model_of("gru", kind, make, policy_kwargs=kwargs).learn(48)
    policy, found = model.policy, {}
    assert not must_be_padded(policy)
    for head in (PaddedView(policy), UnpaddedView(policy)):
        np.random.seed(0)
        for batch in model.rollout_buffer.storage.minibatches(20, head.layout):
            values, log_probs, entropy, _ = head.evaluate(batch, True)
            assert batch.sequences.states.pi[1].shape[-1] == 0
            weight = batch.advantages
            loss = (log_probs * weight).sum() + (values * batch.returns).sum() + (entropy * weight).sum()
            gradients = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
            columns = [batch.old_log_probs, batch.advantages, values, log_probs, entropy]
            rows = torch.stack(columns).detach().double().numpy()
            told = [rows[:, np.lexsort(rows[:2])], *(np.asarray(part) for part in gradients if part is not None)]
            found.setdefault(head.layout, []).append(told)
    assert len(found["padded"]) == 3
    for ours, theirs in zip(found["grouped"], found["padded"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(other).max())))


def test_a_zip_comes_back_and_stocks_class_takes_it(tmp_path: Path):
    ours = model_of("gru").learn(48)
    ours.save(tmp_path / "ours")
    seen = np.ones((4, 3), np.float32)
    for kind in (fasttrain.RecurrentPPO, sb3_contrib.RecurrentPPO):
        loaded = kind.load(tmp_path / "ours", env=ours.env, device="cpu")
        states = expected_states = None
        for _ in range(3):
            actions, states = loaded.predict(seen, states, deterministic=True)
            expected, expected_states = ours.predict(seen, expected_states, deterministic=True)
            assert np.array_equal(actions, expected)
            assert np.array_equal(states[0], expected_states[0])
        loaded.learn(48)


def test_without_a_cell_the_policy_is_stocks_and_kernels_serve_lstms_alone():
    assert type(fasttrain.RecurrentPPO("MlpLstmPolicy", "CartPole-v1").policy) is RecurrentActorCriticPolicy
    assert type(model_of("lstm").policy) is CellActorCriticPolicy
    asked = model_of("gru", engine="kernels")
    told = "a GRU is computed on PyTorch: compiled kernels compute only LSTMs"
    assert asked.engine.unsupported_reason == told
    assert type(asked.engine) is RecurrentEngine


def test_what_does_not_go_with_a_cell_is_refused():
    for kwargs, message in (
        ({"cell": "mingru"}, "cell=mingru: use lstm or gru"),
        ({"cell": "gru", "lstm_kwargs": {"bias": False}}, "lstm_kwargs={'bias': False} has no effect with cell=gru"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            model_of("gru", policy_kwargs=kwargs)
    own = type("Own", (RecurrentActorCriticPolicy,), {})
    with pytest.raises(ConfigError, match="cell=gru with policy=Own, which has an LSTM: derive it from"):
        fasttrain.RecurrentPPO(own, gym.make("CartPole-v1"), policy_kwargs={"cell": "gru"})
