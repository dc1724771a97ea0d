from __future__ import annotations

from pathlib import Path

from fasttrain.runs.warm_start import Exchange


def test_an_exchange_belongs_to_one_checkpoint(tmp_path: Path):
    better = tmp_path / "better"
    better.mkdir()
    (better / "model.zip").write_bytes(b"weights")
    Exchange(64, {"algo.gamma": 0.9}).leave(tmp_path, better)
    assert Exchange.of(tmp_path, 64) == Exchange(64, {"algo.gamma": 0.9})
    assert Exchange.of(tmp_path, 128) is None
    assert (tmp_path / "exchange.zip").read_bytes() == b"weights"
