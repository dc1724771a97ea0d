"""How a process that a trainer starts begins, and what it begins with: the signals held back, its threads, its group.

First thing that runs there, so it imports nothing heavy: number libraries read their settings on import.

A signal to the whole group, or to every process of a job, is the trainer's business. A process is deaf to it from its
first instruction on: it inherits a mask that holds SIGINT and SIGTERM back, and lets them through when they do nothing.
With all that its env starts it is a process group of its own, which ends as one.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from typing import Any

if sys.platform != "win32":
    from multiprocessing import resource_tracker

# One numeric thread per worker: K workers with C threads each on C cores are several times slower than one thread each.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
     "NUMBA_NUM_THREADS"),
    "1",
)  # fmt: skip


@contextmanager
def one_thread_environment() -> Iterator[None]:
    """Child processes started inside inherit `ONE_THREAD`: a spawned one imports the main script before `start`."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def hold_signals() -> Any:
    """Hold back SIGINT and SIGTERM from this thread and the processes that it starts from now on; the mask before."""
    if sys.platform == "win32":
        return None
    resource_tracker.ensure_running()  # where it starts later, it lets them through again
    return signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started inside must say `belong_to_the_trainer` before a signal can reach them."""
    before = hold_signals()
    try:
        yield
    finally:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(*arguments: Any) -> None:
    """Run a worker until it is told to close or the trainer is gone."""
    belong_to_the_trainer()
    os.environ.update(ONE_THREAD)  # under start_method=forkserver, one that was there before us has other values
    if "torch" in sys.modules:  # the user's main script imports it
        sys.modules["torch"].set_num_threads(1)
    from fasttrain.vec.worker import Worker

    worker = Worker(*arguments)
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=worker.disown)
    worker.serve()
    end_at_once()


def start_function(place: str, *arguments: Any) -> None:
    """Call `module:function`, imported here: that takes seconds, within which the trainer may be killed."""
    belong_to_the_trainer()
    module, _, name = place.partition(":")
    getattr(import_module(module), name)(*arguments)
    end_at_once()


def belong_to_the_trainer() -> None:
    """From here on signals do nothing, and the trainer's end is the end of this process and of all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A program that an env starts inherits what is ignored, but not a handler: its `terminate()` must work.
    signal.signal(signal.SIGTERM, _do_nothing)
    current_process().daemon = False  # an env may have a pool of processes
    if sys.platform != "win32":
        _let_sigterm_end_forks()
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a group in the background may print, whatever `stty` says
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    if not _die_with_the_trainer():
        threading.Thread(target=_end_with_the_trainer, name="fasttrain-parent-watch", daemon=True).start()


def end_at_once() -> None:
    """When all has been closed: taking the interpreter's modules down is 0.6 s of waiting for nothing."""
    atexit.register(os._exit, 0)


def _do_nothing(number: int, frame: Any) -> None:
    """A handler, where SIG_IGN would be inherited."""


def _let_sigterm_end_forks() -> None:
    """`terminate()` is how a pool ends a process that it has forked, be it a moment ago: until then it waits."""

    def obey() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hear()

    def hear() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    os.register_at_fork(before=wait, after_in_parent=hear, after_in_child=obey)


def _die_with_the_trainer() -> bool:
    """Let Linux kill this process's group when the trainer's end of the pipe between them closes; False elsewhere.

    It need not run for that: an env may hold the interpreter in a long call, the process may be stopped, or have ended
    and left others behind. PR_SET_PDEATHSIG would not do: it tells of the end of the thread that started it.
    """
    parent = parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return False
    import fcntl

    pipe = parent.sentinel
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, 10, signal.SIGKILL)  # F_SETSIG, which Python does not name
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    if wait([pipe], 0):  # it ended before
        os._exit(1)
    return True


def _end_with_the_trainer() -> None:
    """Wait for the end of the trainer's process, in a thread that costs nothing: a worker in a long step ends too."""
    parent = parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
