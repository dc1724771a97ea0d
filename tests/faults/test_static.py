"""What no source of fasttrain does with a file: unpickle it, or run text as code. The exceptions are listed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasttrain.spec.config import ALGO_CLASSES, Config
from fasttrain.spec.setting import declared, settings_of

SOURCE = Path(__file__).resolve().parents[2] / "src"  # of all packages; files of fasttrain are named from there
# (file, call) → why it is no hole.
ALLOWED = {
    ("runs/models.py", ".load of a model"): "--trust: SB3's own way, asked for by name",
    ("runs/envs.py", "VecNormalize.load"): "--trust: SB3's own way, asked for by name",
    ("fasttrain_vec/worker.py", "pickle.loads"): "from the trainer, over a pipe that the worker inherited",
    ("fasttrain_vec/worker.py", "cloudpickle.loads"): "from the trainer, over a pipe that the worker inherited",
    ("fasttrain_vec/process.py", "pickle.loads"): "from a worker of ours, over its pipe",
    ("fasttrain_vec/calls.py", "pickle.loads"): "from a worker of ours, over its pipe",
    ("fasttrain_engines/games_worker.py", "pickle.loads"): "between trainer and worker, over a pipe that it inherited",
    (
        "fasttrain_kernels/kernel_cache.py",
        "pickle.loads",
    ): "machine code of ours, in a folder that is the user's (SECURITY.md)",
    ("fasttrain_kernels/kernel_cache.py", "pickle.load"): "from the trainer, over a pipe that the process inherited",
    ("fasttrain_integrations/zoo/__init__.py", "yaml.load"): "by a safe loader of ours, which knows tuples besides",
    ("envs/causes.py", "pickle.load"): "from the checkup, over a pipe that the process inherited",
    ("envs/findings.py", "pickle.loads"): "what was pickled in the same line, to see whether it can be",
}
CODE = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load")
PICKLES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
LOADERS = ("load", "loads", "Unpickler", "load_from_pkl", "read_pickle")


def findings(name: str, source: str) -> Iterator[tuple[str, str, int]]:
    """(file, call, line) of everything that executes what it reads."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        module, _, attribute = called.rpartition(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        executes = (
            called in CODE
            or (module in PICKLES and attribute in LOADERS)
            or (called == "torch.load" and given.get("weights_only") != "True")
            or (called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False")
            or called == "VecNormalize.load"
            or given.get("shell") == "True"
        )
        if executes:
            yield name, called, node.lineno
        elif attribute == "load" and "device" in given:
            yield name, ".load of a model", node.lineno


def test_nothing_executes_what_it_reads_but_the_exceptions():
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix().removeprefix("fasttrain/")
        found |= {each[:2] for each in findings(name, path.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED)


def test_the_rule_bites():
    for source in (
        "pickle.load(file)", "cloudpickle.loads(x)", "torch.load(file)", "torch.load(file, weights_only=False)",
        "np.load(file)", "np.load(file, allow_pickle=True)", "eval(text)", "exec(text)", "PPO.load(file, device='cpu')",
        "VecNormalize.load(file, env)", "subprocess.run(text, shell=True)", "yaml.load(text)", "os.system(text)",
    ):  # fmt: skip
        assert list(findings("a.py", source)), source
    good = "torch.load(f, weights_only=True), np.load(f, allow_pickle=False), json.loads(x), yaml.safe_load(x)"
    assert not list(findings("a.py", good))


def names_code(name: str, one: Any) -> bool:
    """Whether a setting names code, holds free values in which `module:Name` is read, or is a command."""
    hint, told = str(one.type), declared(one).text
    return "Named" in hint or "Any]" in hint or "int | float | str, ..." in hint or "module:" in told


def test_the_page_about_security_names_each_setting_that_imports_or_starts_code():
    declarations = [*settings_of(Config), *((f"algo.{key}", one) for kind in ALGO_CLASSES.values()
                                            for key, one in settings_of(kind))]  # fmt: skip
    keys = {name for name, one in declarations if names_code(name, one)}
    assert {"env.id", "opponent", "algo.policy_kwargs", "eval.env_kwargs", "daemons.command", "loggers"} <= keys
    page = (SOURCE.parent / "SECURITY.md").read_text(encoding="utf-8")
    told = page.partition("| setting | what happens |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w.]+)[=`]", told))
    assert keys <= named, "imports or starts code, and SECURITY.md does not say so"
    assert named <= {name for name, _ in declarations}, "no such setting"
