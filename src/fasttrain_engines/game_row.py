"""Row: plays the games of one env with an engine, one after another.

A row waits for an action, sends it to the engine, waits for the next decision, writes it into the shared memory and
tells the trainer. A fault of the engine ends only that game: the row begins another one, and the game is marked as
lost. A lost game has no result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from fasttrain.batch import NO_LEGAL_ACTION, Int64Array, each_array, select_rows
from fasttrain.errors import EnvError
from fasttrain_engines.channel import cancel
from fasttrain_engines.game import (
    MOST_REWARD,
    NO_ACTION,
    Decision,
    EngineGame,
    Outcome,
    Over,
    Refused,
    check_outcome,
    mask_of,
    row_of,
)
from fasttrain_engines.pool import Pool
from fasttrain_engines.settings import DaemonsConfig
from fasttrain_engines.stats import GameTimes, Tally
from fasttrain_engines.wire import GameLostError
from fasttrain_vec.worker_memory import Arrays

PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # pauses before a row tries again to begin a game
MOST_FORCED = 10_000  # most forced decisions in a row
MOST_WITHOUT = 1000  # games in a row without a decision for the policy; more end the run
MOST_REFUSED = 100  # most refused actions at one decision
KEPT_MB = 64.0  # a file of records that reaches this size is emptied
SPENT = {name: index for index, name in enumerate(GameTimes._fields)}  # name of a time or count → its index in `words`

READY, STEP, AGAIN = range(3)  # news from a row: first decision, result of an action, the same decision again


class Records:
    """A file of JSON lines, which is emptied when it has become too long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []

    def add(self, record: dict[str, Any]) -> None:
        self._lines.append(json.dumps(record, default=str))

    def write(self) -> None:
        """Write the lines that were added since the last call."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        with suppress(OSError):  # on a full disk records are lost, but the run continues
            if self._path.exists() and self._path.stat().st_size > KEPT_MB * 2**20:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")


@dataclass
class Table:
    """The objects that all rows of a worker share."""

    arrays: Arrays
    words: Int64Array  # times and counts of the worker, in shared memory; SPENT has the indices
    action_space: spaces.Space[Any]
    settings: DaemonsConfig
    pool: Pool
    games: Records
    failed: Records
    tell: Callable[..., None]  # (row, READY, STEP or AGAIN, info of an ended episode)
    asks_again: bool
    names: Iterator[int]  # unique numbers for games
    tally: Tally
    two_sided: bool = False  # True: the trainer decides also for the opponent
    empty_raises: bool = False  # True: a decision without a legal action is an error, not a lost game
    guest: bool = False  # True: the games are those of an evaluation
    actions: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # row → future, done once the action arrived


class Row:
    """The games of one env, one after another. The seed of game k depends only on `seed` and k."""

    def __init__(self, table: Table, row: int, seed: int, game: EngineGame) -> None:
        self.table, self.row, self.seed, self.game = table, row, seed, game
        self.pool, self.settings = table.pool, table.settings
        self.number = -1
        self.seat: Any = None  # the `Seat` of the running game
        self.carried = 0.0  # rewards of forced decisions before the policy's first decision
        self.shown_ns = self.asked_ns = 0

    async def live(self, before: asyncio.Task[None] | None) -> None:
        """Play games until the task is cancelled. `before`: the previous task of this row, which is cancelled first."""
        if before is not None:
            await cancel([before])
        try:
            self._show(await self._opened())
            self.table.tell(self.row, READY)
            while True:
                await self._step()
        finally:
            self._leave()

    async def _step(self) -> None:
        arrays, row, words = self.table.arrays, self.row, self.table.words
        self.table.actions[row] = acted = asyncio.get_running_loop().create_future()
        await acted
        words[SPENT["queue_ns"]] += time.perf_counter_ns() - self.shown_ns
        action = arrays.actions[row]
        action = int(action) if isinstance(self.table.action_space, spaces.Discrete) else action.copy()
        try:
            outcome = await self._played(self.game.play(self.seat.channel, action))
            if isinstance(outcome, Refused):
                if not (self.table.asks_again or arrays.opponents_turn[row]):
                    raise GameLostError("refused", f"the engine does not accept action {action}")
                self._narrow(outcome, action)
        except GameLostError as error:
            await self._end(None, error)
            return
        if isinstance(outcome, Refused):
            words[SPENT["refused"]] += 1
            self.shown_ns = time.perf_counter_ns()
            self.table.tell(row, AGAIN)
            return
        words[SPENT["decisions"]] += 1
        self.refusals = 0
        self.length += 1
        self.actions.append(action)
        arrays.rewards[row] = outcome.reward + self.carried
        self.carried = 0.0
        if isinstance(outcome, Over):
            await self._end(outcome, None)
            return
        arrays.terminations[row] = arrays.truncations[row] = False
        self._show(outcome)
        self.table.tell(row, STEP)

    async def _played(self, asked: Awaitable[Outcome]) -> Outcome:
        """The engine's next decision for the policy, checked. Takes the forced decisions that come before it."""
        reward = 0.0
        decision: Any = None  # the last forced decision
        for _ in range(MOST_FORCED):
            outcome = await self._timed(asked)
            if self.spent_ns > 1e9 * self.settings.timeouts_s.game and not isinstance(outcome, Over):
                raise GameLostError("game timeout", f"the engine took {self.settings.timeouts_s.game:g} s for the game")
            if isinstance(outcome, Refused):
                if decision is None:
                    return outcome
                if outcome.legal is None:  # the only legal action was refused
                    raise GameLostError("refused", "the engine does not accept the only legal action")
                self.table.words[SPENT["refused"]] += 1
                outcome = decision._replace(legal=outcome.legal)
            reward += outcome.reward
            if not abs(reward) <= MOST_REWARD:
                raise GameLostError("bad decision", f"the reward is {reward}")
            outcome = outcome._replace(reward=reward)
            forced = self._checked(outcome)
            if forced is None:
                return outcome
            decision = outcome._replace(reward=0.0)
            self.table.words[SPENT["forced"]] += 1
            asked = self.game.play(self.seat.channel, forced)
        raise GameLostError("flood", f"{MOST_FORCED:,} forced decisions in a row")

    def _checked(self, outcome: Decision | Over) -> int | None:
        """Store observation and mask for `_show`. Returns the action of a forced decision, else None."""
        self.observation = row_of(outcome.observation, self.game.observation_space)
        if isinstance(outcome, Decision) and outcome.theirs and not self.table.two_sided:
            raise EnvError(f"{type(self.game).__name__} asks for the opponent's decision, which needs opponent=self")
        if isinstance(outcome, Over) or self.table.arrays.action_masks is None:
            return None
        self.mask = mask_of(outcome.legal, self.table.arrays.action_masks.shape[1])
        one_only = self.game.skip_forced and isinstance(self.table.action_space, spaces.Discrete)
        return int(self.mask.argmax()) if one_only and self.mask.sum() == 1 else None

    async def _opened(self) -> Decision:
        """Begin games until one starts and has a decision for the policy. Returns this decision."""
        pause_s, without = PAUSE_S, 0
        while True:
            try:
                outcome = await self._begun()
            except GameLostError as error:
                seat = self.seat
                if seat is None or await self.pool.turned_away(
                    seat.daemon, seat.channel, seat.since_start, seat.guest, error
                ):
                    self.number -= 1  # the game was not begun
                    self._leave()
                else:
                    self._note_loss(error)
                began_ns = time.perf_counter_ns()
                await asyncio.sleep(pause_s)
                self.table.words[SPENT["idle_ns"]] += time.perf_counter_ns() - began_ns
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self.carried = outcome.reward
            if isinstance(outcome, Decision):
                return outcome
            self._note_game(outcome, outcome.reward)  # the game had no decision for the policy
            without += 1
            if without >= MOST_WITHOUT:
                raise EnvError(f"{without:,} games in a row with the engine had no decision for the policy")

    async def _begun(self) -> Decision | Over:
        """Wait for a place at an engine (a `Seat`) and begin a game. Returns the game's first decision, or its end."""
        self.number, self.length, self.actions = self.number + 1, 0, list[Any]()
        self.refusals, self.spent_ns = 0, 0
        self.began_ns = self.asked_ns = time.perf_counter_ns()
        self.game_seed = int(np.random.SeedSequence((self.seed, self.number)).generate_state(1)[0] >> 1)
        try:
            while self.seat is None or not self.pool.stays(self.seat):
                self._leave()
                self.seat = await self.pool.seat(self.game, self.table.guest)
        finally:
            self.table.words[SPENT["idle_ns"]] += time.perf_counter_ns() - self.began_ns
        self.began_ns = time.perf_counter_ns()
        begun = self.game.begin(self.seat.channel, next(self.table.names), self.game_seed)
        outcome = await self._played(begun)
        if isinstance(outcome, Refused):
            raise GameLostError("bad message", "the engine refused an action before it asked for a decision")
        self.pool.begun(self.seat)
        return outcome

    def _leave(self) -> None:
        seat, self.seat = self.seat, None
        if seat is not None:
            self.pool.leave(seat)

    async def _end(self, over: Over | None, error: GameLostError | None) -> None:
        """End the episode, by its rules or by a fault, begin the next game, then tell the trainer."""
        arrays, row = self.table.arrays, self.row
        info: dict[str, Any] = {}
        cut = over is None or over.truncated
        if over is not None:
            info, last = dict(over.info), self.observation
            self._note_game(over, float(arrays.rewards[row]))
        elif error is not None:
            arrays.rewards[row] = 0.0
            info, last = {"lost": error.cause}, select_rows(arrays.observations[0], row)  # the last known observation
            self._note_loss(error)
        each_array(lambda final, seen: final.__setitem__(row, seen), arrays.final_observations, last)
        self._show(await self._opened())
        arrays.terminations[row], arrays.truncations[row], arrays.lost[row] = not cut, cut, over is None
        self.table.tell(row, STEP, info)

    async def _timed(self, asked: Awaitable[Outcome]) -> Outcome:
        """The engine's answer. Adds the time until the answer to the times of engine, network and decoding."""
        seat, words = self.seat, self.table.words
        channel, decoded = seat.channel, seat.channel.decode_ns
        began = self.asked_ns = time.perf_counter_ns()
        said_ms = None
        seat.daemon.begins_waiting()
        try:
            outcome = check_outcome(await asked)
            said_ms = getattr(outcome, "engine_ms", None)
        finally:
            now = time.perf_counter_ns()
            seat.daemon.ends_waiting()
            seat.daemon.heard_ns = max(seat.daemon.heard_ns, channel.came_ns if channel.came_ns > began else 0)
            decode = channel.decode_ns - decoded + (now - channel.came_ns if channel.came_ns > began else 0)
            wire = max(0, now - began - decode)
            engine = wire if said_ms is None else min(wire, int(said_ms * 1e6))
            self.spent_ns += now - began
            words[SPENT["engine_ns"]] += engine
            words[SPENT["network_ns"]] += wire - engine
            words[SPENT["decode_ns"]] += decode
        self.table.tally.decisions.add(now - began)
        return outcome

    def _show(self, decision: Decision) -> None:
        """Write observation and mask of the decision into the shared memory."""
        arrays, row = self.table.arrays, self.row
        each_array(lambda shown, one: shown.__setitem__(row, one), arrays.observations[0], self.observation)
        if arrays.action_masks is not None:
            arrays.action_masks[row] = self.mask
        arrays.opponents_turn[row] = decision.theirs
        self.shown_ns = time.perf_counter_ns()

    def _narrow(self, refused: Refused, action: object) -> None:
        masks = self.table.arrays.action_masks
        self.refusals += 1
        if self.refusals > MOST_REFUSED:
            raise GameLostError("refused", f"the engine refused {MOST_REFUSED} actions at one decision, last {action}")
        if masks is None:
            return
        if refused.legal is not None:
            self.mask = mask_of(refused.legal, masks.shape[1])
        elif self.mask.sum() > 1 and isinstance(action, int):
            self.mask[action] = False
        masks[self.row] = self.mask

    def _note_game(self, over: Over, last_reward: float) -> None:
        self.pool.game_finished(self.seat)
        self.table.words[SPENT["games"]] += 1
        self.table.tally.steps += self.length
        self.table.tally.games.add(time.perf_counter_ns() - self.began_ns)
        self.table.games.add({**self._record(), "last_reward": last_reward, "truncated": over.truncated})

    def _note_loss(self, error: GameLostError) -> None:
        """Count a lost game, record its messages and give up its seat, because the channel cannot be trusted."""
        words, seat = self.table.words, self.seat
        if error.cause == NO_ACTION and self.table.empty_raises:
            where = f"in env {self.row}, game {self.number}, after {self.length:,} decisions"
            raise EnvError(f"{NO_ACTION} {where}: {error}. {NO_LEGAL_ACTION}: then the game counts as lost") from error
        words[SPENT["lost"]] += 1
        words[SPENT["lost_decisions"]] += self.length
        self.table.tally.lost[error.cause] += 1
        self.table.tally.lost_steps[error.cause] += self.length
        trace = [] if seat is None else [
            [round((one.ns - self.began_ns) / 1e6, 3), one.way, one.payload.decode(errors="backslashreplace")]
            for one in seat.channel.trace
        ]  # fmt: skip
        said = {"cause": error.cause, "why": str(error), "actions": self.actions, "trace": trace}
        self.table.failed.add({**self._record(), **said})
        self.pool.game_lost(seat, error, self.asked_ns)
        self._leave()

    def _record(self) -> dict[str, Any]:
        record = None if self.seat is None else self.game.record()  # without a seat no game has begun
        return {
            **({} if record is None else {"record": record}),
            "row": self.row,
            "game": self.number,
            "seed": self.game_seed,
            "daemon": None if self.seat is None else self.seat.daemon.index,
            "decisions": self.length,
            "seconds": round((time.perf_counter_ns() - self.began_ns) / 1e9, 4),
        }
