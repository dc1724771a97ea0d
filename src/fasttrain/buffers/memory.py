"""Whether a replay buffer fits into memory, said before it is made."""

from __future__ import annotations

from collections.abc import Mapping

from fasttrain.errors import ConfigError
from fasttrain.machine import free_memory


def bytes_of_ring(sizes: Mapping[str, int], rows: int, num_envs: int) -> int:
    """Bytes of a ring of `rows` × `num_envs` transitions that have parts of these `sizes` in bytes.

    Asked before any array is made: np.zeros takes no memory until a page is written, hours later.

    Raises:
        ConfigError: more than is free; says how many transitions would fit.
    """
    each = sum(sizes.values())
    needed, free = each * rows * num_envs, free_memory()
    if needed <= free:
        return needed
    fits = int(0.9 * free) // each // num_envs * num_envs  # 0.9: what is free changes until the next try
    twice = sizes.get("next_observations", 0)
    hint = f"; optimize_memory_usage=True would save {twice:,} bytes of each" if 3 * twice > each else ""
    raise ConfigError(
        f"a replay buffer of {rows * num_envs:,} transitions of {each:,} bytes needs "
        f"{needed / 1e9:.2f} GB ({needed:,} bytes), but {free / 1e9:.2f} GB ({free:,} bytes) are free: "
        f"buffer_size={fits} would fit{hint}"
    )
