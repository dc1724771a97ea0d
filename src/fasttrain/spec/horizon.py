"""Whether a training is long enough for large batches to pay: the one way in which a faster profile learns less."""

from __future__ import annotations

from fasttrain.spec.config import Config

# Gradient updates below which large batches were measured to fall behind: Skull King under `speed` is after 832 of them
# (200,000 steps) 1.6 points of win rate behind stock, the last fifth of its curve 3.5, and after 1,953 (500,000 steps)
# 3.4 ahead; ten seeds each, scripts/learning.py.
ENOUGH_UPDATES = 1_900


def updates_of(config: Config) -> int | None:
    """Gradient updates of the whole training; None where they do not come of rollouts."""
    algo = config.algo
    batch_size = config.batch_size or config.own.batch_size
    if not algo.spec.on_policy or batch_size is None or config.own.n_epochs is None:
        return None
    return int(config.total_timesteps * algo.n_epochs // batch_size)


def too_short(config: Config) -> str:
    """What to say where a tier's own values leave too few updates for their size; empty where they do not."""
    updates, algo, batch_size = updates_of(config), config.algo, config.batch_size or config.own.batch_size
    if updates is None or updates >= ENOUGH_UPDATES or batch_size is None:
        return ""
    stock = algo.spec.tiers["baseline"]
    plain = config.total_timesteps * stock["n_epochs"] / stock["batch_size"]
    if updates > 0.5 * plain:
        return ""
    steps = ENOUGH_UPDATES * batch_size // algo.n_epochs
    return (
        f"short: {config.total_timesteps:,} steps are {updates:,} updates (stock: {plain:,.0f}); below about "
        f"{ENOUGH_UPDATES:,}, here {steps:,} steps, such batches were measured to learn less than stock's: take "
        "+profile=balance, a smaller batch_size, or more steps"
    )
