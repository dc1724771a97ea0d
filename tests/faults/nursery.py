"""A process that has loaded all of fasttrain and starts trainings by forking: in a second instead of ten.

Each training is a session of its own with the signal handlers of a fresh interpreter. SIGUSR1 makes it write the stacks
of all its threads into its log. The nursery ends with whoever started it and takes what still lives along.

One request a line on standard input, one answer a line on standard output, both JSON:
{"start": arguments, "folder": where, "log": file} → {"pid": number}; {"wait": pid, "timeout_s": seconds} → {"code": n}.
Beside `start` may stand `disk`, arguments of a `BadDisk` for its checkpoints, `tty`, its terminal (what it says there
is not in the log), and `memory`, bytes that seem to be all that the processes it starts can have.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
LOADED = (  # and what the first training of its kind would load, else each fork for itself
    "torch._inductor",  # what torch.use_deterministic_algorithms loads
    "scipy.linalg",
    "scipy.special",
    "numba.typed",
    "numba.experimental",
    "fasttrain.algos.dqn",
    "fasttrain.algos.grouped",
    "fasttrain.algos.ppo",
    "fasttrain.algos.step",
    "fasttrain.accelerators.eligible",
    "fasttrain_games.skullking.env",
    "fasttrain_games.skullking.game",
    "fasttrain.runs.resume",
    "fasttrain.runs.train",
)


def load() -> None:
    """Everything that takes its time, without starting a thread that a fork would lose."""
    import pytest

    for module in LOADED:
        importlib.import_module(module)
    import composed_once
    from fasttrain.cli.compose import configured

    composed_once.patch(pytest.MonkeyPatch())
    for chosen in (["algo=ppo"], ["algo=dqn"], [], ["algo=ppo", "env=skullking"]):
        configured(["+profile=speed", *chosen])
    gc.collect()
    gc.freeze()  # else every training that ends looks through all of this again: seconds, on pages that it must copy


def start(arguments: list[str], folder: str, log: str, special: dict[str, Any]) -> int:
    """Fork a training; its process id."""
    tty = special.get("tty")
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.chdir(folder)
    to_log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, name, flags in ((0, tty or os.devnull, os.O_RDWR), (1, tty or log, os.O_RDWR if tty else to_log)):
        file = os.open(name, flags, 0o644)  # the first terminal that a session opens is its own
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "disk" in special:
        put_in(special["disk"])
    if "memory" in special:
        have_only(special["memory"])
    os.environ["FASTTRAIN_ENGINE_SWITCH_AT"] = "0"  # trainings are compared
    from fasttrain.cli import main

    sys.exit(main(arguments))


def put_in(disk: dict[str, Any]) -> None:
    """Have checkpoints written through a `BadDisk`."""
    import functools

    from bad_disk import BadDisk

    from fasttrain.runs import train

    train.CheckpointFolder = functools.partial(train.CheckpointFolder, disk=BadDisk(**disk))  # type: ignore[assignment,misc]


def have_only(size_bytes: int) -> None:
    """A small machine: what its children hold is taken from that."""
    import psutil

    from fasttrain import machine

    def free_memory() -> int:
        held = 0
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                held += child.memory_info().rss
        return max(0, size_bytes - held)

    machine.free_memory = free_memory


def wait(pid: int, timeout_s: float) -> int | None:
    """Exit code, negative after a signal; None: it still lives."""
    deadline = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def serve() -> None:
    """Until standard input ends."""
    living: set[int] = set()
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = start(request.pop("start"), request.pop("folder"), request.pop("log"), request)
            living.add(pid)
            answer({"pid": pid})
        else:
            code = wait(request["wait"], request["timeout_s"])
            if code is not None:
                living.discard(request["wait"])
            answer({"code": code})
    for pid in living:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "faults")]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it
    load()
    serve()
