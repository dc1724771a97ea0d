"""What becomes of a child that an env forks when it comes back into the worker that it is a copy of: it ends.

Two processes that read the same commands and write the same slots would be wrong data. The child of a pool, or one that
just lives on, is the env's own business; it has neither the worker's pipes (`Worker.disown`) nor its shared memory.
"""

from __future__ import annotations

import os


class ForkGuard:
    """Of one worker. `forked` is set in every child that an env forks from it."""

    forked = False

    def check(self, error: BaseException | None = None) -> None:
        """Return in the worker, end in a fork of it; with the exit code of a `sys.exit` that would have ended it."""
        if self.forked:
            code = error.code if isinstance(error, SystemExit) else 1
            os._exit(code if isinstance(code, int) else int(code is not None))
