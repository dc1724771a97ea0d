"""Where and when a result was measured, and a machine that others keep busy."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Variables with which numba, PyTorch, oneDNN, MKL, numpy and JAX use no more than AVX2, and fasttrain no bf16.
NARROW = {
    "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma", "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_ICL", "FASTTRAIN_USE_AMP": "off",
}  # fmt: skip
PACKAGES = ("torch", "numpy", "numba", "stable-baselines3", "sb3-contrib", "gymnasium")


def about(arguments: Sequence[str]) -> dict[str, Any]:
    """Date, machine, versions, commit and command of a result. No path of the machine is in it."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    words = [Path(word).name if os.path.isabs(word) else word for word in arguments]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine_line(),
        "versions": versions,
        "commit": commit_of(ROOT),
        "command": shlex.join(["python", "-m", "benchmarks", *words]),
    }


def commit_of(checkout: Path) -> str:
    """As far as git knows; `-dirty` where files were changed."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def machine_line(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`2 cores, AMD EPYC, AVX2, 23 GB, x86_64, Linux`; `cores` are those that this process may use."""
    from fasttrain.machine import usable_cores

    cpu, memory, widest = platform.processor(), "", ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = f"{size / 2**30:.0f} GB"
    with contextlib.suppress(OSError):
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
        cpu = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), cpu)
        widest = "AVX-512" if " avx512f " in text else "AVX2" * (" avx2 " in text)
    widest = "instructions up to AVX2 alone" if NARROW.items() <= os.environ.items() else widest
    parts = [f"{usable_cores()} cores", cpu, widest, memory, platform.machine(), platform.system()]
    return ", ".join(dict.fromkeys(part for part in parts if part))


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """So many processes that compute all the time, at our own priority."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()
