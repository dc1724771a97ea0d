"""Private parts of numba that the kernels and their cache stand on. pyproject.toml has a ceiling on its version because
of them: a new version is taken once these tests pass with it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numba
import numpy as np
import pytest
from numba.core import caching, cgutils, compiler, dispatcher, serialize, sigutils
from numba.np import arrayobj

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
