"""Games that an external engine plays: what a user derives his own from.

Two kinds of engines. One is asked: `RequestEngine` sends "reset" and "step" and reads what came of it. The other asks
by itself (Forge, Showdown): `DecisionServer` reads until the engine wants a decision, and answers it. In both a user
writes what goes out as messages, and `read`, which makes of one message what it means; waiting, deadlines, ids,
failures, masks and records are done around them. A game that needs more overrides `begin` and `play` themselves.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np
from gymnasium import spaces

from fasttrain.batch import BoolArray
from fasttrain_engines.channel import Channel
from fasttrain_engines.wire import CODECS, FRAMINGS, Codec, Framing, GameLostError

Legal = Union[Sequence[int], BoolArray, None]  # noqa: UP007 - read at run time by Python 3.10
MOST_NOTES = 100_000  # in a row, without a decision
MOST_REWARD = float(np.finfo(np.float32).max)
MOST_MS = 1e9
NO_ACTION = "no legal action"  # the cause that env.on_empty_mask=raise makes an error
COUNTED = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Decision(NamedTuple):
    """The engine waits for an action."""

    observation: Any
    legal: Legal = None  # numbers of the fixed action list, or a mask (A,); None: all
    reward: float = 0.0  # since the decision before
    engine_ms: float | None = None  # that the engine says it thought, if it does
    tag: Any = None  # whatever `answer` needs to know of the question: its id, the options in the engine's own order
    theirs: bool = False  # the other side decides: what is seen and legal is its, the reward ours (opponent=self)


class Over(NamedTuple):
    """The game has ended. `truncated`: by a limit, not by its rules."""

    observation: Any
    reward: float = 0.0
    truncated: bool = False
    info: Mapping[str, Any] = {}
    engine_ms: float | None = None


class Refused(NamedTuple):
    """The engine does not take the last answer. The same decision is asked again, and no step was made."""

    legal: Legal = None  # None: as before, without the action that was refused


Outcome = Union[Decision, Over, Refused]  # noqa: UP007


class EngineGame(ABC):
    """One game after another over one channel. The spaces are fixed; actions are numbers of one fixed list."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    masked: bool = True  # whether decisions name what is legal
    framing: str | type[Framing] = "lines"  # or "length", or a class of the user's own
    codec: str | type[Codec] = "json"  # or "msgpack", "text", or a class of the user's own
    id_key: str = "id"
    timeout_s: float = 30.0  # of each request; set from daemons.timeouts_s.request
    # How long ready games wait for others, to be decided together, while the engines have two more each to play: for
    # engines that play many games on one core.
    wait_ms: float = 0.0

    def channel(self) -> Channel:
        """A new connection's end, which speaks as the game does."""
        return Channel(*self.language(), self.id_key)

    def language(self) -> tuple[Framing, Codec]:
        """Framing and codec of one connection.

        Raises:
            ValueError: there is none of that name.
            ModuleNotFoundError: its package is not installed.
        """
        for name, known in ((self.framing, FRAMINGS), (self.codec, CODECS)):
            if isinstance(name, str) and name not in known:
                raise ValueError(f"{name!r} is none of {', '.join(known)}")
        framing = FRAMINGS[self.framing] if isinstance(self.framing, str) else self.framing
        codec = CODECS[self.codec] if isinstance(self.codec, str) else self.codec
        return framing(), codec()

    async def hello(self, channel: Channel) -> None:  # noqa: B027 - many engines need no greeting
        """After connecting: log in, agree on a version, or ask for a sign of life. A process that does not answer it is
        taken for one that did not come up.

        Raises:
            GameLostError: the engine cannot be played with.
        """

    @abstractmethod
    async def begin(self, channel: Channel, game: int, seed: int) -> Outcome:
        """Begin a game; its first decision. `game` is a number that no other game has.

        Raises:
            GameLostError: the engine failed.
        """

    @abstractmethod
    async def play(self, channel: Channel, action: Any) -> Outcome:
        """Answer the last decision; what comes of it."""

    def record(self) -> Any:
        """What the game can be played again from, for games.jsonl and failed_games.jsonl; None: its seed is enough."""
        return None


class MessageGame(EngineGame):
    """One that says of each message what it means."""

    @abstractmethod
    def read(self, message: Any) -> Outcome | None:
        """What a message means; None: nothing that needs an answer. May raise what it likes on a message that is none
        of the protocol's: the game is lost then."""


class RequestEngine(MessageGame):
    """An engine that answers: a request with an id, a reply with the same one."""

    @abstractmethod
    def reset_request(self, game: int, seed: int) -> dict[str, Any]:
        """The request that begins a game."""

    @abstractmethod
    def step_request(self, action: Any) -> dict[str, Any]:
        """The request that takes an action."""

    async def begin(self, channel: Channel, game: int, seed: int) -> Outcome:
        return await self._asked(channel, self.reset_request(game, seed))

    async def play(self, channel: Channel, action: Any) -> Outcome:
        return await self._asked(channel, self.step_request(action))

    async def _asked(self, channel: Channel, request: dict[str, Any]) -> Outcome:
        outcome = understood(self, await channel.ask(request, self.timeout_s))
        channel.unread()  # what nobody asked for is for nobody
        if outcome is None:
            raise GameLostError("bad message", "the answer to a request means nothing")
        return outcome


class DecisionServer(MessageGame):
    """An engine that asks. Messages that need no answer may come at any time between."""

    decision: Decision  # that is open

    @abstractmethod
    def new_game(self, game: int, seed: int) -> Any:
        """The message that begins a game; None where the engine begins by itself."""

    @abstractmethod
    def answer(self, decision: Decision, action: Any) -> Any:
        """The message that answers a decision."""

    async def begin(self, channel: Channel, game: int, seed: int) -> Outcome:
        message = self.new_game(game, seed)
        if message is not None:
            channel.unread()  # notes of the game before
            channel.send(message)
        return await self._next(channel)

    async def play(self, channel: Channel, action: Any) -> Outcome:
        # What was there before our answer cannot have come of it.
        if any(understood(self, message) is not None for message in channel.unread()):
            raise GameLostError("wrong answer", "more came than the decision that was open, before it was answered")
        channel.send(self.answer(self.decision, action))
        return await self._next(channel)

    async def _next(self, channel: Channel) -> Outcome:
        until, left_s = time.monotonic() + self.timeout_s, self.timeout_s  # notes do not put it off
        for _ in range(MOST_NOTES):
            outcome = understood(self, await channel.receive(max(0.0, left_s)))
            left_s = until - time.monotonic()
            if isinstance(outcome, Decision):
                self.decision = outcome
            if outcome is not None:
                return outcome
        raise GameLostError("flood", f"{MOST_NOTES:,} messages and no decision")


def understood(game: MessageGame, message: object) -> Outcome | None:
    """`read`, where anything that it raises says that the message is none of the protocol's."""
    try:
        return game.read(message)
    except GameLostError:
        raise
    except Exception as error:
        raise GameLostError("bad message", f"{type(error).__name__}: {str(error)[:200]}") from error


async def greeted(game: EngineGame, channel: Channel, timeout_s: float) -> None:
    """`hello`, within `timeout_s` in all.

    Raises:
        GameLostError: it failed in whatever way.
    """
    try:
        await asyncio.wait_for(game.hello(channel), timeout_s)
    except GameLostError:
        raise
    except asyncio.TimeoutError as error:
        raise GameLostError("timeout", f"no greeting within {timeout_s:.3g} s") from error
    except Exception as error:
        text = f"the greeting failed: {type(error).__name__}: {str(error)[:200]}"
        raise GameLostError("bad message", text) from error


def sound(outcome: Outcome) -> Outcome:
    """An outcome whose reward and time are numbers that float32 can hold.

    Raises:
        GameLostError: they are something else.
    """
    if isinstance(outcome, Refused):
        return outcome
    reward, took_ms = outcome.reward, outcome.engine_ms
    try:
        fine = abs(reward) <= MOST_REWARD and (took_ms is None or 0.0 <= took_ms <= MOST_MS)
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise GameLostError("bad decision", f"a reward of {reward!s:.80}, {took_ms!s:.80} ms of thinking")
    return outcome


def mask_of(legal: Legal, width: int) -> BoolArray:
    """A mask (A,), from a mask or from numbers of legal actions.

    Of two actions `[0, 1]` and `[1, 0]` are numbers; a mask of them is one of booleans.

    Raises:
        GameLostError: it names actions that there are not, or none, or one of them twice.
    """
    if legal is None:
        return np.ones(width, np.bool_)
    try:
        given = np.asarray(legal)
    except (ValueError, OverflowError) as error:  # lists of several lengths
        raise GameLostError("bad decision", f"legal actions {legal!s:.80}: {error}") from error
    if given.dtype == np.bool_:
        mask = given.reshape(-1)
    else:
        mask = np.zeros(width, np.bool_)
        if given.size and given.dtype.kind not in "iu":
            raise GameLostError("bad decision", f"legal actions {legal!s:.80}, there are 0 to {width - 1}")
        if given.shape == (width,) and len({*given.tolist()}) < width and np.isin(given, (0, 1)).all():
            mask = given == 1  # numbers of actions do not come twice
        elif given.size and (given.min() < 0 or given.max() >= width or len({*given.ravel().tolist()}) < given.size):
            why = f"each of 0 to {width - 1} may come once; or give a mask of {width} entries, 1 = legal"
            raise GameLostError("bad decision", f"legal actions {legal!s:.80}: {why}")
        else:
            mask[given.astype(np.int64)] = True
    if len(mask) != width or not mask.any():
        cause = NO_ACTION if len(mask) == width else "bad decision"
        raise GameLostError(cause, f"legal actions {legal!s:.80} of {width}")
    return mask


def row_of(observation: object, space: spaces.Space[Any]) -> Any:
    """The observation as arrays of the space's shape and type.

    Raises:
        GameLostError: it has another shape, or numbers that are not finite.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, Mapping) or {*observation} != {*space.spaces}:
            raise GameLostError("bad decision", f"observation {observation!s:.80}, expected the keys {[*space.spaces]}")
        return {key: row_of(observation[key], part) for key, part in space.spaces.items()}
    try:
        with np.errstate(over="ignore"):  # seen below, where it is not finite
            row = np.asarray(observation, space.dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise GameLostError("bad decision", f"observation {observation!s:.80}: {error}") from error
    if row.shape != (space.shape or ()):
        raise GameLostError("bad decision", f"observation of shape {row.shape}, expected {space.shape or ()}")
    if row.dtype.kind == "f" and not np.isfinite(row).all():
        raise GameLostError("bad decision", f"observation {observation!s:.80} is not finite")
    if isinstance(space, COUNTED) and not space.contains(row):  # it would be an index
        raise GameLostError("bad decision", f"observation {observation!s:.80} is not of {space}")
    return row
