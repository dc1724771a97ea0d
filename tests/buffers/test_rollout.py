"""RolloutStorage by itself: advantages as stock's and by hand, what leaves the device, misuse.

Minibatches are compared with stock's in test_stock_buffers.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from fasttrain.buffers.rollout import RolloutRow, RolloutStorage, advantages_of

BOX, FOUR = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)


def storage_for(steps: int = 4, envs: int = 3, gamma: float = 0.99, gae_lambda: float = 0.95, **more) -> RolloutStorage:
    options = {"device": torch.device("cpu"), "gamma": gamma, "gae_lambda": gae_lambda, **more}
    return RolloutStorage(steps, envs, BOX, FOUR, **options)


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


@pytest.mark.parametrize("seed", range(5))
def test_rests_of_one_step_are_as_beside_an_env_that_rests_longer(seed: int):
    """Without two rests in a row all steps are computed at once, with them one after another."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal((2, 40, 3)).astype(np.float32)
    starts, out = (rng.random((40, 3)) < 0.3).astype(np.float32), rng.random((40, 3)) < 0.4
    out[1:, :2] &= ~out[:-1, :2]
    out[1::2, :2], out[10:20, 2] = False, True
    last, dones, rests = values[0], rng.random(3) < 0.5, rng.random(3) < 0.5
    together, alone = out.copy(), out[:, :2].copy()
    slow = advantages_of(rewards, values, starts, last, dones, 0.9, 0.8, together, rests)
    two = (each[..., :2] for each in (rewards, values, starts, last, dones))
    fast = advantages_of(*two, 0.9, 0.8, alone, rests[:2])
    assert slow[:, :2].tobytes() == fast.tobytes()
    assert (together[:, :2] == alone).all()


def test_misuse_is_refused_and_without_masks_every_action_counts_as_legal():
    ours, zeros = storage_for(steps=1, mask_width=4), torch.zeros(3)
    row = (RolloutRow(torch.zeros(3, 3), zeros.long(), zeros, zeros), zeros.numpy(), zeros.bool().numpy())
    with pytest.raises(RuntimeError, match="0 of 1"):
        ours.compute_returns_and_advantages(zeros, zeros.bool().numpy())
    with pytest.raises(RuntimeError, match="0 of 1"):
        next(ours.minibatches(2))
    ours.masks[:] = False
    ours.add(*row)
    assert ours.masks.all()
    with pytest.raises(RuntimeError, match="reset"):
        ours.add(*row)
    nested = spaces.Dict({"a": spaces.Dict({"b": BOX})})
    with pytest.raises(TypeError, match="flatten"):
        RolloutStorage(1, 3, nested, FOUR, device=torch.device("cpu"), gamma=0.9, gae_lambda=0.9)
