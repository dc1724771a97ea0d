"""`fasttrain check --config FILE.yaml [--json]`: all errors of a file of settings, without playing an environment.

With `--json` the errors are a list of `{key, place, reason, suggestion}`, where `place` is `FILE:LINE`. The exit code
is 0 without errors and 2 with errors. `fasttrain settings --schema` prints the schema for editors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fasttrain.cli.commands import refuse_foreign_keys
from fasttrain.cli.compose import composer
from fasttrain.errors import EXIT_DONE, EXIT_WRONG_INPUT, ConfigError, FastTrainError
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.config import Config
from fasttrain.spec.precedence import read
from fasttrain.spec.reading import all_keys

MOST_ERRORS = 50
FREE = ("env.kwargs", "eval.env_kwargs", "algo.kwargs", "algo.policy_kwargs", "tune.space", "candidates",
        "population.settings", "population.explore")  # fmt: skip
GROUPS = ("algo", "env", "profile", "tuned")  # keys that may name a file (`algo: dqn`) or hold settings


class Problem(NamedTuple):
    """One error of a file."""

    key: str
    place: str
    reason: str
    suggestion: str


def main(arguments: Sequence[str]) -> int:
    """Print the errors of the file that follows `--config`.

    Raises ConfigError: there is no such file, or it is no YAML mapping.
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    place = words.index("--config")
    rest = [word for word in (*words[:place], *words[place + 2 :]) if word not in ("check", "--json")]
    if len(words) <= place + 1 or rest:
        raise ConfigError("check --config takes one file, and --json: fasttrain check --config settings.yaml --json")
    found = problems(Path(words[place + 1]))
    if "--json" in words:
        print(json.dumps([one._asdict() for one in found], indent=2, ensure_ascii=False))
    else:
        lines = [f"{one.place}: {one.reason}" for one in found]
        print("\n".join(lines) or f"{words[place + 1]}: no errors")
    return EXIT_WRONG_INPUT if found else EXIT_DONE


def problems(file: Path) -> list[Problem]:
    """The errors of a YAML file of settings, sorted by line.

    Raises ConfigError: there is no such file, or it is no YAML mapping.
    """
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config={file}: {getattr(error, 'strerror', None) or 'not in UTF-8'}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        return [Problem("", f"{file}:{line}", f"no YAML: {getattr(error, 'problem', error)}", "")]
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config={file}: has no keys; write key: value, one a line")
    settings = {key: (value, line) for key, value, line in _settings(root) if "${" not in str(value)}
    rows = [(key, line) for key, _, line in _settings(root)]
    twice = [(key, line) for at, (key, line) in enumerate(rows) if key in dict(rows[:at])]
    found = [Problem(key, f"{file}:{line}", f"{key} is set twice", "remove one of them") for key, line in twice]
    while len(found) < MOST_ERRORS:
        try:
            config = _compose({key: value for key, (value, _) in settings.items()})
            unused = [flag.name for flag in FLAGS if flag.name in settings and not flag.fits(config.algo.spec)]
            if {"algo", "algo.name"} & {*settings}:  # without algo, settings of any algorithm are allowed
                reason = f"has no effect with algo={config.algo.name}"
                found += [Problem(key, f"{file}:{settings[key][1]}", f"{key} {reason}", "") for key in unused]
        except FastTrainError as error:
            reason = str(error)
            key = _key_of(reason, list(settings))
            line = settings.pop(key)[1] if key else 1
            advice = reason.rpartition("; ")[2] if "; " in reason else ""
            found.append(Problem(key, f"{file}:{line}", reason, advice))
            if key:
                continue
        break
    return sorted(found, key=lambda one: int(one.place.rpartition(":")[2]))


def _settings(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, Any, int]]:
    """Dotted key, value and line of each setting."""
    loader = yaml.SafeLoader("")
    for name, value in node.value:
        key = f"{prefix}{loader.construct_object(name, deep=True)}"
        if isinstance(value, yaml.MappingNode) and key not in FREE and value.value:
            yield from _settings(value, f"{key}.")
        elif key != "defaults":
            yield key, loader.construct_object(value, deep=True), name.start_mark.line + 1


def _compose(settings: dict[str, Any]) -> Config:
    """The configuration with these settings. Raises FastTrainError for the first wrong setting."""
    chosen = {key: value for key, value in settings.items() if key not in GROUPS}
    if (name := chosen.pop("algo.name", None)) is not None:
        settings = {**settings, "algo": name}
    plus = {"profile": "+profile", "tuned": "+tuned"}
    words = [f"{plus.get(key, key)}={settings[key]}" for key in GROUPS if settings.get(key)]
    if "env" not in settings and ("env.id" in chosen or "env.entry_point" in chosen):
        words.append("env=gym")
    unknown = [key for key in chosen if key not in all_keys() and not key.startswith(tuple(f"{it}." for it in FREE))]
    given = read([*words, *(f"{key}=0" for key in unknown[:1])], {}, values=chosen)
    with composer() as hydra:
        config, sources = hydra.configured(given)
    refuse_foreign_keys("train", sources, [f"{key}={value}" for key, value in chosen.items()])
    return config


def _key_of(reason: str, keys: list[str]) -> str:
    """The setting that the message `reason` is about: the first of `keys` that it names; empty if it names none."""
    places = {key: reason.find(key) for key in keys}
    named = [key for key, place in places.items() if place >= 0]
    return min(named, key=lambda key: (places[key], -len(key)), default="")
