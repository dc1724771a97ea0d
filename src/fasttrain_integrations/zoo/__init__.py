"""`fasttrain zoo import FILE.yml --env ID --algo NAME` makes a profile from an entry of rl_zoo3's hyperparameters. This
module also reads folders of rl_zoo3's runs, so that they can be played. Nothing in these files is executed.

The YAML has tags of Python. Tuples and OrderedDicts are read as lists and mappings; any other tag is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from fasttrain import terminal
from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.saving.files import write_whole, yaml_values
from fasttrain.spec.algorithms import AlgorithmSpec
from fasttrain.spec.backends import name_of_env
from fasttrain.spec.config import Config
from fasttrain.spec.setting import did_you_mean
from fasttrain_integrations.zoo.entries import Taken, algorithm, configuration, entry_of, nested, taken, zoo_name

USAGE = "fasttrain zoo import FILE.yml --env CartPole-v1 --algo ppo [--output conf/profile/NAME.yaml]"
FASTER = "vec_env=auto", "engine=fast vec_env=auto fused_update=auto"  # overrides: [0] SB3's class, [1] fasttrain's
MARK = "Imported from rl_zoo3"


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"zoo: {message}; the command is {terminal.as_typed(USAGE)}")


def main(arguments: Sequence[str]) -> int:
    """Write the profile. Print where it is, how to use it, and which keys it does not contain."""
    parser = _Arguments(prog="fasttrain zoo", add_help=False, allow_abbrev=False)
    parser.add_argument("verb", choices=["import"])
    parser.add_argument("file")
    parser.add_argument("--env", required=True)
    parser.add_argument("--algo")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(list(arguments))
    file = _file(asked.file)
    spec = algorithm(asked.algo or file.stem)
    entries = read_yaml(file)
    name, entry = entry_of(entries, asked.env, _is_atari, str(file))
    found = taken(entry, asked.env, spec)
    try:
        configuration(found.settings, spec)
    except ConfigError as error:
        raise ConfigError(f"{file}, entry {name}: {error}") from error
    output = _output(asked.output, f"zoo_{zoo_name(spec)}_{name_of_env(asked.env, None)}")
    command = f"{terminal.command()} --config-dir {shlex.quote(str(output.parent.parent))} +profile={output.stem}"
    _write(output, [command, f"{MARK}: {file.name}, entry {name}"], found, spec)
    print(f"written to {output}\n  {command}\n  {command} {FASTER[spec.fast is not None]}    faster")
    if not asked.env.endswith(name):
        print(f"from the entry {name}: no entry is called {asked.env}{did_you_mean(asked.env, map(str, entries))}")
    for kind, lines in (("not taken over", found.left), ("differs", found.notes)):
        for line in lines:
            print(f"{kind}: {terminal.one_line(line)}")
    return EXIT_DONE


def _file(given: str) -> Path:
    """The named file, or an algorithm's file in the installed rl_zoo3."""
    path = Path(given)
    if path.suffix in (".yml", ".yaml") or path.exists():
        return path
    package = importlib.util.find_spec("rl_zoo3")
    places = (package.submodule_search_locations if package else None) or []
    folders = [Path(place, "hyperparams") for place in places]
    known = sorted(file.stem for folder in folders for file in folder.glob("*.yml"))
    if given not in known:
        hold = f"rl_zoo3 has {', '.join(known)}" if known else "rl_zoo3, which has such files, is not installed"
        raise ConfigError(f"zoo import {given}: no such file; name a FILE.yml ({hold})")
    return next(folder / f"{given}.yml" for folder in folders if (folder / f"{given}.yml").is_file())


def _is_atari(env: str) -> bool:
    """Whether an env is an Atari game: by its name, or by its entry point as in rl_zoo3."""
    import gymnasium  # imported here, because this takes 0.2 s

    if re.match(r"ALE/|\w+NoFrameskip-v\d$", env):
        return True
    try:
        return "AtariEnv" in str(gymnasium.spec(env).entry_point)
    except gymnasium.error.Error:
        return False


def _output(given: Path | None, name: str) -> Path:
    path = Path("conf", "profile", f"{name}.yaml") if given is None else given
    if path.suffix != ".yaml" or path.parent.name != "profile" or not re.fullmatch(r"[\w.-]+", path.stem):
        raise ConfigError(
            f"--output {path}: expected conf/profile/NAME.yaml; a profile must be in a folder called profile"
        )
    if path.exists() and not (path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"--output {path}: this file exists and was not made by zoo import; use another name")
    return path


def _write(output: Path, head: Sequence[str], found: Taken, spec: AlgorithmSpec) -> None:
    values = nested(found.settings, {"defaults": [{"override /algo": spec.name}, {"override /env": "gym"}]})
    lines = ["# @package _global_", *(f"# {line}" for line in head)]
    lines += [f"# Not taken over: {terminal.one_line(line)}" for line in found.left]
    lines += [f"# Differs: {line}" for line in found.notes]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if "${" in text:
        raise ConfigError(f"{output.stem}: a text contains ${{, which a profile would replace by another value")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, "\n".join([*lines, text]))
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror or error}") from error


# --- the files and folders of rl_zoo3

MOST_BYTES = 1 << 20  # size limit of a file; usual files have 16 kB
MOST_VALUES = 100_000  # most values in a file; by aliases a short file can have very many


class ZooRun(NamedTuple):
    """A run of rl_zoo3."""

    config: Config
    model: Path
    statistics: Path  # VecNormalize's pickle; it exists if the run was normalized


class _Loader(yaml.SafeLoader):
    """Reads plain values, and the tags that `yaml.dump` writes for an OrderedDict and a tuple."""


def _listed(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return list(loader.construct_sequence(node, deep=True))


def _ordered(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[Any, Any]:
    pairs = _listed(loader, node)
    return dict(pairs[0]) if pairs else {}


PYTHON = "tag:yaml.org,2002:python"
_Loader.add_constructor(f"{PYTHON}/tuple", _listed)
_Loader.add_constructor(f"{PYTHON}/object/apply:collections.OrderedDict", _ordered)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if the file is missing, too large, or holds something else."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        found = yaml.load(text, Loader=_Loader) if len(text) <= MOST_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a YAML file of rl_zoo3") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {terminal.one_line(error)}") from error
    if len(text) > MOST_BYTES or not isinstance(found, dict) or yaml_values(text) > MOST_VALUES:
        raise ConfigError(f"{path} is no YAML file of rl_zoo3: expected a mapping of at most {MOST_VALUES:,} values")
    return found


def zoo_run(folder: Path, model: str) -> ZooRun | None:
    """The run of rl_zoo3 in a folder; None if there is none. Raises ConfigError if it cannot be played.

    `model`: best_model.zip, or model.zip for the last model (if that is missing, the best one).
    """
    found = sorted(folder.glob("*/args.yml"))
    if len(found) != 1:
        return None
    where = found[0].parent
    last, best = folder / f"{where.name}.zip", folder / "best_model.zip"
    file = last if model == "model.zip" else folder / model
    if file == last and not file.is_file() and best.is_file():
        terminal.tell(f"fasttrain: there is no {last}: {best.name} is used")
        file = best
    if not file.is_file():
        raise ConfigError(f"run={folder}: no {file.name} there; name the folder of a finished run of rl_zoo3")
    return ZooRun(_configuration(where, folder), file, where / "vecnormalize.pkl")


def _configuration(where: Path, folder: Path) -> Config:
    arguments, entry = read_yaml(where / "args.yml"), read_yaml(where / "config.yml")
    env, given, packages = (arguments.get(name) for name in ("env", "env_kwargs", "gym_packages"))
    if not isinstance(env, str):
        raise ConfigError(f"{where / 'args.yml'} names no env")
    if isinstance(packages, list) and len(packages) == 1 and ":" not in env:
        env = f"{packages[0]}:{env}"
    try:
        spec = algorithm(str(arguments.get("algo")))
        found = taken({**entry, **({"env_kwargs": given} if isinstance(given, Mapping) else {})}, env, spec)
        config = configuration(found.settings, spec)
    except ConfigError as error:
        raise ConfigError(f"run={folder}: its args.yml and config.yml cannot be used ({error})") from error
    # Evaluations report the env's own rewards, so the statistics of rewards are not needed.
    normalize = tuple(name for name in config.env.normalize if name == "obs")
    if normalize and config.env.frame_stack > 1:
        raise ConfigError(f"run={folder}: it normalises before stacking frames; fasttrain can only normalise the stack")
    return dataclasses.replace(config, env=dataclasses.replace(config.env, normalize=normalize))
