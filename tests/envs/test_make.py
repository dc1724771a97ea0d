"""Building envs from names: what works, and what a wrong name or a broken env is told."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.envs.make import EnvFactory, EnvSpec, make_env
from fasttrain.envs.masks import ActionMasks
from fasttrain.envs.wrappers import LeanInfo
from fasttrain.errors import EnvSpecError

WriteModule = Callable[[str, str], None]

GAME = """
import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm


class Deck:
    pass


class Game(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(3)

    def __init__(self, cards=5, rules=None):
        if cards < 1:
            raise ValueError("cards must be positive")
        self.cards, self.rules = cards, rules

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {"bulky": [1] * 100}
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Write modules into a fresh working directory; registry, sys.path and sys.modules are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    modules, registry = set(sys.modules), set(gymnasium.registry)

    def write(name: str, source: str) -> None:
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


def test_registered_id_is_built_without_the_passive_checker() -> None:
    env = make_env(EnvSpec(id="CartPole-v1", kwargs={"sutton_barto_reward": True}))
    assert "PassiveEnvChecker" not in str(env)
    assert env.unwrapped._sutton_barto_reward is True  # type: ignore[attr-defined]


def test_id_with_module_imports_it_from_the_working_directory(write_module: WriteModule) -> None:
    registers = "import gymnasium\ngymnasium.register('MakeA-v0', entry_point=Game, max_episode_steps=9)\n"
    write_module("game_make_a", GAME + registers)
    env = make_env(EnvSpec(id="game_make_a:MakeA-v0", kwargs={"cards": 7}))
    assert env.unwrapped.cards == 7  # type: ignore[attr-defined]


def test_entry_point_from_a_package_and_from_a_function(write_module: WriteModule, tmp_path: Path) -> None:
    (tmp_path / "pkg_make_b").mkdir()
    build = "\n\ndef build(**kwargs):\n    return Game(**kwargs)\n"
    (tmp_path / "pkg_make_b" / "envs.py").write_text(GAME + build, encoding="utf-8")
    for name in ("Game", "build"):
        env = make_env(EnvSpec(entry_point=f"pkg_make_b.envs:{name}", kwargs={"cards": 3}))
        assert env.unwrapped.cards == 3  # type: ignore[attr-defined]


def test_kwargs_are_not_shared_between_envs(write_module: WriteModule) -> None:
    write_module("game_make_c", GAME)
    spec = EnvSpec(entry_point="game_make_c:Game", kwargs={"rules": ["trump"]})
    first, second = make_env(spec), make_env(spec)
    first.unwrapped.rules.append("joker")  # type: ignore[attr-defined]
    assert second.unwrapped.rules == ["trump"]  # type: ignore[attr-defined]
    assert spec.kwargs == {"rules": ["trump"]}


@pytest.mark.parametrize("by_id", [True, False])
def test_max_episode_steps_truncates(write_module: WriteModule, by_id: bool) -> None:
    write_module("game_make_d", GAME + "gymnasium.register('MakeD-v0', entry_point=Game)\n")
    name = {"id": "game_make_d:MakeD-v0"} if by_id else {"entry_point": "game_make_d:Game"}
    env = make_env(EnvSpec(**name, max_episode_steps=2))  # type: ignore[arg-type]
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
    ("entry", "text"),
    [
        ("wrap_make_u:Nois", "wrappers entry wrap_make_u:Nois: module 'wrap_make_u' has no 'Nois'; did you mean 'N"),
        ("wrap_make_u", r"env\.wrappers entry wrap_make_u: expected module:Name, e\.g\. my_game\.parts:Mine"),
        ("wrap_mak_u:Noisy", "entry wrap_mak_u:Noisy: no module named 'wrap_mak_u'.*did you mean 'wrap_make_u'"),
        ("wrap_make_u:LIMIT", "expected a class or function, it is 3"),
        (
            "wrap_make_u:broken",
            r"wrap_make_u:broken could not wrap <Noisy<Game.*KeyError: 5 \(wrap_make_u.py:\d+, in b",
        ),
        ("wrap_make_u:Needy", "could not wrap .*TypeError: .*missing 1 required positional argument: 'scale'"),
        ("wrap_make_u:leaves", r"leaves could not wrap .*SystemExit: 2 \(wrap_make_u.py"),
        ("wrap_make_u:nothing", "must return a gymnasium.Env, it returned None"),
    ],
)
def test_wrappers_that_cannot_be_used(write_module: WriteModule, entry: str, text: str) -> None:
    closes = "\n    def close(self):\n        Game.closed = True\n"
    write_module("game_make_u", GAME + closes)
    write_module("wrap_make_u", WRAPPERS)
    with pytest.raises(EnvSpecError, match=text):
        make_env(EnvSpec(entry_point="game_make_u:Game", wrappers=("wrap_make_u:Noisy", entry)))
    assert sys.modules["game_make_u"].Game.closed is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("space", "given"),
    [("Discrete(3, dtype=np.int32)", np.int64(2)), ("MultiDiscrete([2, 3], dtype=np.int16)", np.array([1, 2]))],
)
def test_actions_are_of_the_integers_of_their_space(write_module: WriteModule, space: str, given: Any) -> None:
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


def test_masks_are_found_and_lean_info_lies_outside(write_module: WriteModule) -> None:
    env = make_env(EnvSpec(id=taxi(), lean_info=True, needs_masks=True))
    assert isinstance(env, LeanInfo)
    assert isinstance(env.env, ActionMasks)
    _, info = env.reset(seed=3)
    assert info == {}
    assert env.get_wrapper_attr("action_masks")().dtype == np.bool_


def test_use_masks_false_leaves_the_env_alone() -> None:
    env = make_env(EnvSpec(id=taxi(), use_masks=False))
    assert not env.has_wrapper_attr("action_masks")
    assert "action_mask" in env.reset(seed=3)[1]


def test_looking_for_masks_keeps_the_global_random_streams(write_module: WriteModule) -> None:
    write_module("game_make_e", GAME.replace("super().reset(seed=seed)", "np.random.random()"))
    np.random.seed(5)
    expected = np.random.random(2)
    np.random.seed(5)
    make_env(EnvSpec(entry_point="game_make_e:Game"))
    assert np.array_equal(np.random.random(2), expected)


# --- what a wrong name is told


def test_neither_or_both_names() -> None:
    for spec in ({}, {"id": "CartPole-v1", "entry_point": "a:B"}):
        with pytest.raises(EnvSpecError, match=r"one of env\.id .* and env\.entry_point"):
            EnvSpec(**spec)


def test_unknown_id_suggests_the_nearest() -> None:
    message = message_of(id="CartPol-v1")
    assert "env.id=CartPol-v1 is not registered" in message
    assert "'CartPole-v1'" in message


def test_unknown_version_names_the_known_ones() -> None:
    assert "`v1`" in message_of(id="CartPole-v9")


def test_unknown_namespace_says_how_to_name_the_package() -> None:
    assert "env.id=package:Zzz/Qqqqq-v5" in message_of(id="Zzz/Qqqqq-v5")


@pytest.mark.skipif(find_spec("mujoco") is not None, reason="the dependency is there")
def test_missing_dependency_says_how_to_install_it() -> None:
    message = message_of(id="Ant-v5")
    assert "needs a package that is not installed" in message
    assert "gymnasium[mujoco]" in message


def test_module_of_an_id_that_does_not_register_it(write_module: WriteModule) -> None:
    write_module("game_make_f", GAME + "gymnasium.register('MakeF-v0', entry_point=Game)\n")
    assert "'game_make_f' registered: MakeF-v0" in message_of(id="game_make_f:MakF-v0")
    assert "use env.entry_point=game_make_f:Game" in message_of(id="game_make_f:Game")


def test_module_not_there_names_folder_and_near_file(write_module: WriteModule, tmp_path: Path) -> None:
    write_module("game_make_g", GAME)
    message = message_of(entry_point="gamee_make_g:Game")
    assert "no module named 'gamee_make_g'" in message
    assert str(tmp_path) in message
    assert "'game_make_g'" in message


def test_module_under_src_says_how_to_make_it_importable(write_module: WriteModule, tmp_path: Path) -> None:
    (tmp_path / "src" / "game_make_h").mkdir(parents=True)
    assert "pip install -e ." in message_of(entry_point="game_make_h.envs:Game")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import no_such_engine\n", ["ModuleNotFoundError", "no_such_engine", "game_make_i.py:1"]),
        ("x = 1\nraise RuntimeError('no licence')\n", ["RuntimeError: no licence", "game_make_i.py:2"]),
        ("def broken(:\n", ["SyntaxError", "game_make_i.py, line 1"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit: 3", "game_make_i.py:2"]),
    ],
)
def test_module_that_fails_on_import(write_module: WriteModule, source: str, parts: list[str]) -> None:
    write_module("game_make_i", source)
    message = message_of(entry_point="game_make_i:Game")
    assert "importing module 'game_make_i' failed" in message
    assert all(part in message for part in parts), message


def test_entry_point_without_colon() -> None:
    assert "expected module:Name" in message_of(entry_point="my_game")


def test_missing_attribute_suggests_names_of_the_module(write_module: WriteModule) -> None:
    write_module("game_make_j", GAME + "gymnasium.register('MakeJ-v0', entry_point=Game)\n")
    assert "has no 'Gamee'; did you mean 'Game'?" in message_of(entry_point="game_make_j:Gamee")
    assert "envs there: Game" in message_of(entry_point="game_make_j:Wxyz")
    assert "use env.id=game_make_j:MakeJ-v0" in message_of(entry_point="game_make_j:MakeJ-v0")


def test_things_that_are_no_env(write_module: WriteModule) -> None:
    old = "class Old:\n    def reset(self): return 0\n    def step(self, action): return 0, 0.0, False, {}\n"
    write_module("game_make_k", GAME + "LIMIT = 3\n\n" + old + "gymnasium.register('MakeK-v0', entry_point=Old)\n")
    assert "it is 3" in message_of(entry_point="game_make_k:LIMIT")
    assert "not a gymnasium.Env but game_make_k.Deck;" in message_of(entry_point="game_make_k:Deck")
    message = message_of(id="game_make_k:MakeK-v0")
    assert "not a gymnasium.Env but game_make_k.Old" in message
    assert "step returns 4 values" in message
    told = "taken for an env of the old gym interface: 'Old' object has no attribute 'observation_space'"
    assert told in message_of(entry_point="game_make_k:Old")


@pytest.mark.parametrize("by_id", [True, False])
def test_wrong_kwargs_name_the_accepted_ones(write_module: WriteModule, by_id: bool) -> None:
    write_module("game_make_l", GAME + "gymnasium.register('MakeL-v0', entry_point=Game)\n")
    name = {"id": "game_make_l:MakeL-v0"} if by_id else {"entry_point": "game_make_l:Game"}
    message = message_of(**name, kwargs={"card": 1})
    assert "unknown env.kwargs.card; did you mean 'cards'?" in message
    assert "Game accepts: cards=5, rules=None" in message


def test_missing_kwargs(write_module: WriteModule) -> None:
    write_module("game_make_m", GAME.replace("cards=5", "cards"))
    assert "missing env.kwargs.cards; Game accepts: cards" in message_of(entry_point="game_make_m:Game")


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize(("cards", "error"), [(0, "ValueError: cards must be positive"), ("x", "TypeError: '<' not")])
def test_constructor_that_raises_is_located(write_module: WriteModule, by_id: bool, cards: Any, error: str) -> None:
    write_module("game_make_n", GAME + "gymnasium.register('MakeN-v0', entry_point=Game)\n")
    name = {"id": "game_make_n:MakeN-v0"} if by_id else {"entry_point": "game_make_n:Game"}
    message = message_of(**name, kwargs={"cards": cards})
    assert f"could not be built with env.kwargs.cards={cards!r}: {error}" in message
    line = GAME[: GAME.index("if cards < 1" if cards == "x" else "raise ValueError")].count("\n") + 1
    assert f"(game_make_n.py:{line}, in __init__)" in message


def test_own_chained_error_is_reported_itself(write_module: WriteModule) -> None:
    raises = "    try:\n        {}[1]\n    except KeyError as error:\n        raise OSError('a') from error\n"
    write_module("game_make_o", "def build():\n" + raises)
    assert "OSError: a (game_make_o.py:5, in build)" in message_of(entry_point="game_make_o:build")


def test_missing_space(write_module: WriteModule) -> None:
    write_module("game_make_p", GAME.replace("action_space = spaces.Discrete(3)", "action_space = 3"))
    message = message_of(entry_point="game_make_p:Game")
    assert "action_space must be a gymnasium.spaces.Space, found builtins.int" in message


def test_no_masks_names_the_three_ways() -> None:
    message = message_of(id="CartPole-v1", needs_masks=True)
    assert "env.id=CartPole-v1 offers no action masks" in message
    assert "method action_masks()" in message
    assert "info['action_mask']" in message
    assert "key 'action_mask' in a Dict observation" in message
    assert "algo=ppo" in message


def test_env_that_fails_its_checks_is_closed(write_module: WriteModule) -> None:
    closes = "\n    def close(self):\n        Game.closed = True\n        raise OSError('second error')\n"
    write_module("game_make_q", GAME + closes)
    assert "offers no action masks" in message_of(entry_point="game_make_q:Game", needs_masks=True)
    assert sys.modules["game_make_q"].Game.closed is True  # type: ignore[attr-defined]


# --- the factory in other processes


def reset_elsewhere(factory: EnvFactory) -> tuple[int, str]:
    env = factory()
    env.reset(seed=1)
    return env.unwrapped.cards, type(env).__name__  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", [m for m in ("spawn", "forkserver") if m in multiprocessing.get_all_start_methods()])
def test_factory_of_a_file_in_the_working_directory_works_in_another_process(
    write_module: WriteModule, method: str
) -> None:
    write_module("game_make_r", GAME)
    factory = EnvFactory(EnvSpec(entry_point="game_make_r:Game", kwargs={"cards": 4}, lean_info=True))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        assert pool.submit(reset_elsewhere, factory).result(timeout=120) == (4, "LeanInfo")
    assert "game_make_r" not in sys.modules  # the parent had no need to import it


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


# --- what an env or its module may do

RESETS = """
import gymnasium
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm


class Plain(gymnasium.Env):
    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(2)

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
    env = make_env(EnvSpec(**entry, lean_info=True, max_episode_steps=5))  # type: ignore[arg-type]
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


OWN_LOOP = """
import gymnasium
from stable_baselines3 import PPO

class Own(PPO):
    def learn(self, steps):
        self.num_timesteps += steps
        return self

Coin = None
model = Own("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
model.{train}
model.save("coin_agent")
"""


@pytest.mark.parametrize(
    ("name", "text", "train"),
    [("trains_itself", TRAINS, "learn(16)"), ("22_trains", TRAINS, "__class__.learn(model, 16)"),
     ("trains_its_way", OWN_LOOP, "learn(16)")],
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


def test_a_process_without_sb3_stops_it_as_well(write_module: WriteModule, tmp_path: Path):
    """And `train()`, which would look at the env in a process that imports the module again."""
    write_module("trains_itself", TRAINS.format(train="learn(16)"))
    write_module("trains_ours", "from fasttrain import train\ntrain('trains_ours:Coin')\n")
    code = (
        "from fasttrain.envs.user_code import import_user_module\n"
        "for name in ('trains_itself', 'trains_ours'):\n"
        "    try:\n        import_user_module(name, '.', 'env.id=x')\n"
        "    except Exception as error:\n        print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split(" (")[0] for line in done.stdout.splitlines()] == [
        "EnvSpecError env.id=x: importing module 'trains_itself' trains a model: put what trains under "
        '`if __name__ == "__main__":`',
        "EnvSpecError env.id=x: importing module 'trains_ours' trains a model: put what trains under "
        '`if __name__ == "__main__":`',
    ]


def test_a_file_that_is_called_as_a_module_of_pythons_is_named(write_module: WriteModule, tmp_path: Path):
    write_module("queue", OLD_STYLE)
    with pytest.raises(EnvSpecError, match=r"queue.py hides Python's own module of that name; rename it"):
        make_env(EnvSpec(entry_point="queue:Game"))
    assert sys.path.index(str(tmp_path)) > sys.path.index(str(Path(multiprocessing.__file__).parent.parent))
