"""Who is served by the LSTM kernels, and that the engine with them learns as the one without."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

import fasttrain
from fasttrain.engines.packed_lstm import PackedHead, RecurrentKernelEngine, why_no_kernels
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1, 1, (3,), np.float32)
NONE = {"enable_critic_lstm": False}


def policy_of(units: int = 16, **settings: Any) -> Any:
    return RecurrentActorCriticPolicy(BOX, spaces.Discrete(2), lambda _: 1e-3, lstm_hidden_size=units, **settings)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (policy_of(), ""),
        (policy_of(24), "an LSTM of 24 units: kernels take multiples of 16"),
        (policy_of(256), "an LSTM of 256 units: torch's own products are faster above 128"),
        (policy_of(lstm_kwargs={"bias": False}), "an LSTM with arguments of its own"),
        (policy_of().double(), "kernels compute in float32 on the CPU"),
        (policy_of(activation_fn=torch.nn.Dropout), "batch normalisation and dropout read padding as well"),
    ],
)
def test_who_is_served(policy: Any, why: str):
    assert why_no_kernels(policy) == why


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "discrete, two layers": (lambda: gym.make("CartPole-v1"), {"n_lstm_layers": 2}),
    "box, no critic LSTM": (lambda: RandomEnv(BOX, spaces.Box(-1, 1, (2,)), True), NONE),
    "two layers, shared": (lambda: RandomEnv(BOX, spaces.MultiDiscrete([2, 3]), True),
                           {**NONE, "shared_lstm": True, "n_lstm_layers": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_three_rollouts_with_kernels_differ_by_rounding_alone(name: str):
    make, lstm = CASES[name]
    found = []
    for kind in ("torch", "kernels"):
        kwargs = {"lstm_hidden_size": 16, **lstm}
        model = fasttrain.RecurrentPPO(
            "MlpLstmPolicy", seeded_vec(make), n_steps=24, batch_size=40, n_epochs=2, ent_coef=0.01, seed=3,
            device="cpu", policy_kwargs=kwargs, engine=kind,
        ).learn(3 * 96)  # fmt: skip
        found.append(model)
    plain, compiled = found
    assert isinstance(compiled.engine, RecurrentKernelEngine)
    assert isinstance(compiled.engine.head, PackedHead)
    assert not isinstance(plain.engine, RecurrentKernelEngine)
    for one, other in zip(plain.policy.parameters(), compiled.policy.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) < 1e-5
