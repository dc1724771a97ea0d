"""Processes that compile the same kernels at once, one of them killed: python3 cold_cache.py COUNT FOLDER

A process that has loaded numba forks them. What the last two did not find compiled or computed wrongly is printed.
Damaged and unwritable caches: tests/kernels/test_kernel_cache.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numba

from fasttrain_kernels.jit import njit

WHOLE = [[32, 5.75], 6]  # values of `top`, and the machine codes that are kept: three functions for two types


def computed(cache: Path) -> list[Any]:
    """Three kernels that call each other, for two types each; what came of them and how many were not compiled."""
    settings: Any = numba.config
    settings.CACHE_DIR = str(cache)

    @njit
    def base(x: Any) -> Any:
        return 3 * x

    @njit
    def middle(x: Any) -> Any:
        return base(x) + 5

    @njit
    def top(x: Any) -> Any:
        return middle(x) - base(x) * (1 - x)

    values = [top(3), top(0.5)]
    hits = 0
    for kernel in (base, middle, top):
        kernel(3), kernel(0.5)
        hits += sum(kernel.stats.cache_hits.values())  # type: ignore[attr-defined]
    return [values, hits]


def start(cache: Path, out: Path) -> int:
    """Fork one; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        out.write_text(json.dumps(computed(cache)))
    finally:
        os._exit(0)


def main(count: int, folder: Path) -> None:
    numba.njit(lambda x: x)(1)  # loads all of numba
    rng = random.Random(1)
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        pids = []
        for at in range(3):  # each up to a whole compilation later than the one before
            pids.append(start(place / "cache", place / f"{at}.json"))
            time.sleep(rng.uniform(0, 0.2))
        os.kill(pids[rng.randrange(3)], signal.SIGKILL)
        for at in (3, 4):
            for pid in pids:
                os.waitpid(pid, 0)
            pids = [start(place / "cache", place / f"{at}.json")]
        os.waitpid(pids[0], 0)
        found = [json.loads(file.read_text()) for file in sorted(place.glob("*.json"))]
        if len(found) < 4 or found[-1] != WHOLE or any(values != WHOLE[0] for values, _ in found):
            sys.stdout.write(f"{number}: {found}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
