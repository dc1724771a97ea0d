"""How threads inside one kernel share its work: a few counters that all of them see (`threads.Team` has them).

A kernel that can run on threads takes `team` and `me` as its last arguments. Python calls it once, as thread 0, and the
kernel calls the others in by itself (`begin_work`): they are within compiled code already, in `follow`, and look for
work there, since waking a thread that sleeps takes 10 to 80 µs and a step of 256 games 90. What they enter is the
kernel's own machine code with the arguments of thread 0, so it is compiled once, for one thread and for many; numba's
`prange` would compile every function below it a second time, and bring threads of its own. Nobody waits for a thread
that did not come: pieces go to whoever takes them. Such a kernel must not raise, for then it would not wait for others.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from fasttrain.batch import Int64Array
from fasttrain.jit import intrinsic, njit, njit_inline, njit_inner

cgutils: Any = untyped_cgutils

# Entries of `team`: odd while thread 0 is in a kernel and higher every time, how many others are in it, its machine
# code, its arguments, how many pieces there are and are done, for the kernel's own use, threads; then the next piece of
# each thread's share, on a cache line of its own.
CALL, INSIDE, ENTRY, ARGUMENTS, PIECES, DONE, NOTE, SIZE, NEXT = range(9)
LINE = 8  # int64 in a cache line
NOTHING = 1 << 40  # the next piece where none is open: beyond all that will be
CHUNK = 32  # games a thread takes at once: 15 µs of bots' play
SPINS = 4000  # looks before a waiting thread offers its core to others: about 50 µs
STAYS = SPINS + 2000  # looks before a thread that finds no work goes to sleep: about 2 ms
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_GIVE_WAY = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
_POINTER, _INT64 = ir.IntType(8).as_pointer(), ir.IntType(64)


def new_team(threads: int = 1) -> Int64Array:
    """The counters of a kernel that runs on the calling thread only, or on that many."""
    team: Int64Array = np.zeros(NEXT + LINE * threads, np.int64)
    team[SIZE] = threads
    return team


def _address(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    """Of an entry of an array."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [place])


@intrinsic
def fetch_add(typing: Any, team: Any, place: Any, amount: Any) -> Any:
    """team[place] += amount, of all threads one after the other; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", address, arguments[2], "seq_cst")

    return types.int64(team, types.int64, types.int64), generate


@intrinsic
def look(typing: Any, team: Any, place: Any) -> Any:
    """team[place] as it is now; what was written before it was set is seen from here on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature.args[0], *arguments), "seq_cst", 8)

    return types.int64(team, types.int64), generate


@intrinsic
def tell(typing: Any, team: Any, place: Any, value: Any) -> Any:
    """team[place] = value, after everything written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], address, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(team, types.int64, types.int64), generate


@intrinsic
def publish(typing: Any, team: Any) -> Any:
    """Note where the calling kernel's machine code and its arguments are. Its last argument is the thread's number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kernel = builder.function
        result, error, *given = kernel.args  # numba's calling convention; the last of them is replaced
        kept = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in given[:-1]]))
        for number, value in enumerate(given[:-1]):
            builder.store(value, cgutils.gep_inbounds(builder, kept, 0, number))
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT64])
        entry = ir.Function(builder.module, kind, kernel.name + ".entry")
        entry.linkage = "internal"
        inner = ir.IRBuilder(entry.append_basic_block())
        own = inner.load(inner.bitcast(entry.args[0], kept.type))
        values = [inner.extract_value(own, number) for number in range(len(given) - 1)]
        places = [cgutils.alloca_once(inner, pointer.type.pointee, zfill=True) for pointer in (result, error)]
        inner.call(kernel, [*places, *values, entry.args[1]])
        inner.ret_void()
        for place, pointer in ((ENTRY, entry), (ARGUMENTS, kept)):
            address = _address(context, builder, signature.args[0], arguments[0], ir.Constant(_INT64, place))
            builder.store(builder.ptrtoint(pointer, _INT64), address)
        return context.get_dummy_value()

    return types.void(team), generate


@intrinsic
def enter(typing: Any, entry: Any, arguments: Any, me: Any) -> Any:
    """Call what thread 0 published."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT64])
        entry = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(entry, [builder.inttoptr(arguments[1], _POINTER), arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


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
def rest(looks: int) -> None:
    """Between two looks, of which there were so many in vain."""
    if looks < SPINS:
        pause()
    else:
        give_way()


@njit_inner
def wait_for(team: Int64Array, place: int, value: int) -> None:
    """Until team[place] is at least `value`."""
    looks = 0
    while look(team, place) < value:
        rest(looks)
        looks += 1


@njit_inner
def open_pieces(team: Int64Array, pieces: int) -> None:
    """They may be claimed from now on, by threads that are in the kernel already too. All of before are done."""
    team[PIECES], team[DONE] = pieces, 0
    for thread in range(team[SIZE]):
        tell(team, NEXT + LINE * thread, pieces * thread // team[SIZE] if pieces else NOTHING)


@njit_inline
def begin_work(team: Int64Array, me: int, pieces: int) -> None:
    """Thread 0 opens `pieces` and calls the others in: for them the kernel begins anew, from its first line."""
    if me == 0:
        open_pieces(team, pieces)
        if team[SIZE] > 1:
            publish(team)
            fetch_add(team, CALL, 1)


@njit_inner
def claim(team: Int64Array, me: int) -> int:
    """A piece that nobody else takes; -1: none is left.

    First of a share that is the same in every call, so that a game stays in the cache of one core (a step of 256 on two
    cores: 95 → 75 µs), then of what another thread has not come to.
    """
    size = team[SIZE]
    for further in range(size):
        thread = (me + further) % size
        place, end = NEXT + LINE * thread, team[PIECES] * (thread + 1) // size
        if look(team, place) < end:
            piece = fetch_add(team, place, 1)
            if piece < end:
                return int(piece)
    return -1


@njit_inner
def end_work(team: Int64Array, me: int) -> None:
    """Thread 0 goes on once all others have left the kernel, whose arguments live no longer than it stays."""
    if me == 0 and team[SIZE] > 1:
        fetch_add(team, CALL, 1)
        looks = 0
        while look(team, INSIDE) > 0:
            rest(looks)
            looks += 1


@njit_inner
def is_open(team: Int64Array) -> bool:
    """For the others: whether thread 0 is still in the kernel."""
    return bool(look(team, CALL) % 2 == 1)


@njit
def follow(team: Int64Array, me: int) -> None:
    """Take part in every kernel that thread 0 calls the others into, until for about 2 ms there was none.

    Counted as inside before it looks again, so that thread 0 either sees it and waits or had not left.
    """
    looks, last = 0, 0
    while looks < STAYS:
        call = look(team, CALL)
        if call != last and call % 2 == 1 and me < look(team, SIZE):
            fetch_add(team, INSIDE, 1)
            if look(team, CALL) == call and me < look(team, SIZE):
                enter(look(team, ENTRY), look(team, ARGUMENTS), me)
            fetch_add(team, INSIDE, -1)
            looks, last = 0, call
        rest(looks)
        looks += 1
