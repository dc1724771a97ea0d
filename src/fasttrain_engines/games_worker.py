"""The worker process that plays games with external engines: hundreds at once, in one asyncio loop.

Each row of the slots is a task (`game_row`). The trainer sends the numbers of the rows that must act, and gets back the
rows with news. A message takes 0.1 ms on both sides, whatever its length. So all news of one round of the loop are sent
together. If the game's class sets `wait_ms`, news wait that long for news of more rows, but not if the daemons (engine
processes) play fewer than two games each on average.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from fasttrain.envs.masks import mask_width
from fasttrain.envs.names import arguments
from fasttrain.envs.user_code import blame, look_up
from fasttrain.errors import ConfigError, EnvError, EnvSpecError, FastTrainError
from fasttrain_engines.channel import cancel
from fasttrain_engines.game import EngineGame
from fasttrain_engines.game_row import Records, Row, Table
from fasttrain_engines.pool import Pool
from fasttrain_engines.settings import DaemonsConfig
from fasttrain_engines.stats import Tally
from fasttrain_engines.wire import Lengths
from fasttrain_vec.process import PipedProcess
from fasttrain_vec.worker_memory import Arrays, Layout, check_spaces, receive_block

FIRST_GUEST = 1 << 30  # games of evaluations have this number or a higher one
TELL_EVERY_S = 1.0  # seconds between two messages with counts to the trainer


@dataclass(frozen=True)
class GamesSettings:
    """The settings that a worker process gets at its start."""

    entry_point: str
    kwargs: dict[str, Any]
    folder: str  # folder of the user's modules
    run_folder: str  # for logs
    daemons: DaemonsConfig
    worker: int
    num_workers: int
    games: int  # number of training games that are played at once
    count: int  # number of daemons of this worker
    per_daemon: int
    cores: int
    asks_again: bool = True  # False: the learner cannot repeat a decision, so a refused action ends the game
    two_sided: bool = False  # True: the trainer decides also for the opponent
    first_guest: int = 1 << 31  # rows with this number or a higher one are games of evaluations
    guest_kwargs: dict[str, Any] | None = None  # None: `kwargs`
    empty_raises: bool = False  # True: a decision without a legal action is an error (only in training games)


class Ready(NamedTuple):
    """A worker's first message: the spaces of the game."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    masked: bool


def serve(connection: Connection, settings: GamesSettings) -> None:
    """Send the spaces, receive the shared memory, play until the trainer closes the connection."""
    try:
        game = made(settings)
        guest = made(settings, guest=True) if settings.guest_kwargs else game
        for mine, its in ((game.observation_space, guest.observation_space), (game.action_space, guest.action_space)):
            if mine != its:
                what = f"eval.env_kwargs: a game made with {settings.guest_kwargs} has {its}"
                raise ConfigError(f"{what}, a game of the training has {mine}")
        width = mask_width(game.action_space) if game.masked else 0
        connection.send(Ready(game.observation_space, game.action_space, bool(width)))
    except FastTrainError as error:
        connection.send(error)
        return
    layout: Layout = connection.recv()
    arrays, control = layout.views(receive_block(connection))
    asyncio.run(Worker(settings, arrays, control[settings.worker], game.action_space).run(connection))


def made(settings: GamesSettings, guest: bool = False) -> EngineGame:
    """A game of the user's class. `guest`: with the arguments of evaluations. Raises EnvSpecError if there is no such
    class, it cannot be built, or it has no spaces.
    """
    what = f"env.entry_point={settings.entry_point}"
    kwargs = (guest and settings.guest_kwargs) or settings.kwargs
    kind = look_up(settings.entry_point, "env.entry_point", settings.folder)
    if not (isinstance(kind, type) and issubclass(kind, EngineGame)):
        raise EnvSpecError(f"{what} is no RequestEngine or DecisionServer (fasttrain_engines); derive it from one")
    try:
        game: EngineGame = kind(**arguments(kwargs, "env.kwargs.", settings.folder))
        game.language()
        check_spaces(game.observation_space, game.action_space)
    except EnvSpecError:
        raise
    except Exception as error:
        raise EnvSpecError(f"{what} could not be made with env.kwargs={kwargs}: {blame(error)}") from error
    game.timeout_s = settings.daemons.timeouts_s.request
    return game


class Worker(asyncio.Protocol):
    """The rows of one process, their pool of daemons, and the connection to the trainer."""

    def __init__(self, settings: GamesSettings, arrays: Arrays, words: Any, action_space: spaces.Space[Any]) -> None:
        words[:] = 0
        folder = Path(settings.run_folder)
        suffix = f"-{settings.worker}" if settings.num_workers > 1 else ""
        self.settings = settings
        self._journal = folder / f"daemons{suffix}.log"
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leaving = set[asyncio.Task[None]]()  # that cancel rows which the trainer has left
        self._news: list[tuple[Any, ...]] = []
        self.wait_s = 0.0  # `wait_ms` of the game's class
        self._later: asyncio.TimerHandle | None = None  # a timer that sends collected news to the trainer
        self._under_way = set[int]()  # rows that were sent a reset or an action, without news yet
        self._frames = Lengths(1 << 30)
        self.pool = Pool(
            settings.daemons, lambda: made(settings), settings.count, settings.per_daemon, folder, settings.cores,
            self._say, settings.worker, settings.num_workers, self._send, settings.games,
        )  # fmt: skip
        self.table = Table(
            arrays, words, action_space, settings.daemons, self.pool, Records(folder / f"games{suffix}.jsonl"),
            Records(folder / f"failed_games{suffix}.jsonl"), self._tell, settings.asks_again,
            itertools.count(settings.worker, settings.num_workers), self.pool.tally, settings.two_sided,
            settings.empty_raises,
        )  # fmt: skip
        # Games of evaluations are not counted, and their numbers differ from those of training games.
        names = itertools.count(FIRST_GUEST + settings.worker, settings.num_workers)
        self.guests = replace(
            self.table, words=np.zeros_like(words), names=names, tally=Tally(), two_sided=False, empty_raises=False,
            guest=True,
        )  # fmt: skip

    async def run(self, connection: Connection) -> None:
        """Play until the trainer closes the connection or ends."""
        loop = self._loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        line = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self._line: Any = (await loop.create_connection(lambda: self, sock=line))[0]
        try:
            await self.pool.open()
            self._send("up", None)
            while not self._closed.done():
                await asyncio.wait([self._closed], timeout=TELL_EVERY_S)
                self._send("tally", self.pool.sample())
                self._write()
        except FastTrainError as error:
            self._send("failed", error)
            await self._closed
        finally:
            await self.pool.close(self._tasks.values())
            self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            command, content = pickle.loads(payload)
            if command == "act":
                rows = np.frombuffer(content, np.int32).tolist()
                self._under_way.update(rows)
                for row in rows:
                    self.table.actions[row].set_result(None)
            elif command == "reset":
                try:
                    self._reset(content)
                except FastTrainError as error:
                    self._send("failed", error)
            elif command == "leave":
                leaving = self._loop.create_task(cancel([self._tasks[row] for row in self._tasks.keys() & {*content}]))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)
                self._under_way.difference_update(content)
            elif command == "tally":
                self.pool.look()
                self._send("tally", self.pool.sample())

    def _send(self, kind: str, content: object) -> None:
        """Send a message to the trainer without waiting for it."""
        self._line.write(self._frames.pack(pickle.dumps((kind, content))))

    def _tell(self, row: int, kind: int, info: dict[str, Any] | None = None) -> None:
        """Send news of a row, with the news of other rows in this round of the loop or in the next `wait_ms`."""
        self._under_way.discard(row)
        self._news.append((row, kind, info))
        first, wait_s = len(self._news) == 1, self.wait_s
        if wait_s and len(self._under_way) >= 2 * self.settings.count:
            if first:
                self._later = self._loop.call_later(wait_s, self._flush)
        elif first or self._later is not None:
            self._cancel_timer()
            self._loop.call_soon(self._flush)

    def _cancel_timer(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _flush(self) -> None:
        self._cancel_timer()
        news, self._news = self._news, []
        self._send("rows", news)

    def _say(self, text: str) -> None:
        """Write a line about a daemon into daemons.log."""
        with suppress(OSError), open(self._journal, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def _write(self) -> None:
        self.table.games.write()
        self.table.failed.write()

    def _reset(self, seeds: dict[int, int]) -> None:
        self._under_way.update(seeds)
        for row, seed in seeds.items():
            before = self._tasks.get(row)
            guest = row >= self.settings.first_guest
            game = made(self.settings, guest)
            self.wait_s = game.wait_ms / 1000
            life = Row(self.guests if guest else self.table, row, seed, game).live(before)
            self._tasks[row] = task = self._loop.create_task(life)
            task.add_done_callback(partial(self._ended, "guests" if guest else "failed"))

    def _ended(self, kind: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            known = isinstance(error, FastTrainError)
            self._send(kind, error if known else EnvSpecError(f"the game's own code failed: {blame(error)}"))


class GamesProcess(PipedProcess):
    """A worker process and the connection to it."""

    _lost = EnvError

    def __init__(self, settings: GamesSettings) -> None:
        self.up, self.silent_s = False, 0.0  # up: its engines answer; silent_s: seconds without a message from it
        what = f"worker {settings.worker}, which plays the games with the engines,"
        super().__init__(what, "fasttrain_engines.games_worker:serve", settings)

    def ready(self, timeout_s: float) -> Ready:
        """Wait for the game's spaces. Raises FastTrainError if the game could not be built."""
        answer = self.use_pipe(lambda: self.connection.recv() if self.connection.poll(timeout_s) else None)
        if isinstance(answer, FastTrainError):
            raise answer
        if answer is None:
            raise EnvSpecError(f"env.entry_point: the game was not made within {timeout_s:g} s")
        spaces: Ready = answer
        return spaces

    def send(self, command: str, content: object) -> None:
        self.use_pipe(lambda: self.connection.send_bytes(pickle.dumps((command, content))))

    def hear(self) -> tuple[str, Any]:
        message: tuple[str, Any] = pickle.loads(self.use_pipe(self.connection.recv_bytes))
        self.silent_s = 0.0
        return message
