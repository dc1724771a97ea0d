"""PPO, MaskablePPO and RecurrentPPO equal stock: same seed, same envs, several rollouts, the same weights and log.

With the plain Adam loop all numbers are equal bit by bit, episodes that a limit cuts too. Adam's fused kernel contracts
a multiply and an add, values of several cut episodes come of one product then, and sequences are not padded; that stays
below 1e-5 here (seen: 1.5e-7). Of several policies in one game, one that decides everything is flat PPO, and two that
never meet are two trainings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

import fasttrain
from fasttrain.algos import policy_view
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.joint import JointMaskablePPO, JointPPO
from fasttrain.algos.joint_recurrent import JointMaskableRecurrentPPO
from fasttrain.algos.owners import Owners
from fasttrain.algos.recurrent import PaddedView, UnpaddedView, must_be_padded
from plain_env import PlainEnv
from toys import MaskedEnv, RandomEnv, seeded_vec

PLAIN = (fasttrain.PPO, stable_baselines3.PPO)
MASKED = (fasttrain.MaskablePPO, sb3_contrib.MaskablePPO)
MEMORY = (fasttrain.RecurrentPPO, sb3_contrib.RecurrentPPO)
BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4)})
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
THREE, PAIR, ACTING = spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,))
BONUS = {"ent_coef": 0.01}
OPTIONS = {
    "ent_coef": 0.02, "clip_range_vf": LinearSchedule(0.3, 0.0, 1.0), "clip_range": LinearSchedule(0.2, 0.0, 1.0),
    "learning_rate": lambda left: 1e-3 * left, "normalize_advantage": False, "batch_size": 24, "max_grad_norm": 0.1,
    "vf_coef": 0.7, "gae_lambda": 0.8, "gamma": 0.9, "n_epochs": 3,
}  # fmt: skip
TINY_CNN = {"features_extractor_kwargs": {"features_dim": 8}}
SHARED, NONE = {"shared_lstm": True, "enable_critic_lstm": False}, {"enable_critic_lstm": False}
OTHER = {"optimizer_class": torch.optim.RMSprop}


class OftenEmpty(MaskedEnv):
    """Masks that in many states allow nothing at all, in a sub-action or in all."""

    step = RandomEnv.step

    def _draw(self) -> Any:
        drawn = super()._draw()
        self.mask &= self.np_random.random(len(self.mask)) < 0.5
        return drawn


class Normalising(FlattenExtractor):
    """Observations by the statistics of their minibatch."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space)
        self.norm = torch.nn.BatchNorm1d(self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(super().forward(observations))
        return normalised


class Case(NamedTuple):
    """`net` goes into `policy_kwargs`; an env whose episodes are `cut` ends by a limit."""

    classes: tuple[Any, Any]
    make: Callable[[], gym.Env]
    settings: dict[str, Any] = {}  # noqa: RUF012
    net: dict[str, Any] = {}  # noqa: RUF012
    steps: int = 16


def env(seen: spaces.Space, acting: spaces.Space, cut: bool = True, kind: Any = RandomEnv) -> Callable[[], gym.Env]:
    return lambda: kind(seen, acting, cut)


def masked(seen: spaces.Space, acting: spaces.Space, cut: bool = True, kind: Any = MaskedEnv) -> Callable[[], gym.Env]:
    return env(seen, acting, cut, kind)


def cart_pole(limit: int | None = None) -> Callable[[], gym.Env]:
    return lambda: gym.make("CartPole-v1", max_episode_steps=limit)


CASES = {
    "masked discrete": Case(MASKED, masked(spaces.Discrete(9), spaces.Discrete(6), cut=False)),
    "masked discrete, cut, bonus": Case(MASKED, masked(BOX, spaces.Discrete(6)), BONUS),
    "masked equal dims": Case(MASKED, masked(BOX, spaces.MultiDiscrete([3, 3, 3]), cut=False), BONUS),
    "masked multi-discrete": Case(MASKED, masked(BOX, spaces.MultiDiscrete([2, 1, 4])), BONUS),
    "masked multi-binary": Case(MASKED, masked(BOX, spaces.MultiBinary(4), cut=False), BONUS),
    "masked, often nothing legal": Case(MASKED, masked(BOX, THREE, kind=OftenEmpty), BONUS),
    "masked, often an empty head": Case(MASKED, masked(BOX, spaces.MultiDiscrete([2, 4]), kind=OftenEmpty), BONUS),
    "masked dict": Case(MASKED, masked(DICT, spaces.Discrete(5), cut=False)),
    "masked dict of bits": Case(MASKED, masked(DICT, spaces.MultiBinary(3))),
    "masked image": Case(MASKED, masked(IMAGE, THREE), {}, TINY_CNN, steps=12),
    "masked, separate extractors": Case(MASKED, masked(DICT, THREE), {}, {"share_features_extractor": False}),
    "masked, all options": Case(MASKED, masked(BOX, spaces.Discrete(6)), OPTIONS),
    "discrete": Case(PLAIN, cart_pole(12), BONUS),
    "discrete, all options": Case(PLAIN, cart_pole(), OPTIONS),
    "multi-discrete": Case(PLAIN, env(BOX, PAIR, cut=False), BONUS),
    "multi-binary": Case(PLAIN, env(BOX, spaces.MultiBinary(3)), BONUS),
    "box": Case(PLAIN, env(BOX, ACTING), BONUS),
    "box, gSDE": Case(PLAIN, env(BOX, ACTING, cut=False), {"use_sde": True, "sde_sample_freq": 4}),
    "box, separate extractors": Case(PLAIN, env(BOX, ACTING), BONUS, {"share_features_extractor": False}),
    "dict": Case(PLAIN, env(DICT, THREE)),
    "discrete observations": Case(PLAIN, env(spaces.Discrete(5), THREE)),
    "image": Case(PLAIN, env(IMAGE, THREE), {}, TINY_CNN, steps=12),
    "image, separate extractors": Case(
        PLAIN, env(IMAGE, THREE, cut=False), {}, {**TINY_CNN, "share_features_extractor": False}, steps=12
    ),
    "another optimizer": Case(PLAIN, cart_pole(), {}, OTHER),
    "memory": Case(MEMORY, cart_pole(9), BONUS, steps=12),
    "memory, two layers": Case(MEMORY, cart_pole(12), {}, {"n_lstm_layers": 2}, steps=12),
    "memory, shared": Case(MEMORY, cart_pole(12), {}, SHARED, steps=12),
    "memory, shared, two layers": Case(MEMORY, cart_pole(), {}, {**SHARED, "n_lstm_layers": 2}, steps=12),
    "memory, no critic LSTM": Case(MEMORY, cart_pole(12), {}, NONE, steps=12),
    "memory, no critic LSTM, two layers": Case(MEMORY, cart_pole(), {}, {**NONE, "n_lstm_layers": 2}, steps=12),
    "memory, box": Case(MEMORY, env(BOX, ACTING), BONUS, steps=12),
    "memory, box, gSDE": Case(MEMORY, env(BOX, ACTING, cut=False), {"use_sde": True, "sde_sample_freq": 4}, steps=12),
    "memory, multi-discrete": Case(MEMORY, env(BOX, PAIR), BONUS, steps=12),
    "memory, dict": Case(MEMORY, env(DICT, THREE), steps=12),
    "memory, dict, separate extractors": Case(
        MEMORY, env(DICT, spaces.MultiDiscrete([2, 2]), cut=False), {}, {"share_features_extractor": False}
    ),
    "memory, image": Case(MEMORY, env(IMAGE, THREE), {}, TINY_CNN, steps=12),
    "memory, image, shared": Case(MEMORY, env(IMAGE, THREE, cut=False), {}, {**TINY_CNN, **SHARED}, steps=12),
    "memory, discrete observations": Case(MEMORY, env(spaces.Discrete(5), THREE), steps=12),
    "memory, all options": Case(MEMORY, cart_pole(14), {**OPTIONS, "batch_size": 30}, {"net_arch": [8]}, steps=12),
    "memory, one minibatch": Case(MEMORY, cart_pole(), {"batch_size": None}, steps=12),
    "memory, dropout": Case(MEMORY, cart_pole(12), {}, {"n_lstm_layers": 2, "lstm_kwargs": {"dropout": 0.3}}, steps=12),
    "memory, another optimizer": Case(MEMORY, cart_pole(), {}, OTHER, steps=12),
    "memory, batch normalisation": Case(MEMORY, cart_pole(12), {}, {"features_extractor_class": Normalising}, steps=12),
}
EACH = pytest.mark.parametrize(
    "case",
    [Case(PLAIN, cart_pole()), Case(MASKED, masked(BOX, spaces.Discrete(5))), Case(MEMORY, cart_pole(12))],
    ids=["plain", "masked", "memory"],
)


def untrained(case: Case, kind: Any, vec: Any = None, **more: Any) -> Any:
    vec, net = vec or seeded_vec(case.make), case.net
    seen: Any = vec.observation_space
    policy = "MultiInput" if isinstance(seen, spaces.Dict) else "Cnn" if seen.shape == IMAGE.shape else "Mlp"
    if case.classes is MEMORY:
        policy, net = policy + "Lstm", {"lstm_hidden_size": 8, **net}
    settings = {"batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu", **case.settings, **more}
    return kind(policy + "Policy", vec, n_steps=case.steps, policy_kwargs=net, **settings)


def trained(case: Case, kind: Any, rollouts: int = 2, **more: Any) -> Any:
    return untrained(case, kind, **more).learn(rollouts * 4 * case.steps)


def difference(one: Any, other: Any) -> float:
    ours, theirs = one.policy.state_dict(), other.policy.state_dict()
    assert list(ours) == list(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def logged(model: Any) -> dict[str, Any]:
    return {key: value for key, value in model.logger.name_to_value.items() if not key.startswith("time/")}


def moments(model: Any) -> list[Any]:
    states = model.get_parameters()["policy.optimizer"]["state"].values()
    return [value for state in states for _, value in sorted(state.items())]


def states(model: Any) -> list[torch.Tensor]:
    return [part for pair in getattr(model, "_last_lstm_states", None) or () for part in pair]


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of", "ignore:no legal action")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_weights_and_log(case: Case):
    ours_class, stock_class = case.classes
    stock, exact = trained(case, stock_class), trained(case, ours_class)
    assert exact.engine.settings == EngineSettings(), "the numbers of stock are the default"
    assert difference(exact, stock) == 0.0
    assert logged(exact) == logged(stock)
    assert exact.num_timesteps == stock.num_timesteps
    for mine, theirs in ((moments(exact), moments(stock)), (states(exact), states(stock))):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    np.testing.assert_array_equal(exact._last_episode_starts, stock._last_episode_starts)
    fast = untrained(case, ours_class, engine="kernels")
    if fast.engine.kind == "kernels":  # they draw other actions; tests/accelerators compares them
        return
    fast.learn(stock.num_timesteps)
    assert difference(fast, stock) <= 1e-5
    assert logged(fast) == {key: pytest.approx(value, rel=1e-3, abs=1e-4) for key, value in logged(stock).items()}
    np.testing.assert_array_equal(fast._last_episode_starts, stock._last_episode_starts)
    if case.classes is MEMORY:
        assert isinstance(exact.engine.new_view(), PaddedView)
        assert isinstance(fast.engine.new_view(), UnpaddedView) is not must_be_padded(fast.policy)


def test_same_weights_without_masking():
    case = CASES["masked, often nothing legal"]  # its env takes any action
    ours, stock = (untrained(case, kind).learn(128, use_masking=False) for kind in case.classes)
    assert difference(ours, stock) == 0.0


@EACH
def test_target_kl_stops_early_at_the_same_minibatch(case: Case):
    settings = {"target_kl": 0.003, "learning_rate": 3e-3, "n_epochs": 6}
    ours, stock = (trained(case, kind, 4, **settings) for kind in case.classes)
    assert ours._n_updates == stock._n_updates < 4 * 6, "it must stop for this test to see anything"
    assert all(map(torch.equal, moments(ours), moments(stock)))
    assert difference(ours, stock) == 0.0
    assert logged(ours) == logged(stock)


def flat(value: Any) -> Any:
    """A copy, whether the algorithm keeps arrays or tensors."""
    return torch.as_tensor(value).flatten().to(torch.float32).numpy().copy()


class Reader(BaseCallback):
    """Copies what a callback may read at every step and at the end of every rollout."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        more = "action_masks" if case.classes is MASKED else "clipped_actions"
        self.step = ("new_obs", "rewards", "dones", "actions", "values", "log_probs", more)
        self.rollout = ["actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns"]
        if case.classes is MEMORY:
            self.rollout += [f"{part}_states_{net}" for part in ("hidden", "cell") for net in ("pi", "vf")]
        self.seen: list[tuple[str, Any]] = []

    def _on_step(self) -> bool:
        assert self.locals["self"] is self.model
        self.seen += [(name, flat(self.locals[name])) for name in self.step]
        self.seen.append(("counters", (self.num_timesteps, self.n_calls, self.locals["n_steps"])))
        for info in self.locals["infos"]:
            episode = {key: info["episode"][key] for key in "rl"} if "episode" in info else None
            self.seen.append(("info", (episode, info.get("TimeLimit.truncated"), "terminal_observation" in info)))
        return True

    def _on_rollout_end(self) -> None:
        self.seen += [(name, flat(getattr(self.locals["rollout_buffer"], name))) for name in self.rollout]


@EACH
def test_a_life_of_several_parts(case: Case):
    """Read by a callback, normalised, learning on, in another env, and counted anew."""
    models, readers = [], []
    for kind in case.classes:  # one after the other: they share torch's random stream
        model, reader = untrained(case, kind, VecNormalize(seeded_vec(case.make))), Reader(case)
        model.learn(128, callback=reader)
        model.learn(64, reset_num_timesteps=False)
        vec = VecNormalize(seeded_vec(case.make))
        vec.seed(7)
        model.set_env(vec)
        model.learn(64, reset_num_timesteps=False)
        assert model.num_timesteps == 256
        assert model.learn(64).num_timesteps == 64
        models.append(model)
        readers.append(reader)
    assert difference(*models) == 0.0
    assert logged(models[0]) == logged(models[1])
    np.testing.assert_array_equal(models[0]._last_obs, models[1]._last_obs)
    for (name, value), (expected_name, expected) in zip(*(reader.seen for reader in readers), strict=True):
        assert name == expected_name
        np.testing.assert_array_equal(value, expected, err_msg=name)


@EACH
def test_saved_loaded_and_continued_with_the_optimizers_state(case: Case, tmp_path: Path):
    """Stock's zip by ours, ours by stock, each by itself: all four go on alike."""
    for index, kind in enumerate(case.classes):
        trained(case, kind, 1).save(tmp_path / str(index))
    continued = []
    for saved in "01":
        for kind in case.classes:
            vec = seeded_vec(case.make)
            vec.seed(7)
            model = kind.load(tmp_path / saved, env=vec, device="cpu")
            assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {2 * 2}
            continued.append(model.learn(64, reset_num_timesteps=False))
    for model in continued[:3]:
        assert model.num_timesteps == 128
        assert difference(model, continued[3]) == 0.0


def test_bits_which_stock_cannot_learn_are_learned_alike_either_way():
    case = Case(MEMORY, env(BOX, spaces.MultiBinary(3)), BONUS)
    with pytest.raises(RuntimeError, match="can't be cast"):
        trained(case, sb3_contrib.RecurrentPPO)
    exact, unpadded = (trained(case, fasttrain.RecurrentPPO, engine=engine) for engine in ("torch", "kernels"))
    assert difference(exact, unpadded) < 1e-5


CONTAINERS = {fasttrain.PPO: JointPPO, fasttrain.MaskablePPO: JointMaskablePPO}
SETTINGS = {"batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu"}


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of")
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("masked discrete, cut, bonus", "torch"),
        ("masked discrete, cut, bonus", "kernels"),
        ("masked, all options", "torch"),
        ("masked, all options", "kernels"),
        ("masked multi-discrete", "torch"),
        ("masked multi-discrete", "kernels"),
        ("multi-discrete", "torch"),
        ("box", "torch"),  # kernels draw normal numbers for a rollout at once, and torch gives others step by step
    ],
)
def test_one_policy_that_decides_everything_is_flat_ppo(name: str, engine: str) -> None:
    case: Case = CASES[name]
    kind, settings = case.classes[0], {**SETTINGS, **case.settings, "n_steps": case.steps}

    def make(env: Any) -> dict[str, Any]:
        return {"all": kind("MlpPolicy", env, **{**settings, "seed": None})}

    flat = kind("MlpPolicy", seeded_vec(case.make), engine=engine, **settings).learn(2 * 4 * case.steps)
    given = {"make": make, "owners": Owners(["all"], [None]), **settings}
    joint: Any = CONTAINERS[kind](seeded_vec(case.make), engine=engine, **given).learn(2 * 4 * case.steps)
    only = joint.members["all"]
    assert only.engine.kind == engine
    # With kernels the values at the ends of cut episodes are computed one by one here, all together there.
    limit = 0.0 if engine == "torch" else 1e-6
    assert difference(only, flat) <= limit
    assert all(torch.allclose(mine, its, atol=limit) for mine, its in zip(moments(only), moments(flat), strict=True))
    own = {key.removeprefix("all/"): value for key, value in logged(joint).items()}
    assert {**own, **logged(flat)} == own if engine == "torch" else {*logged(flat)} <= {*own}
    assert joint.engine.decisions == {"all": 8 * case.steps}


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_one_recurrent_policy_that_decides_everything_is_flat(engine: str) -> None:
    given: dict[str, Any] = {"n_steps": 16, "policy_kwargs": {"lstm_hidden_size": 16, "net_arch": [8]}, **SETTINGS}
    game = lambda: MaskedEnv(spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(4), cut=True)  # noqa: E731
    kind = fasttrain.MaskableRecurrentPPO
    flat = kind("MlpLstmPolicy", seeded_vec(game), engine=engine, **given).learn(192)
    joint: Any = JointMaskableRecurrentPPO(
        seeded_vec(game), make=lambda env: {"all": kind("MlpLstmPolicy", env, **{**given, "seed": None})},
        owners=Owners(["all"], [None]), engine=engine, **given,
    ).learn(192)  # fmt: skip
    only = joint.members["all"]
    assert only.engine.kind == engine
    assert difference(only, flat) <= (0.0 if engine == "torch" else 1e-6)
    assert torch.equal(joint._last_lstm_states.pi[0], flat._last_lstm_states.pi[0]) or engine == "kernels"


class Flagged(PlainEnv):
    """Random observations after a flag, and a reward for one of the actions. Ends after 5 steps, or cut after 7."""

    observation_space, action_space = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)

    def __init__(self, flag: float) -> None:
        self.flag, self.length, self.cut = flag, 5 if flag else 7, not flag

    def seen(self) -> Any:
        self.drawn = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self.drawn[0] = self.flag
        return self.drawn

    def paid(self, action: Any) -> float:
        return float(action == 1) + self.drawn[1]


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of")
def test_two_policies_that_never_meet_are_two_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of actions and minibatches have no stream here, because two trainings have two streams."""
    monkeypatch.setattr(policy_view, "draw", lambda probs: probs.argmax(-1, keepdim=True))
    monkeypatch.setattr(np.random, "permutation", lambda count: np.arange(count)[::-1].copy())
    own: dict[str, dict[str, Any]] = {
        "fast": {"gamma": 0.9, "n_epochs": 3, "batch_size": 7, "policy_kwargs": {"net_arch": [8]}},
        "slow": {"gae_lambda": 0.8, "ent_coef": 0.02, "batch_size": 16, "n_epochs": 2},
    }
    flags = iter([1.0, 1.0, 0.0, 0.0])
    start: dict[str, Any] = {}

    def make(env: Any) -> dict[str, Any]:
        made = {name: fasttrain.PPO("MlpPolicy", env, n_steps=11, device="cpu", **more) for name, more in own.items()}
        start.update({name: {key: each.clone() for key, each in model.policy.state_dict().items()}
                      for name, model in made.items()})  # fmt: skip
        return made

    joint: Any = JointPPO(
        seeded_vec(lambda: Flagged(next(flags))), make=make, owners=Owners([*own], [[0], None]), n_steps=11,
        batch_size=44, seed=3, device="cpu",
    ).learn(4 * 33)  # fmt: skip
    for place, (name, more) in enumerate(own.items()):
        vec = seeded_vec(lambda flag=1.0 - place: Flagged(flag), num_envs=2)
        alone = fasttrain.PPO("MlpPolicy", vec, n_steps=11, seed=3, device="cpu", **more)
        alone.policy.load_state_dict(start[name])
        vec.seed(3 + 2 * place)
        alone.learn(2 * 33)
        assert difference(joint.members[name], alone) == 0.0, name
        assert all(torch.equal(a, b) for a, b in zip(moments(joint.members[name]), moments(alone), strict=True))
