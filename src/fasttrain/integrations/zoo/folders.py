"""Files of rl_zoo3: its hyperparameters, and the folders its runs leave. Nothing in them is executed.

Its YAML has tags of Python: tuples and OrderedDicts are read as the lists and mappings they are, any other is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fasttrain import terminal
from fasttrain.errors import ConfigError
from fasttrain.integrations.zoo.entries import algorithm, configuration, taken
from fasttrain.saving.files import yaml_values
from fasttrain.spec.config import Config

MOST_BYTES = 1 << 20  # of a file; 16 kB are usual
MOST_VALUES = 100_000  # in a file: one that names its own parts again and again has more than it is long


class ZooRun(NamedTuple):
    """What a folder of rl_zoo3 holds."""

    config: Config
    model: Path
    statistics: Path  # of VecNormalize, a pickle; there only where the run had it


class _Loader(yaml.SafeLoader):
    """Plain values, and the tags that `yaml.dump` of an OrderedDict and of a tuple writes."""


def _listed(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return list(loader.construct_sequence(node, deep=True))


def _ordered(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[Any, Any]:
    pairs = _listed(loader, node)
    return dict(pairs[0]) if pairs else {}


PYTHON = "tag:yaml.org,2002:python"
_Loader.add_constructor(f"{PYTHON}/tuple", _listed)
_Loader.add_constructor(f"{PYTHON}/object/apply:collections.OrderedDict", _ordered)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file.

    Raises:
        ConfigError: there is no such file, it is too large, or it holds something else.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        found = yaml.load(text, Loader=_Loader) if len(text) <= MOST_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a YAML file of rl_zoo3") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {terminal.one_line(error)}") from error
    if len(text) > MOST_BYTES or not isinstance(found, dict) or yaml_values(text) > MOST_VALUES:
        raise ConfigError(f"{path} is no YAML file of rl_zoo3: a mapping of at most {MOST_VALUES:,} values")
    return found


def zoo_run(folder: Path, model: str) -> ZooRun | None:
    """What rl_zoo3 left in a folder of its own; None where it is no such folder.

    Args:
        model: model.zip for the last one, best_model.zip; where there is no last one, the best is taken, with a word.

    Raises:
        ConfigError: it is one that cannot be played.
    """
    found = sorted(folder.glob("*/args.yml"))
    if len(found) != 1:
        return None
    where = found[0].parent
    last, best = folder / f"{where.name}.zip", folder / "best_model.zip"
    file = last if model == "model.zip" else folder / model
    if file == last and not file.is_file() and best.is_file():
        terminal.tell(f"fasttrain: {last} is not there: {best.name} is taken")
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
        raise ConfigError(f"run={folder}: its args.yml and config.yml make no run of fasttrain ({error})") from error
    # Rewards are told as the env pays them, so that statistics of rewards are not needed.
    normalize = tuple(name for name in config.env.normalize if name == "obs")
    if normalize and config.env.frame_stack > 1:
        raise ConfigError(f"run={folder}: frame_stack over normalised observations is the other way round here")
    return dataclasses.replace(config, env=dataclasses.replace(config.env, normalize=normalize))
