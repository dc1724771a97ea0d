"""LeanInfo: keep the info dict small on the steps between, whole on the step that ends the episode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium

# `episode` is Monitor's return and length, `perf` the time a game spent in its opponents' turns.
ALWAYS_KEPT = ("episode", "perf")


class LeanInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Drops info entries that nobody asked for, before a worker pickles them.

    On the final step of an episode everything is kept, so that episode metrics survive; on the others, and on reset,
    only `keys` are. Observations, rewards and ends of episodes pass unchanged: learning is exactly the same.
    Put it outside whatever reads other entries (`ActionMasks` reads `action_mask`).
    """

    def __init__(self, env: gymnasium.Env[Any, Any], keys: Iterable[str] = ()) -> None:
        super().__init__(env)
        self._keys = tuple(dict.fromkeys((*keys, *ALWAYS_KEPT)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._cut(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            info = self._cut(info)
        return observation, reward, terminated, truncated, info

    def _cut(self, info: dict[str, Any]) -> dict[str, Any]:
        return {key: info[key] for key in self._keys if key in info} if info else info
