"""Skull King, Skirmish and settings for Atari. fasttrain finds them by entry points, like games of any other package.

`import fasttrain_games.envs` makes the ids known to `gymnasium.make` in a script.
"""

from pathlib import Path

from fasttrain.native import GameSpec

CONF = Path(__file__).parent / "conf"
# Steps of these games are cheap: the update is the bottleneck. Few large minibatches learn as much per env step here.
FEW_UPDATES = {"batch_size": 1024, "learning_rate": 1e-3, "n_epochs": 4, "rollout_size": 16384}
FAST = {
    "eval_episodes": 2000,
    "num_envs": {"balance": 64, "speed": 256},
    "maskable_ppo": {"speed": FEW_UPDATES},
    "maskable_recurrent_ppo": {"balance": {"rollout_size": 8192}, "speed": FEW_UPDATES},
    "dqn": {"speed": {"learning_rate": 5e-4}},
}
SKULLKING = GameSpec(
    id="fasttrain/SkullKing-v0",
    env="fasttrain_games.skullking.env:SkullKingEnv",
    native="fasttrain_games.skullking.game:SkullKingGame",
    own={"total_timesteps": 3_000_000, **FAST},
    opponent_key="opponents",
    eval_opponent="medium",
    phases={"bid": 175, "play": None},
    conf=CONF,
)
SKIRMISH = GameSpec(
    id="fasttrain/Skirmish-v0",
    env="fasttrain_games.skirmish.env:SkirmishEnv",
    native="fasttrain_games.skirmish.game:SkirmishGame",
    own={"total_timesteps": 5_000_000, **FAST},
    opponent_key="opponent",
    eval_opponent="greedy",
    reward_debug_key="reward_debug",
    conf=CONF,
)
ATARI = GameSpec(
    own={
        "total_timesteps": 10_000_000,
        "eval_episodes": 30,
        "ppo": {"batch_size": 256, "learning_rate": 2.5e-4, "n_epochs": 4, "rollout_size": 1024},
        "dqn": {"batch_size": 32, "learning_rate": 1e-4},
    },
    conf=CONF,
)
