"""A two-sided game that is easy to work out by hand, for the tests of self-play."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.envs.wrappers import TwoSided
from fasttrain.native import GameSpec

GAME = GameSpec(env="duels:Duel", opponent_key="opponent", eval_opponent="zero", reward_debug_key="reward_debug")
UNMEASURED = GameSpec(env="duels:Duel", opponent_key="opponent")
ONE_SIDED = GameSpec(env="duels:Duel")
DECISIONS = 5  # of both sides together, in an episode


class Duel(gymnasium.Env[Any, Any]):
    """Both sides name numbers in turn; the learner gains its own and loses the other's. Odd episodes: opponent first.

    The one to decide sees (decisions so far, last number named, 1 if it is the opponent); 3 is never legal twice.

    Args:
        opponent: "self", or "zero", who names 0 within the learner's step.
        reward_debug: tell at the end what was gained and lost.
    """

    def __init__(self, opponent: str = "self", reward_debug: bool = False) -> None:
        self.tells_terms = reward_debug
        self.two_sided = opponent == "self"
        self.observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.episodes, self.decision, self.last = -1, 0, 0
        self.seen: list[tuple[int, bool, int]] = []  # decision, by the opponent, action

    @property
    def opponents_turn(self) -> bool:
        return (self.decision + self.episodes) % 2 == 1

    def action_masks(self) -> Any:
        return np.array([True, True, True, self.last != 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episodes += 1
        self.decision, self.last = 0, 0
        if self.opponents_turn and not self.two_sided:
            self._decide(0)
        return self._see(), {}

    def step(self, action: Any) -> Any:
        answer = self._decide(action)
        if self.two_sided or answer[2] or not self.opponents_turn:
            return answer
        after = self._decide(0)
        return after[0], answer[1] + after[1], *after[2:]

    def _decide(self, action: Any) -> Any:
        if action == self.last == 3:
            raise ValueError("3 after 3 is illegal")
        opponent = self.opponents_turn
        self.seen.append((self.decision, opponent, int(action)))
        self.decision, self.last = self.decision + 1, int(action)
        over = self.decision == DECISIONS
        info: dict[str, Any] = {"is_win": True, "by": "opponent" if opponent else "learner"} if over else {}
        if over and self.tells_terms:
            named = [(by, action) for decision, by, action in self.seen[-DECISIONS:]]
            info["reward_terms"] = {
                "own": float(sum(action for by, action in named if not by)),
                "other": float(-sum(action for by, action in named if by)),
            }
        return self._see(), float(-action if opponent else action), over, False, info

    def _see(self) -> Any:
        return np.array([self.decision, self.last, float(self.opponents_turn)], np.float32)


def duel() -> TwoSided:
    return TwoSided(Duel())
