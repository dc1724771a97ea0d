"""Games and wrappers. Nothing here imports torch: worker processes load this room and stay small."""

from __future__ import annotations

import gymnasium

SKULL_KING_ID = "fasttrain/SkullKing-v0"
SKIRMISH_ID = "fasttrain/Skirmish-v0"
ENTRY_POINTS = (
    (SKULL_KING_ID, "fasttrain_games.skullking.env:SkullKingEnv"),
    (SKIRMISH_ID, "fasttrain_games.skirmish.env:SkirmishEnv"),
)

__all__ = ["SKIRMISH_ID", "SKULL_KING_ID", "register_envs"]


def register_envs() -> None:
    """Make the games known to `gymnasium.make`; calling it again changes nothing."""
    for name, entry_point in ENTRY_POINTS:
        if name not in gymnasium.registry:
            gymnasium.register(id=name, entry_point=entry_point)


register_envs()
