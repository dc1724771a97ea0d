"""Cold, shared, damaged and unwritable caches of compiled kernels: python3 cold_cache.py COUNT SEED FOLDER

A process that has loaded numba forks those that compile, so that a try costs half a second and not five. Whatever the
cache is like, all must compute the same; what it says goes to its caller, line by line, and then the figures as JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba

from fasttrain.jit import njit

Result = dict[str, Any]
VALUES = [32, 5.75]  # of `top`
KERNELS = 6  # machine codes that are kept: three functions for two types
NOBODY = 65534


def compute() -> tuple[list[float], int]:
    """Three kernels that call each other, for two types each; what came of them and how many were not compiled."""

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
    return values, hits


class Child(NamedTuple):
    """A process that computes; `said` is what it wrote to stderr."""

    pid: int
    out: Path

    def end(self) -> Result:
        """Wait for it; what came of it, `{}` if it was killed."""
        _, status = os.waitpid(self.pid, 0)
        said = self.out.with_suffix(".err").read_text()
        found = json.loads(self.out.read_text() or "{}") if self.out.exists() else {}
        return {"code": os.waitstatus_to_exitcode(status), "said": said, **found}


def start(cache: Path, first: Callable[[], None] = lambda: None) -> Child:
    """Fork one; `first` spoils its world."""
    out = cache.parent / f"child{time.monotonic_ns()}.json"
    pid = os.fork()
    if pid:
        return Child(pid, out)
    try:
        os.dup2(os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
        told = out.open("w")
        settings: Any = numba.config
        settings.CACHE_DIR = str(cache)
        first()
        values, hits = compute()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        json.dump({"values": values, "hits": hits}, told)
        told.close()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


# --- what is done to a cache


def at_once(cache: Path, rng: random.Random) -> list[Result]:
    """Two to four on an empty one, each up to a whole compilation later than the one before."""
    children = [start(cache)]
    for _ in range(rng.randint(1, 3)):
        time.sleep(rng.uniform(0, 0.2))
        children.append(start(cache))
    return [child.end() for child in children]


def killed(cache: Path, rng: random.Random) -> list[Result]:
    """Compiling, or writing."""
    one = start(cache)
    time.sleep(rng.uniform(0, 0.5))
    os.kill(one.pid, signal.SIGKILL)
    one.end()
    return []


def damaged(cache: Path, rng: random.Random) -> list[Result]:
    """Some of the files of a full one: cut, emptied, flipped, longer, or with another's contents."""
    whole = start(cache).end()
    files = sorted(cache.rglob("*.nbc"))
    for file in rng.sample(files, rng.randint(1, len(files))):
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        how = rng.choice(("cut", "empty", "bit", "longer", "zeros"))
        if how == "cut":
            del data[at:]
        elif how == "empty":
            data.clear()
        elif how == "bit":
            data[at] ^= 1 << rng.randrange(8)
        elif how == "longer":
            data += rng.randbytes(at)
        else:
            data[at:] = bytes(len(data) - at)
        file.write_bytes(data)
    return [whole]


def unwritable(cache: Path, rng: random.Random) -> list[Result]:
    """Read-only for this user, a file in its place, or full after some bytes."""
    how = rng.choice(("read-only", "a file", "full"))
    if how == "a file":
        cache.write_text("")
        return [start(cache).end()]
    cache.mkdir()
    if how == "full":
        bytes_left = rng.randrange(500, 5000)  # enough for what is said
        return [start(cache, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, -1))).end()]
    cache.chmod(0o555)
    return [start(cache, lambda: os.setuid(NOBODY) if os.geteuid() == 0 else None).end()]


KINDS = {"at_once": at_once, "killed": killed, "damaged": damaged, "unwritable": unwritable}


def cold_cache(count: int, seed: int, folder: Path, say: Callable[[str], None]) -> Result:
    """Each kind in turn. After it one process more computes, and then another, which must find everything compiled."""
    result: Result = {"cases": 0, "right": 0, "warm": 0, "said_once": 0, "kinds": {}, "bad": []}
    rng = random.Random(seed)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        place = folder / str(number)
        place.mkdir(parents=True)
        cache = place / "cache"
        ended = KINDS[kind](cache, rng)
        bad = kind == "unwritable"
        if bad:
            once = len(ended[0]["said"].splitlines()) == 1 and "cannot be written" in ended[0]["said"]
            result["said_once"] += once
        else:
            ended += [start(cache).end(), start(cache).end()]
            warm = ended[-1].get("hits") == KERNELS
            result["warm"] += warm
        right = all((one["code"], one.get("values")) == (0, VALUES) and (bad or not one["said"]) for one in ended)
        result["right"] += right
        result["cases"] += 1
        result["kinds"][kind] = result["kinds"].get(kind, 0) + 1
        if not right or not (once if bad else warm):
            result["bad"].append(f"{kind}, case {number}: {ended}")
        if number % 20 == 19:
            say(f"{number + 1} of {count} caches")
    return result


def main() -> None:
    count, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    numba.njit(lambda x: x)(1)  # loads all of numba
    found = cold_cache(count, seed, folder, _tell)
    _tell(json.dumps(found))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
