"""Importing this makes the games known to `gymnasium.make`; in a run fasttrain does so itself, where one is made."""

import gymnasium

from fasttrain_games import SKIRMISH, SKULLKING

for game in (SKULLKING, SKIRMISH):
    if game.id is not None and game.id not in gymnasium.registry:
        gymnasium.register(game.id, game.env)
