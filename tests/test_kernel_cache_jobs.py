from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fasttrain.kernel_cache import Compiler, KernelCall, compile_all
from fasttrain.native.batch import random_unit

KERNELS = """
from fasttrain.jit import njit
@njit
def double(x):
    return 2 * x
@njit
def wrong(x):
    return x.nowhere
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of two kernels that nobody compiled yet, one of which cannot be; also for processes started here."""
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    import kernels_of_a_test as module

    yield module
    del sys.modules["kernels_of_a_test"]


def finished(compiler: Compiler) -> str:
    deadline = time.monotonic() + 120
    while not compiler.is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    failure = compiler.failure
    compiler.stop()
    return failure


def test_a_process_compiles_what_this_one_then_finds(kernels):
    call = KernelCall(kernels.double, (np.zeros(3, np.float32),))
    assert not call.is_kept
    assert finished(Compiler([call])) == ""
    assert call.is_kept
    assert kernels.double.overloads == {}
    told: list[str] = []
    compile_all([call], told.append)
    assert told == ["1 of 1: double"]
    assert sum(kernels.double.stats.cache_hits.values()) == 1


def test_what_cannot_be_compiled_is_told(kernels):
    assert "nowhere" in finished(Compiler([KernelCall(kernels.wrong, (1,))]))


def test_the_process_ends_with_the_one_that_asked(kernels, tmp_path: Path):
    """Killed outright, so that it can tell nobody: the end of the pipe is what tells."""
    code = (
        "import os, kernels_of_a_test as k, numpy as np\n"
        "from fasttrain.kernel_cache import Compiler, KernelCall\n"
        "compiler = Compiler([KernelCall(k.double, (np.zeros(3),))] * 1)\n"
        "import signal; os.kill(compiler._process.pid, signal.SIGSTOP)\n"
        "print(compiler._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    os.kill(pid, 18)  # SIGCONT: it looks up and finds nobody
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


def test_a_name_is_the_kernels():
    assert KernelCall(random_unit, (np.zeros(1),)).name == "random_unit"
