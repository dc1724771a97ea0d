"""Ours equals stock: same seed, same envs, several rollouts, the same weights and the same log.

With the plain Adam loop and no episode cut by a limit, weights and log are equal bit by bit. Two things round
differently: the values of several cut episodes are computed in one batch, and Adam's fused kernel contracts a multiply
and an add; both stay below 1e-5 here (seen: 1.5e-7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from sb3_contrib.common.envs import (
    InvalidActionEnvDiscrete,
    InvalidActionEnvMultiBinary,
    InvalidActionEnvMultiDiscrete,
)
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from fasttrain.algos.ppo import PPO, MaskablePPO
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
PLAIN = (PPO, stable_baselines3.PPO)
MASKED = (MaskablePPO, sb3_contrib.MaskablePPO)
BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4)})
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
FOREVER = 10**6


class Case(NamedTuple):
    classes: tuple[type[OnPolicyAlgorithm], type[OnPolicyAlgorithm]]
    make: Callable[[], gym.Env]
    settings: Mapping[str, Any] = MappingProxyType({})
    policy: str = "MlpPolicy"
    exact: bool = True  # bit by bit, with the plain Adam loop
    steps: int = 40


def random_env(observation_space: spaces.Space, action_space: spaces.Space, cut: bool = False) -> Callable:
    return lambda: RandomEnv(observation_space, action_space, cut)


def invalid(kind: type, dims: Any, n_invalid: int, ep_length: int = FOREVER) -> Callable:
    name = "dim" if kind is InvalidActionEnvDiscrete else "dims"
    return lambda: kind(**{name: dims}, n_invalid_actions=n_invalid, ep_length=ep_length)


def cart_pole(limit: int | None = None) -> Callable:
    return lambda: gym.make("CartPole-v1") if limit is None else TimeLimit(gym.make("CartPole-v1"), limit)


def tiny_cnn() -> dict[str, Any]:
    return {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}}}


CASES = {
    "masked discrete": Case(MASKED, invalid(InvalidActionEnvDiscrete, 20, 10)),
    "masked discrete, entropy bonus": Case(MASKED, invalid(InvalidActionEnvDiscrete, 20, 10), {"ent_coef": 0.01}),
    "masked discrete, cut": Case(MASKED, invalid(InvalidActionEnvDiscrete, 20, 10, 15), exact=False),
    "masked multi-discrete": Case(MASKED, invalid(InvalidActionEnvMultiDiscrete, [3, 4], 2), {"ent_coef": 0.01}),
    "masked equal dims": Case(MASKED, invalid(InvalidActionEnvMultiDiscrete, [3, 3, 3], 3), {"ent_coef": 0.01}),
    "masked multi-binary": Case(MASKED, invalid(InvalidActionEnvMultiBinary, 4, 2), {"ent_coef": 0.01}),
    "discrete": Case(PLAIN, cart_pole(), {"ent_coef": 0.01}),
    "discrete, cut": Case(PLAIN, cart_pole(12), exact=False),
    "multi-discrete": Case(PLAIN, random_env(BOX, spaces.MultiDiscrete([2, 3])), {"ent_coef": 0.01}),
    "multi-binary": Case(PLAIN, random_env(BOX, spaces.MultiBinary(3)), {"ent_coef": 0.01}),
    "box": Case(PLAIN, lambda: gym.make("Pendulum-v1")),
    "box, cut": Case(PLAIN, random_env(BOX, spaces.Box(-1, 1, (2,)), cut=True), exact=False),
    "box, gSDE": Case(PLAIN, lambda: gym.make("Pendulum-v1"), {"use_sde": True, "sde_sample_freq": 4}),
    "dict": Case(PLAIN, random_env(DICT, spaces.Discrete(3)), policy="MultiInputPolicy"),
    "dict, cut": Case(PLAIN, random_env(DICT, spaces.Discrete(3), cut=True), policy="MultiInputPolicy", exact=False),
    "discrete observations, cut": Case(PLAIN, random_env(spaces.Discrete(5), spaces.Discrete(3), True), exact=False),
    "image, cut": Case(
        PLAIN, random_env(IMAGE, spaces.Discrete(3), True), tiny_cnn(), "CnnPolicy", exact=False, steps=16
    ),
    "discrete observations": Case(PLAIN, random_env(spaces.Discrete(5), spaces.Discrete(3))),
    "image": Case(PLAIN, random_env(IMAGE, spaces.Discrete(3)), tiny_cnn(), "CnnPolicy", steps=16),
    "separate extractors": Case(PLAIN, cart_pole(), {"policy_kwargs": {"share_features_extractor": False}}),
    "target_kl": Case(PLAIN, cart_pole(), {"target_kl": 0.002, "learning_rate": 3e-3}),
    "clipped values": Case(PLAIN, cart_pole(), {"clip_range_vf": 0.2, "vf_coef": 0.7}),
    "schedules": Case(PLAIN, cart_pole(), {"learning_rate": lambda left: 1e-3 * left, "clip_range": lambda left: left}),
    "plain advantages": Case(PLAIN, cart_pole(), {"normalize_advantage": False}),
    "short last minibatch": Case(PLAIN, cart_pole(), {"batch_size": 60}),
    "another optimizer": Case(PLAIN, cart_pole(), {"policy_kwargs": {"optimizer_class": torch.optim.RMSprop}}),
}


def trained(case: Case, model_class: type[OnPolicyAlgorithm], fused: bool | None = None) -> OnPolicyAlgorithm:
    """Three rollouts and updates. `fused` is set on ours only."""
    settings = {"batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu", **case.settings}
    model = model_class(case.policy, seeded_vec(case.make), n_steps=case.steps, **settings)
    if fused is not None:
        model._fast.fused = fused
    return model.learn(3 * 4 * case.steps)


def difference(a: OnPolicyAlgorithm, b: OnPolicyAlgorithm) -> float:
    ours, theirs = a.policy.state_dict(), b.policy.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def logged(model: OnPolicyAlgorithm) -> dict[str, Any]:
    return {key: value for key, value in model.logger.name_to_value.items() if not key.startswith("time/")}


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of 60")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_same_weights_and_log(case: Case):
    ours_class, stock_class = case.classes
    stock = trained(case, stock_class)
    for fused in (False, True):
        ours = trained(case, ours_class, fused)
        if ours._fast.kernels is not None:  # they draw other actions; tests/algos/test_fused_policy.py compares them
            continue
        assert ours.num_timesteps == stock.num_timesteps
        assert logged(ours).keys() == logged(stock).keys()
        if case.exact and not fused:
            assert difference(ours, stock) == 0.0
            assert logged(ours) == logged(stock)
        else:
            assert difference(ours, stock) <= 1e-5
            for key, value in logged(stock).items():
                assert logged(ours)[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
        np.testing.assert_array_equal(ours._last_episode_starts, stock._last_episode_starts)


def test_same_weights_without_masking():
    case = CASES["masked discrete"]
    models = []
    for model_class in case.classes:
        model = model_class("MlpPolicy", seeded_vec(case.make), n_steps=40, batch_size=32, n_epochs=2, seed=3)
        if isinstance(model, MaskablePPO):
            model._fast.fused = False
        models.append(model.learn(320, use_masking=False))
    assert difference(*models) == 0.0


def test_same_weights_under_vec_normalize():
    models = []
    for model_class in PLAIN:
        env = VecNormalize(seeded_vec(cart_pole()))
        model = model_class("MlpPolicy", env, n_steps=40, batch_size=32, n_epochs=2, seed=3, device="cpu")
        if isinstance(model, PPO):
            model._fast.fused = False
        models.append(model.learn(480))
    assert difference(*models) == 0.0
    np.testing.assert_array_equal(models[0]._last_obs, models[1]._last_obs)
