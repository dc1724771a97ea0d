"""A disk that is full while a checkpoint is written, every state that a crash may leave, and files that were moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bad_disk import PLAIN_FILES, BadDisk, NotingDisk, crashes, replay

from fasttrain.saving.checkpoints import CheckpointFolder


def test_every_state_that_a_crash_may_leave_loads_the_old_or_the_new_one(tmp_path: Path):
    disk, new = NotingDisk(tmp_path / "log"), {**PLAIN_FILES, "model.zip": b"newer"}
    CheckpointFolder(disk.root).publish(1, PLAIN_FILES)
    CheckpointFolder(disk.root, keep=1, disk=disk).publish(2, new)
    renamed = next(operation for operation in disk.log if operation.kind == "rename")
    states = [*crashes(disk.log)]
    assert len(states) > 50
    for number, survived in enumerate(states):
        folder = CheckpointFolder(tmp_path / f"state{number}")
        folder.publish(1, PLAIN_FILES)
        replay(survived, folder.root)
        newest = folder.newest()
        assert newest is not None
        assert newest == folder.all()[0]
        wanted = new if renamed in survived and (folder.root / "step_000000000002").exists() else PLAIN_FILES
        assert {file: (newest / file).read_bytes() for file in PLAIN_FILES} == wanted, survived
        folder.clean()
        assert not list(folder.root.glob(".*"))
        shutil.rmtree(folder.root)


def test_a_disk_is_full_after_any_number_of_bytes(tmp_path: Path):
    newest = CheckpointFolder(tmp_path).publish(1, PLAIN_FILES)
    size = sum(file.stat().st_size for file in newest.iterdir())
    for room in range(0, size, 5):
        with pytest.raises(OSError, match="No space left"):
            CheckpointFolder(tmp_path, disk=BadDisk(room=room)).publish(2, PLAIN_FILES)
        assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001"]
    CheckpointFolder(tmp_path, keep=1, disk=BadDisk(room=size)).publish(2, PLAIN_FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000002"]


@pytest.mark.parametrize("kind", ["files swapped", "a file of the one before", "a sector of zeros"])
def test_whole_files_in_the_wrong_place_are_damage(tmp_path: Path, kind: str):
    """Single bytes: tests/saving/test_checkpoints.py."""
    folder = CheckpointFolder(tmp_path)
    older = folder.publish(1, PLAIN_FILES)
    newest = folder.publish(2, {"state.json": b"[]", "arrays.npz": bytes(range(99)), "model.zip": b"zap"})
    state, arrays = newest / "state.json", newest / "arrays.npz"
    swapped, before = arrays.read_bytes(), state.read_bytes()
    if kind == "files swapped":
        arrays.write_bytes(before)
        state.write_bytes(swapped)
    elif kind == "a sector of zeros":
        arrays.write_bytes(bytes(99))
    else:
        state.write_bytes((older / "state.json").read_bytes())
    assert folder.newest() == older
