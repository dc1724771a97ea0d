"""External game engines: their processes, and the games that are played with them.

A user derives a game from `RequestEngine` or `DecisionServer`; `docs/guides/external_engines.md` shows both. Both
classes are imported on first use, because a command without engines needs only this package's settings.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttrain_engines.game import Decision, DecisionServer, EngineGame, Over, Refused, RequestEngine
    from fasttrain_engines.wire import GameLostError

__all__ = ["Decision", "DecisionServer", "EngineGame", "GameLostError", "Over", "Refused", "RequestEngine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'wire' if name == 'GameLostError' else 'game'}"), name)
