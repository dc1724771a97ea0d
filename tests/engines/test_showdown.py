from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_game import Fake as Recorded

from fasttrain_engines.game import Decision, Over, Refused, mask_of, row_of
from fasttrain_engines.showdown import ACTIONS, SIZE, Showdown
from fasttrain_engines.wire import GameLostError
from messages import assert_says, wrong_inputs

TRAFFIC = (Path(__file__).parent / "recorded" / "showdown.jsonl").read_text().splitlines()
CAME = [json.loads(line[2:]) for line in TRAFFIC if line.startswith("< ")]
HELLO, FIRST, BEFORE, REFUSED, AFTER, OVER = CAME


def begun(game: Showdown, channel: Any, seed: int = 3) -> Any:
    return asyncio.run(game.begin(channel, 0, seed))


def played(game: Showdown, channel: Any, action: int) -> Any:
    return asyncio.run(game.play(channel, np.int64(action)))


def test_a_battle_from_the_first_decision_to_the_end():
    game, channel = Showdown(generation=3, opponent="max_damage"), Recorded(FIRST, BEFORE, AFTER, OVER)
    first = begun(game, channel)
    assert isinstance(first, Decision)
    assert (first.reward, first.tag, first.theirs) == (0.0, 1, False)
    assert row_of(first.observation, game.observation_space).shape == (SIZE,)
    assert np.isfinite(first.observation).all()
    assert mask_of(first.legal, ACTIONS).nonzero()[0].tolist() == [0, 1, 2, 3, 9, 10, 11, 12, 13]
    assert game.record() is None
    played(game, channel, 2)
    played(game, channel, 9)
    assert channel.sent[1:] == [{"answer": 1, "action": 2}, {"answer": 23, "action": 9}], "what is asked is answered"
    json.dumps(channel.sent)  # of plain numbers alone
    over = played(game, channel, 1)
    assert isinstance(over, Over)
    assert (over.reward, over.truncated, over.info["is_win"], over.info["turns"]) == (-1.0, False, False, 29)
    assert over.info["score_diff"] == OVER["left"][0] - OVER["left"][1] < 0
    record: Any = game.record()
    assert record[0].startswith('>start {"formatid":"gen3randombattle"')
    assert record[-1].startswith((">p1 ", ">p2 "))


@pytest.mark.parametrize(("result", "reward"), [(1, 1.0), (0, 0.0), (-1, -1.0)])
def test_a_tie_at_turn_1000_is_neither_won_nor_lost(result: int, reward: float):
    over: Any = Showdown().read({**OVER, "over": result, "turns": 1000})
    assert (over.reward, over.info["is_win"], over.truncated) == (reward, result > 0, False)


def test_a_refused_choice_is_no_step():
    """`[Unavailable choice]`: the Pokémon was trapped, which nobody could know; switches are no longer offered."""
    game, channel = Showdown(generation=3), Recorded(FIRST, BEFORE, REFUSED, AFTER)
    begun(game, channel)
    decision = played(game, channel, 0)
    again = played(game, channel, 9)
    assert again == Refused([0, 1, 2, 3])
    assert game.decision is decision, "the same decision is open"
    assert isinstance(played(game, channel, 2), Decision)
    assert channel.sent[-2:] == [{"answer": 23, "action": 9}, {"answer": 23, "action": 2}]


def test_a_lead_pays_and_costs_as_much():
    game, channel = Showdown(shaping=2.0), Recorded(FIRST, BEFORE, AFTER, OVER)
    paid = [begun(game, channel).reward, *(played(game, channel, 0).reward for _ in range(3))]
    assert paid == pytest.approx([0.0, 2 * BEFORE["lead"], 0.0, -1 - 2 * BEFORE["lead"]])
    assert sum(paid) == pytest.approx(-1.0)
    broken_off = Recorded(FIRST, BEFORE, FIRST)
    begun(game, broken_off)
    assert played(game, broken_off, 0).reward != 0.0
    assert begun(game, broken_off).reward == 0.0, "no lead is left to the next battle"


def test_decisions_of_the_other_side_are_told_apart():
    game = Showdown(opponent="self")
    theirs: Any = game.read({**FIRST, "theirs": True})
    assert theirs.theirs
    assert not game.read(FIRST).theirs
    assert game.new_game(0, 1)["opponent"] == "self"


def test_what_is_sent_holds_whole_numbers_and_names_of_ours_alone():
    """So that nothing can reach the simulator's `>eval`, which runs what follows."""
    game = Showdown(generation=1, opponent="random")
    message = game.new_game(5, 2**40 + 7)
    assert {name: type(value) for name, value in message.items()} == {
        "new": int, "seed": list, "generation": int, "opponent": str,
    }  # fmt: skip
    assert all(type(word) is int and 0 <= word < 2**16 for word in message["seed"])
    assert message == game.new_game(6, 2**40 + 7), "the seed alone decides"
    assert message != game.new_game(5, 2**40 + 8)
    assert game.answer(Decision(None, tag=4), np.int64(2)) == {"answer": 4, "action": 2}


@pytest.mark.parametrize(
    ("message", "cause", "why"),
    [
        ({"error": "Error: nobody can decide\n at x", "ms": 1.0}, "engine error", "nobody can decide"),
        ({"ask": 1}, "bad message", "KeyError: 'view'"),
        ({**FIRST, "view": "AAA*"}, "bad message", "Error"),
        ({**FIRST, "lead": None}, "bad message", "TypeError"),
        ({**OVER, "left": [1]}, "bad message", "not enough values"),
        ([], "bad message", "TypeError"),
    ],
)
def test_what_is_not_understood_loses_the_game(message: Any, cause: str, why: str):
    with pytest.raises(GameLostError, match=why) as lost:
        begun(Showdown(), Recorded(message))
    assert lost.value.cause == cause


def test_a_view_of_another_size_is_refused():
    game = Showdown()
    decision: Any = game.read({**FIRST, "view": base64.b64encode(base64.b64decode(FIRST["view"])[:-4]).decode()})
    with pytest.raises(GameLostError, match="shape"):
        row_of(decision.observation, game.observation_space)


def test_another_program_is_told_apart():
    asyncio.run(Showdown().hello(Recorded(HELLO)))
    with pytest.raises(GameLostError, match=f"has 12 numbers, expected {SIZE}"):
        asyncio.run(Showdown().hello(Recorded({**HELLO, "size": 12})))


@pytest.mark.parametrize("wrong", wrong_inputs("arguments of Showdown"))
def test_wrong_settings_are_told(wrong: str):
    with pytest.raises(ValueError, match="is no") as told:
        Showdown(**yaml.safe_load(wrong))
    assert_says("arguments of Showdown", wrong, str(told.value))
