"""DaemonVecEnv: games with external engines as rows of one vectorized env, each at its engine's pace.

Worker processes (`games_worker`) play. Observations, rewards and so on are in shared memory; small messages tell which
rows have news. All rows can step together, as in SB3, or each by itself (`vec/groups.py`): `send_all` lets rows act,
and `first_ready` waits for rows with a new decision.
"""

from __future__ import annotations

import copy
import itertools
import os
import select
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from fasttrain.batch import BoolArray, FinishedEpisode, Int64Array, Slots, each_array, select_rows
from fasttrain.envs.masks import mask_width
from fasttrain.errors import EnvError, EnvSpecError, FastTrainError
from fasttrain.machine import usable_cores
from fasttrain.vec.base import copy_observations
from fasttrain.vec.external import ExternalVecEnv, Figure
from fasttrain.vec.groups import GroupStep
from fasttrain_engines.daemon import check_jvm_flags
from fasttrain_engines.game_row import AGAIN, READY
from fasttrain_engines.games_worker import GamesProcess, GamesSettings, Ready
from fasttrain_engines.settings import DaemonsConfig, shared_out, workers_for
from fasttrain_engines.stats import GameTimes, Tally, advice, figures, merged, summary, summary_lines
from fasttrain_vec.worker_memory import Arrays, Layout, SharedBlock

LOOK_EVERY_S = 0.5  # seconds between two checks whether workers live
HUNG_S = 300.0  # a worker sends a message each second; after this time without one it counts as hung
SLACK_S = 30.0  # time for starting the worker, in addition to the engines' deadline
CLOSE_S = 8.0


class DaemonVecEnv(ExternalVecEnv):
    """N games of the class `entry_point`. Several games may share an engine's process.

    Args:
        entry_point: module:Class of a `RequestEngine` or `DecisionServer`; the workers build it with `kwargs`.
        cores: number of cores, which are divided among daemons and workers.
        workers: number of worker processes; None: as many as the games need.
        folder: the folder for logs and records of games; None: none are kept.
        asks_again: False for SB3's own training loops, which cannot repeat a decision.
        two_sided: the game also asks for the opponent's decisions, which `SelfPlayVecEnv` makes.
        guests: number of games of an evaluation, at most `num_envs`; they are built with `guest_kwargs`.
        empty_raises: a decision without a legal action is an error, not a lost game.

    Raises:
        EnvSpecError: the class cannot be made, or the first engine does not start.
        ConfigError: the settings contradict each other.
    """

    elsewhere = "the games are played by external engines"

    def __init__(
        self,
        entry_point: str,
        kwargs: dict[str, Any],
        num_envs: int,
        settings: DaemonsConfig,
        cores: int,
        workers: int | None = None,
        folder: Path | None = None,
        asks_again: bool = True,
        two_sided: bool = False,
        guests: int = 0,
        guest_kwargs: dict[str, Any] | None = None,
        empty_raises: bool = False,
    ) -> None:
        if sys.platform == "win32":
            raise EnvSpecError("env.backend=daemons needs Linux or macOS: use WSL")
        check_jvm_flags(settings)
        self.num_daemons, self.per_daemon = shared_out(settings, num_envs, cores)
        self._temporary = None if folder else tempfile.mkdtemp(prefix="fasttrain-")
        self.folder = Path(folder or str(self._temporary))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.num_workers = min(workers or workers_for(settings, num_envs, cores), self.num_daemons)
        self._count, self._num_guests, self._first = num_envs, guests, 0
        self._workers = [
            GamesProcess(
                GamesSettings(
                    entry_point, kwargs, os.getcwd(), str(self.folder), settings, worker, self.num_workers,
                    len(rows), len(daemons), self.per_daemon, cores, asks_again, two_sided, num_envs, guest_kwargs,
                    empty_raises,
                )
            )
            for worker, (rows, daemons) in enumerate(
                zip(self._shared_out(num_envs), self._shared_out(self.num_daemons), strict=True)
            )
        ]  # fmt: skip
        self._news: dict[int, tuple[int, dict[str, Any] | None]] = {}  # row → (READY, STEP or AGAIN; last info)
        self._tallies = [Tally() for _ in self._workers]
        self._failure: FastTrainError | None = None  # the failure that a worker reported
        # `host`: the env of the training, also in the env that `guests()` returns. `host.guests_play`: an evaluation
        # has begun. `host.ended`: the training's games were ended to make room for the evaluation.
        self.host, self.guests_play, self.ended = self, False, False
        try:
            self._ready = self._meet(num_envs + guests, settings.timeouts_s.start + SLACK_S)
        except BaseException:
            self.close()
            raise
        self._take_rows(0, num_envs)

    def _take_rows(self, first: int, count: int) -> None:
        self._first, self._shares, mine = first, self._shared_out(count), slice(first, first + count)
        self.arrays: Arrays = each_array(lambda array: array[mine], self._memory)
        arrays = self.arrays
        self.slots = Slots(
            arrays.observations[0], arrays.actions, arrays.rewards, arrays.terminations, arrays.truncations,
            arrays.action_masks,
        )  # fmt: skip
        self.again: BoolArray = np.zeros(count, np.bool_)  # True where the last action was refused
        super().__init__(count, self._ready.observation_space, self._ready.action_space)
        self.rows = [slice(row, row + 1) for row in range(count)]

    def guests(self) -> DaemonVecEnv:
        """An env for an evaluation's games with these engines; the caller closes it. If the engines take no more games,
        the training's games are ended (`self.ended`).
        """
        guests = copy.copy(self)
        guests._news = {}
        guests._take_rows(self.num_envs, self._num_guests)
        self.host.guests_play = True
        return guests

    def _meet(self, num_envs: int, timeout_s: float) -> Ready:
        """Send the workers their memory, and wait until their engines have started."""
        ready, *_ = [worker.ready(SLACK_S) for worker in self._workers]
        layout = Layout(
            num_envs=num_envs, num_workers=self.num_workers, observation_space=ready.observation_space,
            action_space=ready.action_space, mask_width=mask_width(ready.action_space) if ready.masked else 0,
            num_info_keys=0,
        )  # fmt: skip
        block = SharedBlock(layout.size_bytes)
        self._memory, self.control = layout.views(block.memory)
        self._poller = select.poll()
        for worker in self._workers:
            worker.connection.send(layout)
            block.send(worker.connection)
            self._poller.register(worker.connection.fileno(), select.POLLIN)
        block.close()
        deadline = time.monotonic() + timeout_s
        while not all(worker.up for worker in self._workers):
            self._hear(LOOK_EVERY_S)
            if time.monotonic() > deadline:
                raise EnvSpecError(f"daemons: none has started after {timeout_s:g} s")
        return ready

    def _shared_out(self, count: int) -> list[range]:
        """Divide `count` rows, or daemons, among the workers: one range for each."""
        firsts = [worker * self.num_daemons // self.num_workers for worker in range(self.num_workers + 1)]
        return [range(*(place * count // self.num_daemons for place in ends)) for ends in itertools.pairwise(firsts)]

    # --- all rows step together

    def reset(self) -> VecEnvObs:
        self._pending_actions = None
        entropy = np.random.SeedSequence().generate_state(self.num_envs).tolist()
        seeds = [drawn if seed is None else seed for seed, drawn in zip(self._seeds, entropy, strict=True)]
        self._reset_seeds()
        self._news.clear()
        self.again[:], self.slots.resets = False, None
        for worker, share in zip(self._workers, self._shares, strict=True):
            worker.send("reset", {self._first + row: seeds[row] for row in share})
        self.host.ended &= self._first > 0
        self.clear_slots()
        rows = range(self.num_envs)
        while not all(self._news.get(row, (None, None))[0] == READY for row in rows):
            self._hear(LOOK_EVERY_S)
        self._news.clear()
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        self.slots.actions[...] = actions
        self._act(range(self.num_envs))
        self._await(range(self.num_envs))
        self.slots.finished = [found for row in range(self.num_envs) if (found := self._came(row)) is not None]
        self.slots.resets = self.again.copy() if self.again.any() else None

    @property
    def opponents_turn(self) -> BoolArray:
        """(N,) whether the opponent makes the next decision."""
        return self.arrays.opponents_turn

    def step_listed(self, envs: Int64Array, actions: NDArray[Any]) -> list[FinishedEpisode]:
        """Let only these envs (M,) act; returns ended episodes. An env whose action was refused makes no step."""
        rows = envs.tolist()
        self.send_all(rows, actions)
        self._await(rows)
        return [found for row in rows if (found := self._came(row)) is not None]

    def _act(self, rows: Sequence[int]) -> None:
        for worker, share in zip(self._workers, self._shares, strict=True):
            mine = [row for row in rows if row in share] if self.num_workers > 1 else rows
            if len(mine):
                worker.send("act", (np.array(mine, np.int32) + np.int32(self._first)).tobytes())

    def _came(self, row: int) -> FinishedEpisode | None:
        """Process the message that came for a row. Returns the row's episode if it ended."""
        kind, info = self._news.pop(row)
        self.again[row] = kind == AGAIN
        if kind == AGAIN:
            self.slots.rewards[row] = 0.0
            self.slots.terminations[row] = self.slots.truncations[row] = False
            return None
        self._returns[row] += self.slots.rewards[row]
        self._lengths[row] += 1
        if info is None:
            return None
        last = each_array(np.array, select_rows(self.arrays.final_observations, row))
        return self.end_episode(row, last, info, lost=bool(self.arrays.lost[row]))

    # --- each row steps by itself (the interface `groups.Groups`)

    @property
    def env(self) -> DaemonVecEnv:
        return self

    def groups(self) -> DaemonVecEnv:
        """The env itself: each row is a group."""
        return self

    def rows_of(self, groups: list[int]) -> Int64Array:
        """A group is a row."""
        return np.array(groups)

    def send_all(self, groups: list[int], actions: NDArray[Any]) -> None:
        """Send actions (n, ...) to the n rows whose numbers are `groups`."""
        self.slots.actions[groups] = actions
        self._act(groups)

    def take(self, groups: list[int]) -> list[GroupStep]:
        """The results of the last actions of `groups`, as one step. Each group is a row."""
        self._await(groups)
        stepped = np.array([row for row in groups if self._news[row][0] != AGAIN], np.int64)
        finished = [found for row in groups if (found := self._came(row)) is not None]
        return [GroupStep(stepped, finished, [], select_rows(self.slots.observations, stepped))]

    def first_ready(self, groups: list[int]) -> list[int]:
        """Wait until a group has news. Returns all groups with news. Every group of `groups` must be acting."""
        while self._poller.poll(0):  # process all messages that have arrived
            self._hear(0.0)
        while not (ready := [group for group in groups if group in self._news]):
            self._hear(LOOK_EVERY_S)
        return ready

    def finish(self) -> None:
        """Nothing to do: the env can step as a whole at any time when no row is acting."""

    def fill_infos(
        self, infos: list[dict[str, Any]], rows: object, records: object, finished: list[FinishedEpisode]
    ) -> None:
        """Write the infos of rows in which an episode ended."""
        self.fill_ends(infos, finished)

    # --- the connection to the workers

    def _await(self, rows: Sequence[int]) -> None:
        while not all(row in self._news for row in rows):
            self._hear(LOOK_EVERY_S)

    def _hear(self, timeout_s: float) -> None:
        """Wait for messages of workers and process them. Raises FastTrainError if a worker failed."""
        if self.host._failure is not None:  # workers report a failure only once, but each later call must fail too
            raise self.host._failure
        began = time.monotonic()
        news = self._poller.poll(1000 * timeout_s)
        waited_s = min(timeout_s, time.monotonic() - began)  # `timeout_s` if this process was paused
        for worker in self._workers:
            worker.silent_s += waited_s
        for descriptor, _ in news:
            index, worker = next(
                (index, one) for index, one in enumerate(self._workers) if one.connection.fileno() == descriptor
            )
            kind, content = worker.hear()
            if kind == "rows":
                self._news.update((row - self._first, (what, info)) for row, what, info in content)
            elif kind == "tally":
                self._tallies[index] = content
            elif kind == "up":
                worker.up = True
            elif kind == "takes":
                warnings.warn(content, stacklevel=3)
            elif kind == "guests":
                self._hear_of_guests(content)
            else:
                self.host._failure = content if isinstance(content, FastTrainError) else EnvError(str(content))
                raise self.host._failure
        for worker in self._workers:
            if worker.up and worker.silent_s > HUNG_S:
                self.host._failure = EnvError(f"{worker.name} has said nothing for {HUNG_S:g} s: does its code hang?")
                raise self.host._failure

    def _hear_of_guests(self, failure: FastTrainError | None) -> None:
        """Handle the `failure` of a guest. None: the guest found no place, so end the training's games."""
        if self.host.guests_play and failure is not None:
            raise failure
        if self.host.guests_play and not self.host.ended:
            self.host.ended = True
            self._leave(range(self._count))

    def _leave(self, rows: range) -> None:
        for worker in self._workers:
            worker.send("leave", rows)

    def times(self) -> GameTimes:
        counted = self.control.sum(axis=0)[: len(GameTimes._fields)].tolist()
        restarts = sum(one.restarts.total() - one.restarts["recycled"] for one in self._tallies)
        return GameTimes(*counted)._replace(restarts=restarts)

    def tally(self, fresh: bool = False) -> Tally:
        """The workers' tallies, at most a second old. `fresh`: ask for new ones; only in the trainer's own thread."""
        before = [*self._tallies] if fresh else []
        with suppress(FastTrainError):
            for worker in self._workers if fresh else ():
                worker.send("tally", None)
            while any(now is then for now, then in zip(self._tallies, before)):  # noqa: B905
                self._hear(LOOK_EVERY_S)
        return merged(self._tallies)

    def env_times(self) -> dict[str, Any]:
        times = self.times()
        games = tuple((name, ns // self.num_envs) for name, ns in times.parts_ns.items())
        return {"games": games, "restarts": times.restarts, "lost_steps": times.lost_decisions}

    def summary(self, wall_s: float, fresh: bool = False) -> dict[str, Any]:
        return summary(self.tally(fresh), self.times(), wall_s)

    def lines(self, found: Mapping[str, Any]) -> list[str]:
        return summary_lines(found)

    def figures(self, found: Mapping[str, Any]) -> Iterator[Figure]:
        return (Figure(*one) for one in figures(found, self.tally()))

    def limits(self, play: Callable[[], object]) -> tuple[str, list[str]]:
        tally, times, began = self.tally(fresh=True), self.times(), time.perf_counter()
        play()
        now, wall_s = self.tally(fresh=True), time.perf_counter() - began
        now.daemons = now.daemons_since(tally)
        found = summary(now, self.times().since(times), wall_s)
        return advice(found, self.num_envs, self.num_daemons, usable_cores())

    def close(self) -> None:
        if self._first:
            self.host.guests_play = False
            self._leave(range(self._first, self._first + self.num_envs))
            return
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.end(max(0.1, deadline - time.monotonic()))
        # After a failed start the logs stay, because the error message names them.
        if self._temporary is not None and all(worker.up for worker in self._workers):
            shutil.rmtree(self._temporary, ignore_errors=True)
