"""The laws of CONTRIBUTING.md as tests. Each rule is a function from parsed sources to problems.

Each rule is first shown to bite, on a planted violation; a rule that finds nothing proves nothing. Sizes serve reading:
a function's docstring does not count, because a long contract must not be shortened for a number.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
# Packages beside `fasttrain`, which attach by entry points and which it never imports; and the folder of their tests.
BESIDE = {
    "fasttrain_deploy": "deploy", "fasttrain_engines": "engines", "fasttrain_games": "games",
    "fasttrain_integrations": "integrations", "fasttrain_report": "report", "fasttrain_studies": "studies",
}  # fmt: skip
# What `fasttrain` imports: compiled functions on arrays, without torch and SB3; and the vectorizer, without numba too.
LIBRARIES = {"fasttrain_kernels": "kernels", "fasttrain_vec": "vec"}
PACKAGES = {**BESIDE, **LIBRARIES}
# Prefixes of modules that a worker process loads.
WORKERS = (
    "fasttrain_engines.games_worker", "fasttrain_engines.go", "fasttrain_engines.showdown",
    "fasttrain_integrations.pettingzoo",
)  # fmt: skip
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Room (first name below `fasttrain`) → layer. `""` is the package itself, which imports nothing of ours by statement.
LAYERS = {
    "": 0, "spec": 0, "batch": 0, "errors": 0, "intervals": 0, "machine": 0, "terminal": 0,
    "native": 1, "envs": 1, "fasttrain_kernels": 1, "vec": 1, "fasttrain_vec": 1, "buffers": 1, "perf": 1,
    "algos": 2, "fasttrain_games": 2,
    "accelerators": 3, "saving": 3, "fasttrain_engines": 3,
    "runs": 4,
    "fasttrain_deploy": 5, "fasttrain_studies": 5, "fasttrain_report": 5,
    "cli": 6, "__main__": 6,
    "fasttrain_integrations": 7,
}  # fmt: skip
# Within layer 1, where rooms otherwise do not know each other: what an env is, and what went wrong in one.
SIDEWAYS = {
    (room, f"fasttrain.envs.{name}")
    for room, names in {
        "vec": ("answers", "names", "protocol", "masks", "retrace", "tasks", "user_code"),
        "fasttrain_vec": ("answers", "masks", "retrace", "tasks", "user_code"),
    }.items()
    for name in names
} | {
    (room, f"fasttrain_kernels.{name}") for room in ("buffers", "native") for name in ("jit", "kernel_cache", "threads")
}
# Algorithms see vector environments, never the games; rooms side by side do not know each other.
FORBIDDEN_ROOMS = {(room, other) for room in ("algos", "accelerators") for other in ("envs", "native")} | {
    ("accelerators", "saving"), ("saving", "accelerators"),
    ("fasttrain_games", "algos"),
}  # fmt: skip
TORCH = ("torch", "stable_baselines3", "sb3_contrib")
COMPILERS = ("numba", "llvmlite")
# Third-party packages of layer 0, which everything loads, and the modules that may; (): any.
LAYER_0_PACKAGES = {"numpy": (), "psutil": ("machine",), "scipy": ("intervals",)}

# Source module → why it has no test file of its own name.
WITHOUT_OWN_TEST = {
    "batch": "types; used by every test of vec and buffers",
    "vec": "public names on first use; every test of vec imports through it",
    "fasttrain_vec": "public names on first use; tests/vec/test_vector_env.py imports them so",
    "fasttrain_vec.calls": "tests/vec/test_shared.py and test_vector_env.py make the calls and read the infos",
    "native": "public names on first use; tests/native imports them so",
    "fasttrain_report.page": "what a page shows; every test of a page reads and writes one",
    "fasttrain_report.compare_page": "tests/report/test_study_page.py has the pages over several runs",
    "fasttrain_integrations.trackers": "tests/runs/test_loggers_trackers.py runs each tracker that is installed",
    "__main__": "one call; tests/cli/test___init__.py starts it as a process",
}

Sources = dict[str, str]  # dotted module name → source text


@functools.cache
def read_sources() -> Sources:
    sources = {}
    for path in (path for package in ("fasttrain", *PACKAGES) for path in sorted((SRC / package).rglob("*.py"))):
        parts = path.relative_to(SRC).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def room_of(module: str) -> str:
    package, room, *_ = [*module.split("."), ""]
    return room if package == "fasttrain" else package


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports_of(module: str, source: str, modules: Sources) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported by a statement, inside functions and type-checking blocks too."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}"
                continue
            base = node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in modules else base


# --- the rules


def imports_point_down(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        room = room_of(module)
        if room not in LAYERS:
            yield f"{module}: room {room!r} has no layer in LAYERS"
            continue
        for line, name in imports_of(module, source, sources):
            if name.startswith("."):
                yield f"{module}:{line}: relative import {name!r}; write it from fasttrain on"
            if name.split(".")[0] not in ("fasttrain", *PACKAGES):
                continue
            other = room_of(name)
            allowed = (
                room == other
                or (LAYERS.get(other, 9) < LAYERS[room] and other not in BESIDE)
                or (LAYERS.get(other) == LAYERS[room] != 1 and other not in BESIDE)
                or (room, name) in SIDEWAYS
                or (room, other) == ("vec", "fasttrain_vec")
            )
            if not allowed or (room, other) in FORBIDDEN_ROOMS:
                yield f"{module}:{line}: imports {name} (layer {LAYERS[room]} → {LAYERS.get(other)})"


def no_cycles(sources: Sources) -> Iterator[str]:
    graph = {
        module: {name for _, name in imports_of(module, source, sources) if name in sources and name != module}
        for module, source in sources.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> Iterator[str]:
        if module in path:
            yield "cycle: " + " → ".join((*path[path.index(module) :], module))
        elif module not in done:
            for other in sorted(graph[module]):
                yield from visit(other, (*path, module))
            done.add(module)

    for module in graph:
        yield from visit(module, ())


def layer_0_is_light(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        if LAYERS.get(room_of(module)) != 0:
            continue
        for line, name in imports_of(module, source, sources):
            package = name.split(".")[0]
            if package == "fasttrain" or package in sys.stdlib_module_names:
                continue
            allowed = LAYER_0_PACKAGES.get(package)
            if allowed is None or (allowed and room_of(module) not in allowed):
                yield f"{module}:{line}: layer 0 imports {name}"


def no_torch_in_workers(sources: Sources) -> Iterator[str]:
    """No file of games, engines, native, envs, vec imports torch; games, native, envs and what workers load not even
    through others, and the vectorizer not numba either."""
    for module, source in sources.items():
        room = room_of(module)
        if room in ("native", "envs", "vec", "fasttrain_engines", "fasttrain_games", *LIBRARIES):
            for line, name in imports_of(module, source, sources):
                if name.split(".")[0] == "torch":
                    yield f"{module}:{line}: imports torch"
        if room in ("native", "envs", "fasttrain_games", *LIBRARIES) or module.startswith(WORKERS):
            unwanted = (*TORCH, *COMPILERS) if room == "fasttrain_vec" else TORCH
            yield from (f"{module}: loads {name}" for name in sorted(_loads(module, sources, set(), unwanted)))


def _loads(module: str, sources: Sources, seen: set[str], unwanted: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    seen.add(module)
    for line, name in imports_of(module, sources[module], sources):
        if name.split(".")[0] in unwanted:
            found.add(f"{name} ({module}:{line})")
        elif name in sources and name not in seen:
            found |= _loads(name, sources, seen, unwanted)
    return found


def files_are_short(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{module}: {lines} lines, {MAX_FILE_LINES} allowed"


def functions_are_short(sources: Sources) -> Iterator[str]:
    for module, node in _nodes(sources):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{module}:{node.lineno}: {node.name} has {lines} lines, {MAX_FUNCTION_LINES} allowed"


def no_mutable_module_state(sources: Sources) -> Iterator[str]:
    """No module-level container under a variable's name, none under a constant's name changed, no `global`."""
    for module, source in sources.items():
        nodes, containers = nodes_of(source), set()
        for statement in nodes[0].body:  # type: ignore[attr-defined]
            for name in _assigned_containers(statement):
                if re.fullmatch(r"_{0,2}[A-Z][A-Z0-9_]*|__\w+__", name):
                    containers.add(name)
                else:
                    yield f"{module}:{statement.lineno}: module-level container {name!r}; keep state in objects"
        for node in nodes:
            if isinstance(node, ast.Global):
                yield f"{module}:{node.lineno}: global {', '.join(node.names)}"
            changed = _changed_name(node)
            if changed in containers:
                yield f"{module}:{getattr(node, 'lineno', 0)}: changes the constant {changed}"


def _assigned_containers(statement: ast.stmt) -> list[str]:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return []
    value = statement.value
    literal = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    makers = ("list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict")
    called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in makers
    if not isinstance(value, literal) and not called:
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _changed_name(node: ast.AST) -> str | None:
    """The name X of `X[…] = …`, `del X[…]`, `X.append(…)` and the like."""
    changing = ("append", "add", "update", "pop", "popitem", "clear", "extend", "insert", "remove", "discard",
                "setdefault")  # fmt: skip
    target: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        target = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changing:
        target = node.func.value
    return target.id if isinstance(target, ast.Name) else None


def errors_are_honest(sources: Sources) -> Iterator[str]:
    """No bare except, no assert (it vanishes under -O), no NotImplementedError (a stub)."""
    for module, node in _nodes(sources):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{module}:{node.lineno}: bare except"
        elif isinstance(node, ast.Assert):
            yield f"{module}:{node.lineno}: assert; raise an error that says what to do"
        elif isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield f"{module}:{node.lineno}: NotImplementedError"


def mirrored_by_tests(sources: Sources) -> Iterator[str]:
    """A module with logic has tests/<room>/test_<module>[_<part>].py; in a sub-package, or test_<sub-package>*.py."""
    tests = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    for module, source in sources.items():
        package, *below = module.split(".")
        if not below or module.removeprefix("fasttrain.") in WITHOUT_OWN_TEST or not _has_logic(source):
            continue
        below = [*PACKAGES.get(package, "").split(), *below]
        folder, name = "/".join(below[:-1]), below[-1]
        wanted = f"{folder}/test_{name}.py".lstrip("/")
        shared = f"{below[0]}/test_{below[1]}" if len(below) > 2 else None
        parts = wanted.removesuffix(".py") + "_"
        if wanted not in tests and not any(test.startswith((parts, *([shared] if shared else []))) for test in tests):
            yield f"{module}: no tests/{wanted}" + (f" nor tests/{shared}*.py" if shared else "")


def nothing_knows_the_games(sources: Sources) -> Iterator[str]:
    """fasttrain names no game and no package that attaches, but for the default of `env=` and what runs once stored."""
    for module, source in sources.items():
        if module.split(".")[0] != "fasttrain" or module == "fasttrain.spec.removed":
            continue
        for node in nodes_of(source):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            named = re.search(r"fasttrain_(?:games|engines|report|studies)\.|skullking|skirmish", text, re.IGNORECASE)
            if named and not (module == "fasttrain.spec.games" and text == "skullking"):
                yield f"{module}:{node.lineno}: names {named[0]}"


def _has_logic(source: str) -> bool:
    """Whether any function does more than carry a docstring or `...`."""
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in node.body)
        for node in nodes_of(source)
    )


def _nodes(sources: Sources) -> Iterator[tuple[str, ast.AST]]:
    for module, source in sources.items():
        yield from ((module, node) for node in nodes_of(source))


# --- the rules applied, and each shown to bite

Rule = Callable[[Sources], Iterator[str]]
RULES: list[Rule] = [
    imports_point_down, no_cycles, layer_0_is_light, no_torch_in_workers, files_are_short, functions_are_short,
    no_mutable_module_state, errors_are_honest, mirrored_by_tests, nothing_knows_the_games,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    assert list(rule(read_sources())) == []


BITTEN: list[tuple[Rule, Sources, str]] = [
    (imports_point_down, {"fasttrain.envs.a": "from fasttrain.runs.b import c"}, "imports fasttrain.runs.b"),
    (imports_point_down, {"fasttrain.vec.a": "from fasttrain.envs.make import x"}, "imports fasttrain.envs.make"),
    (imports_point_down, {"fasttrain.runs.a": "def f():\n  import fasttrain_deploy"}, ":2: imports fasttrain_deploy"),
    (imports_point_down, {"fasttrain.envs.a": "from . import b"}, "relative import"),
    (imports_point_down, {"fasttrain.cellar.a": ""}, "has no layer"),
    (imports_point_down, {"fasttrain.runs.a": "import fasttrain_games.b"}, "imports fasttrain_games.b (lay"),
    (imports_point_down, {"fasttrain_games.a": "import fasttrain.algos.b"}, "imports fasttrain.algos.b"),
    (no_cycles, {"fasttrain.a": "import fasttrain.b", "fasttrain.b": "from fasttrain import a"}, "→ fasttrain.b →"),
    (layer_0_is_light, {"fasttrain.batch": "import numba"}, "imports numba"),
    (no_torch_in_workers, {"fasttrain.vec.native": "from torch import nn"}, "imports torch"),
    (no_torch_in_workers, {"fasttrain.envs.a": "import stable_baselines3.common"}, "loads stable_baselines3"),
    (no_torch_in_workers, {"fasttrain_vec.worker": "import fasttrain.b", "fasttrain.b": "import sb3_contrib"},
     "fasttrain_vec.worker: loads sb3_contrib (fasttrain.b:1)"),
    (no_torch_in_workers, {"fasttrain_kernels.a": "import torch"}, "fasttrain_kernels.a: loads torch"),
    (no_torch_in_workers, {"fasttrain_vec.a": "import fasttrain.b", "fasttrain.b": "import numba"}, "loads numba"),
    (imports_point_down, {"fasttrain.buffers.a": "import fasttrain_kernels.b"}, "imports fasttrain_kernels.b"),
    (imports_point_down, {"fasttrain.cli.a": "import fasttrain_studies.b"}, "imports fasttrain_studies.b (lay"),
    (imports_point_down, {"fasttrain.envs.a": "import fasttrain_vec.b"}, "imports fasttrain_vec.b"),
    (imports_point_down, {"fasttrain_vec.a": "import fasttrain.vec.shared"}, "imports fasttrain.vec.shared"),
    (files_are_short, {"fasttrain.a": "x = 1\n" * 401}, "401 lines"),
    (functions_are_short, {"fasttrain.a": "def f():\n" + "    x = 1\n" * 60}, "f has 61 lines"),
    (no_mutable_module_state, {"fasttrain.a": "seen: set[int] = set()"}, "module-level container 'seen'"),
    (no_mutable_module_state, {"fasttrain.a": "K = []\ndef f():\n    K.append(2)"}, ":3: changes the constant K"),
    (no_mutable_module_state, {"fasttrain.a": "def f():\n    global n\n    n = 1"}, "global n"),
    (errors_are_honest, {"fasttrain.a": "try:\n    pass\nexcept:\n    pass"}, "bare except"),
    (errors_are_honest, {"fasttrain.a": "assert 1"}, "assert"),
    (errors_are_honest, {"fasttrain.a": "def f():\n    raise NotImplementedError"}, "NotImplementedError"),
    (nothing_knows_the_games, {"fasttrain.runs.a": "x = 'fasttrain_games.b:C'"}, ":1: names fasttrain_games."),
    (nothing_knows_the_games, {"fasttrain.spec.games": "def f():\n  'Of SkullKing.'"}, ":2: names SkullKing"),
    (mirrored_by_tests, {"fasttrain.vec.zero.where": "def f():\n    return 1"}, "nor tests/vec/test_zero*.py"),
]  # fmt: skip
DOCUMENTED = 'def f():\n    """One.\n' + "\n    More.\n" * 40 + '    """\n' + "    x = 1\n" * 59
PASSED: list[tuple[Rule, Sources]] = [
    (imports_point_down, {"fasttrain.vec.a": "import fasttrain.envs.protocol", "fasttrain.envs.protocol": ""}),
    (imports_point_down, {"fasttrain.vec.a": "import fasttrain_vec.b", "fasttrain.runs.a": "import fasttrain_vec.b"}),
    (imports_point_down, {"fasttrain_games.a": "import fasttrain.native.b\nimport fasttrain_games.c"}),
    (imports_point_down, {"fasttrain.algos.a": "import fasttrain.perf.clock\nimport fasttrain.buffers.rollout"}),
    (no_cycles, {"fasttrain.a": "import fasttrain.b", "fasttrain.b": "", "fasttrain.c": "import fasttrain.b"}),
    (layer_0_is_light, {"fasttrain.batch": "import numpy.typing\nimport json"}),
    (functions_are_short, {"fasttrain.a": DOCUMENTED}),
    (no_mutable_module_state, {"fasttrain.a": "NAMES = ['a']\n__all__ = ['b']\ndef f(x):\n    x[1] = NAMES[0]"}),
    (mirrored_by_tests, {"fasttrain.vec.a": "class P:\n    def f(self) -> int:\n        '''Only says.'''"}),
]


def test_rules_bite_and_let_pass() -> None:
    for rule, sources, problem in BITTEN:
        assert problem in "\n".join(rule(sources)), rule.__name__
    for rule, sources in PASSED:
        assert list(rule(sources)) == []
    assert set(WITHOUT_OWN_TEST) <= {module.removeprefix("fasttrain.") for module in read_sources()}


@pytest.mark.parametrize(
    "modules",
    [
        "fasttrain, fasttrain.envs, fasttrain.envs.make, fasttrain.envs.checkup, fasttrain_games.skullking.env",
        "fasttrain_vec.worker, fasttrain.runs.survey, fasttrain_integrations.pettingzoo, fasttrain_engines.backend, "
        "fasttrain_engines.games_worker, fasttrain_engines.go, fasttrain_engines.showdown",
        "fasttrain.cli, fasttrain.cli.commands, fasttrain_studies.sweep, fasttrain_report.index",  # these begin at once
    ],
)
def test_no_torch_in_a_process_that_loads(modules: str) -> None:
    loads = f"import sys, {modules}; print([name for name in {TORCH!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_torch_gets_its_threads_in_one_place():
    setting = {file.relative_to(SRC).as_posix() for file in SRC.rglob("*.py") if "set_num_threads" in file.read_text()}
    assert setting == {"fasttrain/runs/engine.py", "fasttrain_vec/worker_start.py"}, "the worker knows no fasttrain"
