from __future__ import annotations

from fasttrain.errors import too_little_memory


def test_too_little_memory_names_the_way_out():
    assert too_little_memory(MemoryError("9 TiB")).startswith("not enough memory: 9 TiB; use a smaller num_envs")
    assert too_little_memory(MemoryError()).startswith("not enough memory; use a smaller num_envs")
