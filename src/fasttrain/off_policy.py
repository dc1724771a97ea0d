"""Rules of the plan about algorithms that learn from a replay buffer: random actions, prefetching, the replay ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fasttrain.acceleration import device_of
from fasttrain.errors import ConfigError
from fasttrain.flags import Context, Resolved

BASELINE_RATIO = 1 / 8  # updates per transition of the baseline: one update per vector step of 8 envs


def resolve_local_random_actions(requested: bool, context: Context) -> Resolved:
    """Drawn in the trainer, all envs at once; the stock class asks the action space env by env."""
    if not requested or context.effective["engine"] == "fast":
        return requested, ""
    if context.sources.get("local_random_actions") == "command line":
        raise ConfigError(
            "local_random_actions=true with engine=stock: the stock class draws env by env; take engine=fast, or leave "
            "local_random_actions out"
        )
    return False, "the stock class draws env by env"


def resolve_prefetch(requested: str, context: Context) -> Resolved:
    """`auto`: for images where a core is free, and on CUDA.

    Drawing 8 batches of vectors takes the trainer 0.04 to 0.3 ms of an update of 0.4 to 5 ms; prefetched it was 0.91 to
    1.08 times as fast on 2 cores. 8 batches of 64 stacked images take 42 ms.
    """
    if requested == "off":
        return "off", ""
    config = context.config
    if unfit := _why_no_prefetch(context):
        if requested == "on":
            raise ConfigError(f"prefetch=on: {unfit}; take prefetch=off")
        return "off", unfit
    if requested == "on":
        return "on", "deterministic=true: drawn when asked for, nothing is ahead" if config.deterministic else ""
    if config.deterministic:
        return "off", "deterministic=true leaves nothing to draw ahead"
    if device_of(context) == "cuda":
        return "on", "batches are copied to CUDA meanwhile"
    if context.env.images and context.machine.cores > 2:
        return "on", "images, and a core is free"
    return "off", "batches are drawn in no time"


def _why_no_prefetch(context: Context) -> str:
    if context.effective["engine"] == "stock":
        return "the stock class draws its batches itself (engine=stock)"
    if context.config.env.normalize:
        return "env.normalize: batches are normalised with the statistics of the moment they are used"
    return ""


def check_extras(config: Any, engine: str, sources: Mapping[str, str]) -> None:
    """Refuse what stock DQN has not, and settings of prioritized replay where it is off.

    Raises:
        ConfigError: names the key.
    """
    for key in ("algo.per_alpha", "algo.per_beta"):
        if sources.get(key) == "command line" and not config.algo.prioritized:
            raise ConfigError(
                f"{key} means nothing with algo.prioritized=false: take algo.prioritized=true, or leave it out"
            )
    if engine != "stock" or not config.algo.spec.has_fast:
        return
    for name, (_, usual) in config.algo.spec.extras.items():
        value = getattr(config.algo, name)
        if value != usual and name != "use_masking":
            raise ConfigError(
                f"algo.{name}={str(value).lower()} with engine=stock: the stock class has no such thing; take "
                f"engine=fast, or leave algo.{name} out"
            )


def replay_ratio(effective: Mapping[str, Any]) -> Resolved:
    """Gradient updates per transition, and a warning where they are fewer than the baseline's."""
    updates, num_envs = effective["updates_per_step"], effective["num_envs"]
    ratio = round(updates / num_envs, 4)
    reason = f"{updates} updates per vector step of {num_envs} envs"
    if ratio < BASELINE_RATIO:
        enough = -(-num_envs // 8)
        reason += f": FEWER than the baseline's {BASELINE_RATIO:g}, it will learn less per env step; "
        reason += f"take updates_per_step={enough} or more"
    return ratio, reason
