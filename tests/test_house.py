"""What the house may weigh. A ceiling is lowered by whoever can; who must raise one says why in the same commit."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fasttrain.spec.config import Config
from fasttrain.spec.setting import settings_of
from transition_path import path_of

SRC = Path(__file__).resolve().parent.parent / "src"
# Why a ceiling was raised stands in the message of the commit that raised it: git log -p tests/test_house.py.
CEILINGS = {
    "fasttrain": {"lines": 34_041, "modules": 150, ": Any": 619},
    "fasttrain_deploy": {"lines": 1_017, "modules": 5, ": Any": 15},
    "fasttrain_engines": {"lines": 3_178, "modules": 14, ": Any": 16},
    "fasttrain_games": {"lines": 4_884, "modules": 34, ": Any": 14},
    "fasttrain_integrations": {"lines": 2_558, "modules": 12, ": Any": 67},
    "fasttrain_kernels": {"lines": 3_739, "modules": 13, ": Any": 24},
    "fasttrain_report": {"lines": 2_696, "modules": 13, ": Any": 2},
    "fasttrain_studies": {"lines": 4_280, "modules": 19, ": Any": 9},
    "fasttrain_vec": {"lines": 2_460, "modules": 10, ": Any": 27},
}


@pytest.mark.parametrize("package", CEILINGS)
def test_src_is_not_above_its_ceilings(package: str) -> None:
    texts = [module.read_text(encoding="utf-8") for module in (SRC / package).rglob("*.py")]
    lines, untyped = sum(len(text.splitlines()) for text in texts), sum(text.count(": Any") for text in texts)
    weighs = {"lines": lines, "modules": len(texts), ": Any": untyped}
    assert {name: size for name, size in weighs.items() if size > CEILINGS[package][name]} == {}, weighs


# Lines beside src: what sets up, what measures, all tests, and those of the first two. Minutes have no ceiling, because
# no test measures time.
LABORATORY = {
    "scripts/**/*.py": 331,
    "benchmarks/**/*.py": 5_168,
    "tests/**/*.py": 53_985,
    "tests/test_[bs]*.py": 526,
}


def test_what_lies_beside_src_is_not_above_its_ceilings() -> None:
    weighs = {
        room: sum(len(file.read_text(encoding="utf-8").splitlines()) for file in SRC.parent.glob(room))
        for room in LABORATORY
    }
    assert {room: size for room, size in weighs.items() if size > LABORATORY[room]} == {}, weighs


# Outside `algo.`, without those that other packages add. Four are the curriculum's, seven of what a training begins
# with, one `policies`, one how old a transition may be when PPO learns from it, one an end at a step, one first
# episodes of random lengths.
MOST_SETTINGS = 93  # 3 of them say where a cluster is, one where a run is copied
# With those that the packages of the distribution add: two what `tune` searches for and how often, three the limits of
# a sweep by launcher plugins of Hydra, four the models of a population.
MOST_SETTINGS_IN_ALL = 125


def test_settings_are_not_above_their_ceilings() -> None:
    for kind, most in ((Config.__mro__[1], MOST_SETTINGS), (Config, MOST_SETTINGS_IN_ALL)):
        names = [key for key, _ in settings_of(kind) if not key.startswith("algo.")]
        assert len(names) <= most, names


# What one iteration enters of src/fasttrain and src/fasttrain_vec, without the game and compiled code. 6 lines of PPO
# are the traces of older rollouts, and envs that go on during an update; 3 let actors of a cluster fill the rollout; 3
# end an update above a total variation. One of the kernels asks whether activations have their default arguments.
PATH_CEILINGS = {
    # three lines keep arrays of the storage, with which `add` takes 26 µs for 8 CartPoles, not 43
    "ppo": {"files": 8, "functions": 84, "lines": 896},
    "kernels": {"files": 12, "functions": 84, "lines": 907},
    "recurrent": {"files": 12, "functions": 85, "lines": 885},
    # a hook of the replay buffer instead of two copies of `put`; 12 lines for envs that ask to be replaced
    "dqn": {"files": 14, "functions": 82, "lines": 896},
    "sac": {"files": 12, "functions": 60, "lines": 678},  # as for dqn
}


@pytest.mark.parametrize("path", PATH_CEILINGS)
def test_the_path_of_a_transition_is_not_above_its_ceilings(path: str) -> None:
    passed = path_of(path)
    assert {name: size for name, size in passed.items() if size > PATH_CEILINGS[path][name]} == {}, passed


# What `fasttrain env.id=CartPole-v1 algo=ppo` enters of src/fasttrain and src/fasttrain_vec. plan: from argv until the
# plan is there, without the look at the env. training: all files of the command, without algorithms; lines: all lines
# of these files, up to a round 50.
COMMAND_CEILINGS = {"plan": {"files": 25, "functions": 140}, "training": {"files": 60, "lines": 15_980}}


def test_the_path_of_a_command_is_not_above_its_ceilings() -> None:
    command = [sys.executable, str(Path(__file__).with_name("transition_path.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    passed = json.loads(done.stdout.splitlines()[-1])
    for way, ceilings in COMMAND_CEILINGS.items():
        assert {name: size for name, size in passed[way].items() if size > ceilings[name]} == {}, passed


def test_the_mutants_can_be_made_again_and_their_killers_are_there() -> None:
    texts = {
        file: file.read_text(encoding="utf-8") for room in (SRC, Path(__file__).parent) for file in room.rglob("*.py")
    }
    for line in (Path(__file__).parent / "mutants.jsonl").read_text(encoding="utf-8").splitlines():
        mutant = json.loads(line)
        text = texts[SRC / mutant["file"]]
        assert f"def {mutant['function'].rpartition('.')[2]}(" in text, line
        assert mutant["old"] in text, line
        for file, test in (re.sub(r"\[.*", "", killer).split("::") for killer in mutant.get("killers", ())):
            assert f"def {test}(" in texts[Path(__file__).parent / file], line


# Places where tests reach a private name of src: `x._name`, its import, patches by its name, programs in texts. Names
# of other libraries and of the tests' own toys count not, nor does `self._name`. test_scripts.py tests no src.
MOST_PRIVATE = 65
OTHERS = (
    "_n_updates _last_obs _last_episode_starts _last_lstm_states _on_step _on_rollout_start _init_callback _predict "
    "_get_samples _save_obs _build _current_progress_remaining _vec_normalize_env _rebuild _cache _pid "
    "_begin _copy _draw _tell"
)


def nodes_in(room: Path) -> Iterator[ast.AST]:
    for file in room.rglob("*.py"):
        yield from ast.walk(ast.parse("" if file.name == "test_scripts.py" else file.read_text(encoding="utf-8")))


def defined(node: ast.AST) -> str:
    definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return str(getattr(node, "name" if definition else "attr", getattr(node, "id", ""))) * (definition or stored)


def reached(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr] * (getattr(node.value, "id", "") not in ("self", "cls"))
    if isinstance(node, ast.Call) and re.search(r"attr$|\bobject$", ast.unparse(node.func)):
        return [str(getattr(one, "value", "")) for one in node.args[1:2]]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"(?<!\bself)\.(_\w+)", node.value)
    return [one.name for one in node.names] if isinstance(node, ast.ImportFrom) else []


def test_private_names_that_tests_reach_are_not_above_their_ceiling() -> None:
    planted = ast.parse("from a import _b\nx._b\nself._b\nsetattr(x, '_b', 1)\nm.setattr('a._b', 1)\n'_b'")
    assert [name for node in ast.walk(planted) for name in reached(node) if name == "_b"] == ["_b"] * 4
    private = {name for name in map(defined, nodes_in(SRC)) if re.match(r"_[^_]", name)} - {*OTHERS.split()}
    found = Counter(name for node in nodes_in(Path(__file__).parent) for name in reached(node) if name in private)
    assert sum(found.values()) <= MOST_PRIVATE, found
