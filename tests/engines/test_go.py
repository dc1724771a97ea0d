"""Go over GTP: what an engine says and does that is not as one would think, in recorded traffic."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import yaml

from fasttrain_engines.game import Decision, Over, row_of
from fasttrain_engines.go import Go, Replies
from fasttrain_engines.wire import GameLostError
from messages import assert_says, wrong_inputs

EVERYWHERE = " ".join(f"{letter}{number}" for number in (5, 4, 3, 2, 1) for letter in "ABCDE")
POINTS = [*EVERYWHERE.split(), "PASS"]
LAST, BLACK = slice(6 * 25, 7 * 25), -2  # of an observation: the last move, and whether one plays Black


class Recorded:
    """GNU Go's side of a channel: a command begins with what is known → its answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"all_legal": EVERYWHERE, "list_stones": "", "known_command": "true", **answers}
        self.writes: list[list[str]] = []
        self._replies: list[str] = []
        self.more: list[str] = []

    def send(self, text: str) -> None:
        self.writes.append([re.sub(r"^\d+ ", "", line) for line in text.split("\n")])
        for line in text.split("\n"):
            number, command = line.split(" ", 1)
            answer = self.answers.get(command, self.answers.get(command.split()[0], ""))
            answer = answer.pop(0) if isinstance(answer, list) else answer
            self._replies.append(answer if answer[:1] in ("?", "=") else f"={number} {answer}".strip())

    async def receive(self, timeout_s: float) -> str:
        if not self._replies:
            raise GameLostError("timeout", "nothing more")
        return self._replies.pop(0)

    def unread(self) -> list[str]:
        return self.more


def begun(game: Go, channel: Any, seed: int = 4) -> Any:
    return asyncio.run(game.begin(channel, 0, seed))


def played(game: Go, channel: Any, move: str) -> Any:
    return asyncio.run(game.play(channel, POINTS.index(move)))


def test_a_frame_is_a_reply_up_to_an_empty_line():
    replies = Replies()
    assert replies.pack(b"1 name\n2 version") == b"1 name\n2 version\n"
    assert replies.feed(b"=1 GNU Go\r\n\r") == []
    assert replies.feed(b"\n=2\n\n\n=3 A1 B2\nC3\n\n?4 unk") == [b"=1 GNU Go", b"=2", b"=3 A1 B2\nC3"]
    assert replies.feed(b"nown\n\n") == [b"?4 unknown"]
    with pytest.raises(GameLostError) as lost:
        Replies(10).feed(b"=1 " + b"A1 " * 9)
    assert lost.value.cause == "oversize"


def test_a_decision_is_one_write_and_a_pass_is_always_legal():
    game, channel = Go(size=5), Recorded(genmove=["C3", "pass"])
    first = begun(game, channel)
    assert channel.writes == [
        ["boardsize 5", "komi 24.5", "level 1", "set_random_seed 4", "clear_board", "all_legal black",
         "list_stones black", "list_stones white"],
    ]  # fmt: skip
    assert sorted(first.legal) == list(range(26))
    channel.answers["all_legal"] = ""
    assert played(game, channel, "B2").legal == [25]
    assert channel.writes[-1] == ["play black B2", "genmove white", "all_legal black", "list_stones black",
                                  "list_stones white"]  # fmt: skip


def test_colours_come_in_turn_and_white_is_moved_against_first():
    game, channel = Go(size=5), Recorded(genmove="C3")
    begun(game, channel)
    second = begun(game, channel)
    assert channel.writes[-1][5:7] == ["genmove black", "all_legal white"]
    assert isinstance(second, Decision)
    assert row_of(second.observation, game.observation_space)[LAST].argmax() == 12, "its move in the centre"
    assert second.observation[BLACK] == 0, "White is played"
    assert begun(Go(size=5), channel, seed=5).observation[BLACK] == 0, "half of the boards begin with White"
    for colour in ("black", "white"):
        one = Go(size=5, colour=colour)
        for _ in range(2):
            assert begun(one, channel).observation[BLACK] == (colour == "black")


@pytest.mark.parametrize(("score", "reward", "ahead"), [("B+3.5", 1.0, 3.5), ("W+12", -1.0, -12.0), ("0", 0.0, 0.0)])
def test_two_passes_end_it_though_gnu_go_would_play_on(score: str, reward: float, ahead: float):
    """Whoever passes second: the count is asked for, and no further move."""
    theirs_first = Recorded(genmove="PASS", final_score=score)
    game = Go(size=5)
    begun(game, theirs_first)
    assert played(game, theirs_first, "C3").observation[-3] == 1, "one sees that it has passed"
    over = played(game, theirs_first, "PASS")
    assert theirs_first.writes[-1][:2] == ["play black PASS", "final_score"]
    ours_first = Recorded(genmove="PASS", final_score=score)
    other = Go(size=5)
    begun(other, ours_first)
    for end in (over, played(other, ours_first, "PASS")):
        assert isinstance(end, Over)
        assert (end.reward, end.truncated) == (reward, False)
        told = {"is_win": reward > 0, "colour": "black", "result": score, "errs": 0.0, "score_diff": ahead}
        assert end.info == told


def test_a_resignation_is_a_win():
    game, channel = Go(size=5), Recorded(genmove="resign")
    begun(game, channel)
    over = played(game, channel, "C3")
    assert (over.reward, over.info["result"], over.info["is_win"]) == (1.0, "B+R", True)
    assert game.record() == "(;GM[1]FF[4]SZ[5]KM[24.5]RU[Chinese]PB[fasttrain]PW[GNU Go level 1]RE[B+R];B[cc])"


def test_the_letters_of_points_skip_i():
    game, channel = Go(size=9), Recorded(genmove="A1")
    begun(game, channel)
    for action, point in ((7, "H9"), (8, "J9")):
        asyncio.run(game.play(channel, action))
        assert channel.writes[-1][0] == f"play black {point}"


def test_a_game_without_end_is_cut():
    game, channel = Go(size=5, most_moves=4), Recorded(genmove="A1")
    begun(game, channel)
    assert isinstance(played(game, channel, "C3"), Decision)
    cut = played(game, channel, "C4")
    assert (cut.truncated, cut.reward, cut.info) == (True, 0.0, {"colour": "black"})


def test_an_opponent_may_err():
    own, at_random = 0, set[str]()
    for seed in range(40):
        game, channel = Go(size=5, errs=0.5, colour="white"), Recorded(genmove="C3")
        last = begun(game, channel, seed).observation[LAST].argmax()
        again = Recorded(genmove="C3")
        begun(Go(size=5, errs=0.5, colour="white"), again, seed)
        assert again.writes == channel.writes, "the seed says when, and which move"
        if "genmove black" in channel.writes[0]:
            own += 1
            assert POINTS[last] == "C3"
        else:
            assert channel.writes[0][-1] == "all_legal black"
            assert channel.writes[1][0] == f"play black {POINTS[last]}"
            at_random.add(POINTS[last])
    assert 8 < own < 32
    assert len(at_random) > 10
    game, channel = Go(size=5, errs=1.0, colour="white"), Recorded(all_legal="")
    begun(game, channel)
    assert "play black PASS" in channel.writes[1], "where nothing else is legal"


@pytest.mark.parametrize(("score", "winner", "loser"), [("B+0.5", "black", "white"), ("W+0.5", "white", "black")])
def test_it_errs_less_with_each_win_of_that_colour_and_more_with_each_loss(score: str, winner: str, loser: str):
    game, found = Go(size=5, errs=1.0), list[dict[str, Any]]()
    for played_score in [score] * 6 + [{"B+0.5": "W+0.5", "W+0.5": "B+0.5"}[score]] * 4:
        begun(game, channel := Recorded(genmove="PASS", all_legal="", final_score=played_score))
        found.append(played(game, channel, "PASS").info)
    assert [one["colour"] for one in found] == ["black", "white"] * 5
    errs = {colour: [one["errs"] for one in found if one["colour"] == colour] for colour in ("black", "white")}
    assert errs[winner] == pytest.approx([1.0, 0.975, 0.95, 0.925, 0.925 + 0.025 / 3]), "as it was in each game"
    assert errs[loser] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.975])


@pytest.mark.parametrize(
    ("answers", "cause", "why"),
    [
        ({"play": "?7 illegal move"}, "bad message", "play black C3: the engine says .7 illegal move"),
        ({"play": "=99"}, "wrong answer", "the engine answered command 99, not "),
        ({"final_score": "?9 cannot score", "genmove": "PASS"}, "bad message", "final_score"),
        ({"final_score": "jigo", "genmove": "PASS"}, "bad message", "final_score: the engine says jigo"),
        ({"all_legal": "A1 I3"}, "bad message", "a point: the engine says I3"),
        ({"genmove": "Z9"}, "bad message", "a point: the engine says Z9"),
    ],
)
def test_what_is_not_understood_loses_the_game(answers: dict[str, str], cause: str, why: str):
    game, channel = Go(size=5), Recorded()
    begun(game, channel)
    channel.answers |= {"genmove": "C4", **answers}
    if "final_score" in answers:
        played(game, channel, "C3")
    with pytest.raises(GameLostError, match=why) as lost:
        played(game, channel, "PASS" if "final_score" in answers else "C3")
    assert lost.value.cause == cause


def test_an_engine_that_says_more_than_it_was_asked_is_not_trusted():
    game, channel = Go(size=5), Recorded()
    channel.more = ["=3 C3"]
    with pytest.raises(GameLostError, match="more replies than there were commands"):
        begun(game, channel)


def test_another_engine_is_told_apart():
    with pytest.raises(GameLostError, match="knows no all_legal: is it GNU Go"):
        asyncio.run(Go().hello(Recorded(known_command="false")))
    asyncio.run(Go().hello(Recorded()))


def test_what_is_seen_of_a_board():
    #   . . . . .
    #   . X . . .
    #   . X O . .     X black, seen by White, whose stone has 3 liberties; X has 5
    #   . . . O X     that O has 2, that X at the edge has 2
    #   O . . . .     and the stone in the corner has 2
    channel = Recorded(**{"list_stones black": "B4 B3 E2", "list_stones white": "C3 D2 A1", "genmove": "B3"})
    game = Go(size=5, colour="white")
    seen = begun(game, channel).observation[: 7 * 25].reshape(7, 25)
    found = [{POINTS[point] for point in np.flatnonzero(plane)} for plane in seen]
    assert found == [set(), {"A1"}, {"C3", "D2"}, set(), {"E2"}, {"B4", "B3"}, {"B3"}]


@pytest.mark.parametrize("wrong", wrong_inputs("arguments of Go"))
def test_wrong_settings_are_told(wrong: str):
    with pytest.raises(ValueError, match="expected|a size is|is no number") as told:
        Go(**yaml.safe_load(wrong))
    assert_says("arguments of Go", wrong, str(told.value))
