from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import fasttrain_games.envs
from fasttrain.envs.masks import random_legal_action
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain_games import SKIRMISH
from fasttrain_games.skirmish.env import SkirmishEnv
from fasttrain_games.skirmish.options import make_options
from fasttrain_games.skirmish.words import action_in_words, choice_in_words, move_in_words, target_in_words
from fasttrain_games.skullking.env import SkullKingEnv
from messages import assert_says, wrong_inputs
from reference.skirmish_python.env import SkirmishPythonEnv


def draw(env: Any, rng: np.random.Generator) -> Any:
    return random_legal_action(env.action_space, env.action_masks(), rng)


SKULL_KING = "fasttrain/SkullKing-v0"


@pytest.mark.parametrize(
    ("env_id", "kwargs", "kind", "size"),
    [
        (SKIRMISH.id, {"action_mode": "units", "mission": "take_and_hold", "opponent": "random"}, SkirmishEnv, 163),
        (SKULL_KING, {"num_players": 3, "opponents": ["easy", "hard"]}, SkullKingEnv, 228),
    ],
)
def test_games_are_registered_once_and_made_by_id(env_id: str, kwargs: dict[str, Any], kind: Any, size: int) -> None:
    before = dict(gymnasium.registry)
    importlib.reload(fasttrain_games.envs)
    assert dict(gymnasium.registry) == before
    env = gymnasium.make(env_id, **kwargs)
    assert isinstance(env.unwrapped, kind)
    observation, info = env.reset(seed=1)
    assert (observation.shape, info) == ((size,), {})


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        *((SKIRMISH.id, {"render_mode": "rgb_array", "action_mode": mode, "rounds": 2}) for mode in ("heads", "units")),
        *((SKULL_KING, {"num_players": players, "render_mode": "ansi"}) for players in (2, 8)),
    ],
)
def test_games_pass_both_checkers_without_a_warning(env_id: str, kwargs: dict[str, Any]) -> None:
    env = gymnasium.make(env_id, **kwargs).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check_env(env)
        sb3_check_env(env, warn=True, skip_render_check=False)


@pytest.mark.parametrize(("action_mode", "opponent"), [("heads", "self"), ("units", "planner"), ("dict", "planner")])
def test_single_env_plays_as_the_plain_one(action_mode: str, opponent: str) -> None:
    options = {"action_mode": action_mode, "opponent": opponent, "reward_progress": 0.1, "reward_debug": True}
    one, two = SkirmishEnv(**options), SkirmishPythonEnv(**options)
    rng = np.random.default_rng(2)
    one.reset(seed=4)
    two.reset(seed=4)
    infos = []
    turns = set()
    for step in range(70):
        if step == 20:  # from the next game on
            one.set_opponents("greedy")
            two.set_opponents("greedy")
        np.testing.assert_array_equal(one.action_masks(), two.action_masks())
        assert one.opponents_turn is two.opponents_turn
        turns.add(one.opponents_turn)
        if action_mode == "dict":
            values = random_legal_action(spaces.MultiDiscrete([25] * 3 + [4] * 3 + [5, 3]), one.action_masks(), rng)
            action: Any = dict(zip(one.action_space, values, strict=True))
        else:
            action = draw(one, rng)
        a, b = one.step(action), two.step(action)
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:4] == b[1:4]
        assert set(b[4].pop("perf")) <= {"enemy_turn_ms"}
        assert a[4] == b[4]
        if a[2]:
            infos.append(a[4])
            np.testing.assert_array_equal(one.reset()[0], two.reset()[0])
    assert infos
    assert "reward_terms" in infos[0]
    assert turns == ({True, False} if opponent == "self" else {False})
    assert one.opponents_ns > 0


def test_illegal_actions() -> None:
    env, plain = SkirmishEnv(), SkirmishEnv()
    env.reset(seed=5)
    plain.reset(seed=5)
    action = np.array([0, 99, 0, 3, 0, 0, 1, 0])  # no such move; targets while moving; re-roll while moving
    a = env.step(action)
    assert action[1] == 99, "the caller's own"
    b = plain.step(np.zeros(8, int))
    np.testing.assert_array_equal(a[0], b[0])
    assert a[4]["illegal_actions"] == 1
    assert "illegal_actions" not in b[4]
    strict = SkirmishEnv(on_illegal="raise", action_mode="units")
    with pytest.raises(EnvError, match=r"reset\(\)"):
        strict.step(0)
    strict.reset(seed=1)
    with pytest.raises(EnvError, match=r"27 in head 0 of action \[27\] is illegal now, legal values are \[0, "):
        strict.step(27)


def test_render() -> None:
    env = SkirmishEnv(render_mode="ansi", roster="duel", enemy_roster="raiders", rounds=1)
    env.reset(seed=2)
    lines = env.render().splitlines()
    assert lines[0].startswith("Skirmish only_war  round 1/1  movement (yours)  VP 0:0  CP ")
    board = lines[1:31]
    assert {len(line) for line in board} == {44}
    text = "".join(board)
    assert [text.count(letter) for letter in "1abcde+"] == [1, 1, 1, 1, 1, 1, 5]
    assert text.count("#") > 50
    assert any("1" in line for line in board[24:]), "the learner is below"
    assert lines[31].startswith("1 champions: health 15/15 at ")
    assert len(lines) == 31 + 1 + 5
    info = [env.step(np.zeros(4, int)) for _ in range(3)][-1][4]
    outcome = "won" if info["is_win"] else "draw" if info["is_draw"] else "lost"
    assert env.render().startswith(f"game over: {outcome} 0:0 (+0), {info['end_reason']}\nSkirmish only_war  round 1/1")
    picture = SkirmishEnv(render_mode="rgb_array", width=20, height=30)
    picture.reset(seed=2)
    frame = picture.render()
    assert frame.shape == (240, 160, 3)
    assert frame.dtype == np.uint8
    blue, red = ((frame == colour).all(axis=2) for colour in ((40, 90, 200), (200, 50, 40)))
    assert blue[120:].sum() > 100
    assert red[:120].sum() > 100
    assert not blue[:96].any()
    assert SkirmishEnv().render() is None
    with pytest.raises(TypeError, match="render_mode='human': choose None, 'ansi' or 'rgb_array'"):
        SkirmishEnv(render_mode="human")


@pytest.mark.parametrize("arguments", wrong_inputs("arguments of SkirmishEnv"))
def test_bad_arguments_are_named(arguments: str) -> None:
    with pytest.raises(ConfigError) as told:
        SkirmishEnv(**yaml.safe_load(arguments))
    assert_says("arguments of SkirmishEnv", arguments, str(told.value))


def test_an_argument_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'reward_dammage'; did you mean 'reward_damage'"):
        SkirmishEnv(reward_dammage=1.0)


UNIT = """units:
  - {name: scouts, models: 3, wounds: 1, move: 6, toughness: 3, save: 5, invulnerable: 0, leadership: 7, control: 1,
     ranged: {range: 12, attacks: 1, skill: 4, strength: 3, ap: 0, damage: 1},
     melee: {attacks: 1, skill: 4, strength: 3, ap: 0, damage: 1}}
"""
MISSION = "board: [20, 20]\ndeployment_rows: 4\nmarkers: [[10, 10]]\nterrain: [[4, 8, 3, 2]]\n"


def test_rosters_and_missions_of_ones_own(tmp_path: Path) -> None:
    roster, mission = tmp_path / "mine.yaml", tmp_path / "duel_in_the_fog.yaml"
    roster.write_text(UNIT)
    mission.write_text(MISSION)
    options = make_options(mission=str(mission), roster=str(roster), width=20, height=20)
    assert [sheet.name for sheet in options.rosters[0]] == ["scouts"]
    assert options.missions[0].name == "duel_in_the_fog"
    assert options.missions[0].markers == ((20, 20),)
    assert options.missions[0].terrain == ((4, 8, 7, 10), (13, 10, 16, 12))
    stretched = make_options(mission=str(mission), width=40, height=30).missions[0]
    assert stretched.markers == ((40, 30),)
    assert stretched.terrain[0] == (8, 12, 14, 15)
    assert stretched.deployment_rows == 6
    env = SkirmishEnv(roster=str(roster), mission=str(mission), width=20, height=20)
    env.reset(seed=1)
    assert env.action_space.nvec.tolist() == [25, 4, 5, 1]


@pytest.mark.parametrize("changed", wrong_inputs("rosters and missions of Skirmish"))
def test_a_wrong_roster_or_mission_names_file_and_key(tmp_path: Path, changed: str) -> None:
    """`changed`: a part of the file -> what stands there instead; or all of the file."""
    old, _, new = changed.partition(" -> ")
    key, name, content = ("mission", "own", MISSION) if old in MISSION else ("roster", "mine", UNIT)
    path = tmp_path / f"{name}.yaml"
    path.write_text(content.replace(old, new) if old in content else old)
    with pytest.raises(ConfigError) as told:
        make_options(**{key: str(path)}, width=20, height=20)
    assert_says("rosters and missions of Skirmish", changed, str(told.value).replace(f"{tmp_path}/", ""))


def test_moves_and_targets():
    assert [move_in_words(move) for move in (0, 1, 2, 3, 4, 24)] == [
        "stays", "half a move N", "a full move N", "an advance N", "half a move NE", "an advance NW",
    ]  # fmt: skip
    assert target_in_words(0, 0, 1) == "shoots nobody"
    assert target_in_words(2, 0, 1) == "shoots b"
    assert target_in_words(1, 1, 2) == "charges 1", "the opponent's enemies have numbers"


def test_heads():
    env = SkirmishEnv(opponent="random")
    env.reset(seed=3)
    moves = np.array([2, 0, 24, 0, 0, 0, 3, 1])
    assert env.describe_action(moves) == "1 a full move N, 3 an advance NW, smokescreen for 2"
    assert env.describe_action(np.zeros(8, int)) == "stays"
    assert [env.describe_choice(part, 1) for part in (0, 2, 5, 6, 7)] == [
        "1 half a move N", "3 half a move N", "3 shoots a", "re-roll", "for 2",
    ]  # fmt: skip
    env.step(np.zeros(8, int))  # the shooting phase comes
    assert env.describe_action(np.array([0, 0, 0, 0, 2, 0, 0, 0])) == "2 shoots b"
    assert env.describe_action(np.zeros(8, int)) == "nothing"


def test_units():
    env = SkirmishEnv(opponent="random", action_mode="units")
    env.reset(seed=3)
    assert env.describe_action(2) == "1 a full move N"
    env.step(np.int64(0))
    assert env.describe_choice(0, 0) == "2 stays"


def test_every_legal_action_has_words():
    env, options = SkirmishEnv(opponent="greedy"), make_options(opponent="greedy")
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        mask = env.action_masks()
        heads = np.split(mask, np.cumsum(options.head_sizes)[:-1])
        action = np.array([rng.choice(np.flatnonzero(head)) for head in heads])
        assert env.describe_action(action) == action_in_words(options, env.view(), action.tolist())
        assert all(choice_in_words(options, env.view(), part, int(value)) for part, value in enumerate(action))
        if env.step(action)[2]:
            env.reset()


def test_reset_options_choose_mission_length_and_opponent_of_the_next_game_alone() -> None:
    env = SkirmishEnv(mission=["only_war", "take_and_hold"], roster="duel", enemy_roster="duel", rounds=3)
    rng = np.random.default_rng(0)

    def played(**options: Any) -> dict[str, Any]:
        observation, _ = env.reset(seed=4, options=options)
        over = False
        while not over:
            before = observation
            observation, _, over, _, info = env.step(draw(env, rng))
        assert before[0] <= 1.0, "the round as a share of this game's rounds"
        return info

    for mission in ("only_war", "take_and_hold"):
        ends = [played(mission=mission, rounds=1) for _ in range(5)]
        assert {end["mission"] for end in ends} == {mission}
        assert {end["turn"] for end in ends} == {1}
    env.reset(options={"opponent": "planner"})
    assert env.peek()["level"] == 2
    env.reset()
    assert env.peek()["level"] == 1, "greedy again"
    assert max(played()["turn"] for _ in range(5)) == 3, "whole games again"
    for wrong in wrong_inputs("reset options of Skirmish"):
        with pytest.raises(EnvSpecError) as told:
            env.reset(options=yaml.safe_load(wrong))
        assert_says("reset options of Skirmish", wrong, str(told.value))
