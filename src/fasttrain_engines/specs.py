"""What the games with external engines declare; their files in conf/ have the engines' own settings."""

from fasttrain.spec.games import GameSpec
from fasttrain_engines.backend import CONF

OWN = {"total_timesteps": 1_000_000, "eval_episodes": 400}
GO = GameSpec(own={**OWN, "num_envs": 16}, conf=CONF)
SHOWDOWN = GameSpec(own={**OWN, "num_envs": 32}, opponent_key="opponent", eval_opponent="max_damage", conf=CONF)
