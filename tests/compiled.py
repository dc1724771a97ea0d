"""Kernels that other kernels alone call have no way in from Python: tests come in by one that calls them."""

from __future__ import annotations

from typing import Any

import numba


def from_python(kernel: Any) -> Any:
    """A function that passes its arguments on to `kernel`."""
    return numba.njit(lambda *arguments: kernel(*arguments), error_model="numpy")
