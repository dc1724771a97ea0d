from __future__ import annotations

import inspect
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.envs.make import EnvFactory, EnvSpec, make_env
from fasttrain.errors import EnvSpecError
from messages import assert_says, wrong_inputs

WriteModule = Callable[[str, str], None]

GAME = """
import gymnasium
import plain_env
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm


class Deck:
    pass


class Game(plain_env.PlainEnv):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(3)

    def __init__(self, cards=5, rules=None):
        if cards < 1:
            raise ValueError("cards must be positive")
        self.cards, self.rules = cards, rules

    def told(self):
        return {"bulky": [1] * 100}

    def close(self):
        Game.closed = True
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Write modules into a fresh working directory; registry, sys.path and sys.modules are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    modules, registry = set(sys.modules), set(gymnasium.registry)

    def write(name: str, source: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test's
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")

    yield write
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    for name in set(gymnasium.registry) - registry:
        del gymnasium.registry[name]


def message_of(**spec: Any) -> str:
    with pytest.raises(EnvSpecError) as caught:
        make_env(EnvSpec(**spec))
    return str(caught.value)


def taxi() -> str:
    """The newest Taxi, which older Gymnasiums know under another version."""
    return max(name for name in gymnasium.registry if name.startswith("Taxi-v"))


def test_entry_point_from_a_package_and_from_a_function(write_module: WriteModule, tmp_path: Path) -> None:
    (tmp_path / "pkg_make_b").mkdir()
    build = "\n\ndef build(**kwargs):\n    return Game(**kwargs)\n"
    (tmp_path / "pkg_make_b" / "envs.py").write_text(GAME + build, encoding="utf-8")
    for name in ("Game", "build"):
        env = make_env(EnvSpec(entry_point=f"pkg_make_b.envs:{name}", kwargs={"cards": 3}))
        assert env.unwrapped.cards == 3


def test_kwargs_are_not_shared_between_envs(write_module: WriteModule) -> None:
    write_module("game_make_c", GAME)
    spec = EnvSpec(entry_point="game_make_c:Game", kwargs={"rules": ["trump"]})
    first, second = make_env(spec), make_env(spec)
    first.unwrapped.rules.append("joker")
    assert second.unwrapped.rules == ["trump"]
    assert spec.kwargs == {"rules": ["trump"]}


def test_a_registered_id_is_built_without_the_passive_checker_and_masks_may_be_left_alone() -> None:
    env = make_env(EnvSpec(id="CartPole-v1", kwargs={"sutton_barto_reward": True}))
    assert "PassiveEnvChecker" not in str(env)
    assert env.unwrapped._sutton_barto_reward is True
    assert make_env(EnvSpec(id=taxi(), needs_masks=True)).has_wrapper_attr("action_masks")
    env = make_env(EnvSpec(id=taxi(), use_masks=False))
    assert not env.has_wrapper_attr("action_masks")
    assert "action_mask" in env.reset(seed=3)[1]


@pytest.mark.parametrize("by_id", [True, False])
def test_max_episode_steps_truncates(write_module: WriteModule, by_id: bool) -> None:
    write_module("game_make_d", GAME + "gymnasium.register('MakeD-v0', entry_point=Game)\n")
    name = {"id": "game_make_d:MakeD-v0"} if by_id else {"entry_point": "game_make_d:Game"}
    env = make_env(EnvSpec(**name, max_episode_steps=2))
    env.reset(seed=1)
    assert [env.step(0)[3] for _ in range(2)] == [False, True]


WRAPPERS = """
import gymnasium


class Noisy(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation + 1, reward * 2, *rest


class Needy(gymnasium.Wrapper):
    def __init__(self, env, scale):
        super().__init__(env)


def broken(env):
    return {}[env.unwrapped.cards]


def nothing(env):
    return None


def leaves(env):
    raise SystemExit(2)


class Box:
    Inner = Noisy


LIMIT = 3
"""


def test_users_wrappers_lie_inside_masks_and_lean_info_outside_the_limit(write_module: WriteModule) -> None:
    write_module("game_make_t", GAME + "\n    def action_masks(self):\n        return [True] * 3\n")
    write_module("wrap_make_t", WRAPPERS)
    entries = ("wrap_make_t:Noisy", "wrap_make_t:Box.Inner", "gymnasium.wrappers:RecordEpisodeStatistics")
    env: Any = make_env(EnvSpec(entry_point="game_make_t:Game", wrappers=entries, max_episode_steps=1, lean_info=True))
    names = []
    while isinstance(env, gymnasium.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    assert names == ["LeanInfo", "ActionMasks", "RecordEpisodeStatistics", "Noisy", "Noisy", "TimeLimit"]
    env = make_env(EnvSpec(entry_point="game_make_t:Game", wrappers=entries[:2]))
    env.reset()
    assert env.step(0)[0].tolist() == [2.0, 2.0]
    assert env.step(0)[1] == 4.0


@pytest.mark.parametrize(
    ("space", "given"),
    [("Discrete(3, dtype=np.int32)", np.int64(2)), ("MultiDiscrete([2, 3], dtype=np.int16)", np.array([1, 2]))],
)
def test_actions_are_of_the_integers_of_their_space(write_module: WriteModule, space: str, given: Any) -> None:
    if space.startswith("Discrete") and "dtype" not in inspect.signature(gymnasium.spaces.Discrete).parameters:
        pytest.skip("Gymnasium 1.1 and 1.2 have Discrete spaces of int64 alone")
    write_module(
        "exact",
        "import gymnasium, numpy as np\n"
        "from gymnasium.spaces import Box, Discrete, MultiDiscrete\n"
        "class Exact(gymnasium.Env):\n"
        "    observation_space = Box(0, 1, (1,), np.float32)\n"
        f"    action_space = {space}\n"
        "    def step(self, action):\n"
        "        assert self.action_space.contains(action), action\n"
        "        return np.zeros(1, np.float32), 0.0, False, False, {}\n",
    )
    make_env(EnvSpec(entry_point="exact:Exact", use_masks=False)).step(given)


def test_looking_for_masks_keeps_the_global_random_streams(write_module: WriteModule) -> None:
    write_module(
        "game_make_e", GAME + "\n    def reset(self, **_):\n        return plain_env.np.random.random(2), {}\n"
    )
    np.random.seed(5)
    expected = np.random.random(2)
    np.random.seed(5)
    make_env(EnvSpec(entry_point="game_make_e:Game"))
    assert np.array_equal(np.random.random(2), expected)


def test_neither_or_both_names() -> None:
    for spec in ({}, {"id": "CartPole-v1", "entry_point": "a:B"}):
        with pytest.raises(EnvSpecError, match=r"one of env\.id .* and env\.entry_point"):
            EnvSpec(**spec)


def test_a_missing_dependency_and_a_missing_version_are_told() -> None:
    assert "`v1`" in message_of(id="CartPole-v9")
    if find_spec("mujoco") is None:
        message = message_of(id="Ant-v5")
        assert "needs a package that is not installed" in message
        assert "gymnasium[mujoco]" in message


MODULES = {
    "game": GAME
    + """
LIMIT = 3


class Old:
    def reset(self): return 0
    def step(self, action): return 0, 0.0, False, {}


class Duel(Old):
    possible_agents = ['a', 'b']


class Spaceless(Game):
    action_space = 3


def needs(cards):
    pass


def chained():
    try:
        {}[1]
    except KeyError as error:
        raise OSError('a') from error


gymnasium.register('Make-v0', entry_point=Game)
gymnasium.register('Old-v0', entry_point=Old)
""",
    "parts": WRAPPERS,
    "lacks": "import no_such_engine\n",
    "raises": "x = 1\nraise RuntimeError('no licence')\n",
    "broken": "def broken(:\n",
    "leaves": "import sys\nsys.exit(3)\n",
}


def spec_of(text: str) -> EnvSpec:
    """Of `id=` or `entry_point=`, and what follows: `masks`, wrappers of the module parts, arguments that are 1."""
    name, *more = text.split()
    kind, named = name.split("=")
    wrappers = [word for word in more if word.startswith("parts")]
    kwargs = {word.removesuffix("=1"): 1 for word in more if word.endswith("=1")}
    return EnvSpec(**{kind: named}, kwargs=kwargs, wrappers=tuple(wrappers), needs_masks="masks" in more)


@pytest.mark.parametrize("text", wrong_inputs("envs that cannot be built"))
def test_a_wrong_name_is_told_with_a_way_out(write_module: WriteModule, tmp_path: Path, text: str) -> None:
    for name, source in MODULES.items():
        write_module(name, source)
    (tmp_path / "src" / "inner").mkdir(parents=True)
    with pytest.raises(EnvSpecError) as told:
        make_env(spec_of(text))
    assert_says("envs that cannot be built", text, str(told.value).replace(str(tmp_path), "FOLDER"))
    assert "parts" not in text or sys.modules["game"].Game.closed is True


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize(("cards", "error"), [(0, "ValueError: cards must be positive"), ("x", "TypeError: '<' not")])
def test_constructor_that_raises_is_located(write_module: WriteModule, by_id: bool, cards: Any, error: str) -> None:
    write_module("game_make_n", GAME + "gymnasium.register('MakeN-v0', entry_point=Game)\n")
    name = {"id": "game_make_n:MakeN-v0"} if by_id else {"entry_point": "game_make_n:Game"}
    message = message_of(**name, kwargs={"cards": cards})
    assert f"could not be built with env.kwargs.cards={cards!r}: {error}" in message
    line = GAME[: GAME.index("if cards < 1" if cards == "x" else "raise ValueError")].count("\n") + 1
    wrapped = "was raised from the environment creator" in message  # by Gymnasium 1.1 and 1.2, without the place
    assert wrapped or f"(game_make_n.py:{line}, in __init__)" in message


def test_env_that_fails_its_checks_is_closed(write_module: WriteModule) -> None:
    write_module("game_make_q", GAME + "        raise OSError('second error')\n")
    assert "offers no action masks" in message_of(entry_point="game_make_q:Game", needs_masks=True)
    assert sys.modules["game_make_q"].Game.closed is True


def test_factory_pickles_both_ways_and_remembers_its_folder(
    write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module("game_make_s", GAME)
    factory = EnvFactory(EnvSpec(entry_point="game_make_s:Game"))
    monkeypatch.chdir(tmp_path.parent)
    for copied in (pickle.loads(pickle.dumps(factory)), cloudpickle.loads(cloudpickle.dumps(factory))):
        assert copied.spec == factory.spec
        assert copied().unwrapped.cards == 5
    assert repr(factory) == "EnvFactory(env.entry_point=game_make_s:Game)"


RESETS = """
import gymnasium
import plain_env
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm


class Plain(plain_env.PlainEnv):
    observation_space = spaces.Discrete(1000)

    def step(self, action):
        return 0, 0.0, False, False, {}


class Seeded(Plain):
    def reset(self, seed=None):
        super().reset(seed=seed)
        return int(self.np_random.integers(1000)), None


class Bare(Plain):
    def reset(self):
        return int(self.np_random.integers(1000)), {}


class Ported(Plain):
    first = 0

    def seed(self, seed):
        self.first = seed

    def reset(self):
        return self.first, {}


def limited(name):
    return gymnasium.wrappers.TimeLimit(globals()[name](), 5)
"""


@pytest.mark.parametrize("name", ["Seeded", "Bare", "Ported"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_reset_need_not_take_what_wrappers_hand_to_it(write_module: WriteModule, name: str, inside: bool):
    write_module("resets", RESETS)
    entry = {"entry_point": "resets:limited", "kwargs": {"name": name}} if inside else {"entry_point": f"resets:{name}"}
    env = make_env(EnvSpec(**entry, lean_info=True, max_episode_steps=5))
    first = env.reset(seed=7, options={"level": 2})[0]
    assert first == env.reset(seed=7)[0] != env.reset(seed=8)[0]
    assert env.step(0)[1] == 0.0
    assert type(env.unwrapped).__name__ == name


OLD_STYLE = """
class Game:
    from gymnasium import spaces
    observation_space = action_space = spaces.Discrete(2)

    def num_envs(self):
        return 1

    def reset(self):
        return 0

    def step(self, action):
        return 0, 0.0, False, {}
"""


def test_a_method_called_num_envs_makes_no_vector_env(write_module: WriteModule):
    write_module("old_style", OLD_STYLE)
    assert make_env(EnvSpec(entry_point="old_style:Game")).reset(seed=3) == (0, {})


TRAINS = """
import gymnasium
from stable_baselines3 import PPO

Coin = None
model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
model.{train}
model.save("coin_agent")
"""


OURS = "from fasttrain import train\ntrain('trains_ours:Coin')\n"
OWN = "class Own(PPO):\n    def learn(self, steps):\n        self.num_timesteps += steps\n        return self\n\n"
OWN_LOOP = TRAINS.replace("Coin = None\nmodel = PPO", f"{OWN}Coin = None\nmodel = Own")


@pytest.mark.parametrize(
    ("name", "text", "train"),
    [("trains_itself", TRAINS, "learn(16)"), ("trains_ours", OURS, ""),
     ("22_trains", TRAINS, "__class__.learn(model, 16)"), ("trains_its_way", OWN_LOOP, "learn(16)")],
)  # fmt: skip
def test_a_module_that_trains_while_it_is_imported_is_stopped(
    write_module: WriteModule, tmp_path: Path, name: str, text: str, train: str
):
    write_module(name, text.format(train=train))
    where = rf"importing module .{name}. trains a model: .*__main__.*{name}.py:"
    with pytest.raises(EnvSpecError, match=where):
        make_env(EnvSpec(entry_point=f"{name}:Coin"))
    assert not (tmp_path / "coin_agent.zip").exists()
    assert BaseAlgorithm.__getattribute__ is object.__getattribute__, "it learns again"


def test_a_module_that_goes_on_after_that_is_told_at_its_end(write_module: WriteModule):
    write_module("goes_on", TRAINS.format(train="n_steps\ntry:\n    model.learn(16)\nexcept Exception:\n    pass"))
    with pytest.raises(EnvSpecError, match=r"importing module .goes_on. trains a model: .*__main__"):
        make_env(EnvSpec(entry_point="goes_on:Coin"))


def test_an_sb3_that_the_module_loads_first_is_stopped_as_well(
    write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a worker, which has not loaded it; here a small one stands for it."""
    base = "class BaseAlgorithm:\n    def __init__(self, *_, **__): pass\n    def learn(self, steps): pass\n"
    (tmp_path / "stable_baselines3" / "common").mkdir(parents=True)
    (tmp_path / "stable_baselines3" / "common" / "base_class.py").write_text(base)
    (tmp_path / "stable_baselines3" / "__init__.py").write_text("from .common.base_class import BaseAlgorithm as PPO\n")
    write_module("trains_itself", TRAINS.format(train="learn(16)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "stable_baselines3"]:
            del sys.modules[name]
        with pytest.raises(EnvSpecError, match=r"importing module .trains_itself. trains a model: put the training"):
            make_env(EnvSpec(entry_point="trains_itself:Coin"))


def test_a_file_that_is_called_as_a_module_of_pythons_is_named(write_module: WriteModule, tmp_path: Path):
    write_module("queue", OLD_STYLE)
    with pytest.raises(EnvSpecError, match=r"queue.py hides Python's own module of that name; rename it"):
        make_env(EnvSpec(entry_point="queue:Game"))
    assert sys.path.index(str(tmp_path)) > sys.path.index(str(Path(multiprocessing.__file__).parent.parent))
