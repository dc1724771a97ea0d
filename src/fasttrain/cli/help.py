"""What `--help` and `fasttrain help COMMAND` print; of settings what their declarations say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, Field
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fasttrain import __version__
from fasttrain.cli.commands import COMMANDS, MODULES, OF_A_RUN, OTHER_WORDS, OWNERS, PLAIN, known
from fasttrain.spec import plugins
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.backends import backends
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.config import AlgoConfig, Config
from fasttrain.spec.games import DEFAULT
from fasttrain.spec.setting import declared, settings_of
from fasttrain.terminal import spelt

HELP = """fasttrain {version}: Stable-Baselines3 training several times faster, and where the time went.

usage: fasttrain [train|resume|eval|check|export|play|compare|tune|doctor|report] [key=value …] [-m]
       fasttrain watch [FOLDER] · new FOLDER · zoo import FILE.yml --env ID --algo NAME · help [COMMAND]

  fasttrain +profile=speed                                   the default game with MaskablePPO
  fasttrain +profile=speed env.id=CartPole-v1 algo=ppo       any registered Gymnasium environment
  fasttrain +profile=balance env.id=CartPole-v1 algo=dqn num_envs=16 updates_per_step=8
  fasttrain +profile=speed env.entry_point=my_game.envs:MyGame env.kwargs.size=5
  fasttrain -m +profile=speed num_envs=64,128,256 algo.n_epochs=2,4      a sweep, each cell in a fresh process
  fasttrain resume run=outputs/2026-01-31/12-00-00_CartPole-v1_ppo_1     goes on after a stop or a crash
  fasttrain eval run=outputs/2026-01-31/12-00-00_CartPole-v1_ppo_1 eval.episodes=5000
  fasttrain export run=outputs/2026-01-31/12-00-00_CartPole-v1_ppo_1 format=onnx   (or torchscript)
  fasttrain play run=outputs/2026-01-31/12-00-00_CartPole-v1_ppo_1       watch it; output=game.mp4: a video
  fasttrain report outputs/2026-01-31/*                      report.html of runs, a sweep or a study
  fasttrain watch                                            all runs below outputs/, multirun/ and studies/, live
  fasttrain compare candidates=[baseline,speed] seeds=5      is it faster, does it learn as well? (exit code 3: no)
  fasttrain compare candidates=ablate +profile=speed         which flags pay here (also: fasttrain ablate …)
  fasttrain tune +profile=speed                              the fastest values here
  fasttrain doctor +profile=speed                            where the bottleneck is, and what would pay
  fasttrain check env.entry_point=my_game.envs:MyGame        looks for faults in an env and measures it
  fasttrain new my_project                                   a folder with an env, a callback and tests to begin from
  fasttrain train warmup=only +profile=speed                 compiles its kernels (also: fasttrain warmup …)
  fasttrain help compare                                     a command and its settings
  fasttrain zoo import ppo.yml --env CartPole-v1 --algo ppo  rl_zoo3's hyperparameters as a profile
  FASTTRAIN_NUM_ENVS=16 fasttrain +profile=speed             a flag from the environment

profiles   baseline (stock SB3)  exact (same numbers, faster)  balance  speed  debug
algo=      {algorithms}
env=       a game that a package offers ({game}, the default), or env.id=…, env.entry_point=module:Class

flags (variable in the environment: FASTTRAIN_ and the name in capitals; command line > environment > profile > default)
{flags}

more       --cfg job      print the configuration without running     --info searchpath   where it comes from
           --version      --config-dir DIR   your own profiles        FASTTRAIN_TRACEBACK=1   tracebacks for errors
           --trust   eval, play, export: load a model as SB3 does, running the code pickled in it
exit code  0 done  1 crash  2 bad input  3 gate failed  4 stopped by a signal with everything saved
           130 stopped before there was anything to save"""

USAGE_END = "\n\nfasttrain --help lists profiles, algorithms and flags; fasttrain help train: all settings"
# What commands of a finished run take besides what they alone read; `resume`: what may change in a run that goes on.
OF_RUNS = {
    "eval": ("opponent", "eval.", "env.kwargs"),
    "play": ("opponent",),
    "resume": ("eval.", "stop.", "checkpoint.", "video."),
}


def help_on(arguments: list[str]) -> str:
    """Of the command among them; without one of all, in brief where nobody asked."""
    own = (*COMMANDS[1:], *OTHER_WORDS)  # `train` alone has all of it
    words = arguments[1:2] if arguments[:1] == ["help"] else [word for word in arguments[:1] if word in own]
    if words:
        return _of_command(known(words[0])[0])
    if not {"-h", "--help", "help"} & {*arguments}:
        return HELP.partition("\n\nprofiles")[0].format(version=__version__) + USAGE_END
    flags = "\n".join(f"  {flag.name:<22} {flag.class_text:<10} {flag.text}" for flag in FLAGS)
    return HELP.format(version=__version__, flags=flags, algorithms="  ".join(ALGORITHMS), game=DEFAULT)


def _of_command(command: str) -> str:
    if not (module := MODULES.get(command) or PLAIN[command]):
        return str(plugins.load(plugins.INTEGRATIONS, command).__doc__)
    found = find_spec(module)
    about = ast.get_docstring(ast.parse(Path(str(found and found.origin)).read_text(encoding="utf-8"))) or ""
    if command in PLAIN:
        return about
    first = about.split("\n\n")[0].partition(". ")[0].rstrip(".").replace("\n", " ")
    lines = [first if first.startswith("`fasttrain") else f"`fasttrain {command}`: {first}"]
    lines += ["", *(_line(key, hint, one) for key, hint, one in _settings(Config) if _is_read(command, key, one))]
    if command == "train":
        lines += ["", "of every algorithm"]
        lines += [_line(f"algo.{key}", hint, one) for key, hint, one in _settings(AlgoConfig) if key != "name"]
        lines += ["", "SB3's names of the rest below algo.; algo=NAME chooses"]
        lines += [f"  {name:<24} {', '.join(spec.keys())}" for name, spec in ALGORITHMS.items()]
    elif command not in OF_A_RUN:
        lines += ["", "and what a training takes: fasttrain help train"]
    return "\n".join(lines)


def _is_read(command: str, key: str, one: Field[Any]) -> bool:
    owner = OWNERS.get(key) or OWNERS.get(key.split(".")[0] + ".")
    if declared(one).hidden:
        return False
    if owner is not None:
        return command in owner.commands
    of_run = key.startswith(OF_RUNS.get(command, "\n")) or (command == "resume" and declared(one).may_change)
    return command == "train" or of_run


def _settings(cls: type) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Key, type and declaration of each."""
    for key, one in settings_of(cls, parts=True):
        hint: Any = cls
        for word in key.split("."):
            hint = get_type_hints(hint)[word]
        if not key.startswith("algo."):
            yield key, hint, one


def _line(key: str, hint: Any, one: Field[Any]) -> str:
    it = declared(one)
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [str(word) for each in hints if get_origin(each) is Literal for word in get_args(each)]
    usual = [*one.default] if isinstance(one.default, tuple) else one.default
    words = backends() if key == "env.backend" else words
    default = "" if usual is MISSING else spelt(usual)
    facts = filter(None, [" | ".join(words), it.flag_class and f"class {it.flag_class}"])
    told = f"{it.text} ({'; '.join(facts)})" if words or it.flag_class else it.text
    return f"  {key + ('=' + default if default and len(default) < 20 else ''):<34} {told}"
