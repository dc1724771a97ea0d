"""First thing that runs in a worker process. Imports nothing heavy: number libraries read their settings on import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    # Ctrl-C and SIGTERM reach every process of the group: the trainer decides, and closes its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_trainer, name="fasttrain-parent-watch", daemon=True).start()
    if "numpy" not in sys.modules:
        os.environ.update(ONE_THREAD)
    if "torch" in sys.modules:  # the user's main script imports it
        sys.modules["torch"].set_num_threads(1)
    from fasttrain.vec.worker import Worker

    Worker(*arguments).serve()


def _end_with_the_trainer() -> None:
    """Wait for the end of the trainer's process, in a thread that costs nothing: a worker in a long step ends too."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
