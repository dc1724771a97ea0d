"""Fast MaskablePPO and PPO over pure losses; their checkpoints stay stock SB3 ones."""
