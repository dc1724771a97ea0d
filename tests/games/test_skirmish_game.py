"""The native batch of Skirmish: every number of many games against the plain rules, and the contract of a NativeGame.

By hand, more games: `python tests/games/test_skirmish_game.py --games 5000`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for running it by hand

from fasttrain.envs.masks import random_legal_action
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.threads import new_team
from fasttrain_games.skirmish import kernels, state, tables
from fasttrain_games.skirmish.game import SkirmishGame
from fasttrain_games.skirmish.layout import describe_observation, observation_width
from fasttrain_games.skirmish.options import OPPONENTS
from reference.skirmish import FLAGS, SideBySide, bound, play, stale_tables, state_differences

BOTH_MISSIONS = ["only_war", "take_and_hold"]
REWARDS = {"reward_damage": 0.01, "reward_progress": 0.02, "secondary_every": 3, "reward_debug": True}
NARROW = {"width": 24, "height": 30}


@pytest.mark.parametrize("action_mode", ["heads", "units"])
@pytest.mark.parametrize("opponent", OPPONENTS)
@pytest.mark.parametrize("roster", ["patrol", "duel", "raiders"])
def test_kernels_play_by_the_plain_rules(action_mode: str, opponent: str, roster: str) -> None:
    options = {"action_mode": action_mode, "opponent": opponent, "roster": roster, "enemy_roster": roster}
    reasons = play(2, 3, 5, mission=BOTH_MISSIONS, **NARROW, **REWARDS, **options)
    assert reasons.total() >= 3


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**63),
    opponent=st.sampled_from(["random", "greedy", "planner", "self"]),
    action_mode=st.sampled_from(["heads", "units"]),
    rosters=st.sampled_from([("duel", "duel"), ("patrol", "patrol"), ("raiders", "raiders"), ("company", "company")]),
    rounds=st.integers(1, 6),
    width=st.integers(20, 62),
    height=st.integers(20, 70),
    cache=st.booleans(),
)
def test_any_board_any_roster(rosters: tuple[str, str], **options: Any) -> None:
    seed = options.pop("seed")
    play(1, 2, seed, mission=BOTH_MISSIONS, roster=rosters[0], enemy_roster=rosters[1], **REWARDS, **options)


@pytest.mark.parametrize("opponent", OPPONENTS)
@pytest.mark.parametrize("cache", [True, False])
def test_crowded_boards(opponent: str, cache: bool) -> None:
    """Charges, overwatch, falling back, fights and casualties at every decision."""
    both = SideBySide(
        8, 3, opponent=opponent, cache=cache, roster="raiders", enemy_roster="raiders", mission=BOTH_MISSIONS,
        reward_damage=0.1, reward_progress=0.1, **NARROW,
    )  # fmt: skip
    for _ in range(12):
        both.scatter()
        for _ in range(3):
            both.step()
            both.note_events()
    assert set(both.events) == {*FLAGS, "scored"}
    assert set(both.reasons) >= {"turn_limit"}


def test_sides_of_different_size() -> None:
    assert play(2, 4, 9, roster="duel", enemy_roster="company", opponent="greedy", **NARROW)["turn_limit"] <= 5


def test_the_comparison_of_tables_bites() -> None:
    both = SideBySide(1, 0, opponent="greedy", **NARROW)
    for _ in range(4):
        both.step()
    record, battle = both.game.records[0], both.plain[0].battle
    assert stale_tables(both.game, 0, battle) == []
    record["sight"] = ~record["sight"]
    record["distance"] += 1
    record["engaged"] ^= 1
    record["targets"] ^= 1
    record["distance_known"] = record["sight_known"] = -1
    record["engaged_known"] = 1
    record["targets_known"] = 7
    record["plan_known"] = 1
    record["plan_shot"] = -1
    found = " ".join(stale_tables(both.game, 0, battle))
    for name in ("distance", "sight", "engaged", "targets", "plan"):
        assert name in found
    battle.units[0][0].x += 1
    assert state_differences(both.game, 0, battle) == ["place or health of (0, 0)"]


def test_who_invalidates_what() -> None:
    """Unit 2 of side 0 is bits 16 to 23 of the pairs, unit 2 of side 1 every 8th bit from the third on."""
    games = np.zeros(1, state.GAME)
    record = games[0]

    def known_after(forget: Any, *arguments: int) -> list[Any]:
        for name in ("distance_known", "sight_known"):
            record[name] = -1
        record["engaged_known"], record["targets_known"], record["plan_known"] = 1, 7, 1
        forget(record, *arguments)
        names = ("distance_known", "sight_known", "engaged_known", "targets_known", "plan_known")
        return [record[name].tolist() for name in names]

    row, column = ~(0xFF << 16), ~(0x0101010101010101 << 2)
    assert known_after(tables.forget_all) == [0, 0, 0, [0, 0], 0]
    assert known_after(tables.forget_place_of, 0, 2) == [row, row, 0, [0, 0], 0]
    assert known_after(tables.forget_place_of, 1, 2) == [column, column, 0, [0, 0], 0]
    assert known_after(tables.forget_groups) == [-1, -1, 0, [0, 0], 0]
    assert known_after(tables.forget_flags) == [-1, -1, 1, [0, 0], 0]
    assert known_after(tables.forget_health) == [-1, -1, 1, [7, 7], 0]


def draw_all(game: SkirmishGame, slots: Any, rng: np.random.Generator) -> None:
    for index, mask in enumerate(slots.action_masks):
        slots.actions[index] = random_legal_action(game.action_space, mask, rng)


@pytest.mark.parametrize("action_mode", ["heads", "units"])
def test_a_game_depends_on_its_seed_alone_and_the_cache_changes_nothing(action_mode: str) -> None:
    options = {"action_mode": action_mode, "opponent": {"random": 1, "greedy": 2, "planner": 1}}
    many, slots = bound(5, **options)
    single, alone = bound(1, cache="off", **options)
    many.reset(np.arange(5), [10, 11, 12, 13, 14])
    single.reset(np.arange(1), [13])
    rng = np.random.default_rng(0)
    for _ in range(60):
        np.testing.assert_array_equal(slots.observations[3], alone.observations[0])
        np.testing.assert_array_equal(slots.action_masks[3], alone.action_masks[0])
        draw_all(many, slots, rng)
        alone.actions[0] = slots.actions[3]
        many.step()
        single.step()
        assert slots.rewards[3] == alone.rewards[0]
        assert slots.terminations[3] == alone.terminations[0]
        if slots.terminations[3]:
            assert many.episode_info(3) == single.episode_info(0)
            np.testing.assert_array_equal(many.final_observations[3], single.final_observations[0])


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.threads.ThreadChoice.next", lambda self: True)
    plain, slots = bound(130)
    threaded, other = bound(130)
    threaded.max_threads = 2
    rng = np.random.default_rng(0)
    for game in (plain, threaded):
        game.reset(np.arange(130), list(range(130)))
    for _ in range(32):
        draw_all(plain, slots, rng)
        other.actions[:] = slots.actions
        plain.step()
        threaded.step()
        for name in ("observations", "action_masks", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(slots, name), getattr(other, name))
    assert threaded.opponents_ns > 0


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
    for wrong in ([0, 0], [6], [-1]):
        with pytest.raises(EnvError, match="step_listed takes games 0 to 5, each once"):
            game.step_listed(wrong)
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


def test_rewards_add_up_to_the_outcome() -> None:
    game, slots = bound(4, reward_damage=0.5, reward_progress=0.25, secondary_every=7, reward_debug=True)
    game.reset(np.arange(4), list(range(4)))
    rng = np.random.default_rng(4)
    totals, decisions, ended = np.zeros(4), np.zeros(4, int), 0
    for _ in range(100):
        draw_all(game, slots, rng)
        game.step()
        totals += slots.rewards
        decisions += 1
        for index in np.flatnonzero(slots.terminations):
            info, terms = game.episode_info(index), game.episode_info(index)["reward_terms"]
            full = sum(sheet.health for sheet in game.options.rosters[0])
            assert terms["vp"] == pytest.approx(0.1 * info["vp_diff"])
            assert terms["win"] == (1 if info["is_win"] else 0 if info["is_draw"] else -1)
            assert terms["damage"] == pytest.approx(0.5 * (info["model_health"] - info["player_health"]))
            assert full >= info["model_health"]
            assert totals[index] == pytest.approx(sum(terms.values()), abs=1e-4)
            assert decisions[index] == 15
            totals[index], decisions[index], ended = 0, 0, ended + 1
    assert ended >= 20


def test_secondary_terms_are_paid_every_few_decisions_and_at_the_end() -> None:
    game, slots = bound(1, reward_vp=0.0, reward_win=0.0, reward_progress=1.0, secondary_every=6)
    game.reset(np.arange(1), [3])
    rng = np.random.default_rng(4)
    paid = []
    for _ in range(15):
        draw_all(game, slots, rng)
        game.step()
        paid.append(slots.rewards[0] != 0)
    assert [index + 1 for index, one in enumerate(paid) if one] == [6, 12, 15]


def test_nothing_secondary_is_computed_when_it_is_off() -> None:
    game, slots = bound(2)
    game.reset(np.arange(2), [1, 2])
    rng = np.random.default_rng(0)
    for _ in range(10):
        draw_all(game, slots, rng)
        game.step()
    assert game.records["progress"].tolist() == [0.0, 0.0]
    assert game.reward_terms(0) == {"vp": 0.0, "win": 0.0, "damage": 0.0, "progress": 0.0}


def test_the_info_of_an_episode() -> None:
    game, slots = bound(64, opponent="random", **NARROW)
    game.reset(np.arange(64), list(range(64)))
    rng = np.random.default_rng(0)
    winners: Counter[str] = Counter()
    for _ in range(15):
        draw_all(game, slots, rng)
        game.step()
        for index in np.flatnonzero(slots.terminations):
            info = game.episode_info(index)
            assert list(info) == [
                "winner", "is_win", "is_draw", "model_vp", "player_vp", "vp_diff", "end_reason", "turn",
                "model_health", "player_health", "mission",
            ]  # fmt: skip
            assert all(type(value) in (int, bool, str) for value in info.values())
            assert info["vp_diff"] == info["model_vp"] - info["player_vp"]
            if info["end_reason"] == "turn_limit":
                assert info["turn"] == 5
                sign = np.sign(info["vp_diff"])
                assert info["winner"] == {1: "model", 0: "draw", -1: "player"}[int(sign)]
                assert (info["is_win"], info["is_draw"]) == (sign > 0, sign == 0)
            winners[info["winner"]] += 1
            final = game.final_observations[index]
            assert final[1:4].tolist() == [0, 0, 0], "no phase any more"
    assert set(winners) == {"model", "draw", "player"}


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
    with pytest.raises(EnvError, match=r"env 0 has no game to play .*reset\(\) it first"):
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
        with pytest.raises(EnvError, match=r"in head 0 .* legal there is \[0, "):
            units.step()


def test_slots_of_the_wrong_shape() -> None:
    game = SkirmishGame(2)
    with pytest.raises(EnvError, match=r"bind\(slots\)"):
        game.reset(np.arange(2), [1, 2])
    _, slots = bound(2, action_mode="units")
    with pytest.raises(EnvSpecError, match=r"slots.action_masks as an array \(2, 95\) of bool"):
        game.bind(slots)


@pytest.mark.parametrize(("own", "enemies", "width"), [(3, 3, 163), (1, 1, 67), (8, 8, 578), (1, 8, 200)])
def test_layout(own: int, enemies: int, width: int) -> None:
    assert observation_width(own, enemies) == width
    blocks = list(describe_observation(own, enemies).values())
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    assert blocks[-1].stop == width


def test_at_least_one_game() -> None:
    with pytest.raises(ConfigError, match="num_envs=0"):
        SkirmishGame(0)


def main() -> None:
    """Play many games side by side: every opponent, both modes, both missions, two boards."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--games", type=int, default=5000)
    games = parser.parse_args().games
    cells = [(o, m, r) for o in OPPONENTS for m in ("heads", "units") for r in ("patrol", "duel", "raiders", "company")]
    total: Counter[str] = Counter()
    for number, (opponent, mode, roster) in enumerate(cells):
        board = NARROW if number % 2 else {}
        options: dict[str, Any] = {"opponent": opponent, "action_mode": mode, "roster": roster, "enemy_roster": roster}
        total += play(8, -(-games // len(cells)), 1000 * number, mission=BOTH_MISSIONS, **REWARDS, **board, **options)
    sys.stdout.write(f"{total.total()} games, 0 differences: {dict(total)}\n")


if __name__ == "__main__":
    main()
