"""A game of PettingZoo's parallel form whose agents have different spaces, without PettingZoo.

Each agent sees a number as a one-hot: two hounds one of 3, the hare one of 5. Naming it is rewarded with 1. With
`numbers` actions are numbers, and the reward is minus their distance to the one-hot. Ends after 4 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

SIZES = {"hound_0": 3, "hare": 5, "hound_1": 3}


class Chase:
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, numbers: bool = False, masked: bool | str = False) -> None:
        self.possible_agents, self.agents = [*SIZES], list[str]()
        self.numbers, self.masked = numbers, masked
        self.acted: list[dict[str, Any]] = []

    def observation_space(self, agent: str) -> Any:
        seen = spaces.Box(0.0, 1.0, (SIZES[agent],), np.float64)
        mask = spaces.Box(0, 1, (SIZES[agent],), np.int8)
        return spaces.Dict({"observation": seen, "action_mask": mask}) if self._has_mask(agent) else seen

    def action_space(self, agent: str) -> Any:
        size = SIZES[agent]
        return spaces.Box(-1.0, 0.1 * size, (size,), np.float32) if self.numbers else spaces.Discrete(size)

    def reset(self, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.agents, self.steps = [*SIZES], 0
        return self._seen(), {agent: {} for agent in self.agents}

    def _seen(self) -> Any:
        self.drawn = {agent: np.eye(size)[self.random.integers(size)] for agent, size in SIZES.items()}
        return {
            agent: {"observation": drawn, "action_mask": drawn} if self._has_mask(agent) else drawn
            for agent, drawn in self.drawn.items()
        }

    def _has_mask(self, agent: str) -> bool:
        return self.masked is True or (self.masked == "hounds" and agent != "hare")

    def step(self, actions: dict[str, Any]) -> Any:
        self.acted.append(actions)
        for agent, action in actions.items():
            assert action in self.action_space(agent)
        rewards = {
            agent: -float(np.abs(own - self.drawn[agent]).sum()) if self.numbers else float(self.drawn[agent][own])
            for agent, own in actions.items()
        }
        self.steps += 1
        over, infos = dict.fromkeys(self.agents, self.steps == 4), {agent: {} for agent in self.agents}
        seen = self._seen()
        self.agents = [] if self.steps == 4 else self.agents
        return seen, rewards, over, dict.fromkeys(over, False), infos

    def close(self) -> None: ...


def parallel_env(**options: Any) -> Chase:
    return Chase(**options)
