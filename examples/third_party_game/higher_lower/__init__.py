"""What the game declares. fasttrain imports this to read the configuration, so that nothing heavy belongs here."""

from pathlib import Path

from fasttrain.native import GameSpec

GAME = GameSpec(
    id="higher_lower/HigherLower-v0",
    env="higher_lower.game:HigherLower",
    own={"total_timesteps": 50_000, "eval_episodes": 200, "ppo": {"speed": {"learning_rate": 1e-3}}},
    result={"win": "all_right", "scores": ["right"]},
    conf=Path(__file__).parent / "conf",
)
