"""`fasttrain zoo import FILE.yml --env ID --algo NAME`: an entry of rl_zoo3's hyperparameters as a profile of ours."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fasttrain import terminal
from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.integrations.zoo.entries import Taken, algorithm, configuration, entry_of, nested, taken, zoo_name
from fasttrain.integrations.zoo.folders import read_yaml, zoo_run
from fasttrain.saving.files import write_whole
from fasttrain.spec.algorithms import AlgorithmSpec
from fasttrain.spec.backends import name_of_env
from fasttrain.spec.setting import did_you_mean

__all__ = ["main", "zoo_run"]
USAGE = "fasttrain zoo import FILE.yml --env CartPole-v1 --algo ppo [--output conf/profile/NAME.yaml]"
FASTER = "vec_env=auto", "engine=fast vec_env=auto fused_update=auto"  # without a class of ours, and with one
MARK = "Imported from rl_zoo3"


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"zoo: {message}; the command is {terminal.as_typed(USAGE)}")


def main(arguments: Sequence[str]) -> int:
    """Write the profile; say where it is, how it is used and what is not in it.

    Raises:
        ConfigError: an argument, the file or its entry is none that could be imported.
    """
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
    print(f"written to {output}\n  {command}\n  {command} {FASTER[spec.has_fast]}    faster")
    if not asked.env.endswith(name):
        print(f"from the entry {name}: none is called {asked.env}{did_you_mean(asked.env, map(str, entries))}")
    for kind, lines in (("not taken over", found.left), ("otherwise", found.notes)):
        for line in lines:
            print(f"{kind}: {terminal.one_line(line)}")
    return EXIT_DONE


def _file(given: str) -> Path:
    """A file, or the one that the installed package has for an algorithm."""
    path = Path(given)
    if path.suffix in (".yml", ".yaml") or path.exists():
        return path
    package = importlib.util.find_spec("rl_zoo3")
    places = (package.submodule_search_locations if package else None) or []
    folders = [Path(place, "hyperparams") for place in places]
    known = sorted(file.stem for folder in folders for file in folder.glob("*.yml"))
    if given not in known:
        hold = f"rl_zoo3 has {', '.join(known)}" if known else "rl_zoo3, which has some, is not installed"
        raise ConfigError(f"zoo import {given}: no such file; name a FILE.yml ({hold})")
    return next(folder / f"{given}.yml" for folder in folders if (folder / f"{given}.yml").is_file())


def _is_atari(env: str) -> bool:
    """As rl_zoo3 tells such games, or by the name alone where no package has registered them."""
    import gymnasium  # 0.2 s

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
            f"--output {path}: expected conf/profile/NAME.yaml; a profile lies in a folder called profile"
        )
    if path.exists() and not (path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"--output {path}: there is a file that was not imported; take another name")
    return path


def _write(output: Path, head: Sequence[str], found: Taken, spec: AlgorithmSpec) -> None:
    import yaml

    values = nested(found.settings, {"defaults": [{"override /algo": spec.name}, {"override /env": "gym"}]})
    lines = ["# @package _global_", *(f"# {line}" for line in head)]
    lines += [f"# Not taken over: {terminal.one_line(line)}" for line in found.left]
    lines += [f"# Otherwise: {line}" for line in found.notes]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if "${" in text:
        raise ConfigError(f"{output.stem}: a text with ${{ in it, which a profile would look up elsewhere")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, "\n".join([*lines, text]))
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror or error}") from error
