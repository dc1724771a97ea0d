"""Vector environments: SB3 `VecEnv`s that also offer the slots (`fasttrain.batch.Slots`).

A worker process imports this package, which must stay free of torch.
"""
