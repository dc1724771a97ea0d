"""ReplayStorage as an instance of the replay buffer that stock would take, for who asks by `isinstance`."""

from __future__ import annotations

import inspect
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from fasttrain.buffers.replay_storage import ReplayStorage

STOCK_BUFFERS = (None, ReplayBuffer, DictReplayBuffer, NStepReplayBuffer)


class NStepStorage(ReplayStorage, NStepReplayBuffer):  # type: ignore[misc]
    """In place of `NStepReplayBuffer`: as there every batch has discounts, those of one step too."""


class DictStorage(ReplayStorage, DictReplayBuffer):  # type: ignore[misc]
    """In place of `DictReplayBuffer`."""


def replay_class(
    observation_space: spaces.Space[Any], n_steps: int, asked: type[ReplayBuffer] | None
) -> type[ReplayStorage]:
    """That of ours which stands for the class that was asked for, or that stock takes by itself (None)."""
    if isinstance(observation_space, spaces.Dict):
        return DictStorage
    return NStepStorage if asked is NStepReplayBuffer or (asked is None and n_steps > 1) else ReplayStorage


def window_of(n_steps: int, gamma: float, asked: type[ReplayBuffer] | None) -> dict[str, Any]:
    """`n_steps` and `gamma` of the buffer where its own arguments do not name them.

    The algorithm's, unless a buffer class was asked for: stock then leaves `n_steps` to that (and warns of it).
    """
    if asked is None:
        return {"n_steps": n_steps, "gamma": gamma}
    if asked is NStepReplayBuffer:
        defaults = inspect.signature(NStepReplayBuffer.__init__).parameters
        return {name: defaults[name].default for name in ("n_steps", "gamma")}
    return {"n_steps": 1, "gamma": gamma}
