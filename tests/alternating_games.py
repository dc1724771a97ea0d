"""What a user would write for alternating_engine.py; apart, so that workers find it by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from fasttrain.native import GameSpec
from fasttrain_engines import Decision, DecisionServer, Over, Refused

GAME = GameSpec(env="alternating_games:Alternating", opponent_key="opponent", eval_opponent="bot")


class Alternating(DecisionServer):
    """Either side's decisions: four in a game."""

    observation_space = spaces.Box(0.0, 4.0, (2,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, opponent: str = "self") -> None:
        self.opponent = opponent

    def new_game(self, game: int, seed: int) -> Any:
        return {"new": game, "bot": self.opponent != "self"}

    def answer(self, decision: Decision, action: Any) -> Any:
        return {"action": int(action)}

    def read(self, message: dict[str, Any]) -> Any:
        if "refused" in message:
            return Refused(message["legal"])
        if "over" in message:
            return Over(np.array([4, 0]), message["reward"], info={"is_win": message["reward"] > 0})
        seen = np.array([message["made"], message["theirs"]])
        return Decision(seen, None, message["reward"], theirs=message["theirs"])
