"""Daemons that end, hang, stop or grow old are replaced while games go on; nothing is left."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fasttrain.errors import EnvError, EnvSpecError
from fasttrain_engines import pool as pools
from fasttrain_engines.pool import Pool, Seat, ports_of
from fasttrain_engines.settings import Recycle
from fasttrain_engines.wire import GameLostError
from pig_games import COMMAND, Pig, descendants, engines, settings, until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
LOST = GameLostError("closed", "the engine closed the connection")


def pooled(
    talk: Callable[[Pool], Awaitable[Any]], folder: Path, *arguments: Any, per_daemon: int = 2, said: Any = None,
    **changed: Any,
) -> Any:  # fmt: skip
    """What `talk` returns; afterwards nothing may be left."""

    async def run() -> Any:
        given = settings(*arguments, **changed)
        pool = Pool(given, Pig, int(given.count), per_daemon, folder, 1, lines.append)
        try:
            await pool.open()
            return await asyncio.wait_for(talk(pool), 30)
        finally:
            await asyncio.wait_for(pool.close(), 30)
            await asyncio.sleep(0.02)  # transports close in the loop's next round

    lines: list[str] = [] if said is None else said
    before = {one.pid for one in descendants()}  # of other tests in this process
    try:
        return asyncio.run(run())
    finally:
        assert until(lambda: not {one.pid for one in descendants()} - before)


async def came(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 15
    while not true():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.01)


async def all_ready(pool: Pool) -> None:
    await came(lambda: all(one.ready for one in pool.daemons))


def test_ports_are_shared_between_pools():
    assert sorted(ports_of("20000-20004", 1, 2)) == [20001, 20003]
    assert ports_of("20000") == [20000]


def test_games_are_spread_and_who_finds_no_seat_waits(tmp_path: Path):
    async def talk(pool: Pool) -> None:
        await all_ready(pool)
        seats = [await pool.seat(Pig()) for _ in range(4)]
        assert sorted(seat.daemon.index for seat in seats) == [0, 0, 1, 1]
        fifth = asyncio.ensure_future(pool.seat(Pig()))
        await asyncio.sleep(0.05)
        assert not fifth.done()
        gives_up = asyncio.ensure_future(pool.seat(Pig()))
        await asyncio.sleep(0)
        gives_up.cancel()
        pool.leave(seats[1])
        assert (await fifth).daemon is seats[1].daemon
        assert sum(one.seats for one in pool.daemons) == 4

    pooled(talk, tmp_path)


@pytest.mark.parametrize(
    ("signal_number", "arguments", "told"),
    [(signal.SIGKILL, ("--stdio",), "was killed by signal 9"), (signal.SIGSTOP, (), "was stopped by a signal")],
)
def test_a_daemon_that_was_killed_or_stopped_is_replaced(
    tmp_path: Path, signal_number: int, arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pools, "SAMPLE_EVERY_S", 0.2)

    async def talk(pool: Pool) -> Any:
        seat = await pool.seat(Pig())
        assert pool.stays(seat)
        process = seat.daemon.process
        os.kill(process.pid, signal_number)
        await came(lambda: seat.channel.failure)  # who plays is told, long before any deadline
        await came(lambda: seat.daemon.ready and seat.daemon.process is not process)
        assert not pool.stays(seat)
        pool.leave(seat)
        assert seat.daemon.seats == 0
        assert (await pool.seat(Pig())).channel.failure is None
        return pool.tally.restarts

    assert pooled(talk, tmp_path, *arguments, count=1, per_daemon=1 if arguments else 2) == {told: 1}


def test_a_daemon_that_answers_nobody_is_doubted_and_one_that_answers_others_is_not(tmp_path: Path):
    async def talk(pool: Pool) -> None:
        seat = await pool.seat(Pig())
        seat.daemon.heard_ns = 10
        pool.doubt(seat.daemon, "timeout", 5)
        pool.doubt(seat.daemon, "garbage", 50)
        assert seat.daemon.ready
        pool.game_lost(seat, GameLostError("timeout", "late"), 50)
        assert not seat.daemon.ready

    pooled(talk, tmp_path, count=1)


def test_pauses_double_from_failure_to_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(pause_s: float) -> None:
        if pause_s in (0.11, 0.22, 0.44, 0.88):
            pauses.append(pause_s)
        await sleep(min(pause_s, 0.01))

    monkeypatch.setattr(pools.asyncio, "sleep", noted)
    monkeypatch.setattr(pools, "FIRST_PAUSE_S", 0.11)

    async def talk(pool: Pool) -> None:
        daemon, other = pool.daemons
        for number in range(1, 4):
            await came(lambda: daemon.ready)
            pool.game_finished(Seat(other, Any, None))  # says nothing of this one
            daemon.end("ended with exit code 1")
            await came(lambda: len(pauses) == number)  # noqa: B023 - it is awaited here

    pooled(talk, tmp_path)
    assert pauses == [0.11, 0.22, 0.44]


def test_recycling_drains_the_old_one_beside_its_successor(tmp_path: Path):
    async def talk(pool: Pool) -> None:
        (old,) = pool.daemons
        seats = [await pool.seat(Pig()), await pool.seat(Pig())]
        assert [pool.stays(seat) for seat in seats] == [True, True]
        assert pool.stays(seats[0]), "its successor is not up"
        await came(lambda: old.draining)
        assert len(engines()) == 2, "one successor is enough"
        assert not pool.stays(seats[0])
        pool.leave(seats[0])
        moved = await pool.seat(Pig())
        assert moved.daemon is not old
        assert pool.stays(moved)
        assert seats[1].channel.failure is None, "who plays goes on"
        pool.leave(seats[1])
        await came(lambda: pool.daemons == [moved.daemon])
        assert old.process is None
        assert pool.tally.restarts == {"recycled": 1}
        assert (moved.daemon.index, pool._spare) == (1, 0)

    pooled(talk, tmp_path, count=1, recycle=Recycle(games=2))


def test_a_daemon_that_grew_is_recycled_once(tmp_path: Path):
    async def talk(pool: Pool) -> None:
        seat = await pool.seat(Pig())
        seat.daemon.memory_bytes = 2**31
        assert pool.stays(seat)
        await came(lambda: seat.daemon.draining)
        pool.leave(seat)
        other = await pool.seat(Pig())
        await came(lambda: len(pool.daemons) == 1)
        assert pool.stays(other)
        assert pool.tally.restarts == {"recycled": 1}

    pooled(talk, tmp_path, count=1, recycle=Recycle(mb=1000))


@pytest.mark.parametrize("soon_s", [0.001, 0.2])  # the first: its death is seen before its successor is up
def test_an_old_one_that_dies_while_it_is_relieved_is_not_started_again(
    tmp_path: Path, soon_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pools, "LOOK_EVERY_S", soon_s)
    monkeypatch.setattr(pools, "FIRST_PAUSE_S", soon_s)

    async def talk(pool: Pool) -> None:
        (old,) = pool.daemons
        seat = await pool.seat(Pig())
        pool.stays(seat)
        pool.stays(seat)
        old.process.kill()
        await came(lambda: len(pool.daemons) == 1 and pool.daemons[0].ready and pool.daemons[0] is not old)
        pool.leave(seat)
        assert (await pool.seat(Pig())).daemon is pool.daemons[0]

    pooled(talk, tmp_path, count=1, recycle=Recycle(games=1))


def test_where_no_successor_starts_the_old_one_plays_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pools, "FIRST_PAUSE_S", 0.001)
    engine, said = shlex.join([*COMMAND, "--port"]), list[str]()

    async def talk(pool: Pool) -> None:
        seat = await pool.seat(Pig())
        assert pool.stays(seat)
        assert pool.stays(seat)
        await came(lambda: "could not be started in its place" in " ".join(said))
        assert pool.failure is None
        assert pool.daemons == [seat.daemon]
        assert pool.stays(seat)

    command = ("sh", "-c", f"test {{index}} = 0 && exec {engine} {{port}}")
    pooled(talk, tmp_path, said=said, count=1, recycle=Recycle(games=1), command=command)


def test_it_gives_up_after_so_many_games_in_a_row(tmp_path: Path):
    async def talk(pool: Pool) -> None:
        waiting = [await pool.seat(Pig()) for _ in range(2)]
        asked = asyncio.ensure_future(pool.seat(Pig()))
        await asyncio.sleep(0)
        pool.game_lost(waiting[0], LOST, 0)
        pool.game_finished(waiting[0])
        for _ in range(3):
            pool.game_lost(waiting[0], LOST, 0)
        with pytest.raises(EnvError, match="3 games with the engine failed in a row .daemons.max_failures., the "):
            await asked

    pooled(talk, tmp_path, count=1, max_failures=3)


def test_one_process_may_lose_all_its_games_at_once(tmp_path: Path):
    pool = Pool(settings(), Pig, 1, 200, tmp_path, 1, [].append)
    seat: Any = Seat(pool.daemons[0], None, object())
    for guest in [False, True] * 799:
        pool.game_lost(seat._replace(guest=guest), LOST, 0)
    with pytest.raises(EnvError, match="800 games"):  # guests' failures are theirs alone
        pool.game_lost(seat._replace(guest=True), LOST, 0)
    assert pool.failure is None
    pool.game_lost(seat, LOST, 0)
    assert "800 games" in str(pool.failure)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (GameLostError("start", "it is gone"), "could not be started 5 times in a row, the last: it is gone"),
        (ZeroDivisionError("of a game's own code"), "of a game's own code"),
    ],
)
def test_whatever_a_start_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str):
    monkeypatch.setattr(pools, "FIRST_PAUSE_S", 0.001)

    async def talk(pool: Pool) -> None:
        (daemon,) = pool.daemons

        async def fails(game: Any) -> None:
            raise error

        monkeypatch.setattr(daemon, "start", fails)
        daemon.end("ended with exit code 1")
        with pytest.raises(EnvError, match=says):
            await pool.seat(Pig())

    pooled(talk, tmp_path, count=1)


def test_the_first_that_does_not_come_up_is_told_at_once(tmp_path: Path):
    async def never(pool: Pool) -> None:
        raise AssertionError

    with pytest.raises(EnvSpecError, match="(?s)ended with exit code 2; it said:.*--goal"):
        pooled(never, tmp_path, "--goal", 0)


def test_a_connection_too_many_is_refused_and_gives_its_seat_back(tmp_path: Path):
    async def talk(pool: Pool) -> None:
        seats = [await pool.seat(Pig()) for _ in range(2)]
        for seat in seats:
            pool.begun(seat)
        for takes in (3, 2):
            with pytest.raises(GameLostError, match="closed the connection"):
                await pool.seat(Pig())
            assert (pool.per_daemon, [one.seats for one in pool.daemons]) == (takes, [2])
        with pytest.raises(EnvError, match="daemon 0 takes 2 games at once, not 3, so that daemons.count=1 is too few"):
            await pool.seat(Pig())
        pool.failure = None
        pool.leave(seats[0])
        await asyncio.sleep(0.1)
        await pool.seat(Pig())
        assert pool.daemons[0].ready

    pooled(talk, tmp_path, "--max-connections", 2, count=1, per_daemon=3)


def test_a_greeting_that_raises_loses_a_game_and_no_seat(tmp_path: Path):
    class Rude(Pig):
        async def hello(self, channel: Any) -> None:
            raise AttributeError("no attribute get")

    async def talk(pool: Pool) -> None:
        with pytest.raises(GameLostError, match="no attribute get"):
            await pool.seat(Rude())
        assert [one.seats for one in pool.daemons] == [0]

    pooled(talk, tmp_path, count=1)


def test_what_daemons_take_is_told(tmp_path: Path):
    async def talk(pool: Pool) -> Any:
        await all_ready(pool)
        pool.look()
        return pool.sample().daemons

    found = pooled(talk, tmp_path)
    assert [one["daemon"] for one in found] == [0, 1]
    assert all(one["memory_mb"] > 1 and one["cpu_share"] > 0 for one in found)
