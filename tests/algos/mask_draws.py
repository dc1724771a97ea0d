"""Masked actions drawn in many ways, and a count of the illegal ones: there must be none.

Three ways of drawing (`sample`, `multi_sample`, the fused kernel's `act`), logits of float32, bfloat16
and float16, and families of logits and masks that are hard in different ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import Tensor

from fasttrain.accelerators.eligible import policy_reason
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.algos import policy_view as view
from fasttrain.algos.engine import EngineSettings

ROWS = 4096  # of one call
HUGE = 1e4
DIMS = {"sample": (20,), "multi_sample": (2, 3, 7, 1), "fused act": (20,), "fused act, multi": (2, 3, 7, 1)}
WIDE, WIDE_ROWS = 1500, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("gaussian", "extreme", "illegal favoured", "ties", "single legal", "wide")
BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Work(NamedTuple):
    """One kind of draws."""

    kind: str  # a key of DIMS
    dtype: torch.dtype
    family: str


class Tally(NamedTuple):
    """What came of it. `broken`: log-probabilities that are not finite."""

    draws: int  # rows; every one has all its sub-actions checked
    illegal: int
    broken: int


def works() -> Iterator[Work]:
    """Every kind; the kernels compute in float32 only."""
    for kind in DIMS:
        if kind.startswith("fused") and policy_reason(policy_of(DIMS[kind])):
            continue
        for dtype in DTYPES if not kind.startswith("fused") else DTYPES[:1]:
            yield from (Work(kind, dtype, family) for family in FAMILIES)


def random_masks(generator: torch.Generator, rows: int, dims: tuple[int, ...], family: str) -> Tensor:
    """(rows, sum of dims) bool with a legal choice of every sub-action; rare ones in a wide space."""
    share = {"single legal": 0.0, "wide": 0.01}.get(family, 0.4)
    masks = torch.rand(rows, sum(dims), generator=generator) < share
    start = 0
    for size in dims:
        legal = torch.randint(size, (rows, 1), generator=generator) + start
        masks.scatter_(1, legal, True)
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
    starts = torch.tensor([0, *np.cumsum(dims[:-1])]) if len(dims) > 1 else torch.zeros(1, dtype=torch.int64)
    legal = masks.gather(1, actions.clamp(min=0).minimum(sizes - 1) + starts)
    return int((outside | ~legal).any(1).sum())


def policy_of(dims: tuple[int, ...]) -> Any:
    """A small policy that the kernels serve."""
    action_space = spaces.Discrete(dims[0]) if len(dims) == 1 else spaces.MultiDiscrete(dims)
    return MaskableActorCriticPolicy(BOX, action_space, lambda _: 1e-3, net_arch=[16])


def draw(work: Work, draws: int, seed: int) -> Tally:
    """At least `draws` draws of one kind. Torch's global random state is used, as in training."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    wide = work.family == "wide"
    dims = (WIDE, *DIMS[work.kind][1:]) if wide else DIMS[work.kind]
    rows = WIDE_ROWS if wide else ROWS
    fused = work.kind.startswith("fused")
    policy = policy_of(dims) if fused else None
    kernels = KernelEngine(policy, EngineSettings()) if fused else None
    done = illegal = broken = 0
    while done < draws:
        masks = random_masks(generator, rows, dims, work.family)
        if kernels is not None and policy is not None:
            if work.family == "illegal favoured":  # the kernel's logits come from weights: one mask for all rows
                masks = masks[:1].expand(rows, -1).contiguous()
            with torch.no_grad():
                policy.action_net.bias.copy_(random_logits(generator, masks[:1], work.family)[0])
            kernels.begin(None)
            observations = torch.rand(rows, 4, generator=generator).numpy()
            stored = kernels.act(observations, masks.numpy()).stored
            assert stored is not None
            actions, log_probs = stored.actions, stored.log_probs
        else:
            logits = random_logits(generator, masks, work.family).to(work.dtype)
            multi = work.kind == "multi_sample"
            actions, log_probs = view.multi_sample(logits, dims, masks) if multi else view.sample(logits, masks)
        done += rows
        illegal += count_illegal(actions.reshape(rows, -1), masks, dims)
        broken += int((~torch.isfinite(log_probs)).sum())
    return Tally(done, illegal, broken)
