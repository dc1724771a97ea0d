"""The command `fasttrain`, or `python -m fasttrain`. A Ctrl-C while modules are imported prints no traceback."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress

from fasttrain import put_behind_python
from fasttrain.terminal import let_output_end

THREADS_S = 5.0  # seconds that an env's threads get to end after the command is done


def main() -> int:
    """The command line; returns the exit code."""
    gc.disable()  # saves a second of imports; commands.implementation enables it afterwards
    with suppress(OSError):  # the working directory was deleted; the command reports this later
        if sys.path[0] in ("", os.getcwd()):  # started by `python -m`
            put_behind_python(os.getcwd())
    let_output_end()
    ended: list[int] = []
    atexit.register(_leave, ended)  # registered first, so called last
    try:
        from fasttrain.cli import main as run

        ended.append(run())
    except KeyboardInterrupt:
        sys.stderr.write("fasttrain: stopped before anything could be saved\n")
        return 130
    except ImportError as error:
        way_out = "fasttrain needs this: install it again, or rename a file here that has a package's name"
        sys.stderr.write(f"fasttrain: error: {' '.join(str(error).split())}: {way_out}\n")
        return 2
    leaving = threading.Event()
    atexit.register(leaving.set)
    threading.Thread(target=_leave_threads, args=(ended, leaving), daemon=True).start()
    return ended[0]


def _leave_threads(ended: list[int], leaving: threading.Event) -> None:
    """End the process if an env's threads do not end: the interpreter waits for them before it calls `_leave`."""
    threading.main_thread().join()
    if not leaving.wait(THREADS_S):
        _leave(ended)


def _leave(ended: list[int]) -> None:
    """End the process when everything is closed and written. Deleting 400,000 objects one by one would take 1.5 s, and
    ale-py's library would print pages about leaks."""
    if ended:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # nobody reads the stream any more, or it is closed
                stream.flush()
        os._exit(ended[0])


if __name__ == "__main__":
    sys.exit(main())
