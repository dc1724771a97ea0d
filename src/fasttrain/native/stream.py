"""A game's own random stream, splitmix64, in the field `rng` of its record. Shared by the games' kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import Record
from fasttrain.jit import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
U27 = np.uint64(27)
U30 = np.uint64(30)
U31 = np.uint64(31)
U32 = np.uint64(32)
U11 = np.uint64(11)


@njit
def random_bits(game: Record) -> Any:
    """The next 64 bits of the game's splitmix64 stream."""
    game.rng = game.rng + GOLDEN
    bits = game.rng
    bits = (bits ^ (bits >> U30)) * MIX_1
    bits = (bits ^ (bits >> U27)) * MIX_2
    return bits ^ (bits >> U31)


@njit
def random_below(game: Record, bound: int) -> Any:
    """Uniform int64 in 0..bound-1 (bound < 2^16; the bias of the multiply-shift is below 2^-16 / bound)."""
    return np.int64(((random_bits(game) >> U32) * np.uint64(bound)) >> U32)


@njit
def random_unit(game: Record) -> Any:
    """Uniform float64 in [0, 1)."""
    return np.float64(random_bits(game) >> U11) * (1.0 / 9007199254740992.0)


@njit
def seed_stream(game: Record, seed: int) -> None:
    """Begin the stream of `seed` (uint64): one splitmix step parts neighbouring seeds."""
    game.rng = seed
    game.rng = random_bits(game)
