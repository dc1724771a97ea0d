"""Matrix products of the compiled kernels beside PyTorch's (MKL), on one thread: GFLOP/s.

One measurement takes all shapes of one pass, in a process of its own; `rate` is the geometric mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.work import OURS, Sample, Work, works_of

SHAPES = ((8, 64), (64, 64), (64, 16), (128, 128), (256, 256), (512, 512), (512, 256), (86, 64))  # inputs, outputs
ROWS = (64, 256, 2048)
TURNS, FLOPS = 7, 2e8  # of one timed stretch at least
PASSES = {
    "forward": "bias + inputs @ weights",
    "inputs": "gradient of the inputs",
    "weights": "gradient of the weights",
}


def measure(which: str, ours: bool) -> Sample:
    """GFLOP/s of each shape."""
    make = kernels(which) if ours else partial(torchs, which)
    found: Sample = {}
    for inputs, outputs in SHAPES:
        for rows in ROWS:
            flops = 2.0 * rows * inputs * outputs
            repeats, call = max(1, int(FLOPS / flops)), make(rows, inputs, outputs)
            call(3)
            spent = []
            for _ in range(TURNS):
                begun = time.perf_counter()
                call(repeats)
                spent.append(time.perf_counter() - begun)
            found[f"{rows} × {inputs} × {outputs}"] = flops * repeats / statistics.median(spent) / 1e9
    return {"rate": statistics.geometric_mean(found.values()), **found}


def kernels(which: str) -> Callable[[int, int, int], Callable[[int], Any]]:
    """Makes the kernel's call for a shape; a call repeats the product."""
    import torch

    from fasttrain.accelerators.layout import pad_width
    from fasttrain_kernels.dense import add_product, set_product
    from fasttrain_kernels.jit import njit_bare
    from fasttrain_kernels.simd import PAD

    @njit_bare
    def set_often(a: Any, b: Any, start: Any, rows: int, out: Any, repeats: int) -> None:
        for _ in range(repeats):
            set_product(a, b, start, rows, out)

    @njit_bare
    def add_often(a: Any, b: Any, rows: int, out: Any, repeats: int) -> None:
        for _ in range(repeats):
            add_product(a, b, rows, out)

    def make(rows: int, inputs: int, outputs: int) -> Callable[[int], Any]:
        k, n = inputs if inputs % 8 == 0 else pad_width(inputs), outputs
        x, d = (torch.randn(rows, pad_width(size) + PAD).numpy()[:, :size] for size in (k, n))  # as in `lay_out`
        w, start = torch.randn(k, n).numpy(), torch.randn(n).numpy()
        if which == "weights":
            return lambda repeats: add_often(x.T, d, k, w, repeats)
        if which == "forward":
            return lambda repeats: set_often(x, w, start, rows, d, repeats)
        wide = pad_width(k)
        back, out = torch.randn(n, wide).numpy(), torch.zeros(rows, wide + PAD).numpy()[:, :wide]
        return lambda repeats: set_often(d, back, torch.zeros(wide).numpy(), rows, out, repeats)

    return make


def torchs(which: str, rows: int, inputs: int, outputs: int) -> Callable[[int], Any]:
    """As `kernels`, by PyTorch."""
    import torch

    torch.set_num_threads(1)
    x, d, w = torch.randn(rows, inputs), torch.randn(rows, outputs), torch.randn(outputs, inputs)
    start = torch.randn(outputs)
    products: dict[str, Callable[[], Any]] = {
        "forward": lambda: torch.nn.functional.linear(x, w, start),
        "inputs": lambda: d @ w,
        "weights": lambda: d.T @ x,
    }
    return lambda repeats: [products[which]() for _ in range(repeats)] and None


WORKS = works_of(
    *(Work(f"gemm-{which}", f"One thread, {text}; rows × inputs × outputs.",
           {OURS: partial(measure, which, True), "PyTorch": partial(measure, which, False)},
           unit="GFLOP/s", equal=()) for which, text in PASSES.items()),
)  # fmt: skip
