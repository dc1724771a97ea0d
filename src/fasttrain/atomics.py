"""What threads inside one kernel agree by: a few counters that all of them see (`threads.Team` makes them).

A kernel that runs on threads takes `team` and `me` as its last arguments: plain Python threads call it together,
without the GIL, and it shares the work out itself. So it is compiled once, for one thread and for many; numba's
`prange` would compile every function below it a second time, and bring threads of its own.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from fasttrain.batch import Int64Array
from fasttrain.jit import intrinsic, njit_inner

cgutils: Any = untyped_cgutils

NEXT, DONE, GATE, SIZE = range(4)  # entries of `team` (4,): the next piece, pieces done, what is open, threads
CHUNK = 32  # games a thread takes at once: 15 µs of bots' play
SPINS = 4000  # looks before a waiting thread offers its core to others: about 50 µs
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_GIVE_WAY = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Of an entry of the array argument."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@intrinsic
def fetch_add(typing: Any, team: Any, place: Any, amount: Any) -> Any:
    """team[place] += amount, of all threads one after the other; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _address(context, builder, signature, arguments), arguments[2], "acq_rel")

    return types.int64(team, types.int64, types.int64), generate


@intrinsic
def look(typing: Any, team: Any, place: Any) -> Any:
    """team[place] as it is now; what was written before it was set is seen from here on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, arguments), "acquire", 8)

    return types.int64(team, types.int64), generate


@intrinsic
def tell(typing: Any, team: Any, place: Any, value: Any) -> Any:
    """team[place] = value, after everything written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _address(context, builder, signature, arguments), "release", 8)
        return context.get_dummy_value()

    return types.void(team, types.int64, types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Leave the core's units to its other hyperthread for a moment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(typing: Any) -> Any:
    """Let another thread have the core: without it a thread that waits keeps the one it waits for from running."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, _GIVE_WAY), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit_inner
def wait_for(team: Int64Array, place: int, value: int) -> None:
    """Until team[place] is at least `value`."""
    looks = 0
    while look(team, place) < value:
        looks += 1
        if looks < SPINS:
            pause()
        else:
            give_way()


@njit_inner
def wait_for_all(team: Int64Array, me: int, count: int) -> None:
    """Thread 0 goes on once all `count` pieces are done; the others have nothing to wait for."""
    if me == 0:
        wait_for(team, DONE, count)
