"""An opponent of your own, for games that let somebody outside decide for the other side.

    fasttrain +profile=speed opponent=opponents:FirstLegal
    fasttrain +profile=speed "opponent={opponent: 'opponents:FirstLegal', errs: 0.2}"

Run where this file lies. Quality is measured against the game's `eval_opponent`, as in self-play.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.vec.self_play import Opponent


class FirstLegal(Opponent):
    """Takes the first legal action, and one at random now and then.

    Args:
        errs: how often at random.
        seed: of these.
    """

    def __init__(self, errs: float = 0.0, seed: int = 0) -> None:
        self.errs, self._rng = errs, np.random.default_rng(seed)

    def act(
        self, observations: Any, action_masks: NDArray[np.bool_] | None, envs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """One action for each of the M envs where it is this side's turn; `action_masks` (M, A), True = legal."""
        assert action_masks is not None, "a game with masks"
        noise = self._rng.random(action_masks.shape) * (self._rng.random((len(envs), 1)) < self.errs)
        return np.argmax(action_masks * (1.0 + noise), axis=1)
