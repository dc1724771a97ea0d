"""External game engines: their processes, pooled and watched, and the games that are played with them.

`RequestEngine` and `DecisionServer` are what a user derives a game from; `docs/daemons.md` shows both.
"""

from fasttrain_engines.game import Decision, DecisionServer, EngineGame, Over, Refused, RequestEngine
from fasttrain_engines.wire import GameLostError

__all__ = ["Decision", "DecisionServer", "EngineGame", "GameLostError", "Over", "Refused", "RequestEngine"]
