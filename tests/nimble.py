"""A game of PettingZoo's AEC form that needs no PettingZoo: three seats take one to three stones, the last one wins.

A seat that takes three stones twice is out of the game. `told`: where the mask stands, "observation" or "info". `loss`:
what the other seats lose when one wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

made: list[Any] = []


class Nimble:
    metadata = {"render_modes": ["ansi"], "name": "nimble"}  # noqa: RUF012

    def __init__(
        self,
        stones: int = 12,
        told: str = "observation",
        cut_at: int = 0,
        render_mode: str | None = None,
        loss: float = 0.0,
    ) -> None:
        self.loss = loss
        self.possible_agents = ["red", "green", "blue"]
        self.stones, self.told, self.cut_at, self.render_mode = stones, told, cut_at, render_mode
        self.log: list[tuple[str, Any]] = []
        made.append(self)

    def observation_space(self, seat: str) -> Any:
        box = spaces.Box(0.0, 20.0, (2,), np.float64)
        return (
            spaces.Dict({"observation": box, "action_mask": spaces.Box(0, 1, (3,), np.int8)}) if self._inside else box
        )

    def action_space(self, seat: str) -> Any:
        return spaces.Discrete(3)

    @property
    def _inside(self) -> bool:
        return self.told == "observation"

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection = [*self.possible_agents], "red"
        self.left, self.greed, self.moves = (options or {}).get("stones", self.stones), dict.fromkeys(self.agents, 0), 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.log.append(("reset", seed))
        self._tell()

    def _tell(self) -> None:
        mask = (np.arange(3) < self.left).astype(np.int8)
        self.infos = {seat: {} if self._inside else {"action_mask": mask} for seat in self.agents}
        self._mask = mask

    def observe(self, seat: str) -> Any:
        seen = np.array([self.left, self.possible_agents.index(seat)], np.float64)
        return {"observation": seen, "action_mask": self._mask} if self._inside else seen

    def step(self, action: Any) -> None:
        seat = self.agent_selection
        self.log.append((seat, action))
        self.rewards = dict.fromkeys(self.agents, 0.0)
        after = [*self.agents, *self.agents][self.agents.index(seat) + 1]
        if self.terminations[seat] or self.truncations[seat]:
            self.agents.remove(seat)
        else:
            taken = int(action) + 1
            self.left -= taken
            self.moves += 1
            self.greed[seat] += taken == 3
            self.rewards[seat] = 0.125 * taken
            if self.left <= 0:
                self.rewards = {one: self.rewards[one] + (1.0 if one == seat else -self.loss) for one in self.agents}
                self.terminations = dict.fromkeys(self.agents, True)
            elif self.cut_at and self.moves >= self.cut_at:
                self.truncations = dict.fromkeys(self.agents, True)
            elif self.greed[seat] == 2:
                self.rewards[seat] = -1.0
                self.terminations[seat] = True
        self.agent_selection = after
        self._tell()

    def render(self) -> str:
        return "o" * self.left

    def close(self) -> None: ...


def env(**options: Any) -> Nimble:
    return Nimble(**options)
