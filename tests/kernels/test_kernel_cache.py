"""The cache of compiled kernels: what stays warm, what never serves another's code, and what a bad disk does to it."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import numba
import numpy as np
import pytest
from numba.core import caching, cgutils, compiler, dispatcher, serialize, sigutils
from numba.np import arrayobj

from fasttrain import kernel_cache
from fasttrain_kernels.jit import njit
from fasttrain_kernels.kernel_cache import Compiler, KernelCall, compile_all

RULE = "from fasttrain_kernels.jit import njit\n@njit\ndef rule(x):\n    return 2 * x\n"
CALLER = (
    "from fasttrain_kernels.jit import njit\nfrom game.rule import rule\n@njit\ndef score(x):\n    return rule(x) + 1\n"
)
OTHER_USER = """import os, numba, fasttrain_kernels.jit
numba.njit(lambda x: x)(1)  # loads all of numba, which that user may not read
if os.geteuid() == 0:  # modes do not bind root
    os.setuid(65534)
"""


def write_package(site: Path) -> Path:
    (site / "game").mkdir(parents=True)
    (site / "game" / "__init__.py").touch()
    (site / "game" / "rule.py").write_text(RULE)
    (site / "game" / "caller.py").write_text(CALLER)
    return site


def play(site: Path, kept: Path | None, before: str = "", **variables: str) -> list[str]:
    """What `score(3)` is in a fresh process, whether its code came from the disk (1) or not (0), and what was said."""
    code = "from game.caller import score; print(score(3)); print(sum(score.stats.cache_hits.values()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    environment |= {"NUMBA_CACHE_DIR": str(kept or ""), **variables}
    command = [sys.executable, "-B", "-c", before + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [*done.stdout.split(), *done.stderr.splitlines()]


def test_clones_and_processors_share_a_folder_and_an_edited_callee_is_compiled(tmp_path: Path):
    package, kept = write_package(tmp_path / "site"), tmp_path / "kept"
    assert play(package, kept) == ["7", "0"]
    clone = write_package(tmp_path / "clone")
    os.utime(clone / "game" / "caller.py", (1, 1))
    (clone / "game" / "unrelated.py").write_text("# beside it\n")
    assert play(clone, kept) == ["7", "1"], "same contents at another place and time"
    (clone / "game" / "rule.py").write_text(RULE.replace("2 * x", "10 * x"))
    assert play(clone, kept) == ["31", "0"], "old machine code of the caller was played on"
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert play(package, kept, **plain) == ["7", "0"], "it loaded the code of another processor"
    assert [play(package, kept), play(package, kept, **plain)] == [["7", "1"]] * 2, "one put the other out"


@pytest.mark.skipif(os.name == "nt", reason="modes of folders bind nobody there")
def test_what_one_user_of_an_image_compiled_another_reads(tmp_path: Path):
    """The package is read-only for that user; without a home nothing new can be kept, which is said in one line."""
    site, home = write_package(tmp_path / "site"), tmp_path / "home"
    packages = Path(kernel_cache.__file__).parent.parent
    for package in ("fasttrain", "fasttrain_kernels"):
        shutil.copytree(packages / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {"XDG_CACHE_HOME": str(home), "HOME": str(home)}
    assert play(site, None, **settings) == ["7", "0"]
    shutil.rmtree(home)
    home.mkdir()
    for parent in tmp_path.parents[:-2] if os.geteuid() == 0 else ():
        parent.chmod(parent.stat().st_mode | 0o055)
    folders = [tmp_path, *(folder for folder in tmp_path.rglob("*") if folder.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert play(site, None, OTHER_USER, **settings) == ["7", "1"]
        (site / "game" / "rule.py").write_text(RULE.replace("2 * x", "10 * x"))
        value, hits, *said = play(site, None, OTHER_USER, **settings)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert (value, hits, len(said)) == ("31", "0", 1)
    assert str(home) in said[0]
    assert "cannot be written" in said[0]


# --- in this process


def triple(x: int) -> int:
    return 3 * x


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kernel_cache._cannot_keep.cache_clear()
    return tmp_path / "fasttrain"


def compiled(function: Callable[..., Any] = triple) -> Any:
    """A kernel as in a new process."""
    return njit(FunctionType(function.__code__, function.__globals__))


def hits(kernel: Any) -> int:
    assert kernel(5) == 15
    return sum(kernel.stats.cache_hits.values())


def test_it_says_what_need_not_be_compiled_and_code_without_checks_is_not_taken_for_code_with_them(kept, monkeypatch):
    """NUMBA_BOUNDSCHECK=1 looks for a fault: machine code of other days would hide it."""
    call = KernelCall(compiled(), (5,))
    assert not call.is_kept
    call.kernel.compile(call.signature)
    assert KernelCall(compiled(), (5,)).is_kept
    assert not KernelCall(compiled(), (0.5,)).is_kept
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert [hits(compiled()), hits(compiled())] == [0, 1]
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", None)
    assert hits(compiled()) == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a bit": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_compiled_anew_and_replaced(kept: Path, how: str):
    assert hits(compiled()) == 0
    (file,) = kept.iterdir()
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    assert [hits(compiled()), hits(compiled())] == [0, 1]
    assert list(kept.iterdir()) == [file]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, None])
def test_a_disk_that_takes_nothing_costs_one_line(kept, error, monkeypatch, capfd):
    if error is None:
        kept.write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(error, os.strerror(error))))
    assert [hits(compiled()), hits(compiled())] == [0, 0]
    (said,) = capfd.readouterr().err.splitlines()
    assert str(kept) in said
    assert error is None or list(kept.iterdir()) == [], "drafts were left"


def test_old_versions_and_drafts_of_the_dead_go(kept: Path):
    def version(number: int) -> Any:
        code = triple.__code__
        return njit(FunctionType(code.replace(co_consts=(None, 3, number)), triple.__globals__))

    kept.mkdir()
    for number in range(5):
        assert hits(version(number)) == 0
        (newest,) = (file for file in kept.glob("*.nbc") if file.stat().st_mtime > 1000)
        os.utime(newest, (number, number))
        if number == 2:
            name = newest.name.split(".nbc")[0].rpartition(".")[0]
            drafts = [newest.with_name(f"{name}.{at}.tmp") for at in range(2)]
            for draft in drafts:
                draft.touch()
            os.utime(drafts[0], (0, 0))
    assert {*kept.glob("*.tmp")} == {drafts[1]}, "of two drafts that of one who may still be writing stays"
    assert len(list(kept.glob("*.nbc"))) == kernel_cache.KEPT
    assert hits(version(4)) == 1


# --- compiled by a process of its own


KERNELS = """
from fasttrain_kernels.jit import njit
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


def test_a_process_compiles_what_this_one_then_finds_and_tells_what_cannot_be(kernels):
    call = KernelCall(kernels.double, (np.zeros(3, np.float32),))
    assert not call.is_kept
    assert "nowhere" in finished(Compiler([call, KernelCall(kernels.wrong, (1,))]))
    assert call.is_kept
    assert kernels.double.overloads == {}
    told: list[str] = []
    compile_all([call], told.append)
    assert told == ["1 of 1: double"]
    assert sum(kernels.double.stats.cache_hits.values()) == 1


def test_the_process_ends_with_the_one_that_asked(kernels, tmp_path: Path):
    """Killed outright, so that it can tell nobody: the end of the pipe is what tells."""
    code = (
        "import os, kernels_of_a_test as k, numpy as np\n"
        "from fasttrain_kernels.kernel_cache import Compiler, KernelCall\n"
        "compiler = Compiler([KernelCall(k.double, (np.zeros(3),))] * 1)\n"
        "import psutil, signal; (child,) = psutil.Process().children(); child.suspend()\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    os.kill(pid, 18)  # SIGCONT: it looks up and finds nobody
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


# Private parts of numba that the kernels and their cache stand on. pyproject.toml has a ceiling on its version because
# of them: a new version is taken once these tests pass with it.
ARGUMENTS = {
    compiler.CompileResult._rebuild: "target_context, libdata, fndesc, env, signature, objectmode, lifted, typeann, "
    "reload_init, referenced_envs",
    compiler.CompileResult._reduce: "self",
    caching.NullCache.load_overload: "self, sig, target_context",
    caching.NullCache.save_overload: "self, sig, cres",
    dispatcher.Dispatcher.get_call_template: "self, args, kws",
    serialize.dumps: "obj",
    sigutils.normalize_signature: "sig",
    cgutils.alloca_once: "builder, ty, size, name, zfill",
    cgutils.alloca_once_value: "builder, value, name, zfill",
    cgutils.gep_inbounds: "builder, ptr, inds, kws",
    cgutils.pointer_add: "builder, ptr, offset, return_type",
    cgutils.unpack_tuple: "builder, tup, count",
    cgutils.for_range_slice: "builder, start, stop, step, intp, inc",
    cgutils.get_or_insert_function: "module, fnty, name",
    arrayobj.populate_array: "array, data, shape, strides, itemsize, meminfo, parent",
}


def test_private_functions_take_what_they_took():
    found = {function: ", ".join(inspect.signature(function).parameters) for function in ARGUMENTS}
    assert found == ARGUMENTS


def test_code_without_reference_counts_can_make_no_array():
    with pytest.raises(Exception, match="NRT"):
        numba.njit(_nrt=False)(lambda n: np.zeros(n))(3)


WITHOUT_PRIVATE_PARTS = """
import sys
import numba, numba.misc.appdirs
del numba.core.caching.NullCache, numba.misc.appdirs.AppDirs
sys.modules["fasttrain_kernels.simd"] = None  # which stands on most of them
import fasttrain
for kind, options in ((fasttrain.PPO, {"n_steps": 16, "batch_size": 8}), (fasttrain.DQN, {"learning_starts": 8})):
    model = kind("MlpPolicy", "CartPole-v1", device="cpu", engine="kernels", **options).learn(16)
    print(model.engine.kind, model.engine.unsupported_reason)
"""


def test_another_numba_costs_the_kernels_and_nothing_else():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PRIVATE_PARTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch compiled kernels cannot be imported with this version of numba (") == 2
