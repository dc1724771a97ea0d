"""`python -m fasttrain` is the same as `fasttrain`: a Ctrl-C while the rest is loaded is no traceback."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress


def main() -> int:
    """The command line; returns the exit code."""
    ended: list[int] = []
    atexit.register(_leave, ended)  # the first that is registered is the last that is called
    try:
        from fasttrain.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("fasttrain: stopped before anything could be saved\n")
        return 130
    ended.append(run())
    return ended[0]


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
