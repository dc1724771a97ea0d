"""ActionRepeat: one decision of the policy lasts several steps of the env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from fasttrain.batch import BoolArray
from fasttrain.envs.masks import is_legal


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes the chosen action up to `times` times; rewards add up, observation and info are those of the last step.

    A repetition ends early where the episode does, and where `action_masks` (of an `ActionMasks` inside) no longer
    allows the action. What `info["perf"]["enemy_turn_ms"]` reports is added up too: it is time, not state. Outside,
    an env step is a decision: lengths, `total_timesteps` and rollouts count decisions.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int, masked: bool) -> None:
        super().__init__(env)
        self._times = times
        self._masks: Callable[[], BoolArray] | None = env.get_wrapper_attr("action_masks") if masked else None

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        reward: Any
        observation, reward, terminated, truncated, info = self.env.step(action)
        enemy_turn_ms = _enemy_turn_ms(info)
        for _ in range(self._times - 1):
            if terminated or truncated or not self._still_legal(action):
                break
            observation, more, terminated, truncated, info = self.env.step(action)
            reward = reward + more
            enemy_turn_ms += _enemy_turn_ms(info)
        if enemy_turn_ms:
            info = {**info, "perf": {**info.get("perf", {}), "enemy_turn_ms": enemy_turn_ms}}
        return observation, reward, terminated, truncated, info

    def _still_legal(self, action: Any) -> bool:
        return self._masks is None or is_legal(self.action_space, self._masks(), action)


def _enemy_turn_ms(info: dict[str, Any]) -> float:
    return float(info["perf"].get("enemy_turn_ms", 0.0)) if "perf" in info else 0.0
