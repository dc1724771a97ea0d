"""First thing that runs in a process that a trainer starts. Imports nothing heavy.

Number libraries read their settings on import.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

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


def start(*arguments: Any) -> None:
    """Run a worker until it is told to close or the trainer is gone."""
    _belong_to_the_trainer()
    os.environ.update(ONE_THREAD)  # a fork server that was there before us has other values
    if "torch" in sys.modules:  # the user's main script imports it
        sys.modules["torch"].set_num_threads(1)
    from fasttrain.vec.worker import Worker

    Worker(*arguments).serve()


def start_function(place: str, *arguments: Any) -> None:
    """Call `module:function`, imported here: that takes seconds, within which the trainer may be killed."""
    _belong_to_the_trainer()
    module, _, name = place.partition(":")
    getattr(import_module(module), name)(*arguments)


def _belong_to_the_trainer() -> None:
    """Signals to all of the group are the trainer's business, and its end is this process's end, whatever it does."""
    # Ctrl-C and SIGTERM reach every process of the group: the trainer decides, and closes its workers. A program that
    # an env starts inherits what is ignored, but not a handler: its `terminate()` must work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)
    _die_with_the_trainer()
    threading.Thread(target=_end_with_the_trainer, name="fasttrain-parent-watch", daemon=True).start()


def _do_nothing(number: int, frame: Any) -> None:
    """A handler, where SIG_IGN would be inherited."""


def _die_with_the_trainer() -> None:
    """Let Linux kill this process when the trainer's end of the pipe between them closes.

    The thread below never runs while an env holds the interpreter in a long call, or while the process is stopped.
    PR_SET_PDEATHSIG would not do: the parent in that sense is the fork server, which lives as long as its children.
    """
    parent = parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    import fcntl

    pipe = parent.sentinel
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, 10, signal.SIGKILL)  # F_SETSIG, which Python does not name
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _end_with_the_trainer() -> None:
    """Wait for the end of the trainer's process, in a thread that costs nothing: a worker in a long step ends too."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
