"""How busy the machine was: CPU share and memory of the process with its children, and the GPU's share."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

from fasttrain.machine import usable_cores

Read = TypeVar("Read")


class Utilization:
    """Shares since construction or the last `reset`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cores = len(self._process.cpu_affinity()) if hasattr(self._process, "cpu_affinity") else usable_cores()
        self.reset()

    def reset(self) -> None:
        """Begin a new stretch."""
        self._cpu_s = self._cpu_seconds()
        self._since = time.perf_counter()

    def cpu_share(self) -> float | None:
        """CPU time used ÷ (wall time × cores); None for a stretch too short for the clock's 10 ms tick."""
        wall = time.perf_counter() - self._since
        return (self._cpu_seconds() - self._cpu_s) / (wall * self._cores) if wall > 0.05 else None

    def memory_bytes(self) -> int:
        """Resident memory of the process and its children."""
        return int(sum(self._over_family(lambda process: process.memory_info().rss)))

    def usage(self) -> tuple[float, int]:
        """CPU seconds so far ÷ cores, and resident memory, children included; 0.8 ms, and 60 µs more per child."""
        both = self._over_family(lambda process: (sum(process.cpu_times()[:2]), process.memory_info().rss))
        return sum(cpu_s for cpu_s, _ in both) / self._cores, sum(size for _, size in both)

    def gpu_share(self) -> float | None:
        """Utilisation of the first CUDA device, 0..1; None without one or without NVIDIA's library."""
        import torch

        if not torch.cuda.is_available():
            return None
        try:
            return float(torch.cuda.utilization()) / 100
        except (ModuleNotFoundError, RuntimeError):
            return None

    def _cpu_seconds(self) -> float:
        return sum(self._over_family(lambda process: sum(process.cpu_times()[:2])))  # user, system

    def _over_family(self, read: Callable[[psutil.Process], Read]) -> list[Read]:
        values = []
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):  # a child may end between listing and asking
                values.append(read(process))
        return values
