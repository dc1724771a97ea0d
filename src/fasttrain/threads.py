"""Threads for kernels: a team that calls one together, and whether that pays, by what it took."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from fasttrain.batch import Int64Array


def alone() -> Int64Array:
    """The counters (4,) of a kernel that runs on the calling thread only; `atomics.py` names them."""
    return np.array([0, 0, 0, 1])


class Team:
    """Plain threads that call a kernel together with the caller.

    The kernel's last two arguments are the team's counters and the caller's number; `atomics.py` has what it shares its
    work out by. It releases the GIL, waits inside for what the others took on, and returns the same whoever did what:
    nothing is waited for in Python, where handing the GIL over costs more than a step of 256 games.
    """

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Any]] = []
        self._process = os.getpid()

    def run(self, kernel: Callable[..., Any], threads: int, *arguments: Any) -> Any:
        """What `kernel(*arguments, team, 0)` returns, called here while `threads` - 1 others call it as 1, 2, …"""
        team = np.array([0, 0, 0, threads])
        for number, queue in enumerate(self._followers(threads - 1), start=1):
            queue.put((kernel, (*arguments, team, number)))
        return kernel(*arguments, team, 0)

    def _followers(self, count: int) -> list[SimpleQueue[Any]]:
        if self._process != os.getpid():  # a fork has none of the threads
            self._queues, self._process = [], os.getpid()
        while len(self._queues) < count:
            queue: SimpleQueue[Any] = SimpleQueue()
            threading.Thread(target=_follow, args=(queue,), name="fasttrain-kernels", daemon=True).start()
            self._queues.append(queue)
        return self._queues[:count]

    def __del__(self) -> None:
        for queue in self._queues:
            queue.put(None)


def _follow(queue: SimpleQueue[Any]) -> None:
    while (work := queue.get()) is not None:
        kernel, arguments = work
        kernel(*arguments)
        del work, kernel, arguments  # they hold a rollout's arrays


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
