"""Decorators that compile functions by numba, once per machine (cached on disk). Compiled functions release the GIL.

`njit` has strict IEEE arithmetic, so that a kernel gives the same numbers as the Python code against which it is
tested. The other decorators are for kernels whose results may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fasttrain.errors import ConfigError

try:
    import numba
except ValueError as error:  # for example NUMBA_NUM_THREADS=0
    raise ConfigError(f"numba does not start: {error} Look at the variables NUMBA_… of the environment") from error
import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

from fasttrain_kernels.kernel_cache import KEEPS, KernelCache

if TYPE_CHECKING:
    from numba.core.typing.templates import Signature

    Values = Sequence[ir.Value]
    Code = tuple[Signature, Callable[..., ir.Value]]  # an intrinsic's types, and the function that writes its code

if cast(Any, numba.config).DISABLE_JIT:
    raise ConfigError("NUMBA_DISABLE_JIT is set: fasttrain's kernels need numba's compiler; unset that variable")
F = TypeVar("F", bound=Callable[..., Any])
Options = dict[str, object]  # options of numba.njit
_RELAXED: Options = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy"}
_BARE: Options = {**_RELAXED, "_nrt": False}


def njit(function: F) -> F:
    """Compile `function` on its first call. Type checkers still see the Python function."""
    return _kernel(function)


def _kernel(function: F, **options: object) -> F:
    compiled: Any = numba.njit  # Any, because numba's annotations lack some options
    dispatcher = compiled(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if KEEPS:
        dispatcher._cache = KernelCache(dispatcher)  # with `cache=True` numba would set its own cache here
    resolve = dispatcher.get_call_template

    def resolve_types(args: Sequence[types.Type], kws: Mapping[str, types.Type]) -> object:
        return resolve(tuple(map(_plain, args)), {name: _plain(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = resolve_types
    return cast(F, dispatcher)


def _plain(kind: types.Type) -> types.Type:
    """The type for which a kernel is compiled when another kernel calls it with `kind`.

    In numba a literal number has a type of its own, and a record's field may be int32 where other callers have int64.
    For each such type numba would compile the function again, which takes a quarter of the compile time of Skull King.
    """
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and getattr(kind, "signed", False) else kind


def njit_relaxed(function: F) -> F:
    """As `njit`, with relaxed arithmetic: sums in any order, and fused multiply-add instructions.

    Without a fixed order LLVM can vectorize a dot product (95 GFLOP/s on a core). NaN and infinity keep their meaning,
    so that a guard can still see them.
    """
    return _kernel(function, **_RELAXED)


def njit_bare(function: F) -> F:
    """As `njit_relaxed`, without reference counts of arrays, which cost two atomic operations for every view of a row.

    numba refuses such a function if it creates an array or returns a view. Arrays must be arguments; views come from
    `njit_inline` functions.
    """
    return _kernel(function, **_BARE)


def njit_inner(function: F) -> F:
    """As `njit_bare`, for functions that only kernels call. Without Python wrappers they compile in 7/8 of the time."""
    return _kernel(function, no_cpython_wrapper=True, **_BARE)


def njit_inline(function: F) -> F:
    """As `njit_relaxed`, copied into every kernel that calls it: for views, and for long functions called in one place,
    which LLVM would otherwise optimise twice."""
    return _kernel(function, inline="always", **_RELAXED)


def intrinsic(function: Callable[..., Code]) -> Any:
    """numba's `intrinsic`: `function` gets the types of a call, and returns its signature and a writer of LLVM code."""
    return numba.extending.intrinsic(function)


@intrinsic
def fetch(typing: Any, x: types.Type, begin: types.Type, end: types.Type) -> Code:
    """Prefetch x[begin:end] into the cache, in lines of 16 entries of 4 bytes, without waiting for the data."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        array, begin, end = arguments
        data = context.make_array(signature.args[0])(context, builder, array).data
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range_slice(builder, begin, end, ir.Constant(ir.IntType(64), 16)) as (index, _):
            address = builder.bitcast(builder.gep(data, [index]), byte)
            builder.call(function, [address, number(0), number(3), number(1)])  # read, all caches, data
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64), write
