"""Our rollout as an instance of SB3's buffers: the same names, dtypes and samples, filled by SB3's own `add`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.buffers.stock import as_stock

STEPS, ENVS = 5, 3
BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4), "image": spaces.Box(0, 255, (2, 2, 1), np.uint8)})
FOUR = spaces.Discrete(4)
CASES = {
    "plain": (RolloutBuffer, BOX, FOUR, None),
    "discrete observations": (RolloutBuffer, spaces.Discrete(7), spaces.MultiDiscrete([2, 3]), None),
    "wide integers": (RolloutBuffer, spaces.Box(0, 9, (2,), np.uint16), BOX, None),
    "dict": (DictRolloutBuffer, DICT, spaces.MultiBinary(3), None),
    "masks": (MaskableRolloutBuffer, BOX, FOUR, 4),
    "masks of bits": (MaskableRolloutBuffer, BOX, spaces.MultiBinary(3), 6),
    "masks, dict": (MaskableDictRolloutBuffer, DICT, spaces.MultiDiscrete([2, 3]), 5),
}


def drawn(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: drawn(part) for key, part in space.spaces.items()}
    return np.stack([space.sample() for _ in range(ENVS)])


def both(name: str, steps: int = STEPS) -> tuple[Any, Any]:
    """Stock's buffer and ours after the same calls of stock's `add`."""
    kind, seen, acted, width = CASES[name]
    seen.seed(1)
    acted.seed(2)
    rng = np.random.default_rng(3)
    stock = kind(STEPS, seen, acted, "cpu", 0.9, 0.99, ENVS)
    settings: Any = {"device": torch.device("cpu"), "gamma": 0.99, "gae_lambda": 0.9, "mask_width": width}
    ours = as_stock(RolloutStorage(STEPS, ENVS, seen, acted, **settings))
    for _ in range(steps):
        step = (
            drawn(seen), drawn(acted), rng.standard_normal(ENVS).astype(np.float32), rng.random(ENVS) < 0.3,
            torch.from_numpy(rng.standard_normal((ENVS, 1)).astype(np.float32)),
            torch.from_numpy(rng.standard_normal(ENVS).astype(np.float32)),
        )  # fmt: skip
        masks = {} if width is None else {"action_masks": (rng.random((ENVS, width)) < 0.5).astype(np.int8)}
        for buffer in (stock, ours):
            buffer.add(*step, **masks)
    if steps == STEPS:
        last = torch.from_numpy(rng.standard_normal((ENVS, 1)).astype(np.float32)), rng.random(ENVS) < 0.5
        for buffer in (stock, ours):
            buffer.compute_returns_and_advantage(*last)
    return stock, ours


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("steps", [STEPS, 2])
@pytest.mark.parametrize("name", CASES)
def test_everything_that_stock_has_is_there_with_the_same_value(name: str, steps: int):
    stock, ours = both(name, steps)
    assert isinstance(ours, CASES[name][0])
    assert ours.size() == stock.size() == steps
    for attribute, value in vars(stock).items():
        found = getattr(ours, attribute)
        if isinstance(value, np.ndarray):  # what was never filled is nobody's business
            value, found = value[:steps], found[:steps]
        assert_same(value, found)


@pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
@pytest.mark.parametrize("name", CASES)
def test_samples_are_stocks_in_stocks_order(name: str, batch_size: int | None):
    stock, ours = both(name)
    for _ in range(2):  # two epochs: stock's buffer has been flattened by the first
        np.random.seed(7)
        expected = list(stock.get(batch_size))
        np.random.seed(7)
        found = list(ours.get(batch_size))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other)
            assert_same(one._asdict(), other._asdict())
    assert ours.values.shape == (STEPS, ENVS), "ours is not flattened"


def test_an_unfinished_rollout_is_refused_as_by_stock():
    for buffer in both("plain", 2):
        with pytest.raises(AssertionError):
            next(iter(buffer.get()))


@pytest.mark.parametrize("name", ["plain", "wide integers", "masks, dict"])
def test_what_is_assigned_reaches_the_samples_and_the_update(name: str):
    stock, ours = both(name)
    changed = ["values", "returns", "advantages", "log_probs", "actions", "observations"]
    for attribute in [*changed, *(["action_masks"] if "masks" in name else [])]:
        old: Any = getattr(stock, attribute)
        new = {key: part[::-1].copy() for key, part in old.items()} if isinstance(old, dict) else old[::-1].copy()
        for buffer in (stock, ours):
            setattr(buffer, attribute, new)
        assert_same(getattr(ours, attribute), new)
    ours.rewards += 1.0
    np.random.seed(7)
    expected = next(iter(stock.get(4)))
    np.random.seed(7)
    assert_same(next(iter(ours.get(4)))._asdict(), expected._asdict())
    np.random.seed(7)
    batch = next(ours.storage.minibatches(4))
    assert torch.equal(batch.advantages, expected.advantages)


def test_arrays_in_stocks_dtype_alias_the_storage():
    _, ours = both("plain")
    ours.advantages[:] = 5.0
    ours.actions[:] = 1
    batch = next(ours.storage.minibatches())
    assert (batch.advantages == 5.0).all()
    assert (batch.actions == 1).all()


def test_reset_empties_it():
    _, ours = both("masks")
    ours.reset()
    assert (ours.size(), ours.full, ours.pos) == (0, False, 0)
