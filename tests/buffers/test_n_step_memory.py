"""What a ring of transitions takes, and that one which does not fit is refused."""

from __future__ import annotations

import pytest

from fasttrain.buffers import n_step
from fasttrain.errors import ConfigError


def test_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(n_step, "free_memory", lambda: 1000)
    assert n_step.bytes_of_ring({"observations": 6, "rewards": 4}, 50, 2) == 1000
    with pytest.raises(ConfigError, match=r"needs 0.00 GB \(1,020 bytes\).*1,000 bytes\) are free: buffer_size=90"):
        n_step.bytes_of_ring({"observations": 6, "rewards": 4}, 51, 2)


def test_the_hint_is_given_where_it_helps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(n_step, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="optimize_memory_usage=True would save 40 bytes of each"):
        n_step.bytes_of_ring({"observations": 40, "next_observations": 40}, 100, 1)
    with pytest.raises(ConfigError) as refusal:
        n_step.bytes_of_ring({"observations": 80, "next_observations": 8}, 100, 1)
    assert "optimize_memory_usage" not in str(refusal.value)
