"""A game of PettingZoo's parallel form that needs no PettingZoo: agent i is done after 2 + i steps, if it eats (1).

An agent that does not eat is done at once, with reward -1. Observation: (steps so far, number of the agent).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


class Herd:
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, size: int = 3, masked: bool = False) -> None:
        self.possible_agents = [f"cow_{number}" for number in range(size)]
        self.agents: list[str] = []
        self.masked, self.steps, self.games = masked, 0, 0
        self.acted: list[dict[str, int]] = []

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self.steps = [*self.possible_agents], 0
        self.games += 1
        return self._seen(self.agents), self._infos(self.agents)

    def _seen(self, agents: list[str]) -> Any:
        return {agent: np.array([self.steps, self.possible_agents.index(agent)], np.float32) for agent in agents}

    def _infos(self, agents: list[str]) -> Any:
        return {agent: {"action_mask": np.array([0, 1])} if self.masked else {} for agent in agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert {*actions} == {*self.agents}
        self.acted.append(actions)
        self.steps += 1
        agents = self.agents
        ends = {agent: not actions[agent] or self.steps >= 2 + self.possible_agents.index(agent) for agent in agents}
        rewards = {agent: 1.0 if actions[agent] else -1.0 for agent in agents}
        self.agents = [agent for agent in agents if not ends[agent]]
        return self._seen(agents), rewards, ends, dict.fromkeys(agents, False), self._infos(agents)

    def close(self) -> None: ...


def parallel_env(**options: Any) -> Herd:
    return Herd(**options)
