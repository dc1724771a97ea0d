"""The native batch of Skirmish: every number of its games against the plain rules, and what only its games do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.envs.masks import random_legal_action
from fasttrain.errors import EnvError
from fasttrain_games.skirmish import kernels
from fasttrain_games.skirmish.game import SkirmishGame
from fasttrain_games.skirmish.layout import describe_observation, observation_width
from fasttrain_kernels.threads import new_team
from reference.skirmish import FLAGS, SideBySide, bound, play
from reference.skirmish_python.env import SkirmishPythonEnv

BOTH_MISSIONS = ["only_war", "take_and_hold"]
REWARDS = {"reward_damage": 0.01, "reward_progress": 0.02, "secondary_every": 3, "reward_debug": True}
NARROW = {"width": 24, "height": 30}


@pytest.mark.parametrize(
    ("opponent", "action_mode", "roster", "enemy_roster", "board", "cache"),
    [
        ("random", "heads", "patrol", "patrol", NARROW, "on"),
        ("random", "units", "raiders", "raiders", {"width": 62, "height": 70, "rounds": 6}, "off"),
        ("greedy", "heads", "duel", "company", NARROW, "off"),
        ("greedy", "units", "patrol", "patrol", {"width": 44, "height": 60, "rounds": 3}, "on"),
        ("planner", "heads", "raiders", "raiders", NARROW, "on"),
        ("planner", "units", "duel", "duel", {"width": 20, "height": 20, "rounds": 1}, "off"),
        ("planner", "heads", "company", "company", {"width": 50, "height": 40, "rounds": 2}, "on"),
        ("self", "heads", "patrol", "patrol", {"width": 30, "height": 44}, "off"),
        ("self", "units", "raiders", "raiders", NARROW, "on"),
    ],
)
def test_kernels_play_by_the_plain_rules(
    opponent: str, action_mode: str, roster: str, enemy_roster: str, board: dict[str, int], cache: str
) -> None:
    rosters = {"roster": roster, "enemy_roster": enemy_roster, "mission": BOTH_MISSIONS}
    reasons = play(2, 3, 5, opponent=opponent, action_mode=action_mode, cache=cache, **rosters, **board, **REWARDS)
    assert reasons.total() >= 3


@pytest.mark.parametrize(
    ("opponent", "cache"), [("random", "off"), ("greedy", "on"), ("planner", "on"), ("self", "off")]
)
def test_crowded_boards(opponent: str, cache: str) -> None:
    """Charges, overwatch, falling back, fights and casualties at every decision."""
    both = SideBySide(
        8, 3, opponent=opponent, cache=cache, roster="raiders", enemy_roster="raiders", mission=BOTH_MISSIONS,
        reward_damage=0.1, reward_progress=0.1, **NARROW,
    )  # fmt: skip
    for _ in range(8):
        both.scatter()
        for _ in range(3):
            both.step()
            both.note_events()
    assert set(both.events) == {*FLAGS, "scored"}
    assert set(both.reasons) >= {"turn_limit"}


def test_a_game_won_before_the_first_decision_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opponent that goes first and shoots across the board may leave nobody: then another game is begun."""
    weapon = "{attacks: 1, skill: 6, strength: 1, ap: 0, damage: 1}"
    (tmp_path / "lone.yaml").write_text(
        "units: [{name: lone, models: 1, wounds: 1, move: 6, toughness: 1, save: 7, invulnerable: 0, leadership: 7, "
        f"control: 1, ranged: {weapon.replace('{', '{range: 1, ')}, melee: {weapon}}}]"
    )
    options = {"roster": str(tmp_path / "lone.yaml"), "enemy_roster": "company", "width": 30, "height": 26}
    begun, begin = [], SkirmishPythonEnv._begin
    monkeypatch.setattr(SkirmishPythonEnv, "_begin", lambda env: (begun.append(env), begin(env)))
    for seed in range(25):
        SideBySide(1, seed, **options)
    assert len(begun) > 25


def draw_all(game: SkirmishGame, slots: Any, rng: np.random.Generator) -> None:
    for index, mask in enumerate(slots.action_masks):
        slots.actions[index] = random_legal_action(game.action_space, mask, rng)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain_kernels.threads.ThreadChoice.next", lambda self: True)
    games = (bound(130), bound(130))
    games[1][0].max_threads = 2
    rng = np.random.default_rng(0)
    for game, _ in games:
        game.reset(np.arange(130), list(range(130)))
    for _ in range(32):
        draw_all(*games[0], rng)
        games[1][1].actions[:] = games[0][1].actions
        for game, _ in games:
            game.step()
        for name in ("observations", "action_masks", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(*(getattr(slots, name) for _, slots in games))
    assert games[1][0].opponents_ns > 0


def test_step_listed_touches_the_listed_games_alone() -> None:
    game, slots = bound(6, opponent="self")
    game.reset(np.arange(6), list(range(6)))
    assert 0 < game.opponents_turn.sum() < 6, "who is first is drawn"
    rng = np.random.default_rng(1)
    for _ in range(40):
        before = [game.peek(i) for i in range(6)]
        rows = [slots.observations.copy(), slots.action_masks.copy(), slots.rewards.copy()]
        chosen = np.flatnonzero(game.opponents_turn)
        chosen = chosen if chosen.size else np.array([0, 4])
        draw_all(game, slots, rng)
        slots.rewards[:] = rows[2] = 7.0
        game.step_listed(chosen)
        for i in range(6):
            if i in chosen:
                assert game.peek(i) != before[i]
                assert slots.rewards[i] != 7.0
            else:
                assert game.peek(i) == before[i]
                np.testing.assert_array_equal(slots.observations[i], rows[0][i])
                np.testing.assert_array_equal(slots.action_masks[i], rows[1][i])
                assert slots.rewards[i] == 7.0
    game.step_listed([])


def test_the_opponents_view_is_the_learners_in_its_place() -> None:
    """The same battle with the sides changed and the board turned gives the other side the same observation."""
    both = SideBySide(4, 2, opponent="self", **NARROW)
    turned = SideBySide(4, 2, opponent="self", **NARROW)
    both.scatter()
    for index in range(4):
        battle, other = both.plain[index].battle, turned.plain[index].battle
        battle.active = 1
        width, height = battle.mission.width, battle.mission.height
        for unit in (unit for side in battle.units for unit in side):
            image = other.units[1 - unit.side][unit.index]
            image.x, image.y, image.health = width - 1 - unit.x, height - 1 - unit.y, unit.health
            for name in FLAGS:
                setattr(image, name, getattr(unit, name))
        other.first, other.active, other.phase = 1 - battle.first, 0, battle.phase
        other.round, other.cp, other.vp = battle.round, battle.cp[::-1], battle.vp[::-1]
        both._copy(index, battle)
        turned._copy(index, other)
    views = []
    for side in (both, turned):
        kernels.write_step(side.game.records, side.game.setup, np.arange(4), *side.game.written, new_team(), 0)
        views.append((side.slots.observations.copy(), side.slots.action_masks.copy()))
    assert both.game.opponents_turn.all()
    assert not turned.game.opponents_turn.any()
    np.testing.assert_allclose(views[0][0], views[1][0], atol=1e-7)
    np.testing.assert_array_equal(views[0][1], views[1][1])


def test_opponents_can_be_changed_for_some() -> None:
    game, slots = bound(3, opponent="random")
    game.set_opponents("planner", indices=[1])
    game.set_opponents({"self": 1.0}, indices=np.array([2]))
    game.reset(np.arange(3), [1, 2, 3])
    assert game.records["level"].tolist() == [0, 2, 3]
    game.set_opponents("greedy")
    draw_all(game, slots, np.random.default_rng(0))
    game.step()
    assert game.records["level"].tolist() == [0, 2, 3], "from the next game on"
    game.reset(np.array([0, 2]), [None, None])
    assert game.records["level"].tolist() == [1, 2, 1]


def test_greedy_beats_random_and_planner_beats_both() -> None:
    """The opponents are worth something: greedy plays for its points, planner for more."""
    leads = {}
    for opponent in ("random", "greedy", "planner"):
        game, slots = bound(64, opponent=opponent)
        game.reset(np.arange(64), list(range(64)))
        rng = np.random.default_rng(0)
        for _ in range(15):
            draw_all(game, slots, rng)
            game.step()
        leads[opponent] = np.mean([game.episode_info(i)["vp_diff"] for i in range(64)])
    assert abs(leads["random"]) < 10
    assert leads["greedy"] < -20
    assert leads["planner"] < -20


def test_illegal_actions_name_env_head_and_legal_values() -> None:
    game, slots = bound(3)
    with pytest.raises(EnvError, match=r"env 0 has no game for .*call reset\(\) first"):
        game.step()
    game.reset(np.arange(3), [1, 2, 3])
    slots.actions[:] = slots.action_masks[:, :25].argmax(1)[:, None] * 0
    slots.actions[1, 4] = 2
    before = game.peek(0)
    with pytest.raises(EnvError, match=r"Skirmish env 1: 2 in head 4 of action \[0, 0, 0, 0, 2, 0, 0, 0\] is illegal"):
        game.step()
    assert game.peek(0) == before, "no action was applied"
    units, slots = bound(1, action_mode="units")
    units.reset(np.arange(1), [1])
    for wrong in (-1, 25, 29, 1000):
        slots.actions[0] = wrong
        with pytest.raises(EnvError, match=r"in head 0 .* legal values are \[0, "):
            units.step()


@pytest.mark.parametrize(("own", "enemies", "width"), [(3, 3, 163), (1, 1, 67), (8, 8, 578), (1, 8, 200)])
def test_layout(own: int, enemies: int, width: int) -> None:
    assert observation_width(own, enemies) == width
    blocks = list(describe_observation(own, enemies).values())
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    assert blocks[-1].stop == width
