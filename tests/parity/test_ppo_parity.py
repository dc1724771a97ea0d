"""Ours equals stock: same seed, same envs, several rollouts, the same weights and the same log.

With the plain Adam loop weights and log are equal bit by bit, episodes that a limit cuts too. Adam's fused kernel
contracts a multiply and an add, and values of several cut episodes come of one product then; that stays below 1e-5 here
(seen: 1.5e-7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
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
from numpy.typing import NDArray
from sb3_contrib.common.envs import (
    InvalidActionEnvDiscrete,
    InvalidActionEnvMultiBinary,
    InvalidActionEnvMultiDiscrete,
)
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import action_dims
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
    steps: int = 40


class MaskedEnv(RandomEnv):
    """The RandomEnv with a random mask per state; some choice of every sub-action is legal."""

    def _draw(self) -> Any:
        dims = action_dims(self.action_space)
        self.mask: NDArray[np.bool_] = self.np_random.random(sum(dims)) < 0.5
        for start, size in zip(np.cumsum([0, *dims[:-1]]), dims, strict=True):
            self.mask[start + self.np_random.integers(size)] = True
        return super()._draw()

    def action_masks(self) -> NDArray[np.bool_]:
        return self.mask


class OftenEmpty(MaskedEnv):
    """Masks that in many states allow nothing at all, in a sub-action or in all."""

    def _draw(self) -> Any:
        drawn = super()._draw()
        self.mask &= self.np_random.random(len(self.mask)) < 0.5
        return drawn


def masked_env(observation_space: spaces.Space, action_space: spaces.Space, cut: bool = False) -> Callable:
    return lambda: MaskedEnv(observation_space, action_space, cut)


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
    "masked discrete, cut": Case(MASKED, invalid(InvalidActionEnvDiscrete, 20, 10, 15)),
    "masked multi-discrete": Case(MASKED, invalid(InvalidActionEnvMultiDiscrete, [3, 4], 2), {"ent_coef": 0.01}),
    "masked equal dims": Case(MASKED, invalid(InvalidActionEnvMultiDiscrete, [3, 3, 3], 3), {"ent_coef": 0.01}),
    "masked multi-binary": Case(MASKED, invalid(InvalidActionEnvMultiBinary, 4, 2), {"ent_coef": 0.01}),
    "masked multi-discrete, cut": Case(MASKED, masked_env(BOX, spaces.MultiDiscrete([2, 4]), True)),
    "masked box state": Case(MASKED, masked_env(BOX, spaces.MultiDiscrete([2, 1, 4])), {"ent_coef": 0.01}),
    "masked, often nothing legal": Case(MASKED, lambda: OftenEmpty(BOX, spaces.Discrete(3)), {"ent_coef": 0.01}),
    "masked, often an empty head": Case(
        MASKED, lambda: OftenEmpty(BOX, spaces.MultiDiscrete([2, 4])), {"ent_coef": 0.01}
    ),
    "masked dict": Case(MASKED, masked_env(DICT, spaces.Discrete(5)), policy="MultiInputPolicy"),
    "masked dict, cut": Case(MASKED, masked_env(DICT, spaces.MultiBinary(3), True), policy="MultiInputPolicy"),
    "masked image": Case(MASKED, masked_env(IMAGE, spaces.Discrete(3)), tiny_cnn(), "CnnPolicy", steps=16),
    "masked, separate extractors": Case(
        MASKED,
        masked_env(DICT, spaces.Discrete(4)),
        {"policy_kwargs": {"share_features_extractor": False}},
        "MultiInputPolicy",
    ),
    "masked, all options": Case(
        MASKED,
        masked_env(BOX, spaces.Discrete(6)),
        {
            "ent_coef": 0.02,
            "clip_range_vf": LinearSchedule(0.3, 0.0, 1.0),
            "clip_range": LinearSchedule(0.2, 0.0, 1.0),
            "learning_rate": LinearSchedule(1e-3, 0.0, 1.0),
            "normalize_advantage": False,
            "batch_size": 60,
            "max_grad_norm": 0.1,
            "vf_coef": 0.7,
            "gae_lambda": 0.8,
            "gamma": 0.9,
            "n_epochs": 3,
        },
    ),
    "discrete": Case(PLAIN, cart_pole(), {"ent_coef": 0.01}),
    "discrete, cut": Case(PLAIN, cart_pole(12)),
    "multi-discrete": Case(PLAIN, random_env(BOX, spaces.MultiDiscrete([2, 3])), {"ent_coef": 0.01}),
    "multi-binary": Case(PLAIN, random_env(BOX, spaces.MultiBinary(3)), {"ent_coef": 0.01}),
    "box": Case(PLAIN, lambda: gym.make("Pendulum-v1")),
    "box, cut": Case(PLAIN, random_env(BOX, spaces.Box(-1, 1, (2,)), cut=True)),
    "box, gSDE": Case(PLAIN, lambda: gym.make("Pendulum-v1"), {"use_sde": True, "sde_sample_freq": 4}),
    "dict": Case(PLAIN, random_env(DICT, spaces.Discrete(3)), policy="MultiInputPolicy"),
    "dict, cut": Case(PLAIN, random_env(DICT, spaces.Discrete(3), cut=True), policy="MultiInputPolicy"),
    "discrete observations, cut": Case(PLAIN, random_env(spaces.Discrete(5), spaces.Discrete(3), True)),
    "image, cut": Case(PLAIN, random_env(IMAGE, spaces.Discrete(3), True), tiny_cnn(), "CnnPolicy", steps=16),
    "discrete observations": Case(PLAIN, random_env(spaces.Discrete(5), spaces.Discrete(3))),
    "image": Case(PLAIN, random_env(IMAGE, spaces.Discrete(3)), tiny_cnn(), "CnnPolicy", steps=16),
    "separate extractors": Case(PLAIN, cart_pole(), {"policy_kwargs": {"share_features_extractor": False}}),
    "separate extractors, image": Case(
        PLAIN,
        random_env(IMAGE, spaces.Discrete(3)),
        {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}, "share_features_extractor": False}},
        "CnnPolicy",
        steps=16,
    ),
    "box, linear schedule": Case(
        PLAIN, lambda: gym.make("Pendulum-v1"), {"learning_rate": LinearSchedule(1e-3, 0.0, 1.0), "ent_coef": 0.01}
    ),
    "target_kl": Case(PLAIN, cart_pole(), {"target_kl": 0.002, "learning_rate": 3e-3}),
    "clipped values": Case(PLAIN, cart_pole(), {"clip_range_vf": 0.2, "vf_coef": 0.7}),
    "schedules": Case(PLAIN, cart_pole(), {"learning_rate": lambda left: 1e-3 * left, "clip_range": lambda left: left}),
    "plain advantages": Case(PLAIN, cart_pole(), {"normalize_advantage": False}),
    "short last minibatch": Case(PLAIN, cart_pole(), {"batch_size": 60}),
    "another optimizer": Case(PLAIN, cart_pole(), {"policy_kwargs": {"optimizer_class": torch.optim.RMSprop}}),
}


def untrained(case: Case, model_class: type[OnPolicyAlgorithm], fused: bool | None = None) -> Any:
    """`fused` is set on ours only."""
    settings = {"batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu", **case.settings}
    model = model_class(case.policy, seeded_vec(case.make), n_steps=case.steps, **settings)
    if fused is not None:
        model.use_engine("kernels" if fused else "torch")
    return model


def trained(case: Case, model_class: type[OnPolicyAlgorithm], fused: bool | None = None) -> OnPolicyAlgorithm:
    """Two rollouts and updates."""
    return untrained(case, model_class, fused).learn(2 * 4 * case.steps)


def difference(a: OnPolicyAlgorithm, b: OnPolicyAlgorithm) -> float:
    ours, theirs = a.policy.state_dict(), b.policy.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def logged(model: OnPolicyAlgorithm) -> dict[str, Any]:
    return {key: value for key, value in model.logger.name_to_value.items() if not key.startswith("time/")}


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of 60")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore:no legal action")
def test_same_weights_and_log(case: Case):
    ours_class, stock_class = case.classes
    stock = trained(case, stock_class)
    for fused in (False, True):
        ours = untrained(case, ours_class, fused)
        if ours.engine.kind == "kernels":  # they draw other actions; tests/accelerators/test_kernels.py compares them
            continue
        ours.learn(stock.num_timesteps)
        assert ours.num_timesteps == stock.num_timesteps
        assert logged(ours).keys() == logged(stock).keys()
        if not fused:
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
        models.append(model.learn(320, use_masking=False))
    assert difference(*models) == 0.0


@pytest.mark.parametrize("case", [CASES["discrete"], CASES["masked, all options"]], ids=["plain", "masked"])
def test_same_weights_under_vec_normalize(case: Case):
    models = [built(model_class, VecNormalize(seeded_vec(case.make))).learn(480) for model_class in case.classes]
    assert difference(*models) == 0.0
    np.testing.assert_array_equal(models[0]._last_obs, models[1]._last_obs)


def built(model_class: type[OnPolicyAlgorithm], env: Any, **settings: Any) -> Any:
    """A small MLP model; ours with the numbers of stock."""
    model = model_class(
        "MlpPolicy", env, **{"n_steps": 40, "batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu", **settings}
    )
    ours = isinstance(model, (PPO, MaskablePPO))
    assert not ours or model.engine.settings == EngineSettings(), "the numbers of stock are the default"
    return model


BOTH = pytest.mark.parametrize(
    "case",
    [Case(PLAIN, cart_pole()), Case(MASKED, masked_env(BOX, spaces.Discrete(5)))],
    ids=["plain", "masked"],
)


@BOTH
def test_target_kl_stops_early_at_the_same_minibatch(case: Case):
    settings = {"target_kl": 0.003, "learning_rate": 3e-3, "n_epochs": 6}
    models = [built(model_class, seeded_vec(case.make), **settings).learn(480) for model_class in case.classes]
    assert models[0]._n_updates == models[1]._n_updates < 3 * 6, "it must stop for this test to see anything"
    steps = [{int(state["step"]) for state in model.policy.optimizer.state.values()} for model in models]
    assert steps[0] == steps[1]
    assert difference(*models) == 0.0
    assert logged(models[0]) == logged(models[1])


def flat(value: Any) -> NDArray[np.float32]:
    """A copy, whether the algorithm keeps arrays or tensors."""
    return torch.as_tensor(value).flatten().to(torch.float32).numpy().copy()


class Reader(BaseCallback):
    """Copies what a callback may read at every step and at the end of every rollout."""

    STEP = ("new_obs", "rewards", "dones", "actions", "values", "log_probs")
    ROLLOUT = ("actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.names = (*self.STEP, "action_masks" if masked else "clipped_actions")
        self.seen: list[tuple[str, Any]] = []

    def _on_step(self) -> bool:
        assert self.locals["self"] is self.model
        for name in self.names:
            self.seen.append((name, flat(self.locals[name])))
        self.seen.append(("counters", (self.num_timesteps, self.n_calls, self.locals["n_steps"])))
        for info in self.locals["infos"]:
            episode = {key: info["episode"][key] for key in "rl"} if "episode" in info else None
            self.seen.append(("info", (episode, info.get("TimeLimit.truncated"), "terminal_observation" in info)))
        return True

    def _on_rollout_end(self) -> None:
        for name in self.ROLLOUT:
            value = getattr(self.locals["rollout_buffer"], name)
            self.seen.append((name, flat(value)))


@BOTH
def test_callbacks_read_the_same_locals(case: Case):
    readers = []
    for model_class in case.classes:
        readers.append(Reader(case.classes == MASKED))
        built(model_class, seeded_vec(case.make)).learn(480, callback=readers[-1])
    ours, theirs = (reader.seen for reader in readers)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, value), (_, expected) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(value, expected, err_msg=name)


@BOTH
@pytest.mark.parametrize("reset", [True, False])
def test_learn_called_twice(case: Case, reset: bool):
    models = []
    for model_class in case.classes:  # each built and trained before the next: they share torch's random stream
        models.append(built(model_class, seeded_vec(case.make)).learn(320))
        models[-1].learn(320, reset_num_timesteps=reset)
    assert models[0].num_timesteps == models[1].num_timesteps == (320 if reset else 640)
    assert difference(*models) == 0.0
    assert logged(models[0]) == logged(models[1])


@BOTH
def test_another_env_in_the_middle(case: Case):
    models = []
    for model_class in case.classes:
        models.append(built(model_class, seeded_vec(case.make)).learn(160))
        env = seeded_vec(case.make)
        env.seed(7)
        models[-1].set_env(env)
        models[-1].learn(320, reset_num_timesteps=False)
    assert difference(*models) == 0.0
    np.testing.assert_array_equal(models[0]._last_obs, models[1]._last_obs)


@BOTH
def test_saved_loaded_and_continued_with_the_optimizers_state(case: Case, tmp_path: Path):
    """Stock's zip by ours, ours by stock, each by itself: all four go on alike."""
    for index, model_class in enumerate(case.classes):
        built(model_class, seeded_vec(case.make)).learn(320).save(tmp_path / str(index))
    continued = []
    for saved in "01":
        for model_class in case.classes:
            env = seeded_vec(case.make)
            env.seed(7)
            model = model_class.load(tmp_path / saved, env=env, device="cpu")
            assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {2 * 2 * 5}
            continued.append(model.learn(320, reset_num_timesteps=False))
    for model in continued[:3]:
        assert model.num_timesteps == 640
        assert difference(model, continued[3]) == 0.0
    env = seeded_vec(case.make)
    env.seed(7)
    fresh = case.classes[1].load(tmp_path / "1", env=env, device="cpu")
    fresh.policy.optimizer.state.clear()
    assert difference(fresh.learn(320, reset_num_timesteps=False), continued[3]) > 0.0, "the state must matter"
