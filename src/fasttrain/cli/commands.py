"""The command words: where each is implemented, which keys it alone reads, and what it does to its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain import terminal
from fasttrain.errors import ConfigError
from fasttrain.saving.files import read_json
from fasttrain.spec.overrides import key_of, split_options
from fasttrain.spec.typed import did_you_mean

MODULES = {
    "train": "fasttrain.runs.train",
    "resume": "fasttrain.runs.resume",
    "eval": "fasttrain.runs.evaluate",
    "play": "fasttrain.runs.play",
    "check": "fasttrain.runs.check",
    "export": "fasttrain.runs.export",
    "compare": "fasttrain.studies.compare",
    "ablate": "fasttrain.studies.ablate",
    "tune": "fasttrain.studies.tune",
    "doctor": "fasttrain.studies.doctor",
    "report": "fasttrain.report.index",
    "warmup": "fasttrain.runs.warmup",
}
COMMANDS = tuple(MODULES)
STUDIES = ("compare", "ablate", "tune")  # many runs, each in a process of its own, in one folder
REPORTED = ("train", "resume", *STUDIES)  # what they leave is drawn as report.html
STARTS_RUNS = (*STUDIES, "doctor")  # they get Hydra's --config-dir among their overrides, to pass it on
SWEEPABLE = ("train", "eval", "check", "export")
TRUSTING = ("eval", "play", "export")  # they load models, and take --trust
WITHOUT_FOLDER = ("play", "report", "resume", "warmup")  # leave no output folder of their own


class Owner(NamedTuple):
    """Commands that read a key (or all below it, if it ends in a dot), and what to say where it means nothing."""

    commands: tuple[str, ...]
    use: str


OWNERS = {
    "run": Owner(
        ("resume", "eval", "export", "play", "report", "doctor"), "to evaluate that run: fasttrain eval run=…"
    ),
    "format": Owner(("export",), "to export that run: fasttrain export run=…"),
    "model": Owner(("export", "play"), "to export that run: fasttrain export run=…"),
    "output": Owner(("export",), "to export that run: fasttrain export run=…"),
    "trust": Owner(TRUSTING, "to load a model with its pickles: fasttrain eval run=… --trust"),
    "play.": Owner(("play",), "to watch a run: fasttrain play run=…"),
    "candidates": Owner(("compare",), "to compare: fasttrain compare candidates=[baseline,speed]"),
    "horizon_minutes": Owner(("compare",), "a single run takes stop.max_minutes=…"),
    "seeds": Owner(("compare", "ablate"), "a single run takes seed=…"),
    "gate.": Owner(("compare", "ablate"), "to judge candidates: fasttrain compare candidates=[baseline,speed]"),
    "stop.": Owner(
        ("train", "resume", "compare", "doctor"), "to end a training early: fasttrain +profile=speed stop.max_minutes=…"
    ),
    "on_existing": Owner(("train", *STUDIES), "take another folder: hydra.run.dir=…"),
    "profiler": Owner(("train",), "to profile a training: fasttrain +profile=speed profiler=cprofile"),
    "study": Owner(STUDIES, "to go on with a study: fasttrain compare study=FOLDER"),
    "minutes": Owner(("ablate", "tune"), "a single run takes stop.max_minutes=…"),
    "profile_name": Owner(("ablate", "tune"), "only they write profiles"),
    "ablate.": Owner(("ablate",), "to try flags one by one: fasttrain ablate +profile=speed"),
    "tune.": Owner(("tune",), "to search for the best values: fasttrain tune +profile=speed"),
    "doctor.": Owner(("doctor",), "to look for the wall: fasttrain doctor +profile=speed"),
}


def implementation(command: str) -> Any:
    """The command's `main(config, sources, folder, overrides) -> exit code`; imported late: torch costs a second."""
    return import_module(MODULES[command]).main


def known(word: str) -> str:
    """`word` if it is a command.

    Raises:
        ConfigError: it is not.
    """
    if word not in COMMANDS:
        hint = did_you_mean(word, COMMANDS)
        raise ConfigError(f"unknown command '{word}'{hint}; the commands are {', '.join(COMMANDS)}")
    return word


def refuse_foreign_keys(command: str, typed: Iterable[str], overrides: Sequence[str]) -> None:
    """Keys that only other commands read.

    Raises:
        ConfigError: `typed` has one.
    """
    for key in typed:
        owner = OWNERS.get(key) or OWNERS.get(key.split(".")[0] + ".")
        if owner is not None and command not in owner.commands:
            value = next((text.partition("=")[2] for text in reversed(overrides) if key_of(text) == key), "")
            shown = key if owner.commands == ("play",) else f"{key}={value}"
            raise ConfigError(f"{shown} means nothing for {command}; {terminal.as_typed(owner.use)}")


def prepare(command: str, arguments: Sequence[str]) -> list[str]:
    """What was typed after `command`, as Hydra is to see it: `candidates` as text, `--test env` and
    `--trust` as keys, the folder.

    Raises:
        ConfigError: a sweep of something that is no single run, or `--trust` for what loads no model.
    """
    if {"-m", "--multirun"} & set(arguments) and command not in SWEEPABLE:
        raise ConfigError(f"-m sweeps over trainings; {command} cannot be swept")
    if "--trust" in arguments:
        if command not in TRUSTING:
            raise ConfigError(f"--trust means nothing for {command}; {', '.join(TRUSTING)} load models")
        arguments = ["trust=true" if text == "--trust" else text for text in arguments]
    if command in WITHOUT_FOLDER:
        return ["hydra.run.dir=.", "hydra.output_subdir=null", *arguments]
    if command == "doctor":
        return _test_as_key(arguments)
    if command in STUDIES:
        studies = [text.partition("=")[2] for text in split_options(arguments)[1] if key_of(text) == "study"]
        if studies:
            arguments = _going_on(Path(studies[-1]), command, arguments)
        result = [quoted(text) if key_of(text) == "candidates" else text for text in arguments]
        folder = studies[-1] if studies else "studies/${now:%Y-%m-%d}/${now:%H-%M-%S}_" + command + "_${pid:}"
        return [f"hydra.run.dir={_in_quotes(folder)}", *result]
    return list(arguments)


def _going_on(folder: Path, command: str, typed: Sequence[str]) -> list[str]:
    """What the study in `folder` was begun with, and what is typed now in its place: `seeds=10` adds seeds.

    Raises:
        ConfigError: there is none, and nothing is said that could begin it; or it is another command's.
    """
    stored = read_json(folder / "study.json")
    if not stored and len(typed) == 1:
        raise ConfigError(f"study={folder}: no study.json there; name the folder of a study, or say what to {command}")
    if stored and stored.get("command") != command:
        other = stored.get("command")
        raise ConfigError(f"study={folder} is one of {other}: {terminal.command()} {other} study={folder}")
    if not isinstance(stored.get("arguments", []), list):
        raise ConfigError(f"study={folder}: its study.json is none that fasttrain wrote")
    keys = {key_of(text) for text in typed} - {""}
    return [*(str(text) for text in stored.get("arguments", ()) if key_of(str(text)) not in keys), *typed]


def quoted(override: str) -> str:
    """`candidates=[{name: a, overrides: [num_envs=8]}]`, its value in quotes: Hydra's grammar knows no `=` there."""
    key, _, value = override.partition("=")
    bare = value[:1] not in ("'", '"')
    return f"{key}={_in_quotes(value)}" if bare else override


def _in_quotes(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _test_as_key(arguments: Sequence[str]) -> list[str]:
    """`--test env` and `--test=env` → `doctor.test=env`."""
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--test":
            result.append(f"doctor.test={next(rest, '')}")
        elif argument.startswith("--test="):
            result.append(f"doctor.test={argument.partition('=')[2]}")
        else:
            result.append(argument)
    return result
