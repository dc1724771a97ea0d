from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fasttrain_engines.channel import MOST_UNREAD, TRACED, Channel, connect
from fasttrain_engines.wire import GameLostError, Json, Lines

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def talked(serve: Serve, talk: Callable[[Channel], Awaitable[Any]], codec: Any = None) -> Any:
    """What `talk` returns, against a server that does `serve` with each connection."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with server:
            address = server.sockets[0].getsockname()
            channel = await connect(lambda: Channel(Lines(), codec or Json()), address, 5.0)
            try:
                return await talk(channel)
            finally:
                channel.close()
                await asyncio.sleep(0.02)

    return asyncio.run(asyncio.wait_for(run(), 30))


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def says(*lines: bytes, ends: bool = False) -> Serve:
    """Says that at once, and listens; or ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(line + b"\n" for line in lines))
        await writer.drain()
        if not ends:
            await reader.read()

    return serve


def answers(change: Callable[[dict[str, Any]], Any]) -> Serve:
    """Answers each request with what `change` makes of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(change(json.loads(line))).encode() + b"\n")

    return serve


async def cause_of(asked: Awaitable[Any]) -> str:
    with pytest.raises(GameLostError) as lost:
        await asked
    return lost.value.cause


def test_an_answer_is_its_requests_own_in_whatever_order_they_come():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = [json.loads(await reader.readline()) for _ in range(5)]
        for request in reversed(requests):
            writer.write(json.dumps({"id": request["id"], "twice": 2 * request["n"]}).encode() + b"\n")
        await reader.read()

    async def talk(channel: Channel) -> list[Any]:
        return await asyncio.gather(*(channel.ask({"n": n}, 5.0) for n in range(5)))

    assert [answer["twice"] for answer in talked(serve, talk)] == [0, 2, 4, 6, 8]


async def half_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write_eof()
    await reader.read()


async def byte_by_byte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(1000):
        writer.write(b"1")
        await writer.drain()
        await asyncio.sleep(0.01)


async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = json.loads(await reader.readline())
    await asyncio.sleep(0.3)
    writer.write(json.dumps({"id": request["id"]}).encode() + b"\n")
    await reader.read()


@pytest.mark.parametrize(
    ("serve", "timeout_s", "cause"),
    [
        (answers(lambda request: {"id": 99}), 5.0, "wrong answer"),
        (answers(lambda request: {"id": 0}), 5.0, "wrong answer"),
        (answers(lambda request: {"id": True}), 0.2, "timeout"),  # True is not the answer to request 1
        (silent, 0.05, "timeout"),
        (late, 0.1, "timeout"),
        (byte_by_byte, 0.1, "timeout"),
        (half_closed, 20.0, "closed"),
        (says(b"{"), 5.0, "garbage"),
        (says(b"[" * 99 + b"]" * 99), 5.0, "too deep"),
    ],
)
def test_what_goes_wrong_fails_all_that_wait_and_closes_for_good(serve: Serve, timeout_s: float, cause: str):
    async def talk(channel: Channel) -> list[str]:
        found = await asyncio.gather(cause_of(channel.ask({}, timeout_s)), cause_of(channel.ask({}, 20.0)))
        await asyncio.sleep(0.3 if serve is late else 0.0)
        with pytest.raises(GameLostError):
            channel.send({})
        return [*found, await cause_of(channel.ask({}, 5.0))]

    assert talked(serve, talk) == [cause] * 3


def test_messages_that_nobody_asked_for_are_kept_up_to_a_limit():
    async def some(channel: Channel) -> list[Any]:
        return [await channel.receive(5.0) for _ in range(3)]

    assert talked(says(b"1", b"2", b"3"), some) == [1, 2, 3]

    async def many(channel: Channel) -> str:
        while channel.failure is None:
            await asyncio.sleep(0.01)
        return channel.failure.cause

    assert talked(says(*[b"1"] * (MOST_UNREAD + 1)), many) == "flood"


def test_what_was_said_before_the_end_is_heard_and_then_it_is_closed():
    async def talk(channel: Channel) -> tuple[Any, str]:
        return await channel.receive(5.0), await cause_of(channel.receive(5.0))

    assert talked(says(b"1", ends=True), talk) == (1, "closed")


def test_a_codec_of_the_users_own_may_raise_what_it_likes():
    class Careless(Json):
        def decode(self, payload: Any) -> Any:
            return payload.nothing

    async def talk(channel: Channel) -> str:
        return await cause_of(channel.ask({}, 5.0))

    assert talked(answers(lambda request: request), talk, Careless()) == "garbage"


def test_the_newest_frames_are_kept_shortened():
    async def talk(channel: Channel) -> list[tuple[str, bytes]]:
        for number in range(TRACED):
            await channel.ask({"n": number, "long": "x" * 1000}, 5.0)
        return [(one.way, one.payload) for one in channel.trace]

    kept = talked(answers(lambda request: request), talk)
    assert [way for way, _ in kept] == [">", "<"] * (TRACED // 2)
    assert kept[0][1].startswith(b'{"n":20,')
    assert {len(payload) for _, payload in kept} == {400}


def test_a_cancelled_question_leaves_nothing_behind():
    async def talk(channel: Channel) -> Any:
        waiting = asyncio.ensure_future(channel.receive(5.0))
        await asyncio.sleep(0)
        waiting.cancel()
        channel.send({"n": 1})
        return await channel.receive(5.0)

    assert talked(answers(lambda request: request), talk) == {"n": 1}


def test_an_encoding_that_fails_is_the_callers_own_error():
    async def talk(channel: Channel) -> Any:
        with pytest.raises(ValueError, match="not JSON compliant"):
            await channel.ask({"a": float("inf")}, 1.0)
        return await channel.ask({"a": 1}, 5.0)

    assert talked(answers(lambda request: request), talk) == {"a": 1, "id": 2}


def test_nobody_listens():
    async def run() -> None:
        with pytest.raises(GameLostError, match="Connect call failed") as lost:
            await connect(lambda: Channel(Lines(), Json()), ("127.0.0.1", 9), 5.0)
        assert lost.value.cause == "no connection"

    asyncio.run(run())


def test_a_channel_that_was_closed_before_it_was_connected_hangs_up():
    class Transport:
        gone = False

        def close(self) -> None:
            self.gone = True

    async def run() -> bool:
        channel, transport = Channel(Lines(), Json()), Transport()
        channel.close()
        channel.connection_made(transport)
        return transport.gone

    assert asyncio.run(run())
