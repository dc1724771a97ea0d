"""One row's games against engines that are written down: what is told, shown, counted and recorded."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.errors import EnvError
from fasttrain_engines import game_row
from fasttrain_engines.game import Decision, EngineGame, Over, Refused
from fasttrain_engines.game_row import AGAIN, READY, SPENT, STEP, Records, Row, Table
from fasttrain_engines.pool import Seat
from fasttrain_engines.settings import DaemonsConfig, Timeouts
from fasttrain_engines.stats import Tally
from fasttrain_engines.wire import GameLostError

BOTH = [0, 1]


class Written(EngineGame):
    """Plays what is written: outcomes, or errors that it raises; after that a decision for ever."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.played = list(outcomes), list[Any]()

    async def begin(self, channel: Any, game: int, seed: int) -> Any:
        self.played.append((game, seed))
        return await self._next()

    async def play(self, channel: Any, action: Any) -> Any:
        self.played.append(action)
        return await self._next()

    async def _next(self) -> Any:
        await asyncio.sleep(0)
        outcome = self.outcomes.pop(0) if self.outcomes else Decision([0], BOTH)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def read(self, message: Any) -> Any:
        return None


class Slow(Written):
    """Each answer takes 50 ms."""

    async def play(self, channel: Any, action: Any) -> Any:
        await asyncio.sleep(0.05)
        return await super().play(channel, action)


class FakePool:
    """Seats without daemons."""

    def __init__(self) -> None:
        self.tally, self.open, self.losses = Tally(), 0, list[tuple[str, int]]()

    async def seat(self, game: Any, guest: bool) -> Seat:
        self.open += 1
        daemon = SimpleNamespace(index=0, heard_ns=0, begins_waiting=lambda: None, ends_waiting=lambda: None)
        channel: Any = SimpleNamespace(decode_ns=0, came_ns=0, trace=[])
        return Seat(daemon, channel, None)

    def stays(self, seat: Seat) -> bool:
        return True

    def leave(self, seat: Seat) -> None:
        self.open -= 1

    def game_finished(self, seat: Seat) -> None:
        pass

    def begun(self, seat: Seat) -> None:
        pass

    async def turned_away(self, *of_seat: Any) -> bool:
        return of_seat[-1].cause == "closed"

    def game_lost(self, seat: Any, error: GameLostError, asked_ns: int) -> None:
        self.losses.append((error.cause, self.tally.lost_steps.total() - sum(steps for _, steps in self.losses)))


class Stage:
    """A row, and what it told."""

    def __init__(
        self,
        folder: Path,
        game: Written,
        asks_again: bool = True,
        masked: bool = True,
        skip_forced: bool = False,
        **changed: Any,
    ) -> None:
        self.game, self.pool, self.told = game, FakePool(), list[tuple[int, int, Any]]()
        game.skip_forced = skip_forced
        one, flag = np.zeros((1, 1), np.float32), np.zeros(1, np.bool_)
        self.arrays: Any = SimpleNamespace(
            observations=(one, one), final_observations=one.copy(), actions=np.zeros(1, np.int64),
            rewards=np.zeros(1, np.float32), terminations=flag.copy(), truncations=flag.copy(), lost=flag.copy(),
            opponents_turn=flag.copy(),
            action_masks=np.ones((1, 3), np.bool_) if masked else None,
        )  # fmt: skip
        self.words = np.zeros(16, np.int64)
        self.games, self.failed = Records(folder / "games.jsonl"), Records(folder / "failed.jsonl")
        self.table = Table(
            self.arrays, self.words, game.action_space, DaemonsConfig(**changed), self.pool,
            self.games, self.failed, lambda row, kind, info=None: self.told.append((row, kind, info)), asks_again,
            itertools.count(), self.pool.tally,
        )  # fmt: skip

    def play(self, *actions: int, seed: int = 1) -> list[tuple[Any, ...]]:
        """What the trainer sees after each action: (kind, observation, mask, reward, terminated, truncated, lost)."""
        return asyncio.run(asyncio.wait_for(self._play(actions, seed), 20))

    async def _play(self, actions: tuple[int, ...], seed: int) -> list[tuple[Any, ...]]:
        row = Row(self.table, 0, seed, self.game)
        life = asyncio.ensure_future(row.live(None))
        seen = []
        for number, action in enumerate((None, *actions)):
            if action is not None:
                self.arrays.actions[0] = action
                self.table.actions[0].set_result(None)
            while len(self.told) <= number or (0 not in self.table.actions or self.table.actions[0].done()):
                if life.done():
                    await life
                await asyncio.sleep(0.001)
            arrays = self.arrays
            mask = None if arrays.action_masks is None else arrays.action_masks[0].tolist()
            flags = [bool(one[0]) for one in (arrays.terminations, arrays.truncations, arrays.lost)]
            seen.append((self.told[-1][1], float(arrays.observations[0][0, 0]), mask, float(arrays.rewards[0]), *flags))
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        assert self.pool.open == 0, "a seat was kept"
        return seen


Make = Callable[..., Stage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(game_row, "PAUSE_S", 0.001)
    return lambda *outcomes, **changed: Stage(tmp_path, Written(*outcomes), **changed)


def test_a_row_begins_anew_where_its_previous_task_swallowed_the_cancellation(stage: Make):
    made = stage(Decision([1]))

    async def swallows() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(20)
        await asyncio.sleep(20)

    async def begin_anew() -> bool:
        before = asyncio.ensure_future(swallows())
        await asyncio.sleep(0)
        life = asyncio.ensure_future(Row(made.table, 0, 1, made.game).live(before))
        while not made.told:
            await asyncio.sleep(0.001)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        return before.cancelled()

    assert asyncio.run(asyncio.wait_for(begin_anew(), 20))


def test_a_game_ends_and_the_next_begins_in_the_same_step(stage: Make):
    one = stage(
        Decision([1], [0]), Decision([2], [1, 2], 0.5), Over([3], 1.0, info={"is_win": True}), Decision([4]),
        Over([5], 0.5, truncated=True),
    )  # fmt: skip
    first, middle, end, cut = one.play(0, 2, 0)
    assert first[:3] == (READY, 1.0, [True, False, False])
    assert middle == (STEP, 2.0, [False, True, True], 0.5, False, False, False)
    assert end == (STEP, 4.0, [True] * 3, 1.0, True, False, False)
    assert cut[3:] == (0.5, False, True, False)
    assert one.arrays.final_observations.tolist() == [[5.0]]
    assert one.told[-2][2] == {"is_win": True}
    assert [one.words[SPENT[name]] for name in ("decisions", "games", "lost")] == [3, 2, 0]
    assert one.pool.tally.steps == 3


def test_a_game_may_have_a_record_of_its_own(stage: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Written, "record", lambda game: f"{len(game.played)} played")
    one = stage(Decision([1]), Over([3]), Decision([4]), GameLostError("closed", "gone"))
    one.play(0, 1)
    for records, name, expected in ((one.games, "games", "2 played"), (one.failed, "failed", "4 played")):
        records.write()
        assert json.loads((tmp_path / f"{name}.jsonl").read_text())["record"] == expected


@pytest.mark.parametrize(
    "fault",
    [GameLostError("closed", "gone"), Decision([np.nan]), Decision([1, 2]), Decision([1], [7]), Decision([1], []),
     Decision([1], reward=np.nan), Decision([1], reward="much"), Decision([1], engine_ms="long"), Over("x"),
     Decision([1], [[0], [0, 1]]), Refused([9]), Refused([])],
    ids=str,
)  # fmt: skip
def test_a_fault_cuts_the_game_and_no_other(stage: Make, fault: Any, tmp_path: Path):
    one = stage(Decision([1], reward=0.25), Decision([2], BOTH), fault, Decision([5], [1]), Decision([6]))
    _, played, cut, after = one.play(0, 1, 1)
    assert played[3] == 0.25
    assert cut == (STEP, 5.0, [False, True, False], 0.0, False, True, True)
    assert one.arrays.final_observations.tolist() == [[2.0]], "what the lost action was taken on"
    assert after[:2] == (STEP, 6.0)
    assert one.told[2][2] == {"lost": one.pool.losses[0][0]}
    assert one.pool.losses[0][1] == 1
    one.failed.write()
    (record,) = [json.loads(line) for line in (tmp_path / "failed.jsonl").read_text().splitlines()]
    assert (record["decisions"], record["actions"], record["game"]) == (1, [0], 0)
    assert [one.words[SPENT[name]] for name in ("lost", "lost_decisions")] == [1, 1]


@pytest.mark.parametrize("before", [(), (Decision([1], BOTH),), (Decision([1], [0]),)])
@pytest.mark.parametrize("fault", [Decision([1], []), Decision([1], [False] * 3), Refused([])], ids=str)
def test_a_decision_without_a_legal_action_may_be_an_error(stage: Make, before: Any, fault: Any):
    one = stage(*(before or [Decision([1], BOTH)] * isinstance(fault, Refused)), fault)
    one.table.empty_raises = True
    with pytest.raises(EnvError, match=r"no legal action in env 0, game 0, .*on_empty_mask=all_legal"):
        one.play(0, 0)


def test_a_game_that_does_not_begin_is_tried_again_with_another_seed(stage: Make):
    lost = GameLostError("closed", "gone")
    one = stage(lost, Refused(), Decision([1], reward=float("inf")), Decision([4], reward=0.5), Decision([5]))
    assert [step[1] for step in one.play(0)] == [4.0, 5.0]
    names, seeds = zip(*(played for played in one.game.played if isinstance(played, tuple)), strict=True)
    assert names == (0, 1, 2, 3)
    assert [seeds.index(seed) for seed in seeds] == [0, 0, 2, 3], "one that was not begun is not lost"
    assert one.arrays.rewards[0] == 0.5, "of the game that is played, and of no other"
    assert [cause for cause, _ in one.pool.losses] == ["bad message", "bad decision"]


def test_seeds_depend_on_the_rows_seed_and_the_game_alone(stage: Make):
    def seeds(*outcomes: Any, seed: int) -> list[Any]:
        one = stage(*outcomes)
        one.play(0, 0, 0, seed=seed)
        return [played[1] for played in one.game.played if isinstance(played, tuple)]

    quick = seeds(Decision([1]), Over([1]), Decision([1]), Over([1]), seed=5)
    slow = seeds(Decision([1]), Decision([1]), Over([1]), seed=5)
    assert quick[: len(slow)] == slow
    assert quick[:2] != seeds(Decision([1]), Over([1]), seed=6)[:2]


def test_a_refusal_asks_again_with_less(stage: Make):
    one = stage(Decision([1], [0, 1, 2]), Refused(), Refused([0]), Decision([2], [1]))
    _, again, narrowed, played = one.play(1, 2, 0)
    assert again[:3] == (AGAIN, 1.0, [True, False, True])
    assert narrowed[:3] == (AGAIN, 1.0, [True, False, False])
    assert played[:2] == (STEP, 2.0)
    assert [one.words[SPENT[name]] for name in ("refused", "decisions")] == [2, 1]


def test_refusals_without_end_lose_the_game(stage: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(game_row, "MOST_REFUSED", 3)
    steps = stage(Decision([1]), *[Refused([0])] * 9, masked=False).play(0, 0, 0, 0)
    assert [step[0] for step in steps] == [READY, AGAIN, AGAIN, AGAIN, STEP]
    assert steps[-1][-1], "lost"


def test_who_cannot_ask_twice_loses_the_game(stage: Make):
    assert stage(Decision([1]), Refused(), Decision([3]), asks_again=False).play(0)[-1][-2:] == (True, True)


def test_forced_decisions_are_played_and_their_rewards_count(stage: Make):
    outcomes = (Decision([1], [0], 0.5), Decision([2], [1], 0.25), Decision([3], BOTH, 0.125), Decision([4], [2], 1.0),
                Decision([5], BOTH, 2.0))  # fmt: skip
    one = stage(*outcomes, skip_forced=True)
    first, step = one.play(1)
    assert first[1] == 3.0
    assert step[1:4] == (5.0, [True, True, False], 0.5 + 0.25 + 0.125 + 1.0 + 2.0)
    assert one.game.played[1:] == [0, 1, 1, 2]
    assert [one.words[SPENT[name]] for name in ("decisions", "forced")] == [1, 3]


def test_games_without_a_decision_pay_and_are_over_at_once(stage: Make, tmp_path: Path):
    one = stage(Decision([1], [0], 0.5), Over([2], 0.25), Over([3], 2.0), Decision([4]), skip_forced=True)
    assert one.play()[0][1] == 4.0
    one.games.write()
    records = [json.loads(line) for line in (tmp_path / "games.jsonl").read_text().splitlines()]
    assert [(record["decisions"], record["last_reward"]) for record in records] == [(0, 0.75), (0, 2.0)]
    assert one.words[SPENT["idle_ns"]] < 1e9, "nothing failed: nobody pauses"


def test_an_engine_whose_games_never_ask_ends_the_run(stage: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(game_row, "MOST_WITHOUT", 3)
    with pytest.raises(EnvError, match="3 games in a row with the engine had no decision for the policy"):
        stage(*[Over([1])] * 3).play()


def test_the_parts_of_a_games_time_add_up_with_its_failures(stage: Make):
    one = stage(Decision([1]), GameLostError("timeout", "late"), Decision([2]))
    one.game.__class__ = Slow
    one.play(0)
    assert sum(one.words[SPENT[f"{name}_ns"]] for name in ("engine", "network", "decode")) >= 5e7


def test_another_action_than_the_forced_one_may_be_named(stage: Make):
    outcomes = (Decision([1], BOTH), Decision([2], [1], 9.0), Refused([2]), Refused([0, 2]), Decision([5], BOTH, 1.0))
    one = stage(*outcomes, skip_forced=True)
    steps = one.play(1, 2)
    assert [step[1:4] for step in steps[1:]] == [(2.0, [True, False, True], 9.0), (5.0, [True, True, False], 1.0)]
    assert one.game.played[1:] == [1, 1, 2, 2]
    assert [one.words[SPENT[name]] for name in ("decisions", "forced", "refused")] == [2, 2, 2]


def test_a_game_has_a_deadline(stage: Make):
    one = stage(Decision([1]), Decision([2]), timeouts_s=Timeouts(game=0.03))
    one.game.__class__ = Slow
    assert one.play(0)[-1][-2:] == (True, True)
    assert one.told[-1][2] == {"lost": "game timeout"}


def test_records_begin_anew_and_a_full_disk_costs_only_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(game_row, "KEPT_MB", 0.00002)
    records = Records(tmp_path / "games.jsonl")
    for number in range(3):
        records.add({"number": number})
        records.write()
    assert (tmp_path / "games.1.jsonl").read_text() == '{"number": 0}\n{"number": 1}\n'
    records.write()
    assert (tmp_path / "games.jsonl").read_text() == '{"number": 2}\n'
    gone = Records(tmp_path / "nowhere" / "games.jsonl")
    gone.add({})
    gone.write()
