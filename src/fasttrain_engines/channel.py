"""Channel: one connection to an engine. Messages go out at once; what comes in is decoded on the way.

A channel that failed once, by a wrong frame or an answer that came too late, is closed for good: nothing that may still
come on it can be told apart from an answer to something else.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from fasttrain_engines.wire import Codec, Framing, GameLostError

MOST_UNREAD, MOST_UNREAD_BYTES = 1000, 64 << 20  # messages that nobody asked for
TRACED = 40  # newest frames that are kept for the record of a failed game
TRACED_BYTES = 400  # of each
T = TypeVar("T")


class Traced(NamedTuple):
    """A frame that went (>) or came (<)."""

    ns: int  # of time.perf_counter_ns
    way: str
    payload: bytes


class Channel(asyncio.Protocol):
    """`send` and `receive` messages, or `ask` with an id and get the answer that carries it.

    Args:
        framing: of this connection alone; it holds what has begun to arrive.
        id_key: where a message says what it answers; empty: there are no ids.
    """

    def __init__(self, framing: Framing, codec: Codec, id_key: str = "id") -> None:
        self._framing, self._codec, self._id_key = framing, codec, id_key
        self._loop = asyncio.get_running_loop()
        self._writer: Any = None
        self._transports: list[Any] = []  # two where the way out is another one than the way in
        self._unread: deque[tuple[Any, int]] = deque()  # and the size of each
        self._unread_bytes = 0
        self._reader: asyncio.Future[Any] | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last_id = 0
        self.failure: GameLostError | None = None
        self.trace: deque[Traced] = deque(maxlen=TRACED)
        self.came_ns = time.perf_counter_ns()
        self.decode_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.writes_to(transport)

    def writes_to(self, transport: asyncio.BaseTransport) -> None:
        """Where the way out is another one than the way in, as with pipes."""
        self._writer = transport
        self._transports.append(transport)
        if self.failure is not None:  # before it was connected
            self._hang_up()

    def data_received(self, data: bytes) -> None:
        self.came_ns = now = time.perf_counter_ns()
        if self.failure is not None:
            return
        try:
            for payload in self._framing.feed(data):
                self.trace.append(Traced(now, "<", payload[:TRACED_BYTES]))
                self._take(self._codec.decode(payload), len(payload))
        except GameLostError as error:
            self.fail(error)
        except Exception as error:  # of a framing or codec of the user's own
            self.fail(GameLostError("garbage", f"{type(error).__name__}: {str(error)[:200]}"))
        self.decode_ns += time.perf_counter_ns() - now

    def _take(self, message: object, size: int) -> None:
        number = message.get(self._id_key) if self._asked and isinstance(message, dict) else None
        if type(number) is int:  # true is no id
            answer = self._asked.pop(number, None)
            if answer is None:
                raise GameLostError("wrong answer", f"it answers request {number}, which nobody made")
            if not answer.done():
                answer.set_result(message)
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(message)
        elif len(self._unread) >= MOST_UNREAD or self._unread_bytes + size > MOST_UNREAD_BYTES:
            raise GameLostError("flood", f"{len(self._unread) + 1:,} messages that nobody asked for")
        else:
            self._unread.append((message, size))
            self._unread_bytes += size

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(GameLostError("closed", f"the engine closed the connection{f': {exc}' if exc else ''}"))

    def eof_received(self) -> bool:
        return False  # half a connection is none

    def fail(self, error: GameLostError) -> None:
        """Close for good; who waits is told why."""
        if self.failure is not None:
            return
        self.failure = error
        for waiting in (self._reader, *self._asked.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        self._hang_up()

    def _hang_up(self) -> None:
        for transport in self._transports:
            (transport.abort if hasattr(transport, "abort") else transport.close)()

    def close(self) -> None:
        """End of the channel by our own wish."""
        self.fail(GameLostError("closed", "the channel was closed"))

    def send(self, message: object) -> None:
        """Send a message that expects no answer, or one that `receive` waits for.

        Raises:
            GameLostError: the channel has failed.
        """
        if self.failure is not None:
            raise self.failure
        payload = self._codec.encode(message)
        self.trace.append(Traced(time.perf_counter_ns(), ">", payload[:TRACED_BYTES]))
        self._writer.write(self._framing.pack(payload))

    async def receive(self, timeout_s: float) -> Any:
        """The next message that answers no id.

        Raises:
            GameLostError: none came in time, or the channel failed.
        """
        if self._unread:
            message, size = self._unread.popleft()
            self._unread_bytes -= size
            return message
        self._reader = self._loop.create_future()
        return await self._in_time(self._reader, timeout_s)

    def unread(self) -> list[Any]:
        """What came and nobody has waited for; it counts as read."""
        came = [message for message, _ in self._unread]
        self._unread.clear()
        self._unread_bytes = 0
        return came

    async def ask(self, message: dict[str, Any], timeout_s: float) -> Any:
        """Send a request with a new id; its answer. Several may be under way at once.

        Raises:
            GameLostError: no answer came in time, or the channel failed.
        """
        self._last_id += 1
        self.send({**message, self._id_key: self._last_id})
        self._asked[self._last_id] = answer = self._loop.create_future()
        return await self._in_time(answer, timeout_s)

    async def _in_time(self, waiting: asyncio.Future[T], timeout_s: float) -> T:
        if self.failure is not None:
            raise self.failure
        error = GameLostError("timeout", f"no answer within {timeout_s:g} s")
        timer = self._loop.call_later(timeout_s, self.fail, error)
        try:
            return await waiting
        finally:
            timer.cancel()


async def connected(make: Callable[[], Channel], address: str | tuple[str, int], timeout_s: float) -> Channel:
    """A channel to a unix socket's path, or to host and port.

    Raises:
        GameLostError: nobody listens there, or it took too long.
    """
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        tried = loop.create_unix_connection(make, address)
    else:
        tried = loop.create_connection(make, *address)
    try:
        found: Channel = (await asyncio.wait_for(tried, timeout_s))[1]
        return found
    except (OSError, asyncio.TimeoutError) as error:
        raise GameLostError("no connection", f"{address}: {error or f'no answer within {timeout_s:g} s'}") from error


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """End tasks. One cancellation is not enough before Python 3.12, whose `wait_for` may swallow it."""
    left = {*tasks}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=0.5)
        await asyncio.gather(*done, return_exceptions=True)
