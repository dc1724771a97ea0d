"""The one typed doorway to numba: compiled once per machine (cached on disk), without the GIL.

For `njit` arithmetic is strict IEEE, `fastmath` off, so that a kernel gives the same numbers as the plain Python it is
tested against. The other forms are for `rounding` kernels and say what they relax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numba.extending

from fasttrain.kernel_cache import KernelCache

F = TypeVar("F", bound=Callable[..., Any])


def njit(function: F) -> F:
    """Compile `function` in nopython mode on first call; type checkers see the plain function."""
    return _kernel(function)


def _kernel(function: F, **options: Any) -> F:
    dispatcher: Any = numba.njit(nogil=True, **options)(function)
    dispatcher._cache = KernelCache(dispatcher)  # what `cache=True` sets to numba's own
    return cast(F, dispatcher)


def njit_threads(function: F) -> F:
    """As `njit`, with `numba.prange` loops over threads; see `use_threads`."""
    return _kernel(function, parallel=True)


def njit_relaxed(function: F) -> F:
    """As `njit`, for the arithmetic of `rounding` kernels: sums in any order, fused multiply-add, IEEE division.

    Reassociation is what lets LLVM vectorise a dot product (95 GFLOP/s of a core here). NaN and infinity keep their
    meaning, so that a guard can still see them.
    """
    flags = {"contract", "reassoc", "nsz"}
    return _kernel(function, fastmath=flags, error_model="numpy")


def njit_bare(function: F) -> F:
    """As `njit_relaxed`, for the inner kernels: arrays are not reference-counted, so none can be made.

    A view of a row costs two atomic operations otherwise. numba refuses such a function that makes an array or returns
    a view: what is wanted goes in as an argument, a view comes from an `njit_inline` function.
    """
    options: Any = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy", "_nrt": False}
    return _kernel(function, **options)


def njit_inline(function: F) -> F:
    """As `njit_relaxed`, copied into every kernel that calls it."""
    flags = {"contract", "reassoc", "nsz"}
    return _kernel(function, fastmath=flags, error_model="numpy", inline="always")


def njit_parallel(function: F) -> F:
    """As `njit_relaxed`, with `numba.prange` loops over threads; see `use_threads`."""
    flags = {"contract", "reassoc", "nsz"}
    return _kernel(function, fastmath=flags, error_model="numpy", parallel=True)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`: a function of types that returns a signature and the LLVM code for a call of it."""
    return numba.extending.intrinsic(function)


def use_threads(count: int) -> None:
    """Start numba's threads, if that is still to do, and let kernels with `prange` loops use `count` of them.

    Must come before such a kernel is reached through another one: machine code from the disk cache calls the threads
    without starting them, and crashes. Starting them sets torch's number of threads too, as both share one OpenMP
    library: it is put back here. Otherwise a run that asked for one torch thread has all of them from then on, and the
    tanh of 256 × 64 numbers takes up to 20 ms, not 0.03, where another process wants the second core.
    """
    config: Any = numba.config
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        numba.set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))
    finally:
        if torch is not None and torch.get_num_threads() != before:
            torch.set_num_threads(before)
