"""How networks compute: `EngineSettings`, mixed precision, and the memory format of images.

Only the networks compute in low precision. Their outputs are cast to float32 at once, so that distributions, ratios,
losses and advantages are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from stable_baselines3.common.torch_layers import NatureCNN
from torch import Tensor, nn

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import did_you_mean

KINDS = ("torch", "kernels")
ROWS_FROM = 32  # with fewer images channels_last is slower: 8 take 1.1 times as long, 64 with their gradient 0.83
_NETWORKS = ("features_extractor", "pi_features_extractor", "vf_features_extractor", "action_net", "value_net")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the networks compute. With the defaults they compute on PyTorch, and every number is that of stock SB3."""

    kind: str = "torch"  # or "kernels": compiled for the CPU, faster, equal except for rounding and random draws
    threads: int = 1  # maximum number of threads of the kernels
    fused_adam: bool = False  # torch's fused Adam on the CPU: a step of [64, 64] layers takes 99 µs, not 275
    channels_last: bool = False  # NatureCNN on the CPU reads images with the channels last in memory
    amp_dtype: torch.dtype | None = None  # dtype in which networks compute: bfloat16, or float16 on CUDA
    compile_mode: str | None = None  # a mode of torch.compile; on CUDA every mode but "default" uses CUDA graphs
    gradient_accumulation: int = 1  # micro-batches per minibatch; on-policy only
    pin_memory: bool = False  # copies between host and CUDA go through page-locked memory

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"engine={self.kind!r}: choose {' or '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")

    @classmethod
    def of(cls, asked: str | EngineSettings) -> EngineSettings:
        """`asked` as settings: a str is the `kind`; settings are returned unchanged."""
        return cls(kind=asked) if isinstance(asked, str) else asked

    @property
    def exact(self) -> bool:
        """Whether every number must equal stock SB3's, so that no code may round differently."""
        rounding = [each for each in fields(self) if each.name not in ("threads", "pin_memory")]
        return all(getattr(self, each.name) == each.default for each in rounding)


def convolutions(policy: nn.Module) -> list[nn.Module]:
    """The convolutions of SB3's NatureCNN. A user's network may not work in another memory format."""
    networks = [network for network in policy.modules() if type(network) is NatureCNN]
    return [layer for network in networks for layer in network.modules() if isinstance(layer, nn.Conv2d)]


def use_channels_last(policy: nn.Module, on: bool) -> None:
    """Let `convolutions` read batches in `torch.channels_last`, or no longer.

    oneDNN, which computes convolutions for PyTorch on the CPU, is faster so: with AVX2 a gradient of NatureCNN for
    256 images takes 295 ms on one core, not 351, and 174 ms on two, not 222. Weights stay contiguous, as in stock SB3.
    """
    for layer in convolutions(policy):
        hooks = layer._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _channels_last]:
            del hooks[key]
        if on:
            layer.register_forward_pre_hook(_channels_last)


def _channels_last(_layer: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
    """The layer's input (n, channels, height, width) in channels_last; None, as it is, if the batch is small."""
    (images,) = inputs
    if len(images) < ROWS_FROM:
        return None
    if images.shape[1] == 1:  # here both formats have the same strides: write the other ones
        return images.reshape(*images.shape[::2], images.shape[3], 1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


class Precision:
    """Lets networks compute in `dtype` on one kind of device.

    Args:
        device_type: "cpu" or "cuda".
        dtype: bfloat16 or float16. float16 needs a gradient scaler, because its range is small.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype
        self.scaler = torch.amp.GradScaler(device_type) if dtype is torch.float16 else None

    def autocast(self) -> torch.autocast:
        """The autocast context for calls of networks."""
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextmanager
    def inside(self, policy: Any) -> Iterator[None]:
        """In this context each of the policy's networks computes under autocast and returns float32.

        Use it for policies whose own methods compute networks and distributions together.
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
    """The policy's networks. No network in the list contains another network of the list."""
    networks = [getattr(policy, name, None) for name in _NETWORKS]
    extractor = policy.mlp_extractor
    parts = [getattr(extractor, name, None) for name in ("policy_net", "value_net")]
    networks += parts if all(isinstance(part, nn.Module) for part in parts) else [extractor]
    return list({id(network): network for network in networks if isinstance(network, nn.Module)}.values())


def as_float32(outputs: Any) -> Any:
    """Floating-point tensors, alone or in a tuple, as float32. Everything else is returned unchanged."""
    if isinstance(outputs, tuple):
        return tuple(as_float32(part) for part in outputs)
    return outputs.float() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs
