"""Archives and arrays from anywhere. More of what is refused: tests/faults/evil_files.py."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.errors import ConfigError
from fasttrain.saving.archives import check_arrays, is_plain_path, open_archive, read_arrays, read_member, read_tensors


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
        with open_archive(file, "x") as archive:
            assert read_member(archive, "b/c", 2, "x") == b"22"
            with pytest.raises(ConfigError, match="x: its b/c is too large"):
                read_member(archive, "b/c", 1, "x")
            with pytest.raises(ConfigError, match="x: there is no d in it"):
                read_member(archive, "d", 1, "x")


def test_too_many_members_are_refused_before_they_are_listed(monkeypatch: pytest.MonkeyPatch):
    content = archive_of({f"{n:090d}": b"" for n in range(60)})
    monkeypatch.setattr("zipfile.ZipFile", None)
    with pytest.raises(ConfigError, match="its directory is too large"), open_archive(io.BytesIO(content), "x", 5):
        pass
    monkeypatch.undo()
    few = io.BytesIO(archive_of(dict.fromkeys("abc", b"")))
    with pytest.raises(ConfigError, match="3 members; 2 allowed"), open_archive(few, "x", 2):
        pass


def test_a_damaged_member_is_told(tmp_path: Path):
    content = archive_of({"a": b"wholesome"}).replace(b"wholesome", b"damaged!!")
    with (
        open_archive(io.BytesIO(content), "x") as archive,
        pytest.raises(ConfigError, match="cannot be read: Bad CRC-32"),
    ):
        read_member(archive, "a", 100, "x")


GOOD_ARRAY = b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }         \n" + bytes(8)
GOOD = archive_of({"a.npy": GOOD_ARRAY})


def with_changes(content: bytes, least: int) -> st.SearchStrategy[bytes]:
    """`content` with other values in a few places."""

    def changed(changes: list[tuple[int, int]]) -> bytes:
        found = bytearray(content)
        for place, value in changes:
            found[place] = value
        return bytes(found)

    places = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    return st.lists(places, min_size=least, max_size=4).map(changed)


@given(st.binary(max_size=300) | with_changes(GOOD, 0))
def test_whatever_the_bytes_it_is_read_or_refused(content: bytes):
    with contextlib.suppress(ConfigError), open_archive(io.BytesIO(content), "x") as archive:
        check_arrays(archive, "x")


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int8), np.array(3.5)])
def test_arrays_come_back(tmp_path: Path, array: np.ndarray):
    np.savez(tmp_path / "x.npz", a=array)
    assert np.array_equal(read_arrays(tmp_path / "x.npz", 10_000)["a"], array)
    with pytest.raises(ConfigError, match="too large"):
        read_arrays(tmp_path / "x.npz", 10)


def test_plain_paths_and_those_that_lead_elsewhere():
    for name in ("a", "a/b.npy", "a b", ".data/x", "ä", "a..b"):
        assert is_plain_path(name), name
    for name in ("", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\\b", "C:a", "a\x00b", "a\nb", "a" * 501):
        assert not is_plain_path(name), name


# --- tensors without unpickling


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_every_kind_of_number_and_form_of_tensor():
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
        views = {"whole": tensor, "turned": tensor.t(), "row": tensor[1], "empty": tensor[:0], "one": tensor[0, 0]}
        found = read_tensors(saved(views), "x")
        assert [*found] == [*views]
        assert all(found[view].dtype == tensor.dtype and torch.equal(found[view], views[view]) for view in views)


def test_plain_values_and_parameters():
    value = {
        "numbers": [0, 1, 300, 70_000, -5, 2**40, 2**100, 1.5, True, False, None],
        "nested": OrderedDict(a=({"b": []}, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))),
        "text": "ä" * 300,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = read_tensors(saved(value), "x")
    assert torch.equal(found.pop("parameter"), torch.ones(2))
    assert found == {name: value[name] for name in ("numbers", "nested", "text")}


def test_what_no_tensor_needs_is_refused():
    for value in (torch.device("cpu"), {1, 2}, torch.nn.Linear(1, 1), torch.Size([1]), bytearray(3)):
        with pytest.raises(ConfigError, match="x names|instruction|there is a"):
            read_tensors(saved(value), "x")
    old = io.BytesIO()
    torch.save({}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match="no zip file"):
        read_tensors(old.getvalue(), "x")


def with_pickle(pickle: bytes) -> bytes:
    return archive_of({"archive/data.pkl": pickle, "archive/data/0": bytes(16), "archive/version": b"3"})


PLAIN = zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(4), "b": [1, (2, 3)]}))).read("archive/data.pkl")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of pickletools, reading an old kind of text
@given(with_changes(PLAIN, 1) | st.binary(max_size=60))
def test_any_pickle_is_read_or_refused(pickle: bytes):
    with contextlib.suppress(ConfigError):
        read_tensors(with_pickle(pickle), "x")


DEEP = b")" + b"\x85" * 300_000
HUGE = b"\x8a\x05" + (1 << 33).to_bytes(5, "little")


def test_a_list_in_many_places_is_looked_at_once():
    """Each list here holds the one before it twice: 2⁴⁰ ends of the walk, if it were taken at every turn."""
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    found = read_tensors(saved(value), "x")
    assert found[0] is found[1]
    assert len(found[0]) == 2


def test_a_second_pickle_that_torch_may_take_for_the_first_is_refused():
    file = io.BytesIO(with_pickle(PLAIN))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/DATA.PKL", PLAIN)
    with pytest.raises(ConfigError, match=r"has 'archive/data\.pkl' twice"):
        read_tensors(file.getvalue(), "x")


@pytest.mark.parametrize(
    ("pickle", "reason"),
    [
        (b"\x80\x02}" + DEEP + b"Ns.", "300,000 tuples"),  # the hash of such a key would overflow the stack
        (b"\x80\x02})Ns.", "neither texts nor integers"),
        (b"\x80\x02}NNs.", "neither texts nor integers"),
        (b"\x80\x02})\x85q\x00" + b"".join(b"h%c\x86\x80\x02q%c" % (n, n + 1) for n in range(50)), "one tuple twice"),
        (PLAIN.replace(b"K\x04\x85q\x08K\x01", HUGE + b"\x85q\x08K\x00"), "more numbers than its storage"),
        (PLAIN.replace(b"K\x04\x85q\x08K\x01", HUGE + b"\x85q\x08K\x01"), "resize"),
    ],
)
def test_what_would_break_or_fill_the_process_is_refused(pickle: bytes, reason: str):
    assert pickle != PLAIN
    with pytest.raises(ConfigError, match=reason):
        read_tensors(with_pickle(pickle), "x")
