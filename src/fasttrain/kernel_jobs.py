"""Kernels compiled before they are called: here, or by a process of its own beside training.

A call says for which types; nothing runs. The other process loads numba and the kernels' modules, no torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numba

_START = "from fasttrain.kernel_jobs import compile_asked; compile_asked()"


class KernelCall(NamedTuple):
    """A kernel and arguments of the types that it will be called with."""

    kernel: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.py_func.__name__)

    @property
    def signature(self) -> tuple[Any, ...]:
        kind_of: Any = numba.typeof
        return tuple(kind_of(argument) for argument in self.arguments)

    @property
    def is_kept(self) -> bool:
        """Whether its machine code is on disk or in this process."""
        signature = self.signature
        return signature in self.kernel.overloads or self.kernel._cache.holds(signature)


def compile_all(calls: Sequence[KernelCall], now: Callable[[str], None] = lambda _: None) -> None:
    """Compile, or load from disk, what is called; `now` hears `2 of 3: train_epoch`."""
    for number, call in enumerate(calls, start=1):
        now(f"{number} of {len(calls)}: {call.name}")
        call.kernel.compile(call.signature)


class Compiler:
    """A process that compiles what is called into the cache. It ends with this one, whatever ends that.

    Not a nice one: a million steps of CartPole beside two busy cores took 84 s so, and 133 s with niceness 5, since
    compiling then took 85 s instead of 29; on idle cores both took the same.
    """

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        asked = [(call.kernel.py_func.__module__, call.name, call.signature) for call in calls]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            self._pipe.write(pickle.dumps(asked))
            self._pipe.flush()  # and it stays open: its end tells the process that nobody waits any more
        except OSError:
            pass  # it died at once: `failure` says of what

    @property
    def _pipe(self) -> Any:
        return self._process.stdin

    def is_done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._process.poll() is not None

    @property
    def failure(self) -> str:
        """Of a process that is done: what it ended with; empty if all is compiled."""
        if self._process.returncode == 0 or self._process.stderr is None:
            return ""
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"ended with exit code {self._process.returncode}"

    def stop(self) -> None:
        """End it, if it is still at work."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()


def compile_asked() -> None:
    """What the process of `Compiler` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too: its trainer decides
    asked = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    try:
        for module, name, signature in asked:
            getattr(import_module(module), name).compile(signature)
    except Exception as error:  # whatever it is, one line tells the trainer
        sys.exit(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _end_with_trainer() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held when Python ends
        pass
    os._exit(0)
