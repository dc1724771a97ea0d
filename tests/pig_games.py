"""Games with the reference engine (examples/engines), for tests of what plays with engines."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fasttrain_engines.settings import DaemonsConfig, Timeouts

ENGINES = Path(__file__).resolve().parent.parent / "examples" / "engines"
sys.path.append(str(ENGINES))  # workers of the tests find the examples there too
Pig, PigByRequest = (getattr(importlib.import_module("pig"), name) for name in ("Pig", "PigByRequest"))
Rules = importlib.import_module("pig_engine").Pig  # the same game without an engine
COMMAND = (sys.executable, "-S", str(ENGINES / "pig_engine.py"))  # without site-packages: it starts faster
STRICT = (sys.executable, "-S", str(Path(__file__).with_name("strict_engine.py")))
WAIT_S = 20.0  # until what must come counts as missing


def settings(*arguments: Any, **changed: Any) -> DaemonsConfig:
    """Of the reference engine, started with these arguments."""
    where = () if {"--socket", "--stdio"} & {*map(str, arguments)} else ("--port", "{port}")
    given: dict[str, Any] = {
        "command": (*COMMAND, *where, *map(str, arguments)), "ports": ports(), "count": 2,
        "timeouts_s": Timeouts(start=15.0, request=10.0),
    }  # fmt: skip
    return DaemonsConfig(**{**given, **changed})


def overrides(*arguments: Any) -> tuple[str, ...]:
    """The same game for a command line; its workers find it by `PYTHONPATH` or sys.path."""
    where = () if "--stdio" in arguments else ("--port", "{port}")
    command = ", ".join(f"'{part}'" for part in (*COMMAND, *where, *map(str, arguments)))
    return ("env.backend=daemons", "env.entry_point=pig:Pig", f"daemons.command=[{command}]",
            f"daemons.ports={ports()}", "daemons.count=2")  # fmt: skip


def ports() -> str:
    """A range of each test process's own: several may look for ports at once, of other runs of the tests too."""
    first = 20000 + 120 * (os.getpid() % 100)
    return f"{first}-{first + 119}"


def until(true: Callable[[], Any], within_s: float = WAIT_S) -> bool:
    """Whether it came true."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All processes below one that are no zombies, nor multiprocessing's own."""
    below = psutil.Process(pid).children(recursive=True)
    own = ("resource_tracker", "forkserver")
    return [one for one in below if (words := said(one)) and not any(name in words for name in own)]


def engines(pid: int | None = None) -> list[psutil.Process]:
    """Those that are reference engines."""
    return [one for one in descendants(pid) if "pig_engine.py" in said(one)]


def said(process: psutil.Process) -> str:
    """Its command line; empty for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def prudent(observations: Any, masks: Any) -> Any:
    """The policy that holds at 20 points of the turn, or where that wins."""
    turn, banked = 50 * observations[:, 2], 50 * observations[:, 3]
    holds = (turn > 19.5) | ((banked > 49.5) & (turn > 0.5))
    return ((holds & masks[:, 1]) | ~masks[:, 0]).astype(int)


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or put in."""
    data = bytearray(frame)
    for _ in range(rng.randrange(1, 5)):
        place, kind = rng.randrange(len(data) + 1), rng.randrange(4)
        if kind == 0 and place < len(data):
            data[place] ^= rng.randrange(1, 256)
        elif kind == 1:
            del data[place : place + rng.randrange(1, 9)]
        elif kind == 2:
            data[place:place] = data[place : place + rng.randrange(1, 20)]
        else:
            data[place:place] = rng.randbytes(rng.randrange(1, 5))
    return bytes(data)
