"""A game is found by the name that its package offers, or as module:NAME; what it declares need not be typed."""

from __future__ import annotations

from pathlib import Path

import pytest

import composed_once
from conftest import RunCommand, configured
from fasttrain.cli.compose import composer
from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.spec import plugins
from fasttrain.spec.precedence import read
from installed import install

MODULE = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from fasttrain.native import GameSpec

class Pole(CartPoleEnv):
    pass

GAME = GameSpec(id="{name}/Pole-v0", env="{name}:Pole", own={{"total_timesteps": 777}}, result={{"win": "balanced"}},
                conf={conf})
TEXT = "no game"
"""


def offer(folder: Path, name: str, conf: str = "None") -> None:
    install(folder, name, {plugins.GAMES: {name: f"{name}:GAME"}}, **{name: MODULE.format(name=name, conf=conf)})


def test_a_game_is_played_by_the_name_that_its_package_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer(tmp_path, "polegame")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured("env=polegame", "algo=ppo", "env.kwargs.sutton_barto_reward=true")
    assert (config.env.id, config.env.game, config.total_timesteps) == ("polegame/Pole-v0", "polegame", 777)
    assert (config.env.result.win, config.env.name) == ("balanced", "polegame-Pole-v0")
    assert configured("env=polegame", "algo=ppo", "env.result.win=won").env.result.win == "won"
    env = make_env(EnvSpec(id="polegame/Pole-v0", kwargs=config.env.kwargs))
    assert type(env.unwrapped).__name__ == "Pole"
    assert env.unwrapped._sutton_barto_reward  # type: ignore[attr-defined]


def test_its_files_lie_with_it(fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer(tmp_path, "confgame", conf="Path(__file__).parent / 'conf'")
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "confgame.yaml").write_text("game: confgame\nkwargs: {sutton_barto_reward: true}\n")
    (tmp_path / "conf" / "profile").mkdir()
    (tmp_path / "conf" / "profile" / "mild.yaml").write_text("# @package _global_\nnum_envs: 3\n")
    (own := tmp_path / "own" / "env").mkdir(parents=True)
    (own / "built_upon.yaml").write_text("defaults: [confgame, _self_]\nkwargs: {render_mode: null}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = fasttrain("env=confgame", "algo=ppo", "+profile=mild", "--cfg", "job").out
    assert "game: confgame" in told
    assert "sutton_barto_reward: true" in told
    assert "num_envs: 3" in told
    told = fasttrain("--config-dir", str(own.parent), "env=built_upon", "algo=ppo", "--cfg", "job").out
    assert "game: confgame" in told, "a file of the user's builds upon a game that no argument names"


def test_a_game_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "minegame.py").write_text(MODULE.format(name="minegame", conf="None"))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured("env.game=minegame:GAME", "algo=ppo")
    assert (config.env.id, config.total_timesteps) == ("minegame/Pole-v0", 777)
    for typed, told in {
        "env.game=minegame:TEXT": "^env.game=minegame:TEXT: expected a fasttrain.native.GameSpec, it is 'no game'$",
        "env.game=minegame:NONE": "^env.game=minegame:NONE cannot be loaded: AttributeError: ",
    }.items():
        with pytest.raises(ConfigError, match=told):
            configured(typed, "algo=ppo")
    with pytest.raises(ConfigError, match="^env.game=minegame:GAME has the env minegame/Pole-v0, not A-v0; remove env"):
        configured("env.game=minegame:GAME", "env.id=A-v0", "algo=ppo")


def test_the_name_of_an_installed_game_takes_its_files():
    config = configured("env.game=skirmish")
    assert (config.env.game, config.env.kwargs) == ("skirmish", configured("env=skirmish").env.kwargs)
    assert config.env.kwargs["mission"] == "only_war"
    pong = configured("env.game=atari", "env.id=ALE/Breakout-v5", "algo=ppo").env
    assert (pong.id, pong.frame_stack, len(pong.wrappers)) == ("ALE/Breakout-v5", 4, 2)
    for typed in (("env=gym", "env.game=skirmish"), ("env.game=skirmish,skullking",)):
        with pytest.raises(ConfigError, match=f"^{typed[-1]}: type env=skirmish.* also uses the game's files$"):
            configured(*typed)


def test_a_finished_run_needs_no_game_of_another_package(
    trained: RunCommand, fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = trained("env.id=CartPole-v1", "algo=ppo", "total_timesteps=64", "algo.rollout_size=64", "batch_size=32",
                  "num_envs=2", "vec_env=dummy", "eval.episodes=2", "checkup=off", "report=false")  # fmt: skip
    monkeypatch.setattr(composed_once, "_lists", {})  # other tests must not find what is composed without games
    monkeypatch.setattr(composed_once, "_configs", {})
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", "fasttrain", {})))
    assert plugins.names(plugins.GAMES) == []
    fasttrain("eval", f"run={run.folder}", "eval.episodes=2").ok()


@pytest.mark.parametrize("typed", [(), ("env=skullking",), ("+profile=speed", "seed=3")])
def test_without_the_default_game_there_is_cartpole(fasttrain, typed, monkeypatch):
    monkeypatch.setattr(plugins, "names", lambda _: [])
    told = ("no package that offers this game is installed", "fasttrain algo=ppo env.id=CartPole-v1")
    fasttrain("total_timesteps=64", *typed).refused(*told)
    assert configured("env.id=CartPole-v1", "algo=ppo").env.id == "CartPole-v1"
    monkeypatch.undo()
    with composer() as hydra:  # nothing stands in for the game in what this process composes later
        assert hydra.configured(read(["seed=7"], {}))[0].env.game == "skullking"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("env.game=nowhere_at_all:GAME", "env.game=nowhere_at_all:GAME cannot be loaded: ModuleNotFoundError: "),
        ("env.game=skulking", "no game is called 'skulking'; did you mean 'skullking'?; there are "),
        ("env=CartPole-v1", "env=CartPole-v1: no such env, choose from atari, go, gym, "),
        ("env=skulking", "env=skulking: no such env, choose from atari, go, gym, "),
    ],
)
def test_a_game_that_cannot_be_had_is_one_line(fasttrain: RunCommand, typed: str, told: str):
    meant = {"env=CartPole-v1": "did you mean env.id=CartPole-v1?", "env.game=nowhere_at_all:GAME": ""}
    fasttrain(typed, "algo=ppo").refused(f"error: {told}", meant.get(typed, "did you mean 'skullking'?"))


def test_an_id_is_made_as_its_game_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    game = "from fasttrain.native import GameSpec\nGAME = GameSpec(id='bare/Id-v0')\n"
    install(tmp_path, "baregame", {plugins.GAMES: {"bare": "baregame:GAME"}}, baregame=game)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvSpecError, match="env.id=bare/Id-v0 is not registered"):
        make_env(EnvSpec(id="bare/Id-v0"))
    monkeypatch.setattr(plugins, "names", lambda _: pytest.fail("packages are asked"))  # by a worker, in each process
    env = make_env(EnvSpec(id="bare/Id-v0", maker="gymnasium.envs.classic_control:CartPoleEnv"))
    assert type(env.unwrapped).__name__ == "CartPoleEnv"
    with pytest.raises(EnvSpecError, match="ale_py|Nothing"):
        make_env(EnvSpec(id="ALE/Nothing-v5"))
