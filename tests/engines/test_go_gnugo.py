"""GNU Go itself, against plain rules: what is legal, what lies on the board, and that seeds make games."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fasttrain.spec.setting import build
from fasttrain_engines.channel import Channel
from fasttrain_engines.daemon import GAMES
from fasttrain_engines.game import Over
from fasttrain_engines.go import Go
from fasttrain_engines.pool import Pool
from fasttrain_engines.settings import DaemonsConfig

FOUND = shutil.which("gnugo", path=os.pathsep.join([os.environ.get("PATH", ""), GAMES]))
pytestmark = pytest.mark.skipif(FOUND is None, reason="gnugo is not installed (apt install gnugo)")
SHIPPED = Path(__file__).parents[2] / "src" / "fasttrain_engines" / "conf" / "daemons" / "gnugo.yaml"


def with_engine(talk: Callable[[Channel], Awaitable[Any]], game: Go, folder: Path) -> Any:
    """What `talk` returns; the engine is started as fasttrain_engines/conf/daemons/gnugo.yaml says."""

    async def run() -> Any:
        pool = Pool(build(DaemonsConfig, yaml.safe_load(SHIPPED.read_text())), lambda: game, 1, 1, folder, 1, print)
        try:
            await pool.open()
            return await asyncio.wait_for(talk((await pool.seat(game)).channel), 120)
        finally:
            await pool.close()
            await asyncio.sleep(0.02)

    return asyncio.run(run())


class Rules:
    """Area rules of Go, as plainly as can be: points are (row, column), positions may not come twice."""

    def __init__(self, size: int) -> None:
        self.size, self.stones = size, dict[tuple[int, int], int]()
        self.before = {frozenset(self.stones.items())}

    def beside(self, point: tuple[int, int]) -> list[tuple[int, int]]:
        row, column = point
        near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        return [one for one in near if min(one) >= 0 and max(one) < self.size]

    def after(self, point: tuple[int, int], side: int) -> dict[tuple[int, int], int] | None:
        """The position after a move, None where it is illegal."""
        if point in self.stones:
            return None
        stones = {**self.stones, point: side}
        for other in self.beside(point):
            if stones.get(other) == 1 - side and not self.breathes(stones, other):
                stones = {one: whose for one, whose in stones.items() if one not in self.group(stones, other)}
        illegal = not self.breathes(stones, point) or frozenset(stones.items()) in self.before
        return None if illegal else stones

    def group(self, stones: dict[tuple[int, int], int], point: tuple[int, int]) -> set[tuple[int, int]]:
        found, side = {point}, stones[point]
        while more := {two for one in found for two in self.beside(one) if stones.get(two) == side} - found:
            found |= more
        return found

    def breathes(self, stones: dict[tuple[int, int], int], point: tuple[int, int]) -> bool:
        return any(two not in stones for one in self.group(stones, point) for two in self.beside(one))

    def play(self, point: tuple[int, int], side: int) -> None:
        stones = self.after(point, side)
        assert stones is not None, f"{point} is illegal"
        self.stones = stones
        self.before.add(frozenset(stones.items()))


@pytest.mark.parametrize(("size", "errs"), [(5, 1.0), (7, 0.0)])
def test_masks_and_boards_are_those_of_plain_rules(size: int, errs: float, tmp_path: Path):
    game, rng = Go(size=size, most_moves=70, errs=errs), random.Random(size)
    points = [(row, column) for row in range(size) for column in range(size)]

    async def play(channel: Channel, seed: int) -> int:
        rules, seen, told = Rules(size), 0, await game.begin(channel, 0, seed)
        while True:
            moves = re.findall(r";[BW]\[(\w*)\]", game.record())
            for number, move in enumerate(moves[seen:], seen):
                if move:
                    rules.play((ord(move[1]) - 97, ord(move[0]) - 97), number % 2)
            seen, mine = len(moves), int(told.observation[-2] == 0)
            planes = told.observation[: 6 * size * size].reshape(2, 3, size, size).sum(axis=1)
            stones = {point: side for side in (0, 1) for point in points if planes[side ^ mine][point]}
            assert stones == rules.stones
            if isinstance(told, Over):
                return seen
            legal = [number for number, point in enumerate(points) if rules.after(point, mine) is not None]
            assert sorted(told.legal) == [*legal, size * size]
            told = await game.play(channel, rng.choice(legal or [size * size]))

    async def talk(channel: Channel) -> list[int]:
        return [await play(channel, seed) for seed in range(2)]

    lengths = with_engine(talk, game, tmp_path)
    assert max(lengths) > 2 * size


def test_the_same_seed_is_the_same_game_and_another_one_another(tmp_path: Path):
    game = Go(size=9, colour="white")

    async def play(channel: Channel, seed: int) -> str:
        told: Any = await game.begin(channel, 0, seed)
        while not isinstance(told, Over):
            told = await game.play(channel, told.legal[len(told.legal) // 2] if game.record().count(";") <= 12 else 81)
        assert np.sign(told.info["score_diff"]) == told.reward == (1 if told.info["is_win"] else -1)
        return game.record()

    async def talk(channel: Channel) -> list[str]:
        return [await play(channel, seed) for seed in (1, 3, 4, 1)]

    games = with_engine(talk, game, tmp_path)
    assert games[0] == games[3]
    assert len({*games}) > 1


NO_SIMPLE_KO = ("A4 D5 D1 B2 C3 E4 A3 B1 E1 C4 E3 B4 C2 D4 B3 D3 B5 A2 C1 E5 C5 A5", "B5")  # by Black it would repeat


def test_the_engine_is_started_with_the_rules_that_the_page_promises(tmp_path: Path):
    game = Go(size=5)
    moves, repeats = NO_SIMPLE_KO

    async def talk(channel: Channel) -> list[str]:
        plays = [f"play {('black', 'white')[at % 2]} {move}" for at, move in enumerate(moves.split())]
        *_, legal = await game._asked(channel, "boardsize 5", *plays, "all_legal black")
        wall = [f"play black C{row}" for row in range(1, 6)]
        *_, area = await game._asked(channel, "clear_board", "komi 0.5", *wall, "play white A1", "final_score")
        *_, capture = await game._asked(channel, "play black B1", "play white PASS", "genmove black")
        return [legal, area, capture]

    legal, area, capture = with_engine(talk, game, tmp_path)
    assert repeats not in legal.split(), "positional superko"
    assert area == "B+24.5", "Chinese rules count area"
    assert capture != "PASS", "a dead stone is captured, so that few are left to judge"
