"""Checkpoint folders: whole or not there, whatever fails on the way."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from fasttrain.saving.checkpoints import MANIFEST, CheckpointFolder, Disk, Writer, problem_of

FILES: dict[str, bytes | Writer] = {
    "state.json": b'{"a": 1}',
    "arrays.npz": bytes(range(256)) * 40,
    "model.zip": b"zip",
}


class FaultyDisk(Disk):
    """Fails at the `at`-th operation, before it is done, after it, or half way through a write."""

    def __init__(self, at: int, how: str, error: BaseException) -> None:
        self.at, self.how, self.error, self.count = at, how, error, 0

    def _step(self, operation: Any, half: Any = None) -> None:
        self.count += 1
        if self.count != self.at:
            return operation()
        if self.how == "after":
            operation()
        elif self.how == "half" and half is not None:
            half()
        raise self.error

    def make(self, folder: Path) -> None:
        self._step(lambda: super(FaultyDisk, self).make(folder))

    def write(self, path: Path, write: Writer) -> None:
        def half() -> None:
            super(FaultyDisk, self).write(path, write)
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])

        self._step(lambda: super(FaultyDisk, self).write(path, write), half)

    def sync(self, folder: Path) -> None:
        self._step(lambda: super(FaultyDisk, self).sync(folder))

    def rename(self, source: Path, target: Path) -> None:
        self._step(lambda: super(FaultyDisk, self).rename(source, target))

    def remove(self, folder: Path) -> None:
        if self.count:  # cleaning up at the beginning and the end is no part of the protocol
            return super().remove(folder)
        return super().remove(folder)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is done, no handler runs on purpose."""


def content_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_what_is_published_is_whole_and_old_ones_go(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    assert folder.newest() == (None, [])
    for step in (5, 10, 123456):
        assert folder.publish(step, FILES).name == f"step_{step:012d}"
    assert [path.name for path in folder.all()] == ["step_000000123456", "step_000000000010"]
    newest, problems = folder.newest()
    assert newest == folder.root / "step_000000123456"
    assert problems == []
    assert content_of(newest) == FILES
    assert sorted(path.name for path in folder.root.iterdir()) == ["step_000000000010", "step_000000123456"]
    folder.publish(123456, {**FILES, "model.zip": b"new"})
    assert (newest / "model.zip").read_bytes() == b"new"


OPERATIONS = 8  # make, four writes, sync, rename, sync


def test_the_number_of_operations_is_as_the_next_tests_assume(tmp_path: Path):
    disk = FaultyDisk(10**9, "before", OSError())
    CheckpointFolder(tmp_path, disk=disk).publish(1, FILES)
    assert disk.count == OPERATIONS


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
def test_a_full_disk_loses_no_older_checkpoint_and_the_next_try_works(tmp_path: Path, at: int, how: str):
    CheckpointFolder(tmp_path).publish(1, FILES)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        CheckpointFolder(tmp_path, disk=FaultyDisk(at, how, full)).publish(2, FILES)
    newest, problems = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert content_of(newest) == FILES
    assert problems == []
    assert not list(tmp_path.glob(".staged*")), "nothing half done is left"
    CheckpointFolder(tmp_path).publish(3, FILES)
    assert CheckpointFolder(tmp_path).newest().folder == tmp_path / "step_000000000003"


def test_no_error_of_a_writer_leaves_something_half_done(tmp_path: Path):
    def fails(file: Any) -> None:
        raise RuntimeError("enforce fail: unexpected pos")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        CheckpointFolder(tmp_path).publish(1, {**FILES, "model.zip": fails})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_one(tmp_path: Path, at: int, how: str):
    CheckpointFolder(tmp_path).publish(1, FILES)
    with pytest.raises(Killed):
        CheckpointFolder(tmp_path, disk=FaultyDisk(at, how, Killed())).publish(2, {**FILES, "model.zip": b"new"})
    folder = CheckpointFolder(tmp_path)
    newest, problems = folder.newest()
    assert newest is not None
    assert problems == []
    renamed = at == OPERATIONS or (at == OPERATIONS - 1 and how == "after")
    assert (newest / "model.zip").read_bytes() == (b"new" if renamed else b"zip")
    folder.clean()
    assert not list(tmp_path.glob(".*"))


def damage(path: Path, rng: random.Random) -> str:
    """Truncate, flip a bit, swap two bytes, append, or delete a random file; what was done."""
    file = rng.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    how = rng.choice(["truncate", "flip", "swap", "append", "delete", "empty"])
    if how == "truncate":
        del content[rng.randrange(len(content)) :]
    elif how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "swap":
        first, second = rng.sample(range(len(content)), 2)
        content[first], content[second] = content[second], content[first]
    elif how == "append":
        content += b"x"
    elif how == "empty":
        content.clear()
    if how == "delete":
        file.unlink()
    else:
        file.write_bytes(bytes(content))
    return f"{how} {file.name}"


def test_damage_is_found_and_the_one_before_taken(tmp_path: Path):
    """300 random damages. Only a byte swapped for its like is none."""
    rng = random.Random(0)
    whole = CheckpointFolder(tmp_path / "whole")
    whole.publish(1, FILES)
    whole.publish(2, FILES)
    for number in range(300):
        work = tmp_path / f"work{number}"
        shutil.copytree(whole.root, work)
        what = damage(work / "step_000000000002", rng)
        newest, problems = CheckpointFolder(work).newest()
        assert newest is not None, what
        assert content_of(newest) == FILES, what
        if newest.name == "step_000000000002":  # what was read is what was written, all the same
            assert what.startswith("swap"), what
        else:
            assert len(problems) == 1, what
            assert problems[0].startswith("step_000000000002: "), what
        shutil.rmtree(work)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("", "is not readable"),
        ("[]", "is none of this version's"),
        ('{"schema": 99, "files": {}}', "is none of this version's"),
        ('{"schema": 1, "files": {}}', "is none of this version's"),
        ('{"schema": 1, "files": {"../model.zip": {"bytes": 3, "sha256": ""}}}', "is none of this version's"),
        ('{"schema": 1, "files": {"/etc/passwd": {"bytes": 3, "sha256": ""}}}', "is none of this version's"),
        ('{"schema": 1, "files": {"x": {"bytes": "3", "sha256": ""}}}', "is none of this version's"),
        (" " * (2 << 20), "is too large"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, manifest: str, said: str):
    (tmp_path / MANIFEST).write_text(manifest)
    assert problem_of(tmp_path) == f"{MANIFEST} {said}"


@pytest.mark.parametrize(
    ("old", "new"), [("\n", "\n "), ('"step": 7', '"step": 8'), ('"step": 7', '"step": 9, "step": 7')]
)
def test_a_manifest_has_one_spelling_and_its_folder_s_step(tmp_path: Path, old: str, new: str):
    published = CheckpointFolder(tmp_path).publish(7, FILES)
    text = (published / MANIFEST).read_text()
    (published / MANIFEST).write_text(text.replace(old, new, 1))
    assert problem_of(published) in (f"{MANIFEST} is not what was written", f"{MANIFEST} is of step 8")


def test_a_damaged_checkpoint_of_a_later_step_takes_no_place_of_a_whole_one(tmp_path: Path):
    """A run that went back to step 2 and is stopped at step 3; step 9 was damaged."""
    CheckpointFolder(tmp_path).publish(2, FILES)
    (CheckpointFolder(tmp_path).publish(9, FILES) / MANIFEST).unlink()
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.publish(3, FILES).is_dir()
    assert folder.newest().folder == tmp_path / "step_000000000003"
    folder.publish(12, FILES)
    assert [path.name for path in folder.all()] == ["step_000000000012"]


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = CheckpointFolder(tmp_path)
    folder.publish(1, FILES)
    broken = folder.publish(2, FILES)
    opened = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == broken / "model.zip":
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    newest, problems = folder.newest()
    assert newest == tmp_path / "step_000000000001"
    assert problems == ["step_000000000002: model.zip cannot be read (Input/output error)"]


def test_a_link_is_no_file_of_a_checkpoint(tmp_path: Path):
    published = CheckpointFolder(tmp_path).publish(1, FILES)
    outside = tmp_path / "outside"
    outside.write_bytes(b"zip")
    (published / "model.zip").unlink()
    (published / "model.zip").symlink_to(outside)
    assert problem_of(published) == "model.zip is missing"
    assert json.loads((published / MANIFEST).read_text())["step"] == 1


def test_copies_of_other_names_are_the_users(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep=2)
    first = folder.publish(100, FILES)
    for name in (f"{first.name}_good", "step_best", "step_1"):
        shutil.copytree(first, tmp_path / name)
    for step in (200, 300, 400):
        folder.publish(step, FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000000000100_good", "step_000000000300", "step_000000000400", "step_1", "step_best"
    ]  # fmt: skip
    assert folder.newest().folder == tmp_path / "step_000000000400"
