"""Checkpoint folders: whole or not there, whatever fails on the way."""

from __future__ import annotations

import errno
import io
import itertools
import json
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO

from fasttrain.errors import ConfigError
from fasttrain.saving.checkpointing import zip_writer
from fasttrain.saving.checkpoints import (
    MANIFEST,
    CheckpointFolder,
    Disk,
    Snapshot,
    Writer,
    array_writer,
    open_checkpoint,
    problem_of,
)
from messages import assert_says, wrong_inputs

FILES: dict[str, bytes | Writer] = {
    "state.json": b'{"a": 1}',
    "arrays.npz": bytes(range(256)) * 40,
    "model.zip": b"zip",
}


def faulty(at: int, how: str, error: BaseException) -> Disk:
    """Fails at the `at`-th operation, before it is done, after it, or half way through a write."""
    disk, count = Disk(), itertools.count(1)

    def failing(name: str) -> Any:
        plain = getattr(disk, name)

        def operation(*given: Any) -> Any:
            if next(count) != at:
                return plain(*given)
            if how == "after" or (how == "half" and name == "write"):
                plain(*given)
            if how == "half" and name == "write":
                given[0].write_bytes(given[0].read_bytes()[: given[0].stat().st_size // 2])
            raise error

        return operation

    for name in ("make", "write", "sync", "rename"):
        setattr(disk, name, failing(name))
    return disk


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is done, no handler runs on purpose."""


def content_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_what_is_published_is_whole_and_old_ones_go(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    assert folder.newest() is None
    for step in (5, 10, 123456):
        assert folder.publish(step, FILES).name == f"step_{step:012d}"
    newest = folder.root / "step_000000123456"
    assert folder.all() == [newest, folder.root / "step_000000000010"]
    assert folder.newest() == newest
    assert content_of(newest) == FILES
    assert sorted(folder.root.iterdir()) == sorted(folder.all())
    folder.publish(123456, {**FILES, "model.zip": b"new"})
    assert (newest / "model.zip").read_bytes() == b"new"


OPERATIONS = 8  # make, four writes, sync, rename, sync


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("at", range(1, OPERATIONS + 1))
@pytest.mark.parametrize("killed", [False, True])
def test_what_fails_at_any_operation_leaves_the_old_or_the_new_one(tmp_path: Path, at: int, how: str, killed: bool):
    CheckpointFolder(tmp_path).publish(1, FILES)
    error = Killed() if killed else OSError(errno.ENOSPC, "No space left on device")
    new = {**FILES, "model.zip": b"new"}
    with pytest.raises(type(error)):
        CheckpointFolder(tmp_path, disk=faulty(at, how, error)).publish(2, new)
    folder = CheckpointFolder(tmp_path)
    newest = folder.newest()
    assert newest == folder.all()[0]
    renamed = at == OPERATIONS or (at == OPERATIONS - 1 and how == "after")
    assert content_of(newest) == (new if renamed else FILES)
    if killed:
        folder.clean()
    assert not list(tmp_path.glob(".*")), "nothing half done is left"
    folder.publish(3, FILES)
    assert folder.newest() == tmp_path / "step_000000000003"


def damage(path: Path, rng: random.Random) -> str:
    """Truncate, flip a bit, swap two bytes, append, or delete a random file; what was done."""
    file = rng.choice(sorted(path.iterdir()))
    content = file.read_bytes()
    at, other = sorted(rng.sample(range(len(content)), 2))
    changed = {
        "truncate": content[:at],
        "flip": content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        "swap": content[:at] + content[other : other + 1] + content[at + 1 : other] + content[at : at + 1]
        + content[other + 1 :],
        "append": content + b"x",
        "delete": None,
    }  # fmt: skip
    how = rng.choice([*changed])
    file.unlink()
    if (now := changed[how]) is not None:
        file.write_bytes(now)
    return f"{how} {file.name}"


def test_no_error_of_a_writer_leaves_something_half_done_and_so_many_operations_there_are(tmp_path: Path):
    def fails(file: Any) -> None:
        raise RuntimeError("enforce fail: unexpected pos")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        CheckpointFolder(tmp_path).publish(1, {**FILES, "model.zip": fails})
    assert list(tmp_path.iterdir()) == []
    CheckpointFolder(tmp_path, disk=faulty(OPERATIONS + 1, "before", Killed())).publish(1, FILES)


def test_damage_is_found_and_the_one_before_taken(tmp_path: Path):
    """100 random damages. Only a byte swapped for its like is none."""
    rng = random.Random(0)
    whole = CheckpointFolder(tmp_path / "whole")
    whole.publish(1, FILES)
    whole.publish(2, FILES)
    for number in range(100):
        work = tmp_path / f"work{number}"
        shutil.copytree(whole.root, work)
        what = damage(work / "step_000000000002", rng)
        newest = CheckpointFolder(work).newest()
        assert newest is not None, what
        assert content_of(newest) == FILES, what
        if newest.name == "step_000000000002":  # what was read is what was written, all the same
            assert what.startswith("swap"), what
        else:
            assert problem_of(work / "step_000000000002"), what
        shutil.rmtree(work)


@pytest.mark.parametrize("manifest", wrong_inputs("manifests of checkpoints"))
def test_manifests_that_are_none(tmp_path: Path, manifest: str):
    (tmp_path / MANIFEST).write_text(manifest)
    assert_says("manifests of checkpoints", manifest, problem_of(tmp_path))
    (tmp_path / MANIFEST).write_text(" " * (2 << 20))
    assert problem_of(tmp_path) == f"{MANIFEST} is too large"


@pytest.mark.parametrize(
    ("old", "new"), [("\n", "\n "), ('"step": 7', '"step": 8'), ('"step": 7', '"step": 9, "step": 7')]
)
def test_a_manifest_has_one_spelling_and_its_folder_s_step(tmp_path: Path, old: str, new: str):
    published = CheckpointFolder(tmp_path).publish(7, FILES)
    text = (published / MANIFEST).read_text()
    (published / MANIFEST).write_text(text.replace(old, new, 1))
    assert problem_of(published) in (f"{MANIFEST} was changed after it was written", f"{MANIFEST} is of step 8")


def test_a_damaged_checkpoint_of_a_later_step_takes_no_place_of_a_whole_one(tmp_path: Path):
    """A run that went back to step 2 and is stopped at step 3; step 9 was damaged."""
    CheckpointFolder(tmp_path).publish(2, FILES)
    (CheckpointFolder(tmp_path).publish(9, FILES) / MANIFEST).unlink()
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.publish(3, FILES).is_dir()
    assert folder.newest() == tmp_path / "step_000000000003"
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
    assert folder.newest() == tmp_path / "step_000000000001"
    assert problem_of(broken) == "model.zip cannot be read (Input/output error)"


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
    assert folder.newest() == tmp_path / "step_000000000400"


# --- the files of one


ARRAYS: dict[str, Any] = {
    "model/weight": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
    "envs/games": np.zeros(2, np.dtype([("a", "i4"), ("b", "f8")], align=True)),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 4), np.int64),
}


def published(tmp_path: Path, **more: Any) -> Path:
    snapshot = Snapshot(7, {"env_steps": 7, **more}, ARRAYS, lambda file: None)
    return CheckpointFolder(tmp_path).publish(7, snapshot.files())


def test_there_and_back(tmp_path: Path):
    with open_checkpoint(published(tmp_path)) as (state, arrays):
        assert state == {"schema": 1, "env_steps": 7}
        assert set(arrays) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert arrays[name].dtype == array.dtype
            assert (arrays[name] == array).all()


def test_a_copy_is_not_changed_by_training_and_objects_are_never_written():
    array = np.zeros(3)
    snapshot = Snapshot(1, {}, {"a": array}, lambda file: None)
    copied = snapshot.copied()
    array += 1
    assert (copied.arrays["a"].tolist(), snapshot.size_bytes) == ([0, 0, 0], 24)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        array_writer({"a": np.array([{}], object)})(io.BytesIO())


class Trap:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def saved(write: Any, array: Any) -> bytes:
    file = io.BytesIO()
    write(file, a=array)
    return file.getvalue()


def lying() -> bytes:
    content = bytearray(saved(lambda file, a: array_writer({"a": a})(file), np.zeros(8)))
    at = content.rfind(b"PK\x01\x02")
    content[at + 24 : at + 28] = (1 << 31).to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("state.json", b"{", "no JSON"),
        ("state.json", b"[]", "another version"),
        ("state.json", json.dumps({"schema": 2}).encode(), "another version"),
        ("arrays.npz", saved(np.savez_compressed, np.zeros(1 << 22)), "compressed"),
        ("arrays.npz", saved(np.savez, np.array([Trap()], object)), "holds objects"),
        ("arrays.npz", lying(), "is compressed"),
        ("arrays.npz", b"PK nothing", "cannot be read"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, name, content, told, capsys):
    folder = published(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told), open_checkpoint(folder):
        pass
    assert "executed" not in capsys.readouterr().out


def test_the_zip_is_what_save_writes_and_of_that_moment():
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1, device="cpu")
    model.learn(32)
    plain, frozen = io.BytesIO(), io.BytesIO()
    model.save(plain)
    write = zip_writer(model)
    model.learn(64)
    write(frozen)
    with zipfile.ZipFile(plain) as wanted, zipfile.ZipFile(frozen) as found:
        assert set(found.namelist()) == set(wanted.namelist())
        assert json.loads(found.read("data")).keys() == json.loads(wanted.read("data")).keys()
    then, now = (PPO.load(io.BytesIO(file.getvalue()), device="cpu") for file in (frozen, plain))
    assert then.num_timesteps == 32
    assert all((then.policy.state_dict()[name] == tensor).all() for name, tensor in now.policy.state_dict().items())
