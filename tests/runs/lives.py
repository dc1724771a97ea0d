"""A game of three lives of four steps, reward 2 each; and a wrapper in which a life is an episode, of rewards 1."""

from __future__ import annotations

from typing import Any

import gymnasium

from plain_env import PlainEnv


class Lives(PlainEnv):
    length = 12

    def paid(self, action: Any) -> float:
        return 2.0


class LifeByLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    over = True

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        if self.over:
            return self.env.reset(**given)
        return self.unwrapped.seen(), {}  # type: ignore[attr-defined]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, _, self.over, cut, info = self.env.step(action)
        return seen, 1.0, self.unwrapped.time % 4 == 0, cut, info  # type: ignore[attr-defined]
