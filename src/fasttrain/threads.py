"""Threads for kernels: a team that calls one together, and whether that pays, by what it took."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fasttrain.atomics import SIZE, follow, new_team
from fasttrain.kernel_jobs import KernelCall

MOST = 256  # threads of a team
FOLLOW = KernelCall(follow, (new_team(), 1))  # what a team needs compiled besides its kernels


class Team:
    """Plain threads that work on a kernel together with the caller; `atomics.py` has what they share its work out by.

    The kernel's last two arguments are the team's counters and the caller's number, 0. It releases the GIL and returns
    the same whoever did what: nothing is waited for in Python, where handing the GIL over costs more than a step of 256
    games. For one caller at a time; `run` finds one that is free.
    """

    def __init__(self) -> None:
        self._counters = new_team(MOST)
        self._followers: list[_Follower] = []

    def run(self, kernel: Callable[..., Any], threads: int, *arguments: Any) -> Any:
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

    def __init__(self, counters: Any, number: int) -> None:
        self._work, self._asleep = SimpleQueue[None](), True
        run = threading.Thread(target=self._run, args=(counters, number), name="fasttrain-kernels", daemon=True)
        run.start()

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._work.put(None)

    def _run(self, counters: Any, number: int) -> None:
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

    def run(self, kernel: Callable[..., Any], threads: int, *arguments: Any) -> Any:
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
    (`minibatch_gradient`), so timing it does not make a run depend on time.

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
