"""A game's random stream in plain Python: splitmix64, number for number that of `fasttrain.native.batch`."""

from __future__ import annotations

_BITS = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E3779B97F4A7C15


class Stream:
    """One game's random numbers; neighbouring seeds give unrelated streams."""

    def __init__(self, seed: int) -> None:
        self.state = seed & _BITS
        self.state = self.bits()

    def bits(self) -> int:
        """The next 64 bits."""
        self.state = (self.state + _GOLDEN) & _BITS
        bits = self.state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
        return bits ^ (bits >> 31)

    def below(self, bound: int) -> int:
        """Uniform in 0..bound - 1."""
        return ((self.bits() >> 32) * bound) >> 32

    def unit(self) -> float:
        """Uniform in [0, 1)."""
        return (self.bits() >> 11) * (1.0 / 9007199254740992.0)

    def die(self) -> int:
        """A roll of one D6."""
        return self.below(6) + 1
