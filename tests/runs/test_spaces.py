from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv
from torch.optim import Adam

from conftest import configured
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.models import build_algorithm, load_policy
from fasttrain.runs.spaces import check_policy, check_spaces
from messages import assert_says, wrong_inputs
from plain_env import PlainEnv

IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
NUMBERS = spaces.Box(-1, 1, (3,))
SMALL = spaces.Box(0, 255, (7, 9, 3), np.uint8)
DICT = spaces.Dict({"seen": NUMBERS, "seat": spaces.Discrete(4), "board": IMAGE})
GOAL = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), NUMBERS))
GLOW = spaces.Box(0, 1, (1, 36, 36))
SCALED = "algo.policy_kwargs.normalize_images=false"


@pytest.mark.parametrize(
    ("arguments", "action", "observation", "text"),
    [
        (("algo=dqn",), spaces.MultiDiscrete([2, 2]), NUMBERS, "E has MultiDiscrete.*algo=dqn needs Discrete; use"),
        (("algo=ppo",), spaces.Discrete(3, start=1), NUMBERS, "E counts its actions from 1; SB3 sends 0 to n - 1"),
        (("algo=ppo",), spaces.MultiDiscrete([2, 2], start=[0, 4]), NUMBERS, r"counts its actions from \[0 4\]"),
        (("algo=ppo",), spaces.Discrete(2), spaces.Sequence(NUMBERS), "E observes Sequence.*read Box, Discrete"),
        (("algo=ppo",), spaces.Discrete(2), spaces.Dict({"x": spaces.Text(3)}), r"E observes Text\("),
        (("algo=dqn", "algo.her=final"), spaces.Discrete(2), DICT, "goal env.*E observes .* without observation and"),
        (("algo=dqn", "algo.her=final", "algo.n_steps=2"), spaces.Discrete(2), GOAL, "use algo.n_steps=1, not 2"),
        (("algo=sac", "algo.her=final", "action_repeat=3"), NUMBERS, GOAL, "use action_repeat=1, not 3"),
        (("algo=ppo", "algo.policy=MlpPolicy"), spaces.Discrete(2), DICT, "algo.policy=MlpPolicy does not suit E"),
        (("algo=ppo", "algo.policy=CnnPolicy"), spaces.Discrete(2), NUMBERS, "CnnPolicy needs images"),
        (("algo=ppo", "env.frame_stack=2"), spaces.Discrete(2), spaces.Discrete(4), "env.frame_stack=2 stacks arrays"),
        (("algo=ppo", "algo.use_sde=true"), spaces.Discrete(2), NUMBERS, "algo.use_sde=true is for numbers .Box., E h"),
        (("algo=ppo", "env.frame_stack=2"), spaces.Discrete(2), DICT, "env.frame_stack=2 stacks arrays"),
        (("algo=ppo",), spaces.Discrete(2), SMALL, r"E: Box\(0, .* is too small for NatureCNN; use algo.policy=Mlp"),
        (("algo=ppo",), spaces.Discrete(2), spaces.Dict({"seen": SMALL, "age": NUMBERS}), "too small for NatureCNN"),
        (("algo=ppo", "env.normalize=[obs]"), spaces.Discrete(2), IMAGE, r"env.normalize=\[obs\] is for numbers"),
        (("algo=ppo",), spaces.MultiDiscrete([[2, 3], [4, 5]]), NUMBERS, "SB3 supports one dimension only: flatten"),
        (("algo=ppo",), spaces.Tuple((spaces.Discrete(2),)), NUMBERS, "turn them into MultiDiscrete or Box in the env"),
        (("algo=sac",), spaces.Discrete(2), NUMBERS, "algo=sac needs Box; use another algo: maskable_ppo, ppo, dqn,"),
        (("algo=sac",), spaces.Box(-1, np.inf, (2,)), NUMBERS, "SB3 needs at least one number and finite bounds"),
        (("algo=ddpg",), spaces.Box(0, 9, (2,), np.int64), NUMBERS, "algo=ddpg adds noise to them"),
        (("algo=sac",), spaces.Box(-1, 1, (2,), np.dtype(">f4")), NUMBERS, "torch has no numbers of >f4"),
    ],
)
def test_spaces_that_do_not_suit(
    arguments: tuple[str, ...], action: spaces.Space[Any], observation: spaces.Space[Any], text: str
):
    with pytest.raises((ConfigError, EnvSpecError), match=text):
        check_spaces(configured("env.id=CartPole-v1", *arguments), "E", action, observation)


def test_spaces_that_suit():
    for argument, observation in (
        ("env.normalize=[reward]", IMAGE),
        ("env.normalize=[obs]", DICT),
        ("env.frame_stack=4", IMAGE),
        ("algo.policy=MlpPolicy", SMALL),
        ("algo.policy=my:Policy", SMALL),
        ("algo.policy_kwargs.features_extractor_class=my:Own", SMALL),
    ):
        config = configured("env.id=CartPole-v1", "algo=ppo", argument)
        check_spaces(config, "E", spaces.Discrete(2), observation)


class Seen(PlainEnv):
    """Draws what it shows from its observation space; four steps long."""

    length = 4

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space

    def seen(self) -> Any:
        return self.observation_space.sample()


def shown(space: spaces.Space[Any], key: str = "") -> spaces.Space[Any]:
    return spaces.Dict({key: space, "other": NUMBERS}) if key else space


# What Stable-Baselines3 makes of each was tried with it: these it learns from, and fasttrain too.
LEARNED = {
    "uint16": spaces.Box(0, 60_000, (4,), np.uint16), "bool": spaces.Box(0, 1, (4,), np.bool_),
    "float16": spaces.Box(-1, 1, (4,), np.float16), "int64": spaces.Box(-(2**62), 2**62, (2,), np.int64),
    "column": spaces.Box(-1, 1, (4, 1)), "flags": spaces.MultiBinary([3, 4]), "one": spaces.Discrete(1),
    "images": spaces.Box(0, 255, (2, 3, 8, 8), np.uint8), "choices": spaces.MultiDiscrete([3, 2]),
    "key": shown(spaces.MultiBinary(3), "flags"), "kind": shown(spaces.Discrete(3), "two words"),
}  # fmt: skip


LEARN = {
    "ppo": ["algo.rollout_size=8", "batch_size=8"],
    "dqn": ["warmup_steps=4", "algo.buffer_size=64", "batch_size=4"],
}


def built(algo: str, space: spaces.Space[Any], *arguments: str) -> Any:
    config = configured("env.id=CartPole-v1", f"algo={algo}", "num_envs=1", *LEARN[algo], *arguments)
    check_spaces(config, "E", Seen.action_space, space)
    check_policy(config, space)
    return build_algorithm(config, DummyVecEnv([lambda: Seen(space)]), PhaseClock())


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
@pytest.mark.parametrize("name", LEARNED)
def test_what_stock_learns_from_ours_learns_from_and_acts_on(algo: str, name: str):
    model = built(algo, LEARNED[name], "engine=fast").learn(16)
    model.predict(LEARNED[name].sample())


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Discrete(6, start=1), r"Discrete\(6, start=1\).*SB3 reads 0 to n - 1: subtract"),
        (spaces.MultiDiscrete([6, 6], start=[0, 1]), "SB3 reads 0 to n - 1"),
        (spaces.MultiDiscrete([[3, 4], [5, 6]]), "SB3 reads one dimension of choices: flatten it"),
        (spaces.Box(-1, 1, ()), r"a number without a dimension: give it the shape \(1,\)"),
        (spaces.Box(-1, 1, (0,)), "which holds nothing: remove it"),
        (spaces.Box(-1, 1, (4,), np.dtype(">f4")), "torch has no numbers of >f4: make them"),
        (spaces.Box(-1, 1, (4,), np.longdouble), "torch has no numbers of "),
        (spaces.Dict({"in": NUMBERS}), "SB3's policies read Box"),
    ],
)
def test_what_stock_cannot_read_is_refused_alone_and_under_a_key(space: spaces.Space[Any], text: str):
    config = configured("env.id=CartPole-v1", "algo=ppo")
    if not isinstance(space, spaces.Dict):
        with pytest.raises(EnvSpecError, match=f"E observes .*{text}"):
            check_spaces(config, "E", Seen.action_space, space)
    with pytest.raises(EnvSpecError, match=rf"under the key 'die' of its observation, .*{text[-20:]}"):
        check_spaces(config, "E", Seen.action_space, shown(space, "die"))


@pytest.mark.parametrize("key", ["type", "agent.pos", "values", "training", ""])
def test_keys_that_torch_refuses(key: str):
    observation = spaces.Dict({key: NUMBERS, "time": NUMBERS})
    with pytest.raises(KeyError if key else (KeyError, ValueError)):  # else the rule would be needless
        PPO("MultiInputPolicy", Seen(observation), n_steps=8, batch_size=8)
    with pytest.raises(EnvSpecError, match=f"key {key!r} of its observation, and torch takes no network of that name"):
        check_spaces(configured("env.id=CartPole-v1", "algo=ppo"), "E", Seen.action_space, observation)


def test_the_policy_fits_the_observations():
    def policy(observation: spaces.Space[Any], *arguments: str) -> str:
        config = configured("env.id=CartPole-v1", "algo=ppo", *arguments)
        return check_spaces(config, "E", Seen.action_space, observation)

    assert [policy(each) for each in (IMAGE, DICT, NUMBERS)] == ["CnnPolicy", "MultiInputPolicy", "MlpPolicy"]
    assert policy(IMAGE, "algo.policy=MlpPolicy") == "MlpPolicy"
    assert (policy(GLOW), policy(GLOW, SCALED)) == ("MlpPolicy", "CnnPolicy")
    with pytest.raises(ConfigError, match=r"CnnPolicy needs images: .*algo.policy_kwargs.normalize_images=false"):
        policy(GLOW, "algo.policy=CnnPolicy")
    with pytest.raises(ConfigError, match="too small for NatureCNN"):  # SB3 moves no channels of such images
        policy(spaces.Box(0, 1, (36, 36, 1)), SCALED)


@pytest.mark.parametrize("argument", wrong_inputs("algo.policy_kwargs"))
def test_policy_arguments_that_cannot_be(argument: str):
    with pytest.raises((ConfigError, EnvSpecError)) as told:
        check_policy(configured("env.id=CartPole-v1", "algo=ppo", f"algo.policy_kwargs.{argument}"), NUMBERS)
    assert_says("algo.policy_kwargs", argument, str(told.value))


class Halves(torch.nn.Module):
    """No BaseFeaturesExtractor, which stock does not ask for."""

    features_dim = 4

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.net = torch.nn.Linear(space.shape[0], self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.net(observations)


def halves(space: spaces.Box) -> torch.nn.Module:
    return Halves(space)


def slow_adam(parameters: Any, **further: Any) -> Adam:
    return Adam(parameters, **{**further, "lr": 1e-5})


@pytest.mark.parametrize("engine", ["fast", "stock"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_what_stock_is_built_of_is_no_less_here(engine: str, algo: str):
    extractor = "Halves" if engine == "fast" else "halves"
    named = {"features_extractor_class": f"{__name__}:{extractor}", "optimizer_class": f"{__name__}:slow_adam",
             "activation_fn": "torch.nn:Mish"}  # fmt: skip
    typed = [f"algo.policy_kwargs.{name}={value}" for name, value in named.items()]
    model = built(algo, NUMBERS, f"engine={engine}", *typed).learn(16)
    assert model.policy.optimizer.defaults["lr"] == 1e-5
    assert {Halves, torch.nn.Mish} <= {type(part) for part in model.policy.modules()}


def test_a_function_in_place_of_a_class_is_known_again_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = f"algo.policy_kwargs.features_extractor_class={__name__}:halves"
    config = configured("env.id=CartPole-v1", "algo=ppo", "num_envs=1", *LEARN["ppo"], named)
    model = build_algorithm(config, DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]), PhaseClock())
    model.save(tmp_path / "model.zip")
    elsewhere = FunctionType(halves.__code__, globals(), "halves")  # where it has another address
    monkeypatch.setitem(globals(), "halves", elsewhere)
    loaded = load_policy(config, tmp_path / "model.zip")
    assert torch.equal(*(each.policy.features_extractor.net.weight for each in (model, loaded)))  # type: ignore[union-attr]


def test_a_network_that_is_not_for_such_observations_is_told_in_one_sentence():
    for extractor, text in (
        ("stable_baselines3.common.torch_layers:NatureCNN", "AssertionError: You should use NatureCNN only with im"),
        ("torch.nn:Flatten", "AttributeError: 'Flatten' object has no attribute 'features_dim'"),
    ):
        with pytest.raises(ConfigError, match=f"{extractor.partition(':')[2]}'}}: {text}"):
            built("ppo", NUMBERS, f"algo.policy_kwargs.features_extractor_class={extractor}")
