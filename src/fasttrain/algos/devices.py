"""Mixed precision around the networks, and around nothing else.

Masks, distributions, ratios, losses and advantages are float32: what leaves a network is cast back before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_NETWORKS = ("features_extractor", "pi_features_extractor", "vf_features_extractor", "action_net", "value_net")


class Precision:
    """Networks compute in `dtype` on one kind of device.

    Args:
        device_type: "cpu" or "cuda".
        dtype: bfloat16, or float16, whose small range needs a gradient scaler.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype
        self.scaler = torch.amp.GradScaler(device_type) if dtype is torch.float16 else None

    def autocast(self) -> torch.autocast:
        """The context in which networks are called."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextmanager
    def inside(self, policy: Any) -> Iterator[None]:
        """While it lasts, each of the policy's networks computes under autocast and hands out float32.

        For policies whose own methods mix networks and distributions, so that nobody else can tell them apart.
        """
        handles = []
        for network in _networks_of(policy):
            context: Any = self.autocast()
            handles.append(network.register_forward_pre_hook(partial(_enter, context)))
            handles.append(network.register_forward_hook(partial(_leave, context), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _enter(context: Any, *_: Any) -> None:
    context.__enter__()


def _leave(context: Any, _network: nn.Module, _inputs: Any, outputs: Any) -> Any:
    context.__exit__(None, None, None)
    return as_float32(outputs)


def _networks_of(policy: Any) -> list[nn.Module]:
    """Modules that are called one after the other, none inside another."""
    found = [getattr(policy, name, None) for name in _NETWORKS]
    extractor = policy.mlp_extractor
    parts = [getattr(extractor, name, None) for name in ("policy_net", "value_net")]
    found += parts if all(isinstance(part, nn.Module) for part in parts) else [extractor]
    return list({id(network): network for network in found if isinstance(network, nn.Module)}.values())


def as_float32(outputs: Any) -> Any:
    """Floating-point tensors as float32, alone or in a tuple; anything else as it is."""
    if isinstance(outputs, tuple):
        return tuple(as_float32(part) for part in outputs)
    return outputs.float() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs
