"""Our buffers as instances of SB3's: the same names, dtypes and samples in stock's order, filled by its own `add`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)

from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.buffers.stock import as_stock, replay_class

STEPS, ENVS = 5, 3
BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4), "image": spaces.Box(0, 255, (2, 2, 1), np.uint8)})
FOUR = spaces.Discrete(4)
CASES = {
    "plain": (RolloutBuffer, BOX, FOUR, None),
    "classes": (RolloutBuffer, spaces.Discrete(7), spaces.MultiDiscrete([2, 3]), None),
    "several classes": (RolloutBuffer, spaces.MultiDiscrete([3, 4]), FOUR, None),
    "bits": (RolloutBuffer, spaces.MultiBinary(5), spaces.MultiBinary(3), None),
    "wide integers": (RolloutBuffer, spaces.Box(0, 60000, (2,), np.uint16), BOX, None),
    "float64": (RolloutBuffer, spaces.Box(-1, 1, (2, 2), np.float64), FOUR, None),
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

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    for _ in range(steps):
        rated = torch.from_numpy(normal(ENVS, 1)), torch.from_numpy(normal(ENVS))
        step = drawn(seen), drawn(acted), normal(ENVS), rng.random(ENVS) < 0.3, *rated
        masks = {} if width is None else {"action_masks": (rng.random((ENVS, width)) < 0.5).astype(np.int8)}
        for buffer in (stock, ours):
            buffer.add(*step, **masks)
    if steps == STEPS:
        last = torch.from_numpy(normal(ENVS, 1)), rng.random(ENVS) < 0.5
        for buffer in (stock, ours):
            buffer.compute_returns_and_advantage(*last)
    return stock, ours


def assert_same(one: Any, other: Any, exact: bool = True) -> None:
    """`exact`: in their types too."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], exact)
    elif isinstance(one, torch.Tensor | np.ndarray):
        assert one.dtype == other.dtype or not exact
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


@pytest.mark.parametrize("batch_size", [None, 4, 100])
@pytest.mark.parametrize("name", CASES)
def test_samples_and_minibatches_are_stocks_in_stocks_order(name: str, batch_size: int | None):
    stock, ours = both(name)
    for _ in range(2):  # two epochs: stock's buffer has been flattened by the first
        found = []
        for draw in (stock.get, ours.get, ours.storage.minibatches):
            np.random.seed(7)
            found.append(list(draw(batch_size)))
        for expected, sample, batch in zip(*found, strict=True):
            assert type(sample) is type(expected)
            assert_same(sample._asdict(), expected._asdict())
            flat = expected.actions.long().flatten() if CASES[name][2] is FOUR else expected.actions
            assert_same(batch.observations, expected.observations, exact=False)
            assert_same(batch.actions, flat, exact=False)
            names = ("old_values", "advantages", "returns", "old_log_prob", "action_masks")
            mine = (batch.old_values, batch.advantages, batch.returns, batch.old_log_probs, batch.action_masks)
            for field, value in zip(names, mine, strict=True):
                assert_same(value, getattr(expected, field, None), exact=False)
    assert ours.values.shape == (STEPS, ENVS), "ours is not flattened"


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
    found = []
    for draw in (stock.get, ours.get, ours.storage.minibatches):
        np.random.seed(7)
        found.append(next(iter(draw(4))))
    assert_same(found[1]._asdict(), found[0]._asdict())
    assert torch.equal(found[2].advantages, found[0].advantages)


def test_arrays_in_stocks_dtype_alias_the_storage_and_reset_empties_it():
    _, ours = both("plain")
    ours.advantages[:] = 5.0
    ours.actions[:] = 1
    batch = next(ours.storage.minibatches())
    assert (batch.advantages == 5.0).all()
    assert (batch.actions == 1).all()
    ours.reset()
    assert (ours.size(), ours.full, ours.pos) == (0, False, 0)
    for buffer in both("plain", 2):
        with pytest.raises(AssertionError):
            next(iter(buffer.get()))


@pytest.mark.parametrize(
    ("space", "n_steps", "asked", "stock"),
    [
        (BOX, 1, None, ReplayBuffer),
        (BOX, 3, None, NStepReplayBuffer),
        (BOX, 1, NStepReplayBuffer, NStepReplayBuffer),
        (BOX, 3, ReplayBuffer, ReplayBuffer),
        (spaces.Dict({"a": BOX}), 1, None, DictReplayBuffer),
        (spaces.Dict({"a": BOX}), 1, DictReplayBuffer, DictReplayBuffer),
    ],
)
def test_a_replay_buffer_is_an_instance_of_what_stock_takes(space: Any, n_steps: int, asked: Any, stock: Any):
    buffer = replay_class(space, n_steps, asked)(8, space, spaces.Discrete(2))
    assert isinstance(buffer, ReplayStorage)
    assert isinstance(buffer, stock)
    assert isinstance(buffer, NStepReplayBuffer) == (stock is NStepReplayBuffer)
