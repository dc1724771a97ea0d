"""The one typed doorway to numba: compiled once per machine (cached on disk), without the GIL.

For `njit` arithmetic is strict IEEE, `fastmath` off, so that a kernel gives the same numbers as the plain Python it is
tested against. The other forms are for `rounding` kernels and say what they relax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fasttrain.errors import ConfigError

try:
    import numba
except ValueError as error:  # NUMBA_NUM_THREADS=0
    raise ConfigError(f"numba does not start: {error} Look at the variables NUMBA_… of the environment") from error
import numba.extending
from numba import types

from fasttrain.kernel_cache import KEEPS, KernelCache

if TYPE_CHECKING:
    from llvmlite import ir
    from numba.core.typing.templates import Signature

    Values = Sequence[ir.Value]
    Code = tuple[Signature, Callable[..., ir.Value]]  # of an intrinsic: its types, and what writes a call of it

if cast(Any, numba.config).DISABLE_JIT:
    raise ConfigError("NUMBA_DISABLE_JIT is set: fasttrain's kernels need numba's compiler; unset that variable")
F = TypeVar("F", bound=Callable[..., Any])
Options = dict[str, object]  # of numba.njit


_RELAXED: Options = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy"}
_BARE: Options = {**_RELAXED, "_nrt": False}


def njit(function: F) -> F:
    """Compile `function` in nopython mode on first call; type checkers see the plain function."""
    return _kernel(function)


def _kernel(function: F, **options: object) -> F:
    compiled: Any = numba.njit  # whose annotations know half of its options
    dispatcher = compiled(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if KEEPS:
        dispatcher._cache = KernelCache(dispatcher)  # what `cache=True` sets to numba's own
    resolve = dispatcher.get_call_template

    def resolve_types(args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> object:
        return resolve(tuple(map(_plain, args)), {name: _plain(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = resolve_types
    return cast(F, dispatcher)


def _plain(kind: types.Type) -> types.Type:
    """The type a kernel is compiled for where another one calls it with `kind`.

    A number that stands in the call as such is a type of its own for numba, a field of a record is an int32: each would
    compile the function once more (a quarter of Skull King's compiling). LLVM finds the numbers by itself.
    """
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and getattr(kind, "signed", False) else kind


def njit_relaxed(function: F) -> F:
    """As `njit`, for the arithmetic of `rounding` kernels: sums in any order, fused multiply-add, IEEE division.

    Reassociation is what lets LLVM vectorise a dot product (95 GFLOP/s of a core here). NaN and infinity keep their
    meaning, so that a guard can still see them.
    """
    return _kernel(function, **_RELAXED)


def njit_bare(function: F) -> F:
    """As `njit_relaxed`, without reference counts of arrays, so that none can be made.

    A view of a row costs two atomic operations otherwise. numba refuses such a function that makes an array or returns
    a view: what is wanted goes in as an argument, a view comes from an `njit_inline` function.
    """
    return _kernel(function, **_BARE)


def njit_inner(function: F) -> F:
    """As `njit_bare`, for what other kernels alone call: without the way in from Python, an eighth of its compiling."""
    return _kernel(function, no_cpython_wrapper=True, **_BARE)


def njit_inline(function: F) -> F:
    """As `njit_relaxed`, copied into every kernel that calls it: for views, and for long functions called in one place,
    which are optimised once that way and not once for themselves and once more in their caller."""
    return _kernel(function, inline="always", **_RELAXED)


def intrinsic(function: Callable[..., Code]) -> Any:
    """numba's `intrinsic`: a function of types that returns a signature and the LLVM code for a call of it."""
    return numba.extending.intrinsic(function)
