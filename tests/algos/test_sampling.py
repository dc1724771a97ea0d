"""No illegal action is ever drawn: in 400,000 draws, and 100 million where `-m campaign` asks for them.

Three ways of drawing (`sample`, `multi_sample`, the fused kernel's `act`), logits of float32, bfloat16
and float16, and families of logits and masks that are hard in different ways.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import Tensor

from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.algos import policy_view
from fasttrain.algos.engine import EngineSettings

DIMS = {"sample": (20,), "multi_sample": (2, 3, 7, 1), "fused": (20,), "fused multi": (2, 3, 7, 1)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("gaussian", "extreme", "illegal favoured", "ties", "single legal", "wide")
HUGE = 1e4


def random_masks(generator: torch.Generator, rows: int, dims: tuple[int, ...], family: str) -> Tensor:
    """(rows, sum of dims) bool with a legal choice of every sub-action; rare ones in a wide space."""
    share = {"single legal": 0.0, "wide": 0.01}.get(family, 0.4)
    masks, start = torch.rand(rows, sum(dims), generator=generator) < share, 0
    for size in dims:
        masks.scatter_(1, torch.randint(size, (rows, 1), generator=generator) + start, True)
        start += size
    return masks


def random_logits(generator: torch.Generator, masks: Tensor, family: str) -> Tensor:
    """(rows, A) float32."""
    noise = torch.randn(masks.shape, generator=generator)
    if family == "extreme":
        return noise.sign() * HUGE
    if family == "illegal favoured":
        return torch.where(masks, -HUGE, HUGE) + noise
    return torch.zeros(masks.shape) if family == "ties" else 3 * noise


def count_illegal(actions: Tensor, masks: Tensor, dims: tuple[int, ...]) -> int:
    """Rows of `actions` (rows, K) with a sub-action that `masks` forbid, or that does not exist."""
    sizes = torch.tensor(dims)
    outside = (actions < 0) | (actions >= sizes)
    legal = masks.gather(1, actions.clamp(min=0).minimum(sizes - 1) + torch.tensor([0, *np.cumsum(dims[:-1])]).long())
    return int((outside | ~legal).any(1).sum())


def kernels_of(dims: tuple[int, ...]) -> Any:
    acting: Any = spaces.Discrete(dims[0]) if len(dims) == 1 else spaces.MultiDiscrete(dims)
    box = spaces.Box(-1.0, 1.0, (4,), np.float32)
    return KernelEngine(MaskableActorCriticPolicy(box, acting, lambda _: 1e-3, net_arch=[16]), EngineSettings())


@pytest.mark.parametrize("draws", [10_000, pytest.param(2_500_000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in DIMS for dtype in DTYPES[: 1 if kind.startswith("fused") else 3]]
)
def test_no_illegal_action(kind: str, dtype: torch.dtype, family: str, draws: int):
    torch.manual_seed(draws)
    generator = torch.Generator().manual_seed(draws)
    wide = family == "wide"
    dims, rows = (1500, *DIMS[kind][1:]) if wide else DIMS[kind], 128 if wide else 4096
    kernels = kernels_of(dims) if kind.startswith("fused") else None
    for _ in range(-(-draws // (4096 if not wide else 3200))):
        masks = random_masks(generator, rows, dims, family)
        if kernels is not None:
            if family == "illegal favoured":  # the kernel's logits come from weights: one mask for all rows
                masks = masks[:1].expand(rows, -1).contiguous()
            with torch.no_grad():
                kernels.policy.action_net.bias.copy_(random_logits(generator, masks[:1], family)[0])
            kernels.begin(None)
            stored = kernels.act(torch.rand(rows, 4, generator=generator).numpy(), masks.numpy()).stored
            actions, log_probs = stored.actions, stored.log_probs
        else:
            logits = random_logits(generator, masks, family).to(dtype)
            multi = kind == "multi_sample"
            actions, log_probs = (
                policy_view.multi_sample(logits, dims, masks) if multi else policy_view.sample(logits, masks)
            )
        assert count_illegal(actions.reshape(rows, -1), masks, dims) == 0
        assert torch.isfinite(log_probs).all()


def test_the_count_sees_what_is_illegal():
    masks = torch.tensor([[True, False, True, True], [True, False, False, True]])
    assert count_illegal(torch.tensor([[0, 1], [0, 0]]), masks, (2, 2)) == 1
    assert count_illegal(torch.tensor([[0, 2], [0, 1]]), masks, (2, 2)) == 1
    assert count_illegal(torch.tensor([[0, -1], [1, 1]]), masks, (2, 2)) == 2
