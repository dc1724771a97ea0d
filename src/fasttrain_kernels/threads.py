"""Threads that work on one call of a kernel together: how they share the work, and whether threads save time.

A kernel that can run on threads has `team` and `me` as its last arguments: counters that all threads see, and the
thread's number. Python calls it once, as thread 0. `begin_work` in the kernel then gives work to the other
threads. They wait for it in compiled code (`follow`), because waking a sleeping thread takes 10 to 80 µs, and a step of
256 games takes only 90 µs. They run the kernel's own machine code with the arguments of thread 0, so that the kernel is
compiled only once. numba's `prange` would compile every function below it a second time, and has threads of its own.
Work is cut into pieces, and a thread takes the next one when it is free, so that no thread waits for a slow one. A
kernel on threads must not raise, because it would then not wait for the other threads.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from fasttrain.batch import Int64Array
from fasttrain_kernels.jit import intrinsic, njit, njit_inline, njit_inner
from fasttrain_kernels.kernel_cache import KernelCall

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.context import Context
    from numba.core.typing.templates import Signature

    from fasttrain_kernels.jit import Code, Values

R = TypeVar("R")

# Entries of `team`. CALL: increases, and is odd while thread 0 is in a kernel; INSIDE: number of other threads in that
# kernel; ENTRY, ARGUMENTS: addresses of the kernel's machine code and arguments; PIECES, DONE: numbers of all and of
# finished pieces; NOTE: for the kernel's own use; SIZE: number of threads; NEXT: the next piece of each thread's share,
# on a cache line of its own.
CALL, INSIDE, ENTRY, ARGUMENTS, PIECES, DONE, NOTE, SIZE, NEXT = range(9)
LINE = 8  # int64 in a cache line
NOTHING = 1 << 40  # number of the next piece if none is open; larger than any piece
CHUNK = 32  # games in a piece: 15 µs if bots play
SPINS = 4000  # checks after which a waiting thread offers its core to others: about 50 µs
STAYS = SPINS + 2000  # checks after which a thread without work goes to sleep: about 2 ms
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_GIVE_WAY = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
_POINTER, _INT64 = ir.IntType(8).as_pointer(), ir.IntType(64)


def new_team(threads: int = 1) -> Int64Array:
    """Counters for a kernel that runs on `threads` threads."""
    team: Int64Array = np.zeros(NEXT + LINE * threads, np.int64)
    team[SIZE] = threads
    return team


def _address(
    context: BaseContext, builder: ir.IRBuilder, kind: types.Type, array: ir.Value, place: ir.Value
) -> ir.Value:
    """The address of an array's entry."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [place])


@intrinsic
def fetch_add(typing: Context, team: types.Type, place: types.Type, amount: types.Type) -> Code:
    """Atomic team[place] += amount; returns the old value."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        address = _address(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("add", address, arguments[2], "seq_cst")

    return types.int64(team, types.int64, types.int64), generate


@intrinsic
def look(typing: Context, team: types.Type, place: types.Type) -> Code:
    """Atomic read of team[place]. After this the thread sees all that other threads wrote before they set the value."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        return builder.load_atomic(_address(context, builder, signature.args[0], *arguments), "seq_cst", 8)

    return types.int64(team, types.int64), generate


@intrinsic
def tell(typing: Context, team: types.Type, place: types.Type, value: types.Type) -> Code:
    """Atomic team[place] = value, after everything that was written before."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        address = _address(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], address, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(team, types.int64, types.int64), generate


@intrinsic
def publish(typing: Context, team: types.Type) -> Code:
    """Write the addresses of the calling kernel's machine code and arguments into `team`, for other threads.

    The kernel's last argument is the thread's number.
    """

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        kernel = builder.function
        result, error, *own_arguments, _ = kernel.args  # numba's calling convention; `_` is the number of thread 0
        stored = cgutils.alloca_once(builder, ir.LiteralStructType([value.type for value in own_arguments]))
        for number, value in enumerate(own_arguments):
            builder.store(value, cgutils.gep_inbounds(builder, stored, 0, number))
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT64])
        entry = ir.Function(builder.module, kind, kernel.name + ".entry")
        entry.linkage = "internal"
        inner = ir.IRBuilder(entry.append_basic_block())
        loaded = inner.load(inner.bitcast(entry.args[0], stored.type))
        values = [inner.extract_value(loaded, number) for number in range(len(own_arguments))]
        places = [cgutils.alloca_once(inner, pointer.type.pointee, zfill=True) for pointer in (result, error)]
        inner.call(kernel, [*places, *values, entry.args[1]])
        inner.ret_void()
        for place, pointer in ((ENTRY, entry), (ARGUMENTS, stored)):
            address = _address(context, builder, signature.args[0], arguments[0], ir.Constant(_INT64, place))
            builder.store(builder.ptrtoint(pointer, _INT64), address)
        return context.get_dummy_value()

    return types.void(team), generate


@intrinsic
def enter(typing: Context, entry: types.Type, arguments: types.Type, me: types.Type) -> Code:
    """Call the kernel that thread 0 has published."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT64])
        entry = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(entry, [builder.inttoptr(arguments[1], _POINTER), arguments[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def pause(typing: Context) -> Code:
    """Let the other hyperthread of this core run for a moment."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(typing: Context) -> Code:
    """Let the system run another thread on this core, which may be the one for which this thread waits."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values) -> ir.Value:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, _GIVE_WAY), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit_inner
def rest(checks: int) -> None:
    """Wait before the next check of a spin loop: briefly at first; after `SPINS` checks let other threads run."""
    if checks < SPINS:
        pause()
    else:
        give_way()


@njit_inner
def wait_for(team: Int64Array, place: int, value: int) -> None:
    """Wait until team[place] is at least `value`."""
    checks = 0
    while look(team, place) < value:
        rest(checks)
        checks += 1


@njit_inner
def open_pieces(team: Int64Array, pieces: int) -> None:
    """Let threads claim this number of pieces, once all earlier pieces are done.

    A kernel must open the same number each time. Otherwise a thread that is just claiming could read the old begin and
    the new end of its share, and take a piece twice.
    """
    team[PIECES], team[DONE] = pieces, 0
    for thread in range(team[SIZE]):
        tell(team, NEXT + LINE * thread, pieces * thread // team[SIZE] if pieces else NOTHING)


@njit_inline
def begin_work(team: Int64Array, me: int, pieces: int) -> None:
    """Thread 0 opens `pieces` and calls the other threads, which run the kernel from its first line."""
    if me == 0:
        open_pieces(team, pieces)
        if team[SIZE] > 1:
            publish(team)
            fetch_add(team, CALL, 1)


@njit_inner
def claim(team: Int64Array, me: int) -> int:
    """The next piece for this thread; -1 if none is left.

    A thread first takes pieces of its own share, which is the same in every call, so that a game stays in the cache of
    one core (a step of 256 games on two cores takes 75 instead of 95 µs). Then it takes pieces of other threads.
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
    """Thread 0 waits until all others have left the kernel, because the arguments exist only until thread 0 returns."""
    if me == 0 and team[SIZE] > 1:
        fetch_add(team, CALL, 1)
        checks = 0
        while look(team, INSIDE) > 0:
            rest(checks)
            checks += 1


@njit_inner
def is_open(team: Int64Array) -> bool:
    """Whether thread 0 is still in the kernel; called by the other threads."""
    return bool(look(team, CALL) % 2 == 1)


@njit
def follow(team: Int64Array, me: int) -> None:
    """Help thread 0 in every kernel that it runs on threads. Returns when there was no such kernel for about 2 ms.

    The thread first increases INSIDE and then checks again whether the kernel is open, so that thread 0 waits for it.
    """
    checks, last = 0, 0
    while checks < STAYS:
        call = look(team, CALL)
        if call != last and call % 2 == 1 and me < look(team, SIZE):
            fetch_add(team, INSIDE, 1)
            if look(team, CALL) == call and me < look(team, SIZE):
                enter(look(team, ENTRY), look(team, ARGUMENTS), me)
            fetch_add(team, INSIDE, -1)
            checks, last = 0, call
        rest(checks)
        checks += 1


# --- the threads

MOST = 256  # threads of a team
FOLLOW = KernelCall(follow, (new_team(), 1))  # must be compiled before kernels run on threads


class Team:
    """Threads that work on a kernel together with the caller, for one caller at a time. `Teams.run` finds a free team.

    The kernel releases the GIL. Nothing waits in Python, because handing over the GIL takes longer than a step.
    """

    def __init__(self) -> None:
        self._counters = new_team(MOST)
        self._followers: list[_Follower] = []

    def run(self, kernel: Callable[..., R], threads: int, *arguments: object) -> R:
        """Return `kernel(*arguments, counters, 0)`, in which up to `threads` - 1 other threads take part."""
        counters, followers, threads = self._counters, self._followers, min(threads, MOST)
        while len(followers) < threads - 1:
            followers.append(_Follower(counters, len(followers) + 1))
        for number in range(threads - 1):
            followers[number].wake()
        counters[SIZE] = threads
        return kernel(*arguments, counters, 0)


class _Follower:
    """A thread that is either in `follow` or asleep."""

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
    """The teams of this process. Acting, updating and games share one team in turn; simultaneous calls use several."""

    def __init__(self) -> None:
        self._free: list[Team] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._free.clear)  # a forked process does not have the threads

    def run(self, kernel: Callable[..., R], threads: int, *arguments: object) -> R:
        """Return what the kernel returns; `arguments`: all arguments except `team` and `me`."""
        if threads < 2:
            return kernel(*arguments, new_team(), 0)
        try:
            team = self._free.pop()
        except IndexError:
            team = Team()
        result = team.run(kernel, threads, *arguments)
        self._free.append(team)  # skipped after an error, because other threads may still be in the kernel
        return result


run = Teams().run


class ThreadChoice:
    """Chooses whether a kernel runs on threads, by the times of its last runs.

    Two threads halve the time of an update on an idle machine. If another process uses the second core, they make it
    several times slower, because every minibatch waits for the thread without a core. Results are the same with
    and without threads, so that a run does not depend on timing.

    Args:
        trial: number of runs in a row with one mode before the next choice. One run is not enough, because threads must
            first be woken: acting for 256 envs takes 0.27 ms at first, then 0.11; without threads 0.19.
    """

    FIRST = 2  # runs of each mode before the first choice, because the first run on threads is slow
    TRY_OTHER_EVERY = 50  # in one of 50 trials the slower mode is used
    CLEAR = 1.3  # a mode that is slower by this factor is tried a quarter as often
    REMEMBERED = 4  # last runs of each mode; the fastest is compared, so that short disturbances do not matter

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
            if len(seconds) < self.FIRST:
                return mode
        faster, slower = sorted(self._seconds, key=lambda mode: min(self._seconds[mode]))
        clear = min(self._seconds[slower]) > self.CLEAR * min(self._seconds[faster])
        every = self.TRY_OTHER_EVERY * (4 if clear else 1)
        return slower if trials % every == every - 1 else faster

    def took(self, on_threads: bool, seconds: float) -> None:
        """Store the seconds that one run of the kernel took."""
        self._seconds[on_threads].append(seconds)

    def run(self, kernel: Callable[..., R], threads: int, *arguments: object, runs: int = 1) -> R:
        """Call the kernel, on up to `threads` threads if they help. `runs`: number of runs in the measured call."""
        on_threads = threads > 1 and self.next()
        begun = time.perf_counter()
        result = run(kernel, threads if on_threads else 1, *arguments)
        if threads > 1:
            self.took(on_threads, (time.perf_counter() - begun) / runs)
        return result
