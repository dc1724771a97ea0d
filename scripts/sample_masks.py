"""Draws very many masked actions and counts the illegal ones: there must be none.

    python3 scripts/sample_masks.py                    10⁸ draws, some minutes
    python3 scripts/sample_masks.py --samples 1e6      as many as you like; tests/algos/test_sampling.py draws 2 million

Three ways of drawing (`losses.sample`, `losses.multi_sample`, the fused kernel's `act`), logits of float32, bfloat16
and float16, and families of logits and masks that are hard in different ways. Exit code 3 if any draw is illegal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import Tensor

from fasttrain.accelerators.eligible import policy_reason
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.algos import losses
from fasttrain.algos.engine import EngineSettings

ROWS = 4096  # of one call
HUGE = 1e4
DIMS = {"sample": (20,), "multi_sample": (2, 3, 7, 1), "fused act": (20,), "fused act, multi": (2, 3, 7, 1)}
WIDE, WIDE_ROWS = 1500, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("gaussian", "extreme", "illegal favoured", "ties", "single legal", "wide")
BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Work(NamedTuple):
    """One line of the table."""

    kind: str  # a key of DIMS
    dtype: torch.dtype
    family: str


class Tally(NamedTuple):
    """What came of it. `broken`: log-probabilities that are not finite."""

    draws: int  # rows; every one has all its sub-actions checked
    illegal: int
    broken: int


def works() -> Iterator[Work]:
    """Every line of the table; the kernels compute in float32 only."""
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
            actions, log_probs = losses.multi_sample(logits, dims, masks) if multi else losses.sample(logits, masks)
        done += rows
        illegal += count_illegal(actions.reshape(rows, -1), masks, dims)
        broken += int((~torch.isfinite(log_probs)).sum())
    return Tally(done, illegal, broken)


def main() -> int:
    """Print the table; 3 if anything illegal was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=float, default=1e8, help="draws in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the sums here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = list(works())
    wide_share = 0.01  # of another family's draws: a row of 1,500 logits costs as much as many of 20
    unit = arguments.samples / sum(wide_share if work.family == "wide" else 1.0 for work in lines)
    total = Tally(0, 0, 0)
    print(f"{'way':<17} {'logits':<9} {'family':<17} {'draws':>12} {'illegal':>8} {'not finite':>10} {'draws/s':>11}")
    for number, work in enumerate(lines):
        began = time.perf_counter()
        found = draw(work, round(unit * (wide_share if work.family == "wide" else 1.0)), arguments.seed + number)
        rate = found.draws / (time.perf_counter() - began)
        dtype = str(work.dtype).removeprefix("torch.")
        print(
            f"{work.kind:<17} {dtype:<9} {work.family:<17} {found.draws:>12,} {found.illegal:>8,} {found.broken:>10,} "
            f"{rate:>11,.0f}",
            flush=True,
        )
        total = Tally(*(old + new for old, new in zip(total, found, strict=True)))
    print(f"{'all':<45} {total.draws:>12,} {total.illegal:>8,} {total.broken:>10,}")
    if arguments.json:
        import bench_machine  # beside this file; the tests load it from elsewhere
        import captures

        about = {"name": "masks", **bench_machine.about(), "command": "python3 scripts/sample_masks.py"}
        captures.store(arguments.json, {**about, **total._asdict()})
    return 3 if total.illegal or total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
