"""Tensors without unpickling. More of what is refused: tests/faults/evil_files.py."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3 import PPO

from fasttrain.errors import ConfigError
from fasttrain.saving.archives import read_tensors

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool]  # fmt: skip


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_state_dict_is_what_torch_reads():
    state = PPO("MlpPolicy", "CartPole-v1", n_steps=2, batch_size=2, device="cpu").policy.state_dict()
    found = read_tensors(saved(state), "x")
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_kind_of_number(dtype: torch.dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    views = {"whole": tensor, "turned": tensor.t(), "row": tensor[1], "empty": tensor[:0], "one": tensor[0, 0]}
    found = read_tensors(saved(views), "x")
    for name, view in views.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], view)


def test_plain_values_and_parameters():
    value = {
        "numbers": [0, 1, 300, 70_000, -5, 2**40, 2**100, 1.5, True, False, None],
        "nested": OrderedDict(a=({"b": []}, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))),
        "text": "ä" * 300,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = read_tensors(saved(value), "x")
    assert found["numbers"] == value["numbers"]
    assert found["nested"] == value["nested"]
    assert found["text"] == value["text"]
    assert torch.equal(found["parameter"], torch.ones(2))


def test_what_no_tensor_needs_is_refused():
    for value in (torch.device("cpu"), {1, 2}, torch.nn.Linear(1, 1), torch.Size([1]), bytearray(3)):
        with pytest.raises(ConfigError, match="x wants|instruction|there is a"):
            read_tensors(saved(value), "x")
    old = io.BytesIO()
    torch.save({}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match="no zip file"):
        read_tensors(old.getvalue(), "x")


def with_pickle(pickle: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", b"3")
    return file.getvalue()


PLAIN = zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(4), "b": [1, (2, 3)]}))).read("archive/data.pkl")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of pickletools, reading an old kind of text
@given(st.lists(st.tuples(st.integers(0, len(PLAIN) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_read_or_refused(changes: list[tuple[int, int]]):
    pickle = bytearray(PLAIN)
    for place, value in changes:
        pickle[place] = value
    with contextlib.suppress(ConfigError):
        read_tensors(with_pickle(bytes(pickle)), "x")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@given(st.binary(max_size=60))
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
        (b"\x80\x02})\x85q\x00" + b"".join(b"h%c\x86\x80\x02q%c" % (n, n + 1) for n in range(50)), "one tuple in two"),
        (PLAIN.replace(b"K\x04\x85q\x08K\x01", HUGE + b"\x85q\x08K\x00"), "more numbers than its storage"),
        (PLAIN.replace(b"K\x04\x85q\x08K\x01", HUGE + b"\x85q\x08K\x01"), "resize"),
    ],
)
def test_what_would_break_or_fill_the_process_is_refused(pickle: bytes, reason: str):
    assert pickle != PLAIN
    with pytest.raises(ConfigError, match=reason):
        read_tensors(with_pickle(pickle), "x")
