"""`python -m fasttrain` is the same as `fasttrain`: a Ctrl-C while the rest is loaded is no traceback."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress

from fasttrain import put_behind_python
from fasttrain.terminal import let_output_end

THREADS_S = 5.0  # for threads of an env's to end, once everything is done


def main() -> int:
    """The command line; returns the exit code."""
    gc.disable()  # a second less; commands.implementation enables it when all is loaded
    with suppress(OSError):  # a working directory that is gone, which the command tells
        if sys.path[0] in ("", os.getcwd()):  # `python -m`
            put_behind_python(os.getcwd())
    let_output_end()
    ended: list[int] = []
    atexit.register(_leave, ended)  # the first that is registered is the last that is called
    try:
        from fasttrain.cli import main as run

        ended.append(run())
    except KeyboardInterrupt:
        sys.stderr.write("fasttrain: stopped before anything could be saved\n")
        return 130
    except ImportError as error:
        way_out = "fasttrain needs it: install fasttrain again, or rename a file here that has a package's name"
        sys.stderr.write(f"fasttrain: error: {' '.join(str(error).split())}: {way_out}\n")
        return 2
    leaving = threading.Event()
    atexit.register(leaving.set)
    threading.Thread(target=_leave_threads, args=(ended, leaving), daemon=True).start()
    return ended[0]


def _leave_threads(ended: list[int], leaving: threading.Event) -> None:
    """The interpreter waits for every thread that is no daemon before it calls what is registered; an env's may never
    end."""
    threading.main_thread().join()
    if not leaving.wait(THREADS_S):
        _leave(ended)


def _leave(ended: list[int]) -> None:
    """Everything is closed and written. Taking 400,000 objects down one by one would cost 1.5 s of CPU, and libraries
    such as ale-py's would print pages about what they find leaked then."""
    if ended:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # nobody reads any more, or it is closed
                stream.flush()
        os._exit(ended[0])


if __name__ == "__main__":
    sys.exit(main())
