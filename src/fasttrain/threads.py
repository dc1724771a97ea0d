"""Threads that work on a kernel together: what they share its work out by, the team of them, and whether that pays.

A kernel that can run on threads takes `team` and `me` as its last arguments: counters that all threads see, and the
caller's number. Python calls it once, as thread 0, and the kernel calls the others in by itself (`begin_work`): they
are within compiled code already, in `follow`, and look for work there, since waking a thread that sleeps takes 10 to
80 µs and a step of 256 games 90. What they enter is the kernel's own machine code with the arguments of thread 0, so
it is compiled once, for one thread and for many; numba's `prange` would compile every function below it a second time,
and bring threads of its own. Nobody waits for a thread that did not come: pieces go to whoever takes them. Such a
kernel must not raise, for then it would not wait for others.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from fasttrain.batch import Int64Array
from fasttrain.jit import intrinsic, njit, njit_inline, njit_inner
from fasttrain.kernel_cache import KernelCall

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.context import Context
    from numba.core.typing.templates import Signature

    from fasttrain.jit import Code, Values

R = TypeVar("R")

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


def _address(
    context: BaseContext, builder: ir.IRBuilder, kind: types.Type, array: ir.Value, place: ir.Value
) -> ir.Value:
    """Of an entry of an array."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [place])


@intrinsic
def fetch_add(typing: Context, team: types.Type, place: types.Type, amount: types.Type) -> Code:
    """team[place] += amount, of all threads one after the other; what it was before."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        address = _address(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", address, arguments[2], "seq_cst")

    return types.int64(team, types.int64, types.int64), generate


@intrinsic
def look(typing: Context, team: types.Type, place: types.Type) -> Code:
    """team[place] as it is now; what was written before it was set is seen from here on."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        return builder.load_atomic(_address(context, builder, signature.args[0], *arguments), "seq_cst", 8)

    return types.int64(team, types.int64), generate


@intrinsic
def tell(typing: Context, team: types.Type, place: types.Type, value: types.Type) -> Code:
    """team[place] = value, after everything written before."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        address = _address(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], address, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(team, types.int64, types.int64), generate


@intrinsic
def publish(typing: Context, team: types.Type) -> Code:
    """Note where the calling kernel's machine code and its arguments are. Its last argument is the thread's number."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
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
def enter(typing: Context, entry: types.Type, arguments: types.Type, me: types.Type) -> Code:
    """Call what thread 0 published."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT64])
        entry = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(entry, [builder.inttoptr(arguments[1], _POINTER), arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def pause(typing: Context) -> Code:
    """Leave the core's units to its other hyperthread for a moment."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(typing: Context) -> Code:
    """Let another thread have the core: without it a thread that waits keeps the one it waits for from running."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
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
    """They may be claimed from now on, by threads that are in the kernel already too. All of before are done.

    A kernel always opens as many: a thread that is just looking for one of before would else read where its share
    began then and where it ends now, and take a piece twice.
    """
    team[PIECES], team[DONE] = pieces, 0
    for thread in range(team[SIZE]):
        tell(team, NEXT + LINE * thread, pieces * thread // team[SIZE] if pieces else NOTHING)


@njit_inline
def begin_work(team: Int64Array, me: int, pieces: int) -> None:
    """Thread 0 opens `pieces` and calls the others in: for them the kernel starts again, from its first line."""
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


# --- the threads

MOST = 256  # threads of a team
FOLLOW = KernelCall(follow, (new_team(), 1))  # what a team needs compiled besides its kernels


class Team:
    """Plain threads that work on a kernel together with the caller and share its work out by its counters.

    The kernel's last two arguments are the team's counters and the caller's number, 0. It releases the GIL and returns
    the same whoever did what: nothing is waited for in Python, where handing the GIL over costs more than a step of 256
    games. For one caller at a time; `run` finds one that is free.
    """

    def __init__(self) -> None:
        self._counters = new_team(MOST)
        self._followers: list[_Follower] = []

    def run(self, kernel: Callable[..., R], threads: int, *arguments: object) -> R:
        """What `kernel(*arguments, counters, 0)` returns, while up to `threads` - 1 others take part."""
        counters, followers, threads = self._counters, self._followers, min(threads, MOST)
        while len(followers) < threads - 1:
            followers.append(_Follower(counters, len(followers) + 1))
        for number in range(threads - 1):
            followers[number].wake()
        counters[SIZE] = threads
        return kernel(*arguments, counters, 0)


class _Follower:
    """A thread that is in `follow` or asleep."""

    def __init__(self, counters: Int64Array, number: int) -> None:
        self._work, self._asleep = SimpleQueue[None](), True
        run = threading.Thread(target=self._run, args=(counters, number), name="fasttrain-kernels", daemon=True)
        run.start()

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._work.put(None)

    def _run(self, counters: Int64Array, number: int) -> None:
        while True:
            self._work.get()
            follow(counters, number)
            self._asleep = True


class Teams:
    """Acting, updating and the games in turn use one team; two callers at once have two."""

    def __init__(self) -> None:
        self._free: list[Team] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._free.clear)  # a fork has none of the threads

    def run(self, kernel: Callable[..., R], threads: int, *arguments: object) -> R:
        """What the kernel returns, called here alone or with others; `arguments` are all but its last two."""
        if threads < 2:
            return kernel(*arguments, new_team(), 0)
        try:
            team = self._free.pop()
        except IndexError:
            team = Team()
        result = team.run(kernel, threads, *arguments)
        self._free.append(team)  # not after an error: the others may be in that kernel still
        return result


run = Teams().run  # of this process


class ThreadChoice:
    """Threads or no threads, by what the last runs of a kernel took.

    Two threads halve an update on an idle machine; where another process wants the second core they make it several
    times slower, because every minibatch waits for the thread that has no core. The choice changes no number
    (`train_epoch`), so timing it does not make a run depend on time.

    Args:
        trial: how many runs in a row the slower mode is tried for. Threads that had nothing to do have gone to sleep:
            for a run of 0.1 ms the first ones say nothing (acting for 256 envs: 0.27 ms, then 0.11; alone 0.19).
    """

    TRY_OTHER_EVERY = 50  # trials: so often the slower mode gets one
    REMEMBERED = 4  # runs of each; the best of them counts, so that a moment's disturbance decides nothing

    def __init__(self, trial: int = 1) -> None:
        self._seconds = {mode: deque[float](maxlen=self.REMEMBERED) for mode in (True, False)}
        self._trial, self._runs, self._mode = trial, 0, True

    def next(self) -> bool:
        """Whether the next run shall use threads."""
        if self._runs % self._trial == 0:
            self._mode = self._choose(self._runs // self._trial)
        self._runs += 1
        return self._mode

    def _choose(self, trials: int) -> bool:
        for mode, seconds in self._seconds.items():
            if not seconds:
                return mode
        faster = min(self._seconds, key=lambda mode: min(self._seconds[mode]))
        return not faster if trials % self.TRY_OTHER_EVERY == self.TRY_OTHER_EVERY - 1 else faster

    def took(self, on_threads: bool, seconds: float) -> None:
        """Note what a run took, per optimizer step or for so many rows."""
        self._seconds[on_threads].append(seconds)
