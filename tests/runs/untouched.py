"""What looking at a model must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _state(model: Any, drawn: bool) -> Any:
    weights = {} if model is None else {name: value.tolist() for name, value in model.policy.state_dict().items()}
    spaces = [model.observation_space, model.action_space] if drawn and model is not None else []
    own = [space.np_random.bit_generator.state for space in spaces]
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return weights, own, streams


@contextmanager
def untouched(model: Any = None, drawn: bool = True) -> Iterator[None]:
    """Fails unless all random streams, and of a model the weights and (`drawn`) its spaces' streams, are as before."""
    before = _state(model, drawn)
    yield
    assert _state(model, drawn) == before
