"""Between host and device: observations and masks to the policy, actions back to the envs.

Page-locked memory lets the copy run beside the host. One buffer per array is enough: reading the actions back waits
for everything the device was given before, so that no buffer is overwritten while a copy still reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.batch import BoolArray
from fasttrain.buffers.rollout import TensorObservations


class Transfer:
    """Plain copies, as SB3 makes them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def observations(self, observations: Any) -> TensorObservations:
        """To the device; (N, ...) or a dict of them."""
        return obs_as_tensor(observations, self.device)

    def masks(self, action_masks: BoolArray) -> Tensor:  # (N, A) bool
        """To the device."""
        return torch.from_numpy(action_masks).to(self.device)

    def actions(self, actions: Tensor) -> NDArray[Any]:  # (N,) or (N, K)
        """To the host."""
        array: NDArray[Any] = actions.cpu().numpy()
        return array


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the host that the device can copy from by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class PinnedTransfer(Transfer):
    """Copies by way of page-locked buffers, which are kept from step to step.

    Args:
        allocate: makes a buffer; replaced where there is no CUDA.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] = page_locked,
    ) -> None:
        super().__init__(device)
        self._allocate = allocate
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def observations(self, observations: Any) -> TensorObservations:
        if isinstance(observations, dict):
            return {key: self._send(f"observations.{key}", part) for key, part in observations.items()}
        return self._send("observations", observations)

    def masks(self, action_masks: BoolArray) -> Tensor:
        return self._send("masks", action_masks)

    def actions(self, actions: Tensor) -> NDArray[Any]:
        buffer = self._buffer("actions", tuple(actions.shape), actions.dtype)
        buffer.copy_(actions, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return np.array(buffer.numpy())  # callbacks may keep it

    def _send(self, name: str, array: NDArray[Any]) -> Tensor:
        given = torch.from_numpy(np.ascontiguousarray(array))
        buffer = self._buffer(name, tuple(given.shape), given.dtype)
        buffer.copy_(given)
        return buffer.to(self.device, non_blocking=True)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = (name, shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = self._allocate(shape, dtype)
        return self._buffers[key]
