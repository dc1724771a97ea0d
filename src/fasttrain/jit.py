"""The one typed doorway to numba: compiled once per machine (cached on disk), without the GIL.

For `njit` arithmetic is strict IEEE, `fastmath` off, so that a kernel gives the same numbers as the plain Python it is
tested against. The other forms are for `rounding` kernels and say what they relax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.extending

F = TypeVar("F", bound=Callable[..., Any])


def njit(function: F) -> F:
    """Compile `function` in nopython mode on first call; type checkers see the plain function."""
    dispatcher = numba.njit(cache=True, nogil=True)(function)
    _stamp_with_neighbours(dispatcher, Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


def _stamp_with_neighbours(dispatcher: Any, folder: Path) -> None:
    """Make a change of any file beside the kernel's own invalidate its cached machine code.

    numba stamps a cache entry with the kernel's own file only, though the code of every kernel it calls is compiled
    into it: without this, an edited rule in one file goes on being played by the old code of another.
    """
    index: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(index, "_source_stamp"):  # numba's private names: where they are gone, its own stamp remains
        index._source_stamp = (index._source_stamp, _fingerprint(folder))


@cache
def _fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, modification time and size of every source file in `folder`."""
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def njit_threads(function: F) -> F:
    """As `njit`, with `numba.prange` loops over threads; see `use_threads`."""
    dispatcher = numba.njit(cache=True, nogil=True, parallel=True)(function)
    _stamp_with_neighbours(dispatcher, Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


def njit_relaxed(function: F) -> F:
    """As `njit`, for the arithmetic of `rounding` kernels: sums in any order, fused multiply-add, IEEE division.

    Reassociation is what lets LLVM vectorise a dot product (95 GFLOP/s of a core here). NaN and infinity keep their
    meaning, so that a guard can still see them.
    """
    flags = {"contract", "reassoc", "nsz"}
    dispatcher = numba.njit(cache=True, nogil=True, fastmath=flags, error_model="numpy")(function)
    _stamp_with_neighbours(dispatcher, Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


def njit_bare(function: F) -> F:
    """As `njit_relaxed`, for the inner kernels: arrays are not reference-counted, so none can be made.

    A view of a row costs two atomic operations otherwise. numba refuses such a function that makes an array or returns
    a view: what is wanted goes in as an argument, a view comes from an `njit_inline` function.
    """
    options: Any = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy", "_nrt": False}
    dispatcher = numba.njit(cache=True, nogil=True, **options)(function)
    _stamp_with_neighbours(dispatcher, Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


def njit_inline(function: F) -> F:
    """As `njit_relaxed`, copied into every kernel that calls it."""
    flags = {"contract", "reassoc", "nsz"}
    dispatcher = numba.njit(cache=True, nogil=True, fastmath=flags, error_model="numpy", inline="always")(function)
    _stamp_with_neighbours(dispatcher, Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


def njit_parallel(function: F) -> F:
    """As `njit_relaxed`, with `numba.prange` loops over threads; see `use_threads`."""
    flags = {"contract", "reassoc", "nsz"}
    dispatcher = numba.njit(cache=True, nogil=True, fastmath=flags, error_model="numpy", parallel=True)(function)
    _stamp_with_neighbours(dispatcher, Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


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
