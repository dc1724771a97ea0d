from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from fasttrain.errors import ConfigError
from fasttrain.saving.env_state import load_random_state, plain, random_state


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def test_all_streams_go_on_from_where_they_were():
    np.random.randn()  # half of a pair is kept for the next call
    random.gauss(0, 1)
    state, arrays = random_state()
    first = drawn()
    load_random_state(json.loads(json.dumps(state)), arrays)
    assert drawn() == first


def test_what_is_no_stream_is_refused():
    state, arrays = random_state()
    before = drawn()
    with pytest.raises(ConfigError, match="numpy"):
        load_random_state(state, {**arrays, "numpy": arrays["numpy"][:3]})
    with pytest.raises(ValueError, match="version 99"):
        load_random_state({**state, "python": {"version": 99, "gauss": None}}, arrays)
    load_random_state(state, arrays)
    assert drawn() == before


def test_plain_values():
    assert plain({"a": np.float64(1.5), "b": [np.int64(2), (True,)], "c": np.arange(2)}) == {
        "a": 1.5, "b": [2, [True]], "c": [0, 1],
    }  # fmt: skip
