"""Vector environments: SB3 `VecEnv`s that also offer the slots (`fasttrain.batch.Slots`)."""
