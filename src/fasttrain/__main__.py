"""`python -m fasttrain` is the same as `fasttrain`: a Ctrl-C while the rest is loaded is no traceback."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line; returns the exit code."""
    try:
        from fasttrain.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("fasttrain: stopped before anything could be saved\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
