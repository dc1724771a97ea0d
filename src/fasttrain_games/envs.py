"""Import this in a script to register the games for `gymnasium.make`. A run of fasttrain does not need it."""

import gymnasium

from fasttrain_games import SKIRMISH, SKULLKING

for game in (SKULLKING, SKIRMISH):
    if game.id is not None and game.id not in gymnasium.registry:
        gymnasium.register(game.id, game.env)
