"""fasttrain.RecurrentPPO equals sb3-contrib's: the same weights, log and states bit by bit after three rollouts; with
sequences unpadded the same minibatches, and weights within rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule

import fasttrain
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.recurrent import PaddedView, UnpaddedView, must_be_padded
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4)})
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
UNPADDED = EngineSettings(fused_adam=True)
SHARED, NONE = {"shared_lstm": True, "enable_critic_lstm": False}, {"enable_critic_lstm": False}


class Case(NamedTuple):
    make: Callable[[], gym.Env]
    lstm: Mapping[str, Any] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})
    policy: str = "MlpLstmPolicy"
    steps: int = 24


class Normalising(FlattenExtractor):
    """Observations by the statistics of their minibatch."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space)
        self.norm = torch.nn.BatchNorm1d(self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(super().forward(observations))
        return found


def random_env(observations: spaces.Space, actions: spaces.Space, cut: bool = False) -> Callable[[], gym.Env]:
    return lambda: RandomEnv(observations, actions, cut)


def cart_pole(limit: int | None = None) -> Callable[[], gym.Env]:
    return lambda: gym.make("CartPole-v1") if limit is None else TimeLimit(gym.make("CartPole-v1"), limit)


CASES = {
    "discrete": Case(cart_pole(), settings={"ent_coef": 0.01}),
    "discrete, cut": Case(cart_pole(9)),
    "two layers": Case(cart_pole(12), {"n_lstm_layers": 2}),
    "shared": Case(cart_pole(12), SHARED),
    "shared, two layers": Case(cart_pole(), {**SHARED, "n_lstm_layers": 2}),
    "no critic LSTM": Case(cart_pole(12), NONE),
    "no critic LSTM, two layers": Case(cart_pole(), {**NONE, "n_lstm_layers": 2}),
    "box": Case(lambda: gym.make("Pendulum-v1"), settings={"ent_coef": 0.01}),
    "box, cut": Case(random_env(BOX, spaces.Box(-1, 1, (2,)), True)),
    "box, gSDE": Case(lambda: gym.make("Pendulum-v1"), settings={"use_sde": True, "sde_sample_freq": 4}),
    "multi-discrete": Case(random_env(BOX, spaces.MultiDiscrete([2, 3]), True), settings={"ent_coef": 0.01}),
    "dict, cut": Case(random_env(DICT, spaces.Discrete(3), True), policy="MultiInputLstmPolicy"),
    "dict, separate extractors": Case(
        random_env(DICT, spaces.MultiDiscrete([2, 2])), {"share_features_extractor": False},
        policy="MultiInputLstmPolicy",
    ),
    "image": Case(
        random_env(IMAGE, spaces.Discrete(3), True), {"features_extractor_kwargs": {"features_dim": 8}},
        policy="CnnLstmPolicy", steps=12,
    ),
    "image, shared": Case(
        random_env(IMAGE, spaces.Discrete(3)), {"features_extractor_kwargs": {"features_dim": 8}, **SHARED},
        policy="CnnLstmPolicy", steps=12,
    ),
    "discrete observations": Case(random_env(spaces.Discrete(5), spaces.Discrete(3), True)),
    "all options": Case(
        cart_pole(14), {"net_arch": [8]},
        {"ent_coef": 0.02, "clip_range_vf": LinearSchedule(0.3, 0.0, 1.0), "clip_range": LinearSchedule(0.2, 0.0, 1.0),
         "learning_rate": LinearSchedule(1e-3, 0.0, 1.0), "batch_size": 40, "max_grad_norm": 0.1, "vf_coef": 0.7,
         "gae_lambda": 0.8, "gamma": 0.9, "n_epochs": 3},
    ),
    "target_kl": Case(cart_pole(), settings={"target_kl": 0.0005, "learning_rate": 3e-3}),
    "plain advantages": Case(cart_pole(), settings={"normalize_advantage": False}),
    "one minibatch": Case(cart_pole(), settings={"batch_size": None}),
    "LSTM dropout": Case(cart_pole(12), {"n_lstm_layers": 2, "lstm_kwargs": {"dropout": 0.3}}),
    "batch normalisation": Case(cart_pole(12), {"features_extractor_class": Normalising}),
    "another optimizer": Case(cart_pole(), {"optimizer_class": torch.optim.RMSprop}),
}  # fmt: skip


def trained(case: Case, kind: Any, steps: int = 2, **more: Any) -> Any:
    settings = {"batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu", **case.settings, **more}
    lstm = {"lstm_hidden_size": 8, **case.lstm}
    model = kind(case.policy, seeded_vec(case.make), n_steps=case.steps, policy_kwargs=lstm, **settings)
    return model.learn(steps * 4 * case.steps)


def difference(one: Any, other: Any) -> float:
    first, second = one.policy.state_dict(), other.policy.state_dict()
    assert list(first) == list(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def logged(model: Any) -> dict[str, Any]:
    return {key: value for key, value in model.logger.name_to_value.items() if not key.startswith("time/")}


def flat(states: Any) -> list[torch.Tensor]:
    return [part for pair in states for part in pair]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_same_bits_and_unpadded_the_same_within_rounding(case: Case):
    stock = trained(case, sb3_contrib.RecurrentPPO)
    ours = trained(case, fasttrain.RecurrentPPO)
    assert isinstance(ours.engine.new_view(), PaddedView)
    assert difference(ours, stock) == 0.0
    assert logged(ours) == logged(stock)
    assert all(map(torch.equal, flat(ours._last_lstm_states), flat(stock._last_lstm_states)))
    assert np.array_equal(ours._last_episode_starts, stock._last_episode_starts)
    for one, other in zip(ours.get_parameters()["policy.optimizer"]["state"].values(),
                          stock.get_parameters()["policy.optimizer"]["state"].values(), strict=True):  # fmt: skip
        assert all(torch.equal(one[name], other[name]) for name in other)
    fast = trained(case, fasttrain.RecurrentPPO, engine=UNPADDED)
    assert isinstance(fast.engine.new_view(), UnpaddedView) is not must_be_padded(fast.policy)
    assert difference(fast, stock) <= 1e-5
    assert logged(fast)["train/n_updates"] == logged(stock)["train/n_updates"]
    for key, value in logged(stock).items():
        assert logged(fast)[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def test_bits_which_stock_cannot_learn_are_learned_alike_either_way():
    case = Case(random_env(BOX, spaces.MultiBinary(3), True), settings={"ent_coef": 0.01})
    with pytest.raises(RuntimeError, match="can't be cast"):
        trained(case, sb3_contrib.RecurrentPPO)
    exact, unpadded = (trained(case, fasttrain.RecurrentPPO, engine=engine) for engine in ("torch", UNPADDED))
    assert difference(exact, unpadded) < 1e-5
