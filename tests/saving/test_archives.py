"""Archives and arrays from anywhere. More of what is refused: tests/faults/evil_files.py."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.errors import ConfigError
from fasttrain.saving.archives import check_arrays, is_plain_path, opened, read_arrays, read_member


def archive_of(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_a_good_one_is_read_from_a_path_and_from_memory(tmp_path: Path):
    content = archive_of({"a": b"1", "b/c": b"22"})
    (tmp_path / "x.zip").write_bytes(content)
    for file in (tmp_path / "x.zip", io.BytesIO(content)):
        with opened(file, "x") as archive:
            assert read_member(archive, "b/c", 2, "x") == b"22"
            with pytest.raises(ConfigError, match="x: its b/c is too large"):
                read_member(archive, "b/c", 1, "x")
            with pytest.raises(ConfigError, match="x: there is no d in it"):
                read_member(archive, "d", 1, "x")


def test_too_many_members_are_refused_before_they_are_listed(monkeypatch: pytest.MonkeyPatch):
    content = archive_of({f"{n:090d}": b"" for n in range(60)})
    monkeypatch.setattr("zipfile.ZipFile", None)
    with pytest.raises(ConfigError, match="its list of names is too long"), opened(io.BytesIO(content), "x", 5):
        pass


def test_a_few_too_many():
    with (
        pytest.raises(ConfigError, match="3 members; 2 allowed"),
        opened(io.BytesIO(archive_of(dict.fromkeys("abc", b""))), "x", 2),
    ):
        pass


def test_a_damaged_member_is_told(tmp_path: Path):
    content = archive_of({"a": b"wholesome"}).replace(b"wholesome", b"damaged!!")
    with opened(io.BytesIO(content), "x") as archive, pytest.raises(ConfigError, match="cannot be read: Bad CRC-32"):
        read_member(archive, "a", 100, "x")


@given(st.binary(max_size=300))
def test_whatever_the_bytes_it_is_read_or_refused(content: bytes):
    try:
        with opened(io.BytesIO(content), "x"):
            pass
    except ConfigError:
        pass


GOOD = archive_of(
    {
        "a.npy": b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }         \n"
        + bytes(8)
    }
)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4))
def test_a_good_one_with_other_bytes_is_read_or_refused(changes: list[tuple[int, int]]):
    content = bytearray(GOOD)
    for place, value in changes:
        content[place] = value
    try:
        with opened(io.BytesIO(bytes(content)), "x") as archive:
            check_arrays(archive, "x")
    except ConfigError:
        pass


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int8), np.array(3.5)])
def test_arrays_come_back(tmp_path: Path, array: np.ndarray):
    np.savez(tmp_path / "x.npz", a=array)
    assert np.array_equal(read_arrays(tmp_path / "x.npz", 10_000)["a"], array)
    with pytest.raises(ConfigError, match="too large"):
        read_arrays(tmp_path / "x.npz", 10)


@pytest.mark.parametrize("name", ["a", "a/b.npy", "a b", ".data/x", "ä", "a..b"])
def test_plain_paths(name: str):
    assert is_plain_path(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\\b", "C:a", "a\x00b", "a\nb", "a" * 501]
)
def test_paths_that_lead_elsewhere(name: str):
    assert not is_plain_path(name)
