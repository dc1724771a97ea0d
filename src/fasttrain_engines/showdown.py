"""Random battles of Pokémon Showdown, played by a small Node program of ours (`node/battles.js`) on its simulator.

What is seen, what is possible and what the built-in opponents do is made there, from the lines that a player gets;
here the messages become decisions. The protocol is at the head of that file.
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
SIZE = 704  # numbers of an observation, as node/numbers.js counts them
GENERATIONS = (1, 2, 3, 4, 5, 9)  # those of 6 to 8 have actions of their own (mega, Z-moves, dynamax)
OPPONENTS = ("random", "max_damage", "self")


class Showdown(DecisionServer):
    """A random battle, six against six; won or lost it is worth 1 or -1, a tie 0.

    Actions stand for what they do, whatever the order of the moment: 0 to 3 the moves that the Pokémon in play began
    the battle with, 4 to 7 the same with terastallization, 8 to 13 a switch to that Pokémon of the team, as it was
    ordered at the beginning. A move that is none of its own (Struggle, recharging, those of a copied Pokémon) stands
    at its place in the simulator's list. info has `is_win`, `score_diff` (Pokémon left, ahead) and `turns`.

    Args:
        generation: whose rules and teams, one of GENERATIONS.
        opponent: `random`: any legal action; `max_damage`: the move that is expected to take most; `self`: decisions of
            both sides are asked for, each with what that side sees, while lead and result stay the first side's.
        shaping: what a lead of all life of a team would pay. It is paid as the lead comes and taken back as it goes, at
            the end at the latest. With `algo.gamma=1`, and only then, what is best stays best (a potential: Ng et al.
            1999).

    Raises:
        ValueError: there is no such generation or opponent, or shaping is no finite number.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)
    action_space = spaces.Discrete(ACTIONS)
    wait_ms = 4.0  # a process plays all its battles on one core

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
            raise GameLostError("start", f"the engine sees {size} numbers, expected {SIZE}")

    def new_game(self, game: int, seed: int) -> dict[str, Any]:
        self._log, self._lead = None, 0.0
        words = (np.random.SeedSequence(seed).generate_state(4) >> 16).tolist()
        return {"new": 1, "seed": words, "generation": self._generation, "opponent": self._opponent}

    def answer(self, decision: Decision, action: Any) -> dict[str, int]:
        return {"answer": decision.tag, "action": int(action)}

    def read(self, message: Any) -> Outcome | None:
        """
        Raises:
            GameLostError: the engine could not go on.
        """
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
        """What the change to `lead` (-1 to 1) pays."""
        before, self._lead = self._lead, lead
        return self._shaping * (lead - before)

    def record(self) -> list[str] | None:
        """The simulator's input log, which its `simulate-battle` plays again; None before the end."""
        return self._log
