"""How a minibatch is laid out for the kernels; tests/accelerators/test_kernels_recurrent.py has what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fasttrain.jit import njit_bare
from fasttrain.kernels import recurrent


@njit_bare
def laid_out(begins: Any, begin: int, end: int, batch: Any, index: Any, laid: Any) -> Any:
    return recurrent.lay_out(begins, begin, end, batch, index, laid)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_are_whole_sequences_step_by_step_and_the_longest_first(parts: int):
    rng = np.random.default_rng(parts)
    for _ in range(50):
        size = int(rng.integers(1, 40))
        begins, batch = rng.random(size) < rng.choice([0.0, 0.2, 1.0]), rng.permutation(1000)[:size]
        whole = np.split(batch, np.flatnonzero(begins[1:]) + 1)
        met = []
        for part in range(parts):
            index, laid = np.zeros((5, size + 2), np.int64), np.zeros(size, np.int64)
            count, longest, total = laid_out(
                begins, size * part // parts, size * (part + 1) // parts, batch, index, laid
            )
            sizes, at = index[2, :longest], 0
            assert sizes.sum() == total
            assert longest == 0 or sizes[0] == count
            rows = []
            for steps in sizes:
                rows.append(laid[at : at + steps])
                at += steps
            met += [np.array([row[s] for row in rows if s < len(row)]) for s in range(count)]
            lengths = [len(each) for each in met[-count:]] if count else []
            assert lengths == sorted(lengths, reverse=True)
        assert sorted(map(tuple, met)) == sorted(map(tuple, whole))
