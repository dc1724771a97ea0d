"""The `GameSpec` of each game with an external engine. Files in conf/ have the settings of the engines."""

from fasttrain.spec.games import GameSpec
from fasttrain_engines.backend import CONF

OWN = {"total_timesteps": 1_000_000, "eval_episodes": 400}
GO = GameSpec(own={**OWN, "num_envs": 16}, conf=CONF)
SHOWDOWN = GameSpec(own={**OWN, "num_envs": 32}, opponent_key="opponent", eval_opponent="max_damage", conf=CONF)
