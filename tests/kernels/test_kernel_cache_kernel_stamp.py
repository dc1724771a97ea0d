"""What a kernel's stamp must see, and what it must not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

from fasttrain_kernels.kernel_cache import digest_of

NUMBERS = """
import numpy as np
BASE = 3
TABLE = np.arange(4)
"""
RULE = """
from typing import NamedTuple
from fasttrain_kernels.jit import njit, njit_inline
from stamped.numbers import BASE
class Pair(NamedTuple):
    left: int
    right: int
@njit
def rule(x):
    return 2 * x + BASE
@njit
def unused(x):
    return x
@njit_inline
def inlined(x):
    return x - 1
def factory(step):
    @njit
    def made(x):
        return x + step
    return made
made = factory(5)
"""
INTRINSIC = """
from fasttrain_kernels.jit import intrinsic
class Code:
    def emit(self, builder, value):
        return builder.add(value, value)
@intrinsic
def twice(typing_context, x):
    def code(context, builder, signature, arguments):
        return Code().emit(builder, arguments[0])
    return x(x), code
"""
CALLER = """
import math
from fasttrain_kernels.jit import njit
from stamped import rules, numbers
from stamped.machine import twice
from stamped.rules import Pair, inlined, made, rule
@njit
def score(x):
    pair = Pair(x, twice(x))
    return rule(pair.left) + inlined(pair.right) + made(x) + numbers.TABLE[1] + math.sqrt(4.0)
"""
SOURCES = {"numbers": NUMBERS, "rules": RULE, "machine": INTRINSIC, "caller": CALLER}


@pytest.fixture
def stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """The digest of `score` after replacements (file, what, by what)."""
    for name in ("stamped", *(f"stamped.{name}" for name in SOURCES)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    count = 0

    def digest(*edits: tuple[str, str, str], kernel: str = "score") -> bytes:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        for name, source in SOURCES.items():
            for file, what, by in edits:
                assert file != name or what in source
                source = source.replace(what, by) if file == name else source
            path = folder / f"{name}.py"
            path.write_text(source)
            module = sys.modules[f"stamped.{name}"] = ModuleType(f"stamped.{name}")
            module.__file__ = str(path)
            exec(compile(source, path, "exec"), vars(module))
            setattr(sys.modules["stamped"], name, module)
        return digest_of(vars(sys.modules["stamped.caller"])[kernel])

    return digest


@pytest.mark.parametrize(
    "edit",
    [("caller", "inlined(pair.right)", "inlined(pair.left)"), ("rules", "x - 1", "x - 2"),
     ("rules", "x + step", "x - step"), ("rules", "factory(5)", "factory(6)"),
     ("rules", "@njit\ndef rule", "@njit_inline\ndef rule"),
     ("rules", "left: int\n    right: int", "right: int\n    left: int"), ("numbers", "BASE = 3", "BASE = 3.0"),
     ("numbers", "arange(4)", "arange(4)[::-1]"), ("numbers", "arange(4)", "arange(4, dtype=np.int32)"),
     ("machine", "Code().emit(builder, arguments[0])", "arguments[0]"), ("machine", "builder.add", "builder.mul"),
     ("caller", "math.sqrt", "math.exp")],
    ids=lambda edit: f"{edit[0]}: {edit[2]}"[:40],
)  # fmt: skip
def test_an_edit_of_anything_that_is_compiled_changes_it(stamp: Callable[..., bytes], edit: tuple[str, str, str]):
    assert stamp(edit) != stamp()


def test_other_edits_and_another_place_do_not(stamp: Callable[..., bytes]):
    """Every digest is that of sources in another folder, written at another time."""
    assert stamp() == stamp(
        ("rules", "return x\n", "return x * 99\n"),  # of a kernel that is not called
        ("numbers", "BASE", "# a comment, which moves all lines\nOTHER = 7\nBASE"),
    )
    assert stamp(kernel="made") == stamp(("numbers", "BASE = 3", "BASE = 4"), kernel="made")


def test_what_looks_alike_differs_and_a_cycle_ends():
    kinds: Any = numba.types
    pairs: list[tuple[Any, Any]] = [
        (0.0, -0.0), (1, True), (1, 1.0), ("1", 1), ((1, 2), (2, 1)), ((1, (2,)), ((1, 2),)), ({1: 2}, {2: 1}),
        (np.array(0.0), np.array(-0.0)), (numba.int64, numba.int32), (numba.float32[:, ::1], numba.float32[:, :]),
        tuple(kinds.NamedUniTuple(numba.int64, 2, namedtuple("Two", names)) for names in ("a b", "b a")),  # type: ignore[misc]
    ]  # fmt: skip
    for one, other in pairs:
        assert digest_of(one) != digest_of(other), (one, other)

    @numba.njit
    def countdown(x: int) -> Any:
        return countdown(x - 1) if x else 0

    assert digest_of(countdown) == digest_of(countdown)


def test_it_is_the_same_under_another_hash_seed_and_from_source_or_bytecode(tmp_path: Path):
    package = tmp_path / "stamped"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, source in SOURCES.items():
        text = source.replace("return rule", "assert x in {1, 'a', (2, 'b')}; return rule")
        (package / f"{name}.py").write_text(text)
    code = "from stamped.caller import score; from fasttrain_kernels import kernel_cache\n"
    code += "print(kernel_cache.digest_of(score).hex())"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert list((package / "__pycache__").glob("caller.*.pyc")), "the second process read the source, too"
    assert said[0] == said[1]
