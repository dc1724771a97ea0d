"""Pool: keeps several daemons of one engine alive and gives their seats to games.

A daemon that ends, hangs or is stopped is restarted, after a pause that doubles with each failure. A daemon that has
played enough games or uses too much memory is recycled: a new daemon starts, and meanwhile the old one still gets
games, because a game without a daemon would delay the step. Then it gets no new games and ends with its last game.

If a daemon refuses or ignores further connections while it plays on n others, each daemon gets at most n games from
then on, and more daemons are started if daemons.count=auto.

Guests are the games of an evaluation. They are played by the same daemons, beside the training's games. If the daemons
take no more games, the trainer is told and ends the training's games. Failures of guests do not end the training.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from fasttrain.errors import EnvError, EnvSpecError
from fasttrain_engines.channel import Channel, cancel
from fasttrain_engines.daemon import CLOSE_S, Daemon
from fasttrain_engines.game import EngineGame, greet
from fasttrain_engines.settings import DaemonsConfig
from fasttrain_engines.stats import Tally
from fasttrain_engines.wire import GameLostError

LOOK_EVERY_S = 0.2  # seconds between two checks whether daemons live
SAMPLE_EVERY_S = 2.0  # seconds between two measurements of memory, CPU time and log sizes
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0  # shortest and longest pause before a failed daemon is restarted
STARTS_IN_A_ROW = 5  # failed starts after which the pool gives up
TURNED_AWAY = 2  # refused connections in a row after which a daemon counts as full
SURE_S = 0.2  # seconds to see whether a process that closed connections is ending


class Seat(NamedTuple):
    """A place at a daemon where a game is played."""

    daemon: Daemon
    channel: Channel
    since_start: object  # an object that identifies the start of the daemon; each restart makes a new object
    guest: bool = False


def ports_of(text: str, part: int = 0, parts: int = 1) -> list[int]:
    """Every `parts`-th port of "20000-29999", from the `part`-th on. Each process begins at another port, because two
    processes that start together may see the same port as free.
    """
    first, _, last = text.partition("-")
    ports = list(range(int(first), int(last or first) + 1))[part::parts]
    at = os.getpid() * 7919 % len(ports)
    return ports[at:] + ports[:at]


def playing(daemon: Daemon) -> int:
    """The number of a daemon's connections on which games run. On the others the first game has no answer yet."""
    return sum(channel.failure is None for channel in daemon.served)


class Pool:
    """`count` daemons with `per_daemon` seats each.

    Args:
        make: builds the game, which greets the engines.
        say: is called with a line about each daemon that ended or was recycled.
        tell: is called with "takes" and a line for the user if daemons get fewer games than planned, or with "guests"
            if a guest finds no seat.
        games: number of games at once; None: as many as there are seats.
        part, parts: number of this pool, and number of pools that share ports and cores.
    """

    def __init__(
        self,
        settings: DaemonsConfig,
        make: Callable[[], EngineGame],
        count: int,
        per_daemon: int,
        folder: Path,
        cores: int,
        say: Callable[[str], None],
        part: int = 0,
        parts: int = 1,
        tell: Callable[[str, object], None] = lambda *_: None,
        games: int | None = None,
    ) -> None:
        self.settings, self._game, self.per_daemon, self._say = settings, make(), per_daemon, say
        self._tell, self._at_once = tell, games or count * per_daemon
        self.most = math.inf if settings.games_per_daemon == "auto" else per_daemon  # with evaluations
        ports = itertools.cycle(ports_of(str(settings.ports), part, parts))
        threads = max(1, cores // parts // count)
        indices = range(part, part + count * parts, parts)
        self._made: Callable[[int], Daemon] = lambda index: Daemon(settings, index, ports, folder, threads)
        self.daemons = [self._made(index) for index in indices]
        self._spare = indices.stop  # index of the daemon that replaces the next recycled one
        self._more = itertools.count(indices.stop + parts, parts)  # indices of daemons beyond `count`
        self._most_played = 0  # largest number of games at once on one daemon so far
        self._successor: Daemon | None = None  # replaces a daemon that is being recycled
        self.tally = Tally()
        self.failure: Exception | None = None  # why the pool gave up
        self._lost_in_a_row = {False: 0, True: 0}  # number of lost games in a row; key: whether they are guests
        self._guests_away = 0  # number of guests in a row that were refused
        # So many lost games in a row are allowed: a process that ends loses all its games, and several may end.
        enough = max(100, 4 * count * per_daemon)
        self._most_lost = enough if settings.max_failures == "auto" else settings.max_failures
        self._began_ns = time.perf_counter_ns()
        self._changed: asyncio.Future[None] | None = None
        self._starting = asyncio.Semaphore(max(1, cores // parts))  # because a starting JVM keeps a core busy
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start the first daemon, then the others together. Raises EnvSpecError if the first one does not start: the
        command, the engine or the deadline is wrong.
        """
        first = self.daemons[0]
        try:
            await first.start(self._game)
        except GameLostError as error:
            raise EnvSpecError(f"daemons: {error}") from error
        self._tasks = [asyncio.create_task(self._keep(daemon)) for daemon in self.daemons]
        self._tasks.append(asyncio.create_task(self._look()))

    async def close(self, games: Iterable[asyncio.Task[None]] = ()) -> None:
        """End the games and all daemons. Daemons that do not end after SIGTERM are killed."""
        await cancel([*games, *self._tasks])
        daemons = {*self.daemons, *([self._successor] if self._successor else [])}
        for daemon in daemons:
            daemon.terminate()
        deadline = time.monotonic() + CLOSE_S
        for daemon in daemons:
            daemon.stop(max(0.01, deadline - time.monotonic()))

    async def seat(self, game: EngineGame, guest: bool = False) -> Seat:
        """Wait for a seat at the daemon with the fewest games.

        Raises:
            GameLostError: the daemon did not answer the greeting.
            EnvError: the pool has given up, or too many guests failed.
        """
        while True:
            if self.failure is not None:
                raise self.failure
            up = [one for one in self.daemons if one.ready and not one.draining]
            free = [one for one in up if one.seats < (self.most if guest else self.per_daemon)]
            # A daemon that has refused a connection gets further connections only one by one.
            free = [one for one in free if not one.turned_away or one.seats <= len(one.served)]
            if free:
                break
            if guest and up:
                self._tell("guests", None)
            self._changed = self._changed or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)
        daemon = min(free, key=lambda one: one.seats)
        daemon.seats += 1
        since_start, began_ns = daemon.over, time.perf_counter_ns()
        channel: Channel | None = None
        try:
            channel = await daemon.connect(game.channel)
            await greet(game, channel, self.settings.timeouts_s.start)
        except BaseException as error:
            try:
                if isinstance(error, GameLostError) and not (
                    await self.turned_away(daemon, channel, since_start, guest, error)
                ):
                    self._failed(error, guest)
                    if since_start is daemon.over:
                        self.doubt(daemon, error.cause, began_ns)
            finally:
                if channel is None:
                    self._free(daemon)
                else:
                    self.leave(Seat(daemon, channel, since_start))
            raise
        return Seat(daemon, channel, since_start, guest)

    def begun(self, seat: Seat) -> None:
        """The first answer of a game arrived: the daemon plays on this connection."""
        daemon = seat.daemon
        daemon.served[seat.channel] = daemon.served.get(seat.channel, 0) + 1
        if seat.guest:
            self._guests_away = 0
        else:
            self._most_played = max(self._most_played, playing(daemon))
        if daemon.turned_away and daemon.seats == len(daemon.served):
            daemon.turned_away = 0
            self._tell_waiting()

    async def turned_away(
        self, daemon: Daemon, channel: Channel | None, since_start: object, guest: bool, error: GameLostError
    ) -> bool:
        """Handle an error while a game begins on a seat. Returns True if the game has not begun, so it is not lost:
        the connection was closed before the game's first answer, or the daemon takes no more connections.
        """
        closed, fresh = error.cause == "closed", channel not in daemon.served
        if not fresh or since_start is not daemon.over or error.cause not in ("closed", "timeout", "no connection"):
            return closed
        if guest and playing(daemon):
            return await self._guest_turned_away(daemon)
        full = playing(daemon) >= max(1, self._most_played)
        alone = daemon.seats == len(daemon.served) + 1  # True: no other seat waits for a first answer
        daemon.turned_away += (full and alone) or not daemon.turned_away
        if closed and not playing(daemon):
            self._failed(error, guest)
        if full and daemon.turned_away >= TURNED_AWAY:
            await daemon.wait_for_end(SURE_S)
            if daemon.process is not None and daemon.process.poll() is None and 0 < playing(daemon) < self.per_daemon:
                self._takes(daemon, playing(daemon))
        return closed or full

    async def _guest_turned_away(self, daemon: Daemon) -> bool:
        """Handle a guest that a daemon refused while it plays other games. Returns whether the daemon lives. After two
        refusals in a row no daemon gets more games at once than this one has now, and the trainer is told.
        """
        await daemon.wait_for_end(SURE_S)
        lives = daemon.process is not None and daemon.process.poll() is None
        self._guests_away += lives
        if self._guests_away >= TURNED_AWAY:
            if (most := max(self.per_daemon, playing(daemon))) < self.most:
                self.most = most
                self._tell("takes", f"{daemon.name} takes {most} games at once: evaluations end the training's games")
            self._tell("guests", None)
        return lives

    def _takes(self, daemon: Daemon, takes: int) -> None:
        """Limit all daemons to `takes` games each; start more daemons if there are then fewer places than games."""
        before, self.per_daemon, self.most = self.per_daemon, takes, takes
        at_once = f"{daemon.name} takes {takes} games at once, not {before}"
        lacking = -(-self._at_once // takes) - len(self.daemons)
        if lacking > 0 and self.settings.count != "auto":
            self._give_up(
                f"{at_once}, so that daemons.count={self.settings.count} is too few for num_envs; use "
                f"daemons.count=auto, or num_envs={takes * int(self.settings.count)}"
            )
            return
        more = [self._made(index) for index in itertools.islice(self._more, max(0, lacking))]
        self.daemons += more
        self._tasks += [asyncio.create_task(self._keep(one)) for one in more]
        also = f", and {lacking} more daemons are started" if more else ""
        self._tell("takes", f"{at_once}: games_per_daemon is {takes} from here on{also}")
        self._tell_waiting()

    def leave(self, seat: Seat) -> None:
        seat.channel.close()
        seat.daemon.served.pop(seat.channel, None)
        if seat.daemon.address is None and seat.daemon.over is seat.since_start:  # pipes cannot be opened again
            seat.daemon.end("recycled" if seat.daemon.draining else "its pipes were closed")
        self._free(seat.daemon)

    def stays(self, seat: Seat) -> bool:
        """Whether the next game may begin on the seat; if so, counts this game. May start to recycle the daemon."""
        daemon, limit = seat.daemon, self.settings.recycle
        if seat.channel.failure is not None or seat.since_start is not daemon.over:
            return False
        if limit.connection_games is not None and daemon.served.get(seat.channel, 0) >= limit.connection_games:
            return False
        full = limit.games is not None and daemon.games >= limit.games
        grown = limit.mb is not None and daemon.memory_bytes > limit.mb * 2**20
        if (full or grown) and self._successor is None:
            self._successor = self._made(self._spare)
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._keep(self._successor, daemon)))
        if not daemon.draining:
            daemon.games += 1
        return not daemon.draining

    def game_finished(self, seat: Seat) -> None:
        seat.daemon.finished += 1
        self._lost_in_a_row[seat.guest] = 0

    def game_lost(self, seat: Seat, error: GameLostError, asked_ns: int) -> None:
        """Count a game that was lost by a fault, and check its daemon."""
        if seat.since_start is seat.daemon.over:
            self.doubt(seat.daemon, error.cause, asked_ns)
        self._failed(error, seat.guest)

    def _failed(self, error: GameLostError, guest: bool) -> None:
        self._lost_in_a_row[guest] += 1
        if (in_a_row := self._lost_in_a_row[guest]) >= self._most_lost:
            text = (
                f"{in_a_row} games with the engine failed in a row (daemons.max_failures), the last: "
                f"{error.cause}: {error}; see failed_games.jsonl and the daemons' logs"
            )
            if guest:
                self._lost_in_a_row[guest] = 0
                raise EnvError(text)
            self._give_up(text)

    def doubt(self, daemon: Daemon, cause: str, asked_ns: int) -> None:
        """Restart a daemon that did not answer and has sent nothing to any game since the request."""
        if cause in ("timeout", "no connection") and daemon.heard_ns < asked_ns:
            daemon.end("does not answer")

    def _free(self, daemon: Daemon) -> None:
        daemon.seats -= 1
        if daemon.draining and not daemon.seats:
            daemon.end("recycled")
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def _give_up(self, text: str) -> None:
        if self.failure is None:
            self.failure = EnvError(text)
            self._tell_waiting()

    async def _keep(self, daemon: Daemon, before: Daemon | None = None) -> None:
        """Keep a daemon running until it is recycled or the pool is closed. `before`: the daemon that it replaces."""
        failed, pause_s = 0, FIRST_PAUSE_S
        while not daemon.draining:
            try:
                if not daemon.ready:
                    async with self._starting:
                        if daemon.draining:  # its successor has started meanwhile
                            break
                        await daemon.start(self._game)
                if before is not None:
                    self._relieve(before, daemon)
                    before = None
                self._tell_waiting()
                failed, finished = 0, daemon.finished
                why = await daemon.over if daemon.over is not None else ""
                if why == "recycled" or daemon.finished > finished:
                    pause_s = FIRST_PAUSE_S
            except Exception as error:
                failed, why = failed + 1, "start"
                temporary = isinstance(error, (GameLostError, OSError))
                if temporary and failed >= STARTS_IN_A_ROW and before is not None:
                    self._say(f"{before.name} plays on, {daemon.name} could not be started in its place: {error}")
                    daemon.stop()
                    self._successor = None
                    return
                if failed >= STARTS_IN_A_ROW or not temporary:
                    self._give_up(f"{daemon.name} could not be started {failed} times in a row, the last: {error}")
                    return
            self.tally.restarts[why] += 1
            daemon.terminate()
            if why == "recycled":
                await daemon.wait_for_end(CLOSE_S)
            daemon.stop()
            if not daemon.draining:
                self._say(f"{daemon.name} {why}: it is started again")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._say(f"{daemon.name} was recycled")
        self.daemons.remove(daemon)
        if self._successor is not None:
            self._successor.add_times(daemon)
        self._successor, self._spare = None, daemon.index

    def _relieve(self, daemon: Daemon, successor: Daemon) -> None:
        self.daemons.append(successor)
        daemon.draining = True
        if not daemon.seats or not daemon.ready:
            daemon.end("recycled")

    async def _look(self) -> None:
        sampled = 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for daemon in self.daemons:
                if daemon.process is not None and daemon.ready and daemon.process.poll() is not None:
                    daemon.end(daemon.ended())
            if time.monotonic() - sampled >= SAMPLE_EVERY_S:
                sampled = time.monotonic()
                self.look()

    def look(self) -> None:
        """Measure the memory of all daemons, in one pass over the processes of the system."""
        below: dict[int, list[psutil.Process]] = {}
        for one in psutil.process_iter(["ppid"]):
            below.setdefault(one.info["ppid"], []).append(one)
        for daemon in self.daemons:
            with suppress(OSError):
                daemon.look(below)

    def sample(self) -> Tally:
        """The counts so far, and the present figures of each daemon."""
        wall_ns = max(1, time.perf_counter_ns() - self._began_ns)
        self.tally.daemons = [
            {
                "daemon": one.index,
                "seconds": round(wall_ns / 1e9, 3),
                "busy_share": round(one.busy_ns / wall_ns, 4),
                "cpu_share": round(one.cpu_s * 1e9 / wall_ns, 4),
                "memory_mb": round(one.memory_bytes / 2**20, 1),
            }
            for one in self.daemons
        ]
        return self.tally
