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

from fasttrain.errors import EnvSpecError
from fasttrain_vec.worker_memory import (
    ALIGNMENT,
    CONTROL_WORDS,
    ForkGuard,
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


ONE = {"observation_space": spaces.Box(-1, 1, (3,), np.float64), "num_envs": 1}


@pytest.mark.parametrize("changes", [{}, {"mask_width": 0, "num_info_keys": 0}, ONE])
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


def test_spaces_that_suit_and_that_do_not():
    two = spaces.Discrete(2)
    for space in (spaces.Box(0, 1, (2,)), spaces.Discrete(3), spaces.MultiBinary(2), MANY):
        check_spaces(space, spaces.MultiDiscrete([2, 2]))
    for space, actions, named in ((spaces.Text(5), two, "Text"), (spaces.Tuple([two]), two, "Tuple"),
                                  (spaces.Dict({"a": MANY}), two, "Dict"), (two, MANY, "Dict")):  # fmt: skip
        with pytest.raises(EnvSpecError, match=f"shared memory needs Box.*, found {named}.*DummyVecEnv"):
            check_spaces(space, actions)


def test_a_guard_ends_forks_alone(monkeypatch: pytest.MonkeyPatch):
    """What an env does that forks: tests/faults/test_forking.py."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    guard = ForkGuard()
    guard.check()
    guard.check(SystemExit(3))
    assert codes == []
    guard.forked = True
    for error in (None, SystemExit(3), SystemExit(), SystemExit("why"), ValueError()):
        guard.check(error)
    assert codes == [1, 3, 0, 1, 1]
