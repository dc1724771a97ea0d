"""The random stream that the games' kernels share: splitmix64, against its published numbers."""

from __future__ import annotations

import numpy as np

from fasttrain_games.skirmish.kernels import seed_games
from fasttrain_games.skirmish.state import GAME
from reference.skirmish_python.stream import Stream


def test_the_published_numbers_of_splitmix64() -> None:
    """The first outputs for the seed 1234567, as listed for the reference implementation (prng.di.unimi.it)."""
    stream = Stream(0)
    stream.state = 1234567
    assert [stream.bits() for _ in range(5)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_kernels_and_plain_python_draw_the_same() -> None:
    """Seeding; everything drawn later is compared in whole games (test_skirmish_game.py)."""
    games = np.zeros(3, GAME)
    seeds = [0, 77, 2**64 - 1]
    seed_games(games, np.arange(3), np.array(seeds, np.uint64))
    assert games["rng"].tolist() == [Stream(seed).state for seed in seeds]
