"""A disk that is full or fails while a checkpoint is written, and every state that a crash may leave."""

from __future__ import annotations

from pathlib import Path

import campaigns
import pytest
from bad_disk import BadDisk, Operation, crashes

from fasttrain.saving.checkpoints import CheckpointFolder

FILES = campaigns.PLAIN_FILES


def test_every_state_that_a_crash_may_leave_loads_the_old_or_the_new_one(tmp_path: Path):
    states, bad = campaigns.power_cuts(tmp_path)
    assert bad == []
    assert states > 50


def test_without_syncs_a_power_cut_would_lose_files():
    """What the enumeration says of an order that is not safe: the rename may be on disk, and the file not."""
    log = [Operation("make", "a"), Operation("write", "a/x", content=b"12"), Operation("rename", "a", "b")]
    kinds = [[operation.kind for operation in survived] for survived in crashes(log)]
    assert ["make", "rename"] in kinds
    synced = [*log[:2], Operation("sync", "a"), *log[2:]]
    kinds = [[operation.kind for operation in survived] for survived in crashes(synced)]
    assert ["make", "sync", "rename"] not in kinds
    assert ["make", "write", "sync", "rename"] in kinds


def test_a_disk_is_full_after_any_number_of_bytes(tmp_path: Path):
    CheckpointFolder(tmp_path).publish(1, FILES)
    size = sum(file.stat().st_size for file in (tmp_path / "step_000000000001").iterdir())
    for room in range(size):
        with pytest.raises(OSError, match="No space left"):
            CheckpointFolder(tmp_path, disk=BadDisk(room=room)).publish(2, FILES)
        assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001"]
    CheckpointFolder(tmp_path, keep=1, disk=BadDisk(room=size)).publish(2, FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000002"]
