"""RolloutStorage against SB3's rollout buffers: the same numbers in the same order, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from fasttrain.buffers.rollout import RolloutStorage, advantages_of

CPU = torch.device("cpu")
BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4), "image": spaces.Box(0, 255, (2, 2, 1), np.uint8)})


def storage_for(observation_space, action_space, *, steps=4, envs=3, mask_width=None, gamma=0.99, gae_lambda=0.95):
    return RolloutStorage(
        steps,
        envs,
        observation_space,
        action_space,
        device=CPU,
        gamma=gamma,
        gae_lambda=gae_lambda,
        mask_width=mask_width,
    )


def draw(space: spaces.Space, envs: int, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: draw(sub, envs, rng) for key, sub in space.spaces.items()}
    space.seed(int(rng.integers(1 << 30)))
    return np.stack([space.sample() for _ in range(envs)])


def fill_both(stock: Any, ours: RolloutStorage, rng: np.random.Generator, mask_width: int | None = None) -> None:
    """The same random rollout into both."""
    envs = ours.num_envs
    for _ in range(ours.num_steps):
        observations = draw(stock.observation_space, envs, rng)
        actions = draw(stock.action_space, envs, rng)
        rewards = rng.standard_normal(envs).astype(np.float32)
        starts = rng.random(envs) < 0.3
        values = torch.from_numpy(rng.standard_normal((envs, 1)).astype(np.float32))
        log_probs = torch.from_numpy(rng.standard_normal(envs).astype(np.float32))
        masks = None if mask_width is None else rng.random((envs, mask_width)) < 0.5
        extra = {} if masks is None else {"action_masks": masks}
        stock.add(observations, actions, rewards, starts, values, log_probs, **extra)
        tensors = (
            {key: torch.as_tensor(value) for key, value in observations.items()}
            if isinstance(observations, dict)
            else torch.as_tensor(observations)
        )
        mask_tensor = None if masks is None else torch.from_numpy(masks)
        ours.add(tensors, torch.from_numpy(actions), rewards, starts, values, log_probs, mask_tensor)
    last_values = torch.from_numpy(rng.standard_normal((envs, 1)).astype(np.float32))
    dones = rng.random(envs) < 0.3
    stock.compute_returns_and_advantage(last_values, dones)
    ours.compute_returns_and_advantages(last_values, dones)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 12),
    envs=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 0.999, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.8, 0.95, 1.0]),
)
def test_advantages_and_returns_bit_by_bit(seed: int, steps: int, envs: int, gamma: float, gae_lambda: float):
    stock = RolloutBuffer(steps, BOX, spaces.Discrete(4), "cpu", gae_lambda, gamma, envs)
    ours = storage_for(BOX, spaces.Discrete(4), steps=steps, envs=envs, gamma=gamma, gae_lambda=gae_lambda)
    fill_both(stock, ours, np.random.default_rng(seed))
    np.testing.assert_array_equal(ours.advantages, stock.advantages)
    np.testing.assert_array_equal(ours.returns, stock.returns)


CASES = {
    "discrete": (RolloutBuffer, BOX, spaces.Discrete(4), None),
    "multi-discrete": (RolloutBuffer, BOX, spaces.MultiDiscrete([2, 3]), None),
    "multi-binary": (RolloutBuffer, spaces.MultiBinary(5), spaces.MultiBinary(3), None),
    "box": (RolloutBuffer, BOX, spaces.Box(-1, 1, (2,), np.float32), None),
    "discrete observations": (RolloutBuffer, spaces.Discrete(6), spaces.Discrete(4), None),
    "multi-discrete observations": (RolloutBuffer, spaces.MultiDiscrete([3, 4]), spaces.Discrete(4), None),
    "float64 observations": (RolloutBuffer, spaces.Box(-1, 1, (2, 2), np.float64), spaces.Discrete(4), None),
    "uint16 observations": (RolloutBuffer, spaces.Box(0, 60000, (2,), np.uint16), spaces.Discrete(4), None),
    "dict": (DictRolloutBuffer, DICT, spaces.Discrete(4), None),
    "masks": (MaskableRolloutBuffer, BOX, spaces.Discrete(4), 4),
    "multi-binary masks": (MaskableRolloutBuffer, BOX, spaces.MultiBinary(3), 6),
    "dict and masks": (MaskableDictRolloutBuffer, DICT, spaces.MultiDiscrete([2, 3]), 5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("batch_size", [None, 4, 5])
def test_minibatches_are_those_of_sb3(case: tuple, batch_size: int | None):
    buffer_class, observation_space, action_space, mask_width = case
    stock = buffer_class(4, observation_space, action_space, "cpu", gae_lambda=0.95, gamma=0.99, n_envs=3)
    ours = storage_for(observation_space, action_space, mask_width=mask_width)
    fill_both(stock, ours, np.random.default_rng(1), mask_width)
    for epoch in range(2):
        np.random.seed(epoch)
        expected = list(stock.get(batch_size))
        np.random.seed(epoch)
        batches = list(ours.minibatches(batch_size))
        assert len(batches) == len(expected)
        for batch, other in zip(batches, expected, strict=True):
            assert_same_batch(batch, other, isinstance(action_space, spaces.Discrete))


def assert_same_batch(batch: Any, stock: Any, discrete: bool) -> None:
    if isinstance(stock.observations, dict):
        for key, value in stock.observations.items():
            np.testing.assert_array_equal(batch.observations[key].numpy(), value.numpy())
    else:
        np.testing.assert_array_equal(batch.observations.numpy(), stock.observations.numpy())
    actions = stock.actions.long().flatten() if discrete else stock.actions
    np.testing.assert_array_equal(batch.actions.numpy(), actions.numpy())
    pairs = [
        (batch.old_values, stock.old_values),
        (batch.old_log_probs, stock.old_log_prob),
        (batch.advantages, stock.advantages),
        (batch.returns, stock.returns),
    ]
    if batch.action_masks is not None:
        assert batch.action_masks.dtype == torch.bool
        pairs.append((batch.action_masks.float(), stock.action_masks))
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)


def test_every_row_once_per_epoch_and_the_last_batch_is_short():
    ours = storage_for(BOX, spaces.Discrete(4), steps=5, envs=2)
    fill_both(RolloutBuffer(5, BOX, spaces.Discrete(4), "cpu", n_envs=2), ours, np.random.default_rng(0))
    batches = list(ours.minibatches(4))
    assert [len(batch.returns) for batch in batches] == [4, 4, 2]
    seen = torch.cat([batch.old_values for batch in batches])
    assert sorted(seen.tolist()) == sorted(ours.values.reshape(-1).tolist())


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5; one env, an episode that ends after step 0; values 1, 2; last value 4, not done.

    Step 1: delta = 3 + 0.5 * 4 - 2 = 3. Step 0: the next state begins another episode: delta = 1 - 1 = 0.
    """
    column = np.array([[1], [3]], np.float32), np.array([[1], [2]], np.float32), np.array([[1], [1]], np.float32)
    advantages = advantages_of(*column, np.array([4], np.float32), np.array([False]), 0.5, 0.5)
    assert advantages.dtype == np.float32
    assert advantages.ravel().tolist() == [0, 3]


@pytest.mark.parametrize(
    ("starts_anew", "rests", "expected"),
    [
        (True, True, {0: 1.75, 2: -5.0}),  # the game ended in step 3: -1 - 4, and 1 + 2 + 0.5 * 4 - 2 + 0.25 * -5
        (False, False, {0: 2.75, 2: -1.0}),  # it decides next, on 8: -1 + 0.5 * 8 - 4, and 3 + 0.25 * -1
        (False, True, {0: 3.0}),  # nobody knows yet what step 2 led to: its value stands for it
    ],
)
def test_gae_over_rests_by_hand(starts_anew: bool, rests: bool, expected: dict[int, float]):
    """gamma 0.5, lambda 0.5; one env decides in the steps 0 and 2, gains 2 in step 1 and loses 1 in step 3."""
    rewards, values = (np.array(column, np.float32)[:, None] for column in ([1, 2, 0, -1, 0], [2, 99, 4, 99, 99]))
    starts = np.array([1, 0, 0, 0, starts_anew], np.float32)[:, None]
    left_out, before = np.array([0, 1, 0, 1, 1], bool)[:, None], rewards.copy()
    advantages = advantages_of(
        rewards, values, starts, np.array([8], np.float32), np.array([False]), 0.5, 0.5, left_out, np.array([rests])
    )
    assert {step: advantages[step, 0] for step in range(5) if not left_out[step, 0]} == expected
    assert (rewards == before).all()


def test_one_row_leaves_the_device_not_all_of_them(monkeypatch: pytest.MonkeyPatch):
    ours, read = storage_for(BOX, spaces.Discrete(5)), []
    ours._values[:], ours._log_probs[:] = torch.rand(4, 3), torch.rand(4, 3)
    for name in ("actions", "values", "log_probs"):
        assert np.array_equal(ours.row(name, 2), getattr(ours, name)[2])
    monkeypatch.setattr("fasttrain.buffers.rollout._host", lambda tensor: read.append(tensor.shape))
    ours.row("values", 2)
    assert read == [(3,)]


def test_without_masks_given_every_action_counts_as_legal():
    ours = storage_for(BOX, spaces.Discrete(4), steps=1, mask_width=4)
    ours.masks[:] = False
    zeros = torch.zeros(3)
    ours.add(torch.zeros(3, 3), zeros.long(), zeros.numpy(), zeros.bool().numpy(), zeros, zeros)
    assert ours.masks.all()


def test_misuse_is_refused():
    ours = storage_for(BOX, spaces.Discrete(4), steps=1)
    zeros = torch.zeros(3)
    row = (torch.zeros(3, 3), zeros.long(), zeros.numpy(), zeros.bool().numpy(), zeros, zeros)
    with pytest.raises(RuntimeError, match="0 of 1"):
        ours.compute_returns_and_advantages(zeros, zeros.bool().numpy())
    with pytest.raises(RuntimeError, match="0 of 1"):
        next(ours.minibatches(2))
    ours.add(*row)
    with pytest.raises(RuntimeError, match="reset"):
        ours.add(*row)
    with pytest.raises(TypeError, match="flatten"):
        storage_for(spaces.Dict({"a": spaces.Dict({"b": BOX})}), spaces.Discrete(4))
