"""The shared block: what lies where, and that it has no name."""

from __future__ import annotations

import mmap
import os
import sys
from itertools import pairwise
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.batch import each_array, select_rows
from fasttrain.errors import EnvSpecError
from fasttrain.vec.worker_memory import (
    ALIGNMENT,
    CONTROL_WORDS,
    Layout,
    SharedBlock,
    check_spaces,
    receive_block,
)
from worker_toys import shared_memory_names

MANY = spaces.Dict({"image": spaces.Box(0, 255, (3, 5), np.uint8), "which": spaces.Discrete(4)})


def layout(**changes: Any) -> Layout:
    values: dict[str, Any] = {
        "num_envs": 5, "num_workers": 2, "observation_space": MANY, "action_space": spaces.MultiDiscrete([3, 4]),
        "mask_width": 7, "num_info_keys": 2,
    }  # fmt: skip
    return Layout(**values | changes)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [] if value is None else [value]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask_width": 0},
        {"num_info_keys": 0},
        {"observation_space": spaces.Box(-1, 1, (3,), np.float64), "num_envs": 1},
    ],
)
def test_arrays_lie_apart_on_cache_lines_and_fill_the_block(changes: dict[str, Any]):
    plan = layout(**changes)
    block = mmap.mmap(-1, plan.size_bytes)
    arrays, control = plan.views(block)
    taken = sorted(
        (leaf.__array_interface__["data"][0], leaf.nbytes) for leaf in [*leaves(arrays), control] if leaf.nbytes
    )
    base = taken[0][0]
    assert all((begin - base) % ALIGNMENT == 0 for begin, _ in taken)
    for (begin, size), (following, _) in pairwise(taken):
        assert begin + size <= following
    last, size = taken[-1]
    assert plan.size_bytes - ALIGNMENT < last + size - base <= plan.size_bytes
    assert control.shape == (plan.num_workers, CONTROL_WORDS)
    assert control.strides[0] % ALIGNMENT == 0, "two workers never write one cache line"


def test_shapes_and_dtypes():
    plan = layout()
    arrays, _ = plan.views(mmap.mmap(-1, plan.size_bytes))
    first, second = arrays.observations
    assert first["image"].shape == (5, 3, 5)
    assert first["image"].dtype == np.uint8
    assert first["which"].shape == (5,)
    assert not np.shares_memory(first["image"], second["image"]), "the state before stays whole"
    assert arrays.actions.shape == (5, 2)
    assert arrays.actions.dtype == np.int64
    assert arrays.rewards.dtype == np.float32
    assert arrays.action_masks is not None
    assert arrays.action_masks.shape == (5, 7)
    assert arrays.info_values.shape == (5, 2)
    bare, _ = layout(mask_width=0, num_info_keys=0).views(mmap.mmap(-1, plan.size_bytes))
    assert bare.action_masks is None
    assert bare.info_values.shape == (5, 0)


def test_rows_of_a_worker_are_views():
    plan = layout()
    arrays, _ = plan.views(mmap.mmap(-1, plan.size_bytes))
    mine = select_rows(arrays, slice(2, 4))
    mine.rewards[:] = 3.0
    mine.observations[1]["which"][:] = 2
    assert arrays.rewards.tolist() == [0, 0, 3, 3, 0]
    assert arrays.observations[1]["which"].tolist() == [0, 0, 2, 2, 0]
    assert select_rows(arrays._replace(action_masks=None), slice(1)).action_masks is None


def test_copies_and_their_return():
    plan = layout()
    arrays, _ = plan.views(mmap.mmap(-1, plan.size_bytes))
    mine = select_rows(arrays, slice(1, 3))._replace(action_masks=None)
    before = each_array(np.copy, mine)
    mine.rewards[:], mine.observations[0]["which"][:] = 3.0, 2
    assert before.rewards.tolist() == [0, 0]
    each_array(np.copyto, mine, before)
    assert arrays.rewards.tolist() == [0] * 5
    assert arrays.observations[0]["which"].tolist() == [0] * 5


def test_a_block_is_shared_by_its_handle_and_has_no_name():
    before = shared_memory_names()
    block = SharedBlock(100)
    ours, theirs = Pipe()
    block.send(ours)
    other = receive_block(theirs)
    other[3:6] = b"abc"
    assert block.memory[:7] == b"\0\0\0abc\0"
    assert shared_memory_names() == before
    block.close()
    block.close()
    assert block.memory[3:6] == b"abc", "the memory lives as long as somebody looks at it"
    assert len(block.memory) == mmap.PAGESIZE


@pytest.mark.skipif(sys.platform == "win32", reason="files")
def test_without_memfd_a_file_that_is_gone_already(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    block = SharedBlock(5000)
    ours, theirs = Pipe()
    block.send(ours)
    receive_block(theirs)[4999:5000] = b"x"
    assert block.memory[4999:5000] == b"x"
    assert list(tmp_path.iterdir()) == []
    block.close()


@pytest.mark.parametrize("space", [spaces.Box(0, 1, (2,)), spaces.Discrete(3), spaces.MultiBinary(2), MANY])
def test_spaces_that_suit(space: spaces.Space):
    check_spaces(space, spaces.MultiDiscrete([2, 2]))


@pytest.mark.parametrize(
    ("observation_space", "action_space", "named"),
    [
        (spaces.Text(5), spaces.Discrete(2), "Text"),
        (spaces.Tuple([spaces.Discrete(2)]), spaces.Discrete(2), "Tuple"),
        (spaces.Dict({"a": MANY}), spaces.Discrete(2), "Dict"),
        (spaces.Discrete(2), MANY, "Dict"),
        (spaces.Sequence(spaces.Discrete(2)), spaces.Discrete(2), "Sequence"),
    ],
)
def test_spaces_that_do_not(observation_space: spaces.Space, action_space: spaces.Space, named: str):
    with pytest.raises(EnvSpecError, match=f"shared memory needs Box.*, found {named}.*DummyVecEnv"):
        check_spaces(observation_space, action_space)
