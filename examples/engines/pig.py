"""Pig, a game with a die, against an engine in a process of its own.

    fasttrain +profile=speed env.backend=daemons env.entry_point=pig:Pig num_envs=16 total_timesteps=50000 \
        daemons.command='[python, pig_engine.py, --port, "{port}"]'

`Pig` waits for the engine's questions, `PigByRequest` asks the engine; the games are the same. PigEngine.java plays
them too, after `javac -d build PigEngine.java`: daemons.command='[java, -cp, build, PigEngine, …]'.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from gymnasium import spaces

from fasttrain_engines import Decision, DecisionServer, EngineGame, Over, Refused, RequestEngine
from fasttrain_engines.channel import Channel

ROLL, HOLD = 0, 1


class _Rules(EngineGame):
    """What both have in common: what is seen of a state, and the two actions.

    Args:
        goal: points that win; the engine's --goal.
        framing, codec: what the engine was told to speak.
    """

    def __init__(self, goal: int = 50, framing: str = "lines", codec: str = "json") -> None:
        self.observation_space = spaces.Box(0.0, 4.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._goal, self.framing, self.codec = goal, framing, codec

    def _seen(self, state: list[int], over: bool = False) -> Any:
        mine, theirs, turn = state
        if not all(type(points) is int and 0 <= points < 2 * self._goal for points in state):
            raise ValueError(f"{state} is no state")
        if not over and max(mine, theirs) >= self._goal:
            raise ValueError(f"{state} is the end of a game")
        return np.array([mine, theirs, turn, mine + turn], np.float32) / self._goal

    def _over(self, message: dict[str, Any]) -> Over:
        info = {"is_win": bool(message["won"])}
        return Over(self._seen(message["state"], over=True), message["reward"], info=info, engine_ms=message["ms"])


class Pig(_Rules, DecisionServer):
    """The engine asks."""

    async def hello(self, channel: Channel) -> None:
        channel.send({"type": "ping"})
        while await channel.receive(self.timeout_s) != {"type": "pong"}:
            await asyncio.sleep(0)

    def new_game(self, game: int, seed: int) -> dict[str, Any]:
        self._game, self._asked = game, 0
        return {"type": "new", "game": game, "seed": seed}

    def answer(self, decision: Decision, action: int) -> dict[str, Any]:
        return {"type": "choose", "game": self._game, "id": decision.tag, "action": action}

    def read(self, message: dict[str, Any]) -> Decision | Over | Refused | None:
        kind = message["type"]
        if kind == "note":
            return None
        if message["game"] != self._game:
            raise ValueError(f"a message of game {message['game']}, this is {self._game}")
        if kind == "over":
            return self._over(message)
        if kind == "refused":
            return Refused(message["legal"])
        if kind != "decide" or message["id"] != self._asked + 1:  # the engine counts its questions
            raise ValueError(f"a message of type {kind}, id {message['id']}")
        self._asked += 1
        return Decision(
            self._seen(message["state"]),
            message["legal"],
            message["reward"],
            engine_ms=message["ms"],
            tag=message["id"],
        )


class PigByRequest(_Rules, RequestEngine):
    """The env asks."""

    def reset_request(self, game: int, seed: int) -> dict[str, Any]:
        return {"type": "reset", "seed": seed}

    def step_request(self, action: int) -> dict[str, Any]:
        return {"type": "step", "action": action}

    def read(self, message: dict[str, Any]) -> Decision | Over:
        if message["type"] != "state":
            raise ValueError(message["why"])
        if message["over"]:
            return self._over(message)
        return Decision(self._seen(message["state"]), message["legal"], message["reward"], engine_ms=message["ms"])
