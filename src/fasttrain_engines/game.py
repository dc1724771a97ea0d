"""The base classes of games with an external engine.

There are two kinds of engines. One answers requests: `RequestEngine` sends "reset" and "step" and reads the answers.
The other asks for decisions (Forge, Showdown): `DecisionServer` reads messages until the engine wants a decision, and
answers it. A user writes the outgoing messages, and the method `read`, which interprets a received message. Waiting,
deadlines, ids, failures, masks and records are handled here. A game that needs other code overrides `begin` and `play`.
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
MOST_NOTES = 100_000  # most messages in a row without a decision
MOST_REWARD = float(np.finfo(np.float32).max)
MOST_MS = 1e9
NO_ACTION = "no legal action"  # a cause of lost games; with env.on_empty_mask=raise it is an error
COUNTED = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Decision(NamedTuple):
    """The engine waits for an action."""

    observation: Any
    legal: Legal = None  # numbers of legal actions, or a mask (A,); None: all
    reward: float = 0.0  # reward since the last decision
    engine_ms: float | None = None  # time for which the engine thought, if the engine reports it
    tag: Any = None  # for `answer`, for example the id of the question or the engine's own list of options
    theirs: bool = False  # True: the opponent decides, with its own observation; the reward is the learner's


class Over(NamedTuple):
    """The game has ended. `truncated`: True if a limit ended it."""

    observation: Any
    reward: float = 0.0
    truncated: bool = False
    info: Mapping[str, Any] = {}
    engine_ms: float | None = None


class Refused(NamedTuple):
    """The engine refuses the last action. The same decision must be made again, and no step was made."""

    legal: Legal = None  # None: the same legal actions without the refused one


Outcome = Union[Decision, Over, Refused]  # noqa: UP007


class EngineGame(ABC):
    """Plays one game after another over one channel. Spaces do not change between games."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    masked: bool = True  # whether decisions name the legal actions
    skip_forced: bool = False  # True: decisions with one legal action are taken without the policy
    framing: str | type[Framing] = "lines"  # "lines", "length", or the user's class
    codec: str | type[Codec] = "json"  # "json", "msgpack", "text", or the user's class
    id_key: str = "id"
    timeout_s: float = 30.0  # timeout of each request; set from daemons.timeouts_s.request
    # Milliseconds that a ready game waits at most for other games, so that one batch has decisions of several games. No
    # game waits if engines play fewer than two games each on average. For engines that play many games on one core.
    wait_ms: float = 0.0

    def channel(self) -> Channel:
        """A channel with the game's framing and codec."""
        return Channel(*self.language(), self.id_key)

    def language(self) -> tuple[Framing, Codec]:
        """Framing and codec of one connection. Raises ValueError for an unknown name, ModuleNotFoundError if a package
        is not installed.
        """
        for name, known in ((self.framing, FRAMINGS), (self.codec, CODECS)):
            if isinstance(name, str) and name not in known:
                raise ValueError(f"{name!r} is none of {', '.join(known)}")
        framing = FRAMINGS[self.framing] if isinstance(self.framing, str) else self.framing
        codec = CODECS[self.codec] if isinstance(self.codec, str) else self.codec
        return framing(), codec()

    async def hello(self, channel: Channel) -> None:  # noqa: B027 - many engines need no greeting
        """Called after connecting: log in, agree on a version, or wait for a sign of life. If this fails, the process
        counts as not started. Raises GameLostError if the engine cannot be played with.
        """

    @abstractmethod
    async def begin(self, channel: Channel, game: int, seed: int) -> Outcome:
        """Begin a game and return its first decision. `game`: a number that no other game has. Raises GameLostError if
        the engine failed.
        """

    @abstractmethod
    async def play(self, channel: Channel, action: Any) -> Outcome:
        """Answer the last decision; returns the next one or the end."""

    def record(self) -> Any:
        """Data for replaying the game, for games.jsonl and failed_games.jsonl. None: the seed is enough."""
        return None


class MessageGame(EngineGame):
    """A game that interprets one message at a time."""

    @abstractmethod
    def read(self, message: Any) -> Outcome | None:
        """The outcome that a message reports; None if it needs no answer. Any exception means that the message does not
        follow the protocol; then the game is lost.
        """


class RequestEngine(MessageGame):
    """An engine that answers each request with a message of the same id."""

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
        outcome = read_message(self, await channel.ask(request, self.timeout_s))
        channel.unread()  # drops messages without an id
        if outcome is None:
            raise GameLostError("bad message", "read() returned None for the answer to a request")
        return outcome


class DecisionServer(MessageGame):
    """An engine that asks for decisions. Between decisions it may send messages that need no answer."""

    decision: Decision  # the decision that waits for an answer

    @abstractmethod
    def new_game(self, game: int, seed: int) -> Any:
        """The message that begins a game; None if the engine begins by itself."""

    @abstractmethod
    def answer(self, decision: Decision, action: Any) -> Any:
        """The message that answers a decision."""

    async def begin(self, channel: Channel, game: int, seed: int) -> Outcome:
        message = self.new_game(game, seed)
        if message is not None:
            channel.unread()  # drops messages of the last game
            channel.send(message)
        return await self._next(channel)

    async def play(self, channel: Channel, action: Any) -> Outcome:
        # A decision that arrived before the action was sent cannot be the result of the action.
        if any(read_message(self, message) is not None for message in channel.unread()):
            raise GameLostError("wrong answer", "the engine asked again before the open decision was answered")
        channel.send(self.answer(self.decision, action))
        return await self._next(channel)

    async def _next(self, channel: Channel) -> Outcome:
        until, left_s = time.monotonic() + self.timeout_s, self.timeout_s  # other messages do not extend the deadline
        for _ in range(MOST_NOTES):
            outcome = read_message(self, await channel.receive(max(0.0, left_s)))
            left_s = until - time.monotonic()
            if isinstance(outcome, Decision):
                self.decision = outcome
            if outcome is not None:
                return outcome
        raise GameLostError("flood", f"{MOST_NOTES:,} messages in a row without a decision")


def read_message(game: MessageGame, message: object) -> Outcome | None:
    """The result of `game.read`. Any exception that `read` raises becomes a GameLostError."""
    try:
        return game.read(message)
    except GameLostError:
        raise
    except Exception as error:
        raise GameLostError("bad message", f"{type(error).__name__}: {str(error)[:200]}") from error


async def greet(game: EngineGame, channel: Channel, timeout_s: float) -> None:
    """`game.hello` within `timeout_s`. Raises GameLostError if it fails in any way."""
    try:
        await asyncio.wait_for(game.hello(channel), timeout_s)
    except GameLostError:
        raise
    except asyncio.TimeoutError as error:
        raise GameLostError("timeout", f"no greeting within {timeout_s:.3g} s") from error
    except Exception as error:
        text = f"the greeting failed: {type(error).__name__}: {str(error)[:200]}"
        raise GameLostError("bad message", text) from error


def check_outcome(outcome: Outcome) -> Outcome:
    """Returns `outcome`. Raises GameLostError if its reward or time is no number that float32 can hold."""
    if isinstance(outcome, Refused):
        return outcome
    reward, took_ms = outcome.reward, outcome.engine_ms
    try:
        valid = abs(reward) <= MOST_REWARD and (took_ms is None or 0.0 <= took_ms <= MOST_MS)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise GameLostError("bad decision", f"reward {reward!s:.80} or engine_ms {took_ms!s:.80} is out of range")
    return outcome


def mask_of(legal: Legal, width: int) -> BoolArray:
    """The mask (A,) for a mask or for numbers of legal actions. With A = 2, `[0, 1]` and `[1, 0]` are read as numbers.

    Raises:
        GameLostError: an action does not exist, comes twice, or no action is legal.
    """
    if legal is None:
        return np.ones(width, np.bool_)
    try:
        array = np.asarray(legal)
    except (ValueError, OverflowError) as error:  # for example lists of different lengths
        raise GameLostError("bad decision", f"legal actions {legal!s:.80}: {error}") from error
    if array.dtype == np.bool_:
        mask = array.reshape(-1)
    else:
        mask = np.zeros(width, np.bool_)
        if array.size and array.dtype.kind not in "iu":
            raise GameLostError("bad decision", f"legal actions {legal!s:.80}: expected numbers from 0 to {width - 1}")
        if array.shape == (width,) and len({*array.tolist()}) < width and np.isin(array, (0, 1)).all():
            mask = array == 1  # 0 or 1 comes twice, so these are no action numbers but a mask
        elif array.size and (array.min() < 0 or array.max() >= width or len({*array.ravel().tolist()}) < array.size):
            why = f"each of 0 to {width - 1} may come once; or give a mask of {width} entries, 1 = legal"
            raise GameLostError("bad decision", f"legal actions {legal!s:.80}: {why}")
        else:
            mask[array.astype(np.int64)] = True
    if len(mask) != width or not mask.any():
        cause = NO_ACTION if len(mask) == width else "bad decision"
        raise GameLostError(cause, f"legal actions {legal!s:.80} of {width}")
    return mask


def row_of(observation: object, space: spaces.Space[Any]) -> Any:
    """The observation as arrays of the space's shape and type. Raises GameLostError if it does not fit the space or is
    not finite.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, Mapping) or {*observation} != {*space.spaces}:
            raise GameLostError("bad decision", f"observation {observation!s:.80}, expected the keys {[*space.spaces]}")
        return {key: row_of(observation[key], part) for key, part in space.spaces.items()}
    try:
        with np.errstate(over="ignore"):  # an overflow is found by the check for finite numbers below
            row = np.asarray(observation, space.dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise GameLostError("bad decision", f"observation {observation!s:.80}: {error}") from error
    if row.shape != (space.shape or ()):
        raise GameLostError("bad decision", f"observation of shape {row.shape}, expected {space.shape or ()}")
    if row.dtype.kind == "f" and not np.isfinite(row).all():
        raise GameLostError("bad decision", f"observation {observation!s:.80} is not finite")
    if isinstance(space, COUNTED) and not space.contains(row):  # such values are used as indices
        raise GameLostError("bad decision", f"observation {observation!s:.80} is not in {space}")
    return row
