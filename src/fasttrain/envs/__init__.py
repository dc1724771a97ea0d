"""Games and wrappers. Nothing here imports torch: worker processes load this room and stay small."""

from __future__ import annotations

import gymnasium

SKULL_KING_ID = "fasttrain/SkullKing-v0"

__all__ = ["SKULL_KING_ID", "register_envs"]


def register_envs() -> None:
    """Make the games known to `gymnasium.make`; calling it again changes nothing."""
    if SKULL_KING_ID not in gymnasium.registry:
        gymnasium.register(id=SKULL_KING_ID, entry_point="fasttrain.envs.skullking.env:SkullKingEnv")


register_envs()
