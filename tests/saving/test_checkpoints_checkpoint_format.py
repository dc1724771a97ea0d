from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO

from fasttrain.errors import ConfigError
from fasttrain.saving.checkpointing import zip_writer
from fasttrain.saving.checkpoints import CheckpointFolder, Snapshot, array_writer, stored

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
    with stored(published(tmp_path)) as (state, arrays):
        assert state == {"schema": 1, "env_steps": 7}
        assert set(arrays) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert arrays[name].dtype == array.dtype
            assert (arrays[name] == array).all()


def test_a_copy_is_not_changed_by_training():
    array = np.zeros(3)
    snapshot = Snapshot(1, {}, {"a": array}, lambda file: None)
    copied = snapshot.copied()
    array += 1
    assert copied.arrays["a"].tolist() == [0, 0, 0]
    assert snapshot.size_bytes == 24


def test_objects_are_never_written():
    with pytest.raises(ValueError, match="allow_pickle=False"):
        array_writer({"a": np.array([{}], object)})(io.BytesIO())


class Trap:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def trapped() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.array([Trap()], object))
    return file.getvalue()


def compressed() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(1 << 22))
    return file.getvalue()


def lying() -> bytes:
    file = io.BytesIO()
    array_writer({"a": np.zeros(8)})(file)
    content = bytearray(file.getvalue())
    at = content.rfind(b"PK\x01\x02")
    content[at + 24 : at + 28] = (1 << 31).to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("state.json", b"{", "no JSON"),
        ("state.json", b"[]", "another version"),
        ("state.json", json.dumps({"schema": 2}).encode(), "another version"),
        ("arrays.npz", compressed(), "compressed"),
        ("arrays.npz", lying(), "is compressed"),
        ("arrays.npz", b"PK nothing", "cannot be read"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, name: str, content: bytes, told: str):
    folder = published(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told), stored(folder):
        pass


def test_a_pickle_among_the_arrays_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = published(tmp_path)
    (folder / "arrays.npz").write_bytes(trapped())
    with pytest.raises(ConfigError, match="holds objects"), stored(folder):
        pass
    assert "executed" not in capsys.readouterr().out


def test_the_zip_is_what_save_writes_and_of_that_moment():
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, policy_kwargs={"net_arch": [4]}, device="cpu")
    model.learn(32)
    plain, frozen = io.BytesIO(), io.BytesIO()
    model.save(plain)
    write = zip_writer(model)
    model.learn(64)
    write(frozen)
    with zipfile.ZipFile(plain) as wanted, zipfile.ZipFile(frozen) as found:
        assert set(found.namelist()) == set(wanted.namelist())
        assert json.loads(found.read("data")).keys() == json.loads(wanted.read("data")).keys()
    frozen.seek(0)
    plain.seek(0)
    then, now = (PPO.load(file, device="cpu") for file in (frozen, plain))
    assert then.num_timesteps == 32
    for name, tensor in now.policy.state_dict().items():
        assert (then.policy.state_dict()[name] == tensor).all()
