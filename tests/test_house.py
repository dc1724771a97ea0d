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
# lines: numba's types, named; any optimizer's state; 48 for what an env may raise, close, clear or leave without a
# legal action in any command, and for where action noise was; 497 for SAC's update as kernels, in place of torch's; 147
# and two modules for a command's settings in its help, and for what is told of settings that are no more; 40 for
# studies, sweeps and rows of plan.json that have such settings; 75 and a module for the door of other packages; 9 for a
# start that is a second shorter; 164 and two modules, 172 and three of engines, for what a backend answers, who is
# asked in place of its name; 10 for the parts of a run, typed; 186 and a module, 55 and one of games, for what a game
# declares of itself, where it is found, and runs that stored it; 16 for classes that are typed where they were before;
# 15 for train(…) that continues a run; 12 for weights that nest a thing in itself or stand under two names; 95 and four
# modules for trackers and rl_zoo3's files, found by their names; 95 for engines of other packages that are faulty,
# which are left out and named, for runs that are read without engines that they did not use, and for metadata that are
# older than the source; 3 for a game that cannot be loaded; 70 for modules of before, which scripts and pickles name,
# for two-sided runs of before, for an installed game that env.game names, and for a finished run where the default game
# is not installed; 442 and three modules for `fasttrain settings`, its schema, `check --config FILE`, and a sentence
# for each setting; 131 and a module for the help of profiles and topics, and for the shell's completion of commands and
# values. 672 and three modules, 19 of games, for tasks of a curriculum: their settings, draws, figures, and the way to
# workers; 110 for texts of vec, envs, spec and cli in whole sentences, with the arguments and errors of each function;
# 138 for what is wrong with an answer of an env that SB3's loop or a VectorEnv failed on, and for output and paths that
# the system refuses. 644 and four modules for what a training may begin with: another model's weights, recorded
# decisions, a teacher. 150 and a module for phases of a game. 1 for a checkup that had no time to compare actions,
# whose equal returns prove nothing. 76 for tasks in self-play, stages that are shown and wait for their own episodes,
# clones of runs as they saw their game, and wrong files of decisions. 77 for a first day: programs of the own
# environment by their paths, observations that no algorithm reads, games for several agents, files with a wrong
# setting, and models that cannot be read, with what to write in their place. 558 and two modules for several policies
# in one game: their settings, the rows that each decides and learns from, how they act together, and their files. 330
# and two modules for goals that one policy sets for another, and for a policy's own reward and view of the game; 110
# and a module for policies that remember; 75 for agents of PettingZoo with different roles and spaces. 65 for wrong
# settings of policies, models of several policies in place of one, errors that name the policy, and the update of
# several policies in doctor. 90 for truncated episodes in clone, curves of tasks, errors in workers of SubprocVecEnv,
# states of curricula that JSON does not hold, and absolute paths of other models. 31 of games for tasks of Skirmish; 21
# for a teacher that is a zip; 4 for trying slower threads less often, which made Skull King 2 % faster (three runs in
# turn). 420 and two modules for a search by Optuna: for reward, win rate and times besides steps/s, with ranges and the
# usual values of each algorithm, trials that end early, several processes in one study, and a confirmation on fresh
# seeds. 28 for searches with A2C and ARS, ranges by a setting's type, tune.space, and the command that uses the result.
# 222 and a module for PPO that learns from its last few rollouts. 290 and a module for envs that go on stepping while
# PPO updates. 210 and a module for sweeps by launcher plugins. 387 and a module for hindsight: a buffer that draws as
# SB3's does, in a time that its size does not change. 930 and five modules for several models side by side: runs that
# are forked with everything imported, cells of a study on cores of their own, population-based training, a training
# that ends at a step, and first episodes of random lengths. 1,150 and five modules for actors of a cluster; 150 and a
# module for runs that are copied to another place; 165 and a module for plan-cluster; 130 and a module for envs that
# ask to be replaced; 60 and a module for the total variation. 105 and a module for evaluations that call the networks
# directly; 62 for products of dense inputs and stored rows. 36 for the number of EnvPool's threads by a trial. Then
# 13,900 lines and 59 modules became fasttrain_deploy, _integrations, _kernels, _report and _studies. 20 for commands of
# other packages and values that are spelt as they are typed; 2 for the usual mask, without a search; 16 for kernels
# that write where the rollout is stored, which makes PPO on 8 CartPoles 1.16 times as fast (five runs in turn). 107 and
# a module are of integrations now, Prometheus; three modules joined others. 8 of engines: rows whose tasks swallow a
# cancellation. 37 and 20 `: Any`: DQN's kernels get working memory for threads, and every engine's `act` may be told
# where its step is stored; 35 of the kernels: parts of a minibatch for threads, with which DQN is 1.3 times as fast.
# 161 and a module of studies, 68 and one of deploy: the settings of their commands, which were in fasttrain/spec, and
# for deploy the check of output=…, which was in fasttrain/runs.
CEILINGS = {
    "fasttrain": {"lines": 33_942, "modules": 150, ": Any": 612},
    "fasttrain_deploy": {"lines": 1_016, "modules": 5, ": Any": 15},
    "fasttrain_engines": {"lines": 3_193, "modules": 14, ": Any": 16},
    "fasttrain_games": {"lines": 4_884, "modules": 34, ": Any": 14},
    "fasttrain_integrations": {"lines": 2_578, "modules": 12, ": Any": 67},
    "fasttrain_kernels": {"lines": 3_739, "modules": 13, ": Any": 24},
    "fasttrain_report": {"lines": 2_697, "modules": 13, ": Any": 2},
    "fasttrain_studies": {"lines": 4_282, "modules": 19, ": Any": 9},
    # 2,102 lines and seven modules were in fasttrain/vec. 229 are a Gymnasium VectorEnv on them, 77 what it shares with
    # SharedMemoryVecEnv, 33 the public names, 7 workers that spin longer.
    "fasttrain_vec": {"lines": 2_466, "modules": 10, ": Any": 27},
}


@pytest.mark.parametrize("package", CEILINGS)
def test_src_is_not_above_its_ceilings(package: str) -> None:
    texts = [module.read_text(encoding="utf-8") for module in (SRC / package).rglob("*.py")]
    lines, untyped = sum(len(text.splitlines()) for text in texts), sum(text.count(": Any") for text in texts)
    weighs = {"lines": lines, "modules": len(texts), ": Any": untyped}
    assert {name: size for name, size in weighs.items() if size > CEILINGS[package][name]} == {}, weighs


# Lines beside src: what measures, what sets up, and the tests. 45 of scripts end pip on Ctrl-C, continue pip where uv
# fails, and tell an environment that was made here and half an upgrade from others; 5 are the lane with the library of
# every integration; 2 of benchmarks set what doctor tries, which is no setting any more. Hardly any test repeats
# another, as reading them room by room has shown, so lines go where tests share their set-up. 298 of tests are the
# search by Optuna: its space, its journal that processes share, what ends early, and the confirmation. 276 of tests:
# forked runs, cells side by side, populations and their exchanges. 1,400 of tests: actors and their faults, replaced
# envs, copied runs, the recipes and the plan of a cluster. 130 of benchmarks: actors, with RLlib beside them. 70 of
# tests: the last killed trial, other settings in one folder, a failed seed, algorithms without minibatches. 371 of
# tests: the vectorizer as a Gymnasium VectorEnv beside SyncVectorEnv, its faults, and without torch and numba; 75 the
# steps of DummyVecEnv compared with stock's, the account and the campaign for a GPU. 470 of benchmarks: the account of
# what trainings must cost and what they cost, that campaign, pufferlib, and a lean loop over EnvPool. 310 of tests:
# direct predictions, faults of workers, groups, dense inputs. 390 of benchmarks: curves of scaling, matrix products,
# slow envs beside async-gym-agents, DQN beside SBX. 62 of tests kill mutants that no test killed (tests/mutants.jsonl).
# 147 of tests: settings that other packages add, their faults, and what is said where such a package is missing;
# images in channels_last.
LABORATORY = {"scripts": 331, "benchmarks": 5_168, "tests": 53_922}


def test_what_lies_beside_src_is_not_above_its_ceilings() -> None:
    weighs = {
        room: sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (SRC.parent / room).rglob("*.py"))
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
# plan is there, without the look at the env. training: all files of the command, without algorithms; lines: of these
# files, up to a round 50. 100 of them build, store and load hindsight and earlier rollouts; 50 tell why a worker of
# SubprocVecEnv ended, and make paths absolute; 100 show how old transitions were, let envs go on during updates, and
# let envs rest in an evaluation; 20 ask whether actors of a cluster collect; 110 and a file replace envs that ask for
# it; 50 end updates above a total variation, and copy a run to another place. Pages of runs, which are drawn at the
# end, are not of src/fasttrain any more. Two functions spell values as they are typed.
COMMAND_CEILINGS = {"plan": {"files": 26, "functions": 140}, "training": {"files": 65, "lines": 17_000}}


def test_the_path_of_a_command_is_not_above_its_ceilings() -> None:
    command = [sys.executable, str(Path(__file__).with_name("transition_path.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    passed = json.loads(done.stdout.splitlines()[-1])
    for way, ceilings in COMMAND_CEILINGS.items():
        assert {name: size for name, size in passed[way].items() if size > ceilings[name]} == {}, passed


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
