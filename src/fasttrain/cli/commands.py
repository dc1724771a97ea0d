"""The command words: where each is implemented, which keys it alone reads, what it does to its arguments, and what to
an output folder that holds something."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fasttrain import terminal
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import Contents, changed_settings, contents_of, in_quotes, override
from fasttrain.saving.files import read_json
from fasttrain.spec import plugins
from fasttrain.spec.checks import NAMED, check_no_secret, check_path
from fasttrain.spec.config import Config
from fasttrain.spec.precedence import TYPED, given_twice, key_of
from fasttrain.spec.reading import all_keys
from fasttrain.spec.removed import texts_without_removed
from fasttrain.spec.setting import did_you_mean

MODULES = {
    "train": "fasttrain.runs.train",
    "resume": "fasttrain.runs.resume",
    "eval": "fasttrain.runs.evaluate",
    "play": "fasttrain.deploy.play",
    "check": "fasttrain.runs.check",
    "export": "fasttrain.deploy.export",
    "clone": "fasttrain.runs.clone",
    "compare": "fasttrain.studies.compare",
    "tune": "fasttrain.studies.tune",
    "doctor": "fasttrain.studies.doctor",
    "report": "fasttrain.report.index",
}
# These take arguments of their own and compose no configuration; without a module: an integration of that name.
PLAIN = {"new": "fasttrain.cli.new", "settings": "fasttrain.cli.settings", "watch": "fasttrain.report.watch", "zoo": ""}
COMMANDS = (*MODULES, *PLAIN)
# Other words for a command with a setting.
OTHER_WORDS = {"ablate": ("compare", "candidates=ablate"), "warmup": ("train", "warmup=only")}
STUDIES = ("compare", "tune")  # many runs, each in a process of its own, in one folder
RUNS = ("train", "resume")  # what they leave is drawn as report.html, as that of studies is
OF_A_RUN = ("resume", "eval", "play", "export", "report")  # of what is there: they need run=FOLDER
STARTS_RUNS = (*STUDIES, "doctor")  # they get Hydra's --config-dir among their overrides, to pass it on
SWEEPABLE = ("train", "eval", "check", "export")
TRUSTING = ("eval", "play", "export")  # they load models, and take --trust
WITHOUT_FOLDER = ("play", "report", "resume")  # leave no output folder of their own


class Owner(NamedTuple):
    """Commands that read a key (or all below it, if it ends in a dot), and what to say where it means nothing."""

    commands: tuple[str, ...]
    use: str


OWNERS = {
    "run": Owner((*OF_A_RUN, *STARTS_RUNS), "to evaluate that run: fasttrain eval run=…"),
    "format": Owner(("export",), "to export that run: fasttrain export run=…"),
    "model": Owner(("eval", "export", "play"), "to export that run: fasttrain export run=…"),
    "output": Owner(("export", "play", "report"), "to export that run: fasttrain export run=…"),
    "trust": Owner(TRUSTING, "to load a model with its pickles: fasttrain eval run=… --trust"),
    "video.": Owner(("train", "resume"), "to film a run: fasttrain play run=… output=game.mp4"),
    "play.": Owner(("play",), "to watch a run: fasttrain play run=…"),
    "clone.": Owner(("clone",), "to imitate somebody: fasttrain clone clone.of=hard"),
    "candidates": Owner(("compare",), "to compare: fasttrain compare candidates=[baseline,speed]"),
    "seeds": Owner(("compare",), "a single run takes seed=…"),
    "gate.": Owner(("compare",), "to judge candidates: fasttrain compare candidates=[baseline,speed]"),
    "stop.": Owner(
        ("train", "resume", "compare", "doctor"), "to end a training early: fasttrain +profile=speed stop.max_minutes=…"
    ),
    "on_existing": Owner(("train", *STUDIES), "use another folder: hydra.run.dir=…"),
    "minutes": Owner(STUDIES, "a single run takes stop.max_minutes=…"),
    "warmup": Owner(("train",), "to compile the kernels of a run: fasttrain train warmup=only"),
    "tune.": Owner(("tune",), "to search for the best values: fasttrain tune +profile=speed"),
    "doctor.": Owner(("doctor",), "to look for the bottleneck: fasttrain doctor +profile=speed"),
}


def implementation(command: str) -> Any:
    """The command's `main(config, sources, folder, overrides) -> exit code`, of `PLAIN` ones `main(arguments)`.

    Imported late: torch costs seconds.
    """
    module = MODULES.get(command) or PLAIN[command]
    main = (import_module(module) if module else plugins.load(plugins.INTEGRATIONS, command)).main
    if not gc.isenabled():  # since the program began; what is loaded by now stays to the end, no collection need see it
        gc.freeze()
        gc.enable()
    return main


def known(word: str) -> tuple[str, list[str]]:
    """The command that `word` is, and what else it says. Raises ConfigError: it is none."""
    if word in OTHER_WORDS:
        return OTHER_WORDS[word][0], [OTHER_WORDS[word][1]]
    if word not in COMMANDS:
        hint = did_you_mean(word, (*COMMANDS, *OTHER_WORDS))
        raise ConfigError(f"unknown command '{word}'{hint}; the commands are {', '.join(COMMANDS)}")
    return word, []


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        typed = re.search(r"unrecognized arguments: --?([\w.-]+)", message)
        if typed and (key := typed[1].replace("-", "_")) in all_keys():
            plus = "+" * (key in ("profile", "tuned"))
            raise ConfigError(f"--{typed[1]}: settings are typed without dashes, {plus}{key}=VALUE")
        raise ConfigError(f"{message}; fasttrain --help lists what there is")


def read_options(typed: Sequence[str]) -> argparse.Namespace:
    """Hydra's own options, before its parser prints its usage and ends the process. Raises ConfigError: one is unknown,
    lacks its value, or names a folder that is not there."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Options
    parser.prog = "fasttrain"
    found = parser.parse_args(list(typed))
    if found.config_dir is not None and not os.path.isdir(found.config_dir):
        raise ConfigError(f"--config-dir={found.config_dir}: no such folder")
    for option in ("config_path", "experimental_rerun"):
        if getattr(found, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} means nothing here; your own files: --config-dir DIR")
    if found.resolve and found.cfg is None:
        raise ConfigError("--resolve has no effect without --cfg")
    acts = {"--run": found.run, "--multirun": found.multirun, "--cfg": found.cfg, "--info": found.info,
            "--shell-completion": found.shell_completion}  # fmt: skip
    if len(asked := [name for name, given in acts.items() if given]) > 1:
        raise ConfigError(f"{' '.join(asked)}: remove all but one of them")
    return found


def leaves_nothing(command: str, typed: Sequence[str]) -> bool:
    """Whether the command has no output folder of its own."""
    return command in WITHOUT_FOLDER or (command == "train" and only_compiles(typed))


def only_compiles(typed: Sequence[str]) -> bool:
    """Whether `warmup` is typed with another value than off."""
    return any(key_of(text) == "warmup" and text.partition("=")[2].strip("'\"") != "off" for text in typed)


def refuse_foreign_keys(command: str, typed: Iterable[str], overrides: Sequence[str]) -> None:
    """Keys that only other commands read. Raises ConfigError: `typed` has one."""
    for key in typed:
        owner = OWNERS.get(key) or OWNERS.get(key.split(".")[0] + ".")
        if owner is not None and command not in owner.commands:
            value = next((text.partition("=")[2] for text in reversed(overrides) if key_of(text) == key), "")
            shown = key if owner.commands == ("play",) else f"{key}={value}"
            raise ConfigError(f"{shown} has no effect with {command}; {terminal.as_typed(owner.use)}")


def outdone(overrides: Sequence[str]) -> list[str]:
    """A line for each setting that was typed again with another value: the last one counts, as always with Hydra."""
    single = [text for text in overrides if "={" not in text and text[0] != "~"]  # of mappings all count
    last = {key_of(text): text for text in single}
    before = [text for text in single if last[key_of(text)].lstrip("+") != text.lstrip("+")]
    return [f"{text} was typed before {last[key_of(text)].lstrip('+')}, which counts" for text in before]


def refuse_sweep(command: str, typed: Sequence[str]) -> None:
    """Raises ConfigError where a command is not to be run once for each of several values."""
    if command not in SWEEPABLE or only_compiles(typed):
        raise ConfigError(f"-m sweeps over trainings; {command} {'warmup=only ' * (command == 'train')}cannot be swept")


def prepare(command: str, options: Sequence[str], typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options and settings that were typed after `command`, as Hydra is to see them: `candidates` as text, `--test env`
    and `--trust` as keys, the folder. Raises ConfigError: a folder is not named that is needed, or `--trust` for what
    loads no model."""
    if command == "report":
        typed = _folders_as_key(typed)
    if len({text for text in typed if key_of(text) == "algo"}) > 1:  # Hydra takes the last, without a word
        raise ConfigError(given_twice("algo", typed))
    for text in typed:
        if key_of(text) in NAMED:  # before Hydra writes down what was typed
            check_no_secret(key_of(text), text.partition("=")[2])
    if {"-m", "--multirun"} & {*options}:
        refuse_sweep(command, typed)
    if command in OF_A_RUN and "run" not in map(key_of, typed):
        refuse_foreign_keys(command, map(key_of, typed), typed)
        raise ConfigError(f"{command} needs run=FOLDER, the folder of a run (outputs/DATE/TIME_…)")
    options, keys = _as_keys(command, options)
    typed = [*typed, *keys]
    if leaves_nothing(command, typed):
        return options, ["hydra.run.dir=.", "hydra.output_subdir=null", *typed]
    if command == "eval":  # of which run, its files say
        typed = [re.sub(r"^\+*env\.kwargs=(?=\s*{)", "eval.env_kwargs=", text) for text in typed]
        return options, [f"hydra.run.dir={in_quotes('outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}_eval_${pid:}')}", *typed]
    if command not in STUDIES:
        return options, typed
    studies = [text.partition("=")[2] for text in typed if key_of(text) == "run"]
    if studies:
        typed = _study_goes_on(Path(studies[-1]), command, typed)
    typed = [quoted(text) if key_of(text) == "candidates" else text for text in typed]
    folder = studies[-1] if studies else "studies/${now:%Y-%m-%d}/${now:%H-%M-%S}_" + command + "_${pid:}"
    return options, [f"hydra.run.dir={in_quotes(folder)}", *typed]


def _as_keys(command: str, options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without the options that are settings: `--trust` is trust=true, and `--test env` is doctor.test=env."""
    if "--trust" in options and command not in TRUSTING:
        raise ConfigError(f"--trust has no effect with {command}; {', '.join(TRUSTING)} load models")
    left, keys = list[str](), ["trust=true"] * ("--trust" in options)
    rest = iter(options)
    for option in rest:
        if command == "doctor" and option.partition("=")[0] == "--test":
            keys.append(f"doctor.test={option.partition('=')[2] or next(rest, '')}")
        elif option != "--trust":
            left.append(option)
    return left, keys


def _study_goes_on(folder: Path, command: str, typed: Sequence[str]) -> list[str]:
    """What the study in `folder` was begun with, and what is typed now in its place: `seeds=10` adds seeds. Raises
    ConfigError: there is none, and nothing is said that could begin it; or it is another command's."""
    stored = read_json(folder / "study.json")
    if not stored and len(typed) == 1:
        raise ConfigError(f"run={folder}: no study.json there; name the folder of a study, or say what to {command}")
    other, *more = OTHER_WORDS.get(str(stored.get("command")), [stored.get("command")])
    named = [text for text in (*typed, *more) if key_of(text) == "candidates"]
    ablates = [re.search(r"=\W*ablate\b", text) is not None for text in named]
    if stored and (other != command or any(each != (stored["command"] == "ablate") for each in ablates)):
        other = stored["command"]
        raise ConfigError(f"run={folder} is a study of {other}: {terminal.command()} {other} run={folder}")
    if not isinstance(stored.get("arguments", []), list):
        raise ConfigError(f"run={folder}: its study.json is none that fasttrain wrote")
    keys = {key_of(text) for text in typed} - {""}
    before = texts_without_removed([str(text) for text in stored.get("arguments", ())])
    more = [] if any(key_of(text) == "candidates" for text in before) else more
    return [*(text for text in (*more, *before) if key_of(text) not in keys), *typed]


def quoted(override: str) -> str:
    """`candidates=[{name: a, overrides: [num_envs=8]}]`, its value in quotes: Hydra's grammar knows no `=` there."""
    key, _, value = override.partition("=")
    bare = value[:1] not in ("'", '"')
    return f"{key}={in_quotes(value)}" if bare else override


def _folders_as_key(typed: Sequence[str]) -> list[str]:
    """`report A B` and `report run=A,B` → `run='A,B'`."""
    folders = [text if "/" in text else f"./{text}" for text in typed if "=" not in text or Path(text).is_dir()]
    rest = [text for text in typed if "=" in text and not Path(text).is_dir()]
    if not folders:
        return [quoted(text) if key_of(text) == "run" and "," in text else text for text in rest]
    named = [text.partition("=")[2] for text in rest if key_of(text) == "run"]
    return [f"run={in_quotes(','.join([*named, *folders]))}", *(text for text in rest if key_of(text) != "run")]


# --- an output folder that holds a run, a sweep or a study already: refused, continued, or started again. Decided here
# for every command and for `train(…)`, before anything is written there; cleared when all else is known to be right.


class Request(NamedTuple):
    """One command, as it is asked for."""

    command: str
    config: Config
    sources: Mapping[str, str]
    overrides: list[str]
    folder: Path
    goes_on: Sequence[str] = ()  # what names the study that is continued, whose own arguments are to be read too


def to_go_on_with(kind: str, way: str, folder: str | Path, key: str) -> Contents | None:
    """What is in the folder, where it is to be continued; None where it is free, or started again. Raises ConfigError:
    it holds something that would be written over, or somebody works there.

    Args:
        kind: what the command leaves there: run, sweep or study; empty where it knows no way on.
        way: `on_existing`.
        key: by which the folder was given.
    """
    check_path(key, str(folder))
    found = contents_of(Path(folder))
    if found is None or (found.kind == kind and way == "overwrite"):
        return None
    if found.kind == kind and way == "resume":
        return found
    ways = ", on_existing=resume continues it, on_existing=overwrite starts it again" * (found.kind == kind)
    raise ConfigError(f"{found.about(key, folder)}: use another folder{ways}")


def decided(asked: Request, typed: str | Path, key: str = "hydra.run.dir") -> Request | str:
    """The command that there is to run, for the one that is asked for: a text where nothing is left to do, and why.
    `typed`: the folder as it was given, by `key`. Raises ConfigError: as `to_go_on_with`, or that run cannot go on."""
    study, config = asked.command in STUDIES, asked.config
    way = "resume" if study and config.run is not None else config.on_existing
    found = to_go_on_with("study" if study else "run" * (asked.command == "train"), way, typed, key)
    if found is None or config.run is not None:
        return asked
    if study:
        return asked._replace(goes_on=[override("run", found.folder)])
    different = _changed(found, found.about(key, typed), config)
    if isinstance(different, str):
        return different
    if different is None:
        return asked._replace(config=dataclasses.replace(config, on_existing="overwrite"))
    values = {name: in_quotes(it) if isinstance(it, str) else terminal.spelt(it) for name, it in different.items()}
    texts = [override("run", found.folder), *(f"{name}={text}" for name, text in values.items())]
    sources = dict.fromkeys(("run", *different), TYPED)
    return Request("resume", dataclasses.replace(config, run=str(found.folder)), sources, texts, found.folder)


def _changed(found: Contents, about: str, config: Config) -> dict[str, Any] | str | None:
    """What a run is continued: the settings that have other values now. A text: nothing is left to do, and why.
    None: it ended before there was anything to continue from, so it is started again. Raises ConfigError: other values
    of settings that cannot change on the way, or no checkpoint."""
    from fasttrain.runs.resume import may_change
    from fasttrain.saving.checkpoints import CheckpointFolder

    where, summary = found.folder, read_json(found.folder / "summary.json")
    different = changed_settings(where, config)
    if wrong := sorted(key for key in different if not may_change(key)):
        raise ConfigError(
            f"{about} of other values of {', '.join(wrong)}, which cannot change on the way: use another "
            "folder, or on_existing=overwrite starts again"
        )
    if summary.get("status") == "done" and config.total_timesteps <= summary.get("env_steps", 0):
        return f"{where} holds this run, finished after {summary['env_steps']:,} steps: nothing is left to do"
    if summary.get("status") == "done" and "total_timesteps" not in different:
        return f"{where} holds this run, finished (by {summary.get('stopped_by')}): nothing is left to do"
    if CheckpointFolder(where / "checkpoints").newest().folder is None:
        if (where / "model.zip").exists():
            raise ConfigError(f"{about} without a checkpoint to continue from: use another folder")
        return None
    return different
