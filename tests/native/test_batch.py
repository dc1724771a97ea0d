"""What both built-in games get from `GameBatch`; their rules have tests of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fasttrain.batch import Slots
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.native.batch import GameBatch, occur_once
from fasttrain_games.skirmish.game import SkirmishGame
from fasttrain_games.skullking.game import SkullKingGame

N = 5
GAMES = {"skullking": lambda: SkullKingGame(N), "skirmish": lambda: SkirmishGame(N)}
both = pytest.mark.parametrize("make", GAMES.values(), ids=GAMES)
Make = Callable[[], GameBatch]


def slots_of(game: GameBatch) -> Slots:
    return Slots(
        observations=np.zeros(game.final_observations.shape, np.float32),
        actions=np.zeros((N, *(game.action_space.shape or ())), np.int64),
        rewards=np.zeros(N, np.float32),
        terminations=np.zeros(N, np.bool_),
        truncations=np.zeros(N, np.bool_),
        action_masks=np.zeros((N, game.mask_width), np.bool_),
    )


def bound(make: Make) -> tuple[GameBatch, Slots]:
    game = make()
    slots = slots_of(game)
    game.bind(slots)
    return game, slots


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("observations", np.zeros((N, 3), np.float32)),
        ("observations", {"a": np.zeros(N)}),
        ("rewards", np.zeros(N, np.float64)),
        ("terminations", np.zeros(N + 1, np.bool_)),
        ("action_masks", None),
        ("actions", np.zeros((N, 77), np.int64)),
    ],
)
@both
def test_slots_that_do_not_fit_are_refused(make: Make, name: str, wrong: Any) -> None:
    game = make()
    with pytest.raises(EnvSpecError, match=rf"needs slots\.{name} as an array"):
        game.bind(replace(slots_of(game), **{name: wrong}))


@both
def test_actions_are_integers(make: Make) -> None:
    game = make()
    slots = slots_of(game)
    with pytest.raises(EnvSpecError, match=r"slots\.actions as an array .* of integers"):
        game.bind(replace(slots, actions=slots.actions.astype(np.float32)))


@both
def test_nothing_goes_before_bind(make: Make) -> None:
    with pytest.raises(EnvError, match=r"bind\(slots\) must come before"):
        make().reset(np.arange(N), range(N))


@both
def test_a_game_depends_on_its_seed_alone(make: Make) -> None:
    first, second = bound(make), bound(make)
    first[0].reset(np.arange(N), [7, 8, 9, 10, 11])
    second[0].reset(np.array([4, 2]), [7, 9 + 2**64])  # seeds count modulo 2^64
    assert (first[1].observations[[0, 2]] == second[1].observations[[4, 2]]).all()


@both
def test_without_a_seed_the_own_stream_goes_on(make: Make) -> None:
    firsts = []
    for _ in range(2):
        game, slots = bound(make)
        game.reset(np.arange(N), [3] * N)
        game.reset(np.array([1, 2]), [None, 3])
        game.reset(np.array([1]), [None])
        firsts.append(slots.observations.copy())
    assert (firsts[0] == firsts[1]).all()
    assert (firsts[0][2] == firsts[0][0]).all()  # its seed again
    assert game.records[1] != game.records[0]  # its stream is further


@both
def test_without_any_seed_games_begin_from_entropy(make: Make) -> None:
    firsts = []
    for _ in range(2):
        game, slots = bound(make)
        game.reset(np.arange(N), [None] * N)
        firsts.append(slots.observations.copy())
    assert not np.array_equal(*firsts)
    assert not (firsts[0][1:] == firsts[0][0]).all()


@both
def test_state_that_does_not_fit_is_refused(make: Make) -> None:
    game, _ = bound(make)
    game.reset(np.arange(N), range(N))
    arrays = {name: array.copy() for name, array in game.state_arrays().items()}
    with pytest.raises(ConfigError, match="no array mix"):
        game.load_state_arrays({name: array for name, array in arrays.items() if name != "mix"})
    with pytest.raises(ConfigError, match="this run needs"):
        game.load_state_arrays({**arrays, "seeded": arrays["seeded"][1:]})
    phases = arrays["games"]["phase"].copy()
    arrays["games"]["phase"] = 120
    with pytest.raises(ConfigError, match="are impossible: phase must lie"):
        game.load_state_arrays(arrays)
    assert (game.state_arrays()["games"]["phase"] == phases).all()  # nothing was taken over


@pytest.mark.parametrize(
    ("listed", "fine"),
    [([0, 2, 1], True), ([], True), ([0, 0], False), ([3], False), ([-1], False), ([1, 5, 1], False)],
)
def test_occur_once_leaves_no_mark(listed: list[int], fine: bool) -> None:
    marks = np.zeros(3, np.bool_)
    assert occur_once(np.array(listed, np.int64), marks) is fine
    assert not marks.any()


def test_records_of_before_a_field_was_added_are_read() -> None:
    game, _ = bound(GAMES["skullking"])
    game.reset(np.arange(N), [1, 2, 3, 4, 5])
    arrays = {name: array.copy() for name, array in game.state_arrays().items()}
    fields = [name for name in game.records.dtype.names or () if name not in ("last_round", "next_rounds")]
    older = np.zeros(N, [(name, game.records.dtype[name]) for name in fields])
    for name in fields:
        older[name] = arrays["games"][name]
    other, _ = bound(GAMES["skullking"])
    other.load_state_arrays({**arrays, "games": older})
    assert (other.records["hand_numbers"] == game.records["hand_numbers"]).all()
    assert other.records["next_rounds"].tolist() == [[1, 10]] * N
    with pytest.raises(ConfigError, match="games of the checkpoint"):
        other.load_state_arrays({**arrays, "games": older[:2]})


def test_reset_options_of_a_game_that_has_none_are_refused() -> None:
    with pytest.raises(EnvSpecError, match=r"takes no reset options, got \{'size': 3\}"):
        GameBatch.set_options(SkirmishGame(N), {"size": 3}, np.arange(N))


def test_skull_king_plays_the_rounds_that_were_chosen_from_the_next_game_on() -> None:
    game, slots = bound(GAMES["skullking"])
    assert isinstance(game, SkullKingGame)
    game.set_options({"rounds": [2, 3]}, np.array([1, 3]))
    game.reset(np.arange(N), [1, 2, 3, 4, 5])
    assert [game.peek(index).round_number for index in range(N)] == [1, 2, 1, 2, 1]
    game.set_options({}, np.array([3]))
    lengths = np.zeros(N, np.int64)
    rounds = [list[int]() for _ in range(N)]
    for _ in range(20):
        slots.actions[:] = slots.action_masks.argmax(axis=1)  # type: ignore[union-attr]
        game.step()
        for index in range(N):
            lengths[index] += 1
            if slots.terminations[index]:
                rounds[index] += [int(lengths[index]), game.peek(index).round_number]
                lengths[index] = 0
    assert rounds[1][:2] == [2 + 2 + 3, 2], "a bid a round, and its cards; then the same rounds again"
    assert rounds[3] == [7, 1], "the whole game after it"
    assert rounds[0] == []
    for wrong in ([0, 3], [3, 2], [8, 11], [3], "3", [1.0, 2]):
        with pytest.raises(EnvSpecError, match="expected the first and the last round, 1 to 10"):
            game.set_options({"rounds": wrong}, np.arange(N))
