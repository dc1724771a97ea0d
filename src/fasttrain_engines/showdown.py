"""Random battles of Pokémon Showdown, played by a small Node program (`node/battles.js`) on its simulator.

The Node program makes observations, legal actions and the built-in opponents' moves from the lines that a player
receives. This module turns the program's messages into decisions. The head of `battles.js` describes the protocol.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from fasttrain_engines.channel import Channel
from fasttrain_engines.game import Decision, DecisionServer, Outcome, Over, Refused
from fasttrain_engines.wire import GameLostError

ACTIONS = 14  # four moves, the same with terastallization, six Pokémon
SIZE = 704  # length of an observation, as in node/numbers.js
GENERATIONS = (1, 2, 3, 4, 5, 9)  # generations 6 to 8 have further actions (mega, Z-moves, dynamax)
OPPONENTS = ("random", "max_damage", "self")


class Showdown(DecisionServer):
    """A random battle, six against six. The reward is 1 for a win, -1 for a loss, 0 for a tie.

    Actions 0 to 3 are the moves that the active Pokémon had at the start of the battle, 4 to 7 the same moves with
    terastallization, 8 to 13 a switch to a Pokémon of the team, in the order of the team at the start. Other moves
    (Struggle, recharging, moves of a copied Pokémon) have the number of their place in the simulator's list. The last
    info has `is_win`, `score_diff` (Pokémon left, ahead) and `turns`.

    Args:
        generation: generation of the rules and teams, one of GENERATIONS.
        opponent: `random`: any legal action; `max_damage`: the move with the largest expected damage; `self`: the
            caller decides for both sides. Each side gets its own observation; rewards are the first side's.
        shaping: reward for a lead of 1. The lead is the learner's share of life points left, minus the opponent's. It
            is paid when the lead grows and taken back when it shrinks, at the latest at the end. The best policy stays
            the best only with `algo.gamma=1` (potential-based shaping, Ng et al. 1999).

    Raises:
        ValueError: there is no such generation or opponent, or shaping is no finite number.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)
    action_space = spaces.Discrete(ACTIONS)
    wait_ms = 4.0  # news of several battles come together, because one core plays all battles of a process

    def __init__(
        self, generation: int = 9, opponent: Literal["random", "max_damage", "self"] = "random", shaping: float = 0.0
    ) -> None:
        if generation not in GENERATIONS:
            raise ValueError(f"generation={generation} is none of {', '.join(map(str, GENERATIONS))}")
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent={opponent} is none of {', '.join(OPPONENTS)}")
        if type(shaping) not in (int, float) or not math.isfinite(shaping):
            raise ValueError(f"shaping={shaping} is no finite number")
        self._generation, self._opponent = generation, opponent
        self._shaping, self._lead = shaping, 0.0
        self._log: list[str] | None = None

    async def hello(self, channel: Channel) -> None:
        channel.send({"hello": 1})
        if (size := (await channel.receive(self.timeout_s)).get("size")) != SIZE:
            raise GameLostError("start", f"an observation of the engine has {size} numbers, expected {SIZE}")

    def new_game(self, game: int, seed: int) -> dict[str, Any]:
        self._log, self._lead = None, 0.0
        words = (np.random.SeedSequence(seed).generate_state(4) >> 16).tolist()
        return {"new": 1, "seed": words, "generation": self._generation, "opponent": self._opponent}

    def answer(self, decision: Decision, action: Any) -> dict[str, int]:
        return {"answer": decision.tag, "action": int(action)}

    def read(self, message: Any) -> Outcome | None:
        if "error" in message:
            raise GameLostError("engine error", str(message["error"])[:2000])
        if "refused" in message:
            return Refused(message["legal"])
        seen = np.frombuffer(base64.b64decode(message["view"], validate=True), "<f4")
        if "ask" in message:
            paid = self._paid(float(message["lead"]))
            tag, theirs = int(message["ask"]), bool(message["theirs"])
            return Decision(seen, message["legal"], paid, tag=tag, theirs=theirs)
        result, self._log = int(message["over"]), list(map(str, message["log"]))
        mine, theirs = message["left"]
        info = {"is_win": result > 0, "score_diff": float(mine - theirs), "turns": int(message["turns"])}
        return Over(seen, result + self._paid(0.0), info=info)

    def _paid(self, lead: float) -> float:
        """The shaping reward for a change of the lead (-1 to 1)."""
        before, self._lead = self._lead, lead
        return self._shaping * (lead - before)

    def record(self) -> list[str] | None:
        """The simulator's input log, which its `simulate-battle` can replay; None before the end."""
        return self._log
