"""What a full disk or a folder without permission does to a run: a warning once, another try later, a list at the end.

Training is worth more than its notes: whatever of a run's files cannot be written, training goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FAILED_WRITES = (OSError, RuntimeError)  # torch's own writer raises the latter


class Saving:
    """Knows which files of a run are not there as they should be.

    Args:
        say: takes a line for the user.

    Attributes:
        failed: name of a file → why its last writing failed; one that worked since is not in it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.failed: dict[str, str] = {}
        self._say = say

    def missing(self) -> list[str]:
        """`a.csv, b.zip (No space left on device)`: names with the same reason together."""
        reasons = dict.fromkeys(self.failed.values())
        named = {why: [name for name, other in self.failed.items() if other == why] for why in reasons}
        return [f"{', '.join(names)} ({why})" for why, names in named.items()]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Writing of `name` inside; a failure ends the block and nothing else."""
        try:
            yield
        except FAILED_WRITES as error:
            if name not in self.failed:
                self._say(f"warning: {name} could not be written ({error}); the run goes on")
            self.failed[name] = str(error)
        else:
            self.failed.pop(name, None)


SAVING = ".saving-"
DRAFTS = ("*.json.tmp", "evaluations.csv.tmp", "report.html.tmp")  # what is written whole or not at all, half written


def clean(folder: Path) -> None:
    """Remove what a process that was killed left half written in a run's folder; nobody else may be at work there."""
    for left in list(folder.rglob(f"{SAVING}*")):
        shutil.rmtree(left, ignore_errors=True)
    for left in [draft for name in DRAFTS for draft in folder.glob(name)]:
        with suppress(OSError):
            left.unlink()


@contextmanager
def into_place(file: Path) -> Iterator[Path]:
    """A path of the same name in a folder of its own; what lies in that folder at the end comes to where `file` is.

    A model and what belongs to it replace older ones when they are written whole, not before.
    """
    folder = file.parent / f"{SAVING}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder / file.name
        for part in sorted(folder.iterdir()):
            os.replace(part, file.parent / part.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
