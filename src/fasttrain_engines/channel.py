"""Channel: one connection to an engine. Messages are sent immediately; received messages are decoded when they arrive.

After a wrong frame or a late answer a channel is closed for good, because a later message could be the answer to an
earlier request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from fasttrain_engines.wire import Codec, Framing, GameLostError

MOST_UNREAD, MOST_UNREAD_BYTES = 1000, 64 << 20  # limits of messages that arrived and that no game has read
TRACED = 40  # number of newest frames that are recorded when a game fails
TRACED_BYTES = 400  # number of bytes that are recorded of each frame
T = TypeVar("T")


class Traced(NamedTuple):
    """A frame that was sent (>) or received (<)."""

    ns: int  # time by time.perf_counter_ns
    way: str
    payload: bytes


class Channel(asyncio.Protocol):
    """Sends and receives messages: `send` and `receive`, or `ask` a request with an id and wait for its answer.

    Args:
        framing: an object for this connection alone, because it keeps incomplete frames.
        id_key: key of the id in requests and answers; empty: there are no ids.
    """

    def __init__(self, framing: Framing, codec: Codec, id_key: str = "id") -> None:
        self._framing, self._codec, self._id_key = framing, codec, id_key
        self._loop = asyncio.get_running_loop()
        self._writer: Any = None
        self._transports: list[Any] = []  # with pipes there are two, one per direction
        self._unread: deque[tuple[Any, int]] = deque()  # messages and their sizes
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
        """Send over this transport. Pipes have one for each direction."""
        self._writer = transport
        self._transports.append(transport)
        if self.failure is not None:  # the channel failed before it was connected
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
        except Exception as error:  # a user's framing or codec raised it
            self.fail(GameLostError("garbage", f"{type(error).__name__}: {str(error)[:200]}"))
        self.decode_ns += time.perf_counter_ns() - now

    def _take(self, message: object, size: int) -> None:
        number = message.get(self._id_key) if self._asked and isinstance(message, dict) else None
        if type(number) is int:  # a bool is no id
            answer = self._asked.pop(number, None)
            if answer is None:
                raise GameLostError("wrong answer", f"the engine answered request {number}, which was not sent")
            if not answer.done():
                answer.set_result(message)
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(message)
        elif len(self._unread) >= MOST_UNREAD or self._unread_bytes + size > MOST_UNREAD_BYTES:
            raise GameLostError("flood", f"{len(self._unread) + 1:,} messages that the game has not read")
        else:
            self._unread.append((message, size))
            self._unread_bytes += size

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(GameLostError("closed", f"the engine closed the connection{f': {exc}' if exc else ''}"))

    def eof_received(self) -> bool:
        return False  # this closes the connection in both directions

    def fail(self, error: GameLostError) -> None:
        """Close the channel for good. All waiting calls raise `error`."""
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
        """Close the channel without a fault."""
        self.fail(GameLostError("closed", "the channel was closed"))

    def send(self, message: object) -> None:
        """Send a message without an id. Raises GameLostError if the channel has failed."""
        if self.failure is not None:
            raise self.failure
        payload = self._codec.encode(message)
        self.trace.append(Traced(time.perf_counter_ns(), ">", payload[:TRACED_BYTES]))
        self._writer.write(self._framing.pack(payload))

    async def receive(self, timeout_s: float) -> Any:
        """The next message without an id. Raises GameLostError after the timeout, or if the channel failed."""
        if self._unread:
            message, size = self._unread.popleft()
            self._unread_bytes -= size
            return message
        self._reader = self._loop.create_future()
        return await self._in_time(self._reader, timeout_s)

    def unread(self) -> list[Any]:
        """Take all waiting messages."""
        messages = [message for message, _ in self._unread]
        self._unread.clear()
        self._unread_bytes = 0
        return messages

    async def ask(self, message: dict[str, Any], timeout_s: float) -> Any:
        """Send a request with a new id and return its answer. Several requests may wait for answers. Raises
        GameLostError after the timeout, or if the channel failed.
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


async def connect(make: Callable[[], Channel], address: str | tuple[str, int], timeout_s: float) -> Channel:
    """A channel to a unix socket (a path) or to (host, port). Raises GameLostError if the connection fails."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        connecting = loop.create_unix_connection(make, address)
    else:
        connecting = loop.create_connection(make, *address)
    try:
        channel: Channel = (await asyncio.wait_for(connecting, timeout_s))[1]
        return channel
    except (OSError, asyncio.TimeoutError) as error:
        raise GameLostError("no connection", f"{address}: {error or f'no answer within {timeout_s:g} s'}") from error


async def cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for them. Repeats `cancel`, because before Python 3.12 `wait_for` may swallow it."""
    running = {*tasks}
    while running:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=0.5)
        await asyncio.gather(*done, return_exceptions=True)
