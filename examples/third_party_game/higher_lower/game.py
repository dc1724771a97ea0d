"""Ten cards one after another: is the next one higher or lower than the one that lies there?"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

LOWER, HIGHER = 0, 1
GUESSES = 10


class HigherLower(gymnasium.Env[NDArray[np.float32], np.int64]):
    """One game. `cards`: of how many values, from 1 on."""

    def __init__(self, cards: int = 13) -> None:
        self.cards = cards
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Put down the first card."""
        super().reset(seed=seed)
        self.guesses, self.right = 0, 0
        self.card = self._draw()
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Guess: 1 for each right one; the card drawn lies there next."""
        before, self.card = self.card, self._draw()
        right = self.card > before if action == HIGHER else self.card < before
        self.guesses, self.right = self.guesses + 1, self.right + int(right)
        over = self.guesses == GUESSES
        info = {"all_right": self.right == GUESSES, "right": self.right} if over else {}
        return self._observation(), float(right), over, False, info

    def _draw(self) -> int:
        return int(self.np_random.integers(1, self.cards + 1))

    def _observation(self) -> NDArray[np.float32]:
        return np.array([self.card / self.cards], np.float32)
