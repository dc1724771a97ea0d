"""What a message means: decisions, ends and refusals whose numbers are numbers; anything else loses the game."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain_engines.game import (
    Decision,
    DecisionServer,
    EngineGame,
    Over,
    Refused,
    RequestEngine,
    check_outcome,
    greet,
    mask_of,
    read_message,
    row_of,
)
from fasttrain_engines.wire import GameLostError


class Fake:
    """A channel whose engine says what is written down; None: nothing more."""

    def __init__(self, *come: Any, early: Sequence[Any] = ()) -> None:
        self.come, self.early, self.sent = list(come), list(early), list[Any]()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def unread(self) -> list[Any]:
        came, self.early = self.early, []
        return came

    async def receive(self, timeout_s: float) -> Any:
        if not self.come:
            raise GameLostError("timeout", "nothing came")
        return self.come.pop(0)

    async def ask(self, message: dict[str, Any], timeout_s: float) -> Any:
        self.sent.append(message)
        return await self.receive(timeout_s)


def meaning(message: Any) -> Any:
    return {"note": None, "ask": Decision(1, tag=message), "end": Over(2), "no": Refused([0])}[message]


class Asks(DecisionServer):
    def new_game(self, game: int, seed: int) -> Any:
        return None if seed < 0 else f"new {game} {seed}"

    def answer(self, decision: Decision, action: Any) -> Any:
        return f"{decision.tag} {action}"

    def read(self, message: Any) -> Any:
        return meaning(message)


class Asked(RequestEngine):
    def reset_request(self, game: int, seed: int) -> dict[str, Any]:
        return {"reset": seed}

    def step_request(self, action: Any) -> dict[str, Any]:
        return {"step": action}

    def read(self, message: Any) -> Any:
        return meaning(message)


def run(asked: Any) -> Any:
    return asyncio.run(asked)


def cause(asked: Any) -> str:
    with pytest.raises(GameLostError) as lost:
        asyncio.run(asked) if asyncio.iscoroutine(asked) else asked()
    return lost.value.cause


def test_notes_are_read_past_and_the_open_decision_is_answered():
    game, channel = Asks(), Fake("note", "note", "ask", "note", "end")
    assert run(game.begin(channel, 3, 7)) == Decision(1, tag="ask")
    assert run(game.play(channel, 5)) == Over(2)
    assert channel.sent == ["new 3 7", "ask 5"]
    silent = Fake("ask")
    run(game.begin(silent, 3, -1))
    assert silent.sent == [], "it begins by itself"


def test_a_refusal_leaves_the_decision_open():
    game, channel = Asks(), Fake("ask", "no", "end")
    run(game.begin(channel, 0, 0))
    assert run(game.play(channel, 1)) == Refused([0])
    assert run(game.play(channel, 0)) == Over(2)
    assert channel.sent == ["new 0 0", "ask 1", "ask 0"]


def test_what_came_before_the_answer_is_not_what_came_of_it():
    game, channel = Asks(), Fake("ask", "end")
    run(game.begin(channel, 0, 0))
    channel.early = ["note"]
    run(game.play(channel, 1))
    late = Fake("ask")
    run(game.begin(late, 0, 0))
    late.early = ["note", "ask"]
    assert cause(game.play(late, 1)) == "wrong answer"
    assert late.sent == ["new 0 0"]


def test_notes_do_not_put_the_deadline_off():
    class Slow(Fake):
        async def receive(self, timeout_s: float) -> Any:
            assert timeout_s >= 0.0
            if timeout_s == 0.0:
                raise GameLostError("timeout", "too late")
            await asyncio.sleep(0.01)
            return "note"

    game = Asks()
    game.timeout_s = 0.05
    assert cause(game.begin(Slow(), 0, 0)) == "timeout"


def test_a_request_is_answered_by_an_outcome():
    game, channel = Asked(), Fake("ask", "end", "note", early=["note"])
    assert run(game.begin(channel, 0, 7)) == Decision(1, tag="ask")
    assert channel.early == [], "what nobody asked for does not pile up"
    assert run(game.play(channel, 1)) == Over(2)
    assert cause(game.play(channel, 1)) == "bad message"
    assert channel.sent == [{"reset": 7}, {"step": 1}, {"step": 1}]


@pytest.mark.parametrize("message", ["what", [], None, {}])
def test_a_message_that_read_does_not_understand_loses_the_game(message: Any):
    assert cause(lambda: read_message(Asks(), message)) == "bad message"


def test_a_greeting_may_fail_in_whatever_way_and_has_one_deadline():
    class Odd(Asks):
        async def hello(self, channel: Any) -> None:
            await channel(self)

    async def wrong(game: Any) -> None:
        raise AttributeError("no attribute get")

    async def lost(game: Any) -> None:
        raise GameLostError("closed", "gone")

    async def endless(game: Any) -> None:
        while True:
            await asyncio.sleep(0.001)

    causes = [cause(greet(Odd(), channel, 0.02)) for channel in (wrong, lost, endless)]
    assert causes == ["bad message", "closed", "timeout"]
    run(greet(Asks(), None, 1.0))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*(("reward", one) for one in (math.nan, math.inf, 1e39, -(10**400), "1", None, [1.0], {})),
     *(("engine_ms", one) for one in (math.nan, math.inf, -1.0, "5", [1], 10**400))],
)  # fmt: skip
def test_a_reward_or_time_that_is_no_number_loses_the_game(name: str, wrong: Any):
    for kind in (Decision, Over):
        outcome = kind(0, **{name: wrong})
        assert cause(lambda outcome=outcome: check_outcome(outcome)) == "bad decision"


@pytest.mark.parametrize(
    "outcome", [Decision(0), Over(0, -1, engine_ms=0), Refused(), Decision(0, reward=np.float32(2))]
)
def test_sound_outcomes_pass(outcome: Any):
    assert check_outcome(outcome) is outcome


@pytest.mark.parametrize(
    ("legal", "mask"),
    [(None, [1, 1, 1]), ([0, 2], [1, 0, 1]), ((1,), [0, 1, 0]), ([True, False, True], [1, 0, 1]),
     ([1, 1, 0], [1, 1, 0]), (np.array([2]), [0, 0, 1])],
)  # fmt: skip
def test_masks(legal: Any, mask: list[int]):
    assert mask_of(legal, 3).tolist() == [bool(one) for one in mask]


@pytest.mark.parametrize(
    "legal",
    [[], [3], [-1], [1, 1], [0, 0, 0], [0.0], "01", {"a": 1}, [[0], [0, 1]], [True], [False] * 3, [True] * 4, [10**30],
     [None]],
    ids=str,
)  # fmt: skip
def test_legal_actions_that_are_none(legal: Any):
    empty = legal in ([], [0, 0, 0], [False] * 3)
    assert cause(lambda: mask_of(legal, 3)) == ("no legal action" if empty else "bad decision")


BOX = spaces.Box(0, 1, (2,), np.float32)
PARTS = spaces.Dict({"a": BOX, "b": spaces.Discrete(3)})


@pytest.mark.parametrize(
    ("observation", "space"),
    [([1, 2.5], BOX), (np.zeros(2), BOX), (2, spaces.Discrete(3)), ([1, 2], spaces.MultiDiscrete([2, 3])),
     ([0, 1], spaces.MultiBinary(2)), ([255], spaces.Box(0, 255, (1,), np.uint8))],
)  # fmt: skip
def test_observations_take_the_spaces_type(observation: Any, space: Any):
    row = row_of(observation, space)
    assert (row.dtype, row.tolist()) == (space.dtype, np.asarray(observation).tolist())
    both = row_of({"a": [0, 1], "b": 2}, PARTS)
    assert both["b"] == 2


@pytest.mark.parametrize(
    ("observation", "space"),
    [([1], BOX), ([1, 2, 3], BOX), ([math.nan, 0], BOX), ([1e300, 0], BOX), ([math.inf, 0], BOX), ("ab", BOX),
     (["a", "b"], BOX), ([[1], [1, 2]], BOX), (None, BOX), ([10**400, 0], BOX), ({}, BOX), (3, spaces.Discrete(3)),
     (-1, spaces.Discrete(3)), ([2, 0], spaces.MultiDiscrete([2, 3])), ([0, 2], spaces.MultiBinary(2)),
     ([256], spaces.Box(0, 255, (1,), np.uint8)), ({"a": [0, 1]}, PARTS), ({"a": [0, 1], "b": 1, "c": 1}, PARTS),
     ([0, 1], PARTS), ({"a": [0], "b": 1}, PARTS)],
    ids=str,
)  # fmt: skip
def test_observations_of_another_space(observation: Any, space: Any):
    assert cause(lambda: row_of(observation, space)) == "bad decision"


def test_a_game_names_what_its_connections_speak():
    class Numbered(Asks):
        framing, id_key = "length", "number"

    class Plain(Asks):
        codec = "text"

    async def sent(game: EngineGame, message: Any) -> bytes:
        channel, engine = game.channel(), Mock()
        channel.writes_to(engine)
        if isinstance(message, dict):
            with pytest.raises(GameLostError):
                await channel.ask(message, 0.001)
        else:
            channel.send(message)
        return bytes(engine.write.call_args[0][0])

    assert asyncio.run(sent(Numbered(), {"a": 2})) == b'\0\0\0\x12{"a":2,"number":1}'
    assert asyncio.run(sent(Plain(), "hello")) == b"hello\n"
