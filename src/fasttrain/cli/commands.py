"""Where each command is implemented, which settings only it reads, and how its arguments and folder are prepared."""

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
from fasttrain.spec.plugins import Owner
from fasttrain.spec.precedence import SHORT, TYPED, key_of, typed_twice_message
from fasttrain.spec.reading import all_keys
from fasttrain.spec.removed import removal_message
from fasttrain.spec.setting import did_you_mean

MODULES = {  # "": of another package, by an entry point
    "train": "fasttrain.runs.train",
    "resume": "fasttrain.runs.resume",
    "eval": "fasttrain.runs.evaluate",
    "play": "",
    "check": "fasttrain.runs.check",
    "export": "",
    "clone": "fasttrain.runs.clone",
    "compare": "",
    "population": "",
    "tune": "",
    "doctor": "",
    "report": "",
}
# Commands that parse their own arguments and compose no configuration.
PLAIN = {"new": "fasttrain.cli.new", "settings": "fasttrain.cli.settings", "watch": "", "plan-cluster": "", "zoo": ""}
COMMANDS = (*MODULES, *PLAIN)
# Short word → the command, and the setting that the word adds.
OTHER_WORDS = {"ablate": ("compare", "candidates=ablate"), "warmup": ("train", "warmup=only")}
STUDIES = ("compare", "population", "tune")  # many runs in one folder, each in a process of its own
RUNS = ("train", "resume")
LIMITS = ("run", "minutes", "seeds", "tune.trials", "sweep.", "on_existing", "report", "live")  # say nothing to study
OF_A_RUN = ("resume", "eval", "play", "export", "report")  # need run=FOLDER
STARTS_RUNS = (*STUDIES, "doctor")  # get Hydra's --config-dir among their overrides, and pass it to their runs
SWEEPABLE = ("train", "eval", "check", "export")
TRUSTING = ("eval", "play", "export")  # load models, and accept --trust
WITHOUT_FOLDER = ("play", "report", "resume")  # have no output folder of their own
OWNERS = {
    "run": Owner((*OF_A_RUN, *STARTS_RUNS), "to evaluate that run: fasttrain eval run=…"),
    "model": Owner(("eval", "export", "play"), "to export that run: fasttrain export run=…"),
    "output": Owner(("export", "play", "report"), "to export that run: fasttrain export run=…"),
    "trust": Owner(TRUSTING, "to load a model with its pickles: fasttrain eval run=… --trust"),
    "video.": Owner(("train", "resume"), "to film a run: fasttrain play run=… output=game.mp4"),
    "clone.": Owner(("clone",), "to imitate somebody: fasttrain clone clone.of=hard"),
    "stop.": Owner(
        ("train", "resume", *STUDIES, "doctor"), "to end a training early: fasttrain +profile=speed stop.max_minutes=…"
    ),
    "on_existing": Owner(("train", *STUDIES), "use another folder: hydra.run.dir=…"),
    "warmup": Owner(("train",), "to compile the kernels of a run: fasttrain train warmup=only"),
    "checkpoint.copy_to": Owner(("train", "resume"), "to copy one run: fasttrain +profile=speed checkpoint.copy_to=…"),
    "cluster.": Owner(("train", "resume"), "to train with actors: fasttrain +profile=speed cluster=ray"),
    **{key: owner for part in plugins.parts(*plugins.PARTS) for key, owner in part.owners.items()},
}


def implementation(command: str) -> Any:
    """Import the command's `main(config, sources, folder, overrides) -> exit code`; for `PLAIN`, `main(arguments)`.

    This may import torch, which takes seconds.
    """
    module = MODULES.get(command) or PLAIN.get(command)
    if not module and (message := plugins.missing_text(command)):
        raise ConfigError(message)
    main = (import_module(module) if module else plugins.load(plugins.COMMANDS, command)).main
    if not gc.isenabled():  # __main__ disabled it. Loaded modules are never garbage: freeze them
        gc.freeze()
        gc.enable()
    return main


def is_of_others(word: str) -> bool:
    """Whether `word` is a command that another package offers. Its `main` gets the arguments after it as typed."""
    return word not in (*COMMANDS, *OTHER_WORDS, "help") and word in plugins.names(plugins.COMMANDS)


def command_of(word: str) -> tuple[str, list[str]]:
    """The command that `word` means, and the settings that it adds. Raises ConfigError: `word` is no command."""
    if word in OTHER_WORDS:
        return OTHER_WORDS[word][0], [OTHER_WORDS[word][1]]
    if word not in COMMANDS:
        if word in all_keys():
            raise ConfigError(f"{word} is a setting: type {word}=VALUE")
        hint = did_you_mean(word, (*COMMANDS, *OTHER_WORDS))
        raise ConfigError(f"unknown command '{word}'{hint}; the commands are {', '.join(COMMANDS)}")
    return word, []


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        typed = re.search(r"unrecognized arguments: --?([\w.-]+)", message)
        if typed and (key := typed[1].replace("-", "_")) in all_keys():
            plus = "+" * (key in ("profile", "tuned"))
            raise ConfigError(f"--{typed[1]}: settings are typed without dashes, {plus}{key}=VALUE")
        raise ConfigError(f"{message}; fasttrain --help lists commands and settings")


def spelt_out(command: str, typed: Sequence[str]) -> tuple[str, list[str]]:
    """`train population=8` → `population population.size=8`; also `cluster=ray` → `cluster.engine=ray`."""
    words = [re.sub(r"^\+*(population|cluster)=(?!\s*[{n])", lambda key: f"{SHORT[key[1]]}=", text) for text in typed]
    sized = any(key_of(text) == "population.size" for text in words)
    return "population" if sized and command == "train" else command, words


def read_options(typed: Sequence[str]) -> argparse.Namespace:
    """Parse Hydra's options. Hydra's own parser would print its usage and end the process.

    Raises ConfigError: an option is unknown, lacks its value, or names a folder that does not exist.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Options
    parser.prog = "fasttrain"
    parsed = parser.parse_args(list(typed))
    if parsed.config_dir is not None and not os.path.isdir(parsed.config_dir):
        raise ConfigError(f"--config-dir={parsed.config_dir}: no such folder")
    for option in ("config_path", "experimental_rerun"):
        if getattr(parsed, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} has no effect; for your own files use --config-dir DIR")
    if parsed.resolve and parsed.cfg is None:
        raise ConfigError("--resolve has no effect without --cfg")
    actions = {"--run": parsed.run, "--multirun": parsed.multirun, "--cfg": parsed.cfg, "--info": parsed.info,
               "--shell-completion": parsed.shell_completion}  # fmt: skip
    if len(typed_actions := [name for name, value in actions.items() if value]) > 1:
        raise ConfigError(f"{' '.join(typed_actions)}: remove all but one of them")
    return parsed


def refuse_foreign_keys(command: str, typed: Iterable[str], overrides: Sequence[str]) -> None:
    """Raises ConfigError: one of the typed keys is read by other commands only."""
    for key in typed:
        owner = OWNERS.get(key) or OWNERS.get(key.split(".")[0] + ".")
        if owner is not None and command not in owner.commands:
            value = next((text.partition("=")[2] for text in reversed(overrides) if key_of(text) == key), "")
            setting = key if owner.commands == ("play",) or not value else f"{key}={value}"
            raise ConfigError(f"{setting} has no effect with {command}; {terminal.as_typed(owner.use)}")


def repeated_settings(overrides: Sequence[str]) -> list[str]:
    """A line for each setting that was typed twice with different values. The last value is used, as in Hydra."""
    single = [text for text in overrides if "={" not in text and text[0] != "~"]  # Hydra merges repeated mappings
    last = {key_of(text): text for text in single}
    before = [text for text in single if last[key_of(text)].lstrip("+") != text.lstrip("+")]
    return [f"{text} has no effect: {last[key_of(text)].lstrip('+')} was typed after it" for text in before]


def refuse_sweep(command: str, warmup: str = "off", copied: bool = False) -> None:
    """Raises ConfigError: the command cannot be run as a sweep. `copied`: checkpoint.copy_to is set."""
    if copied:
        raise ConfigError("checkpoint.copy_to is for one run, and the runs of a sweep would overwrite each other there")
    if command not in SWEEPABLE or warmup == "only":
        raise ConfigError(f"-m sweeps over trainings; {command} {'warmup=only ' * (command == 'train')}cannot be swept")


def prepare(command: str, options: list[str], typed: list[str]) -> tuple[list[str], list[str]]:
    """Turn the options and settings after `command` into those that Hydra needs, with the output folder.

    Raises ConfigError: the command needs a folder, or does not accept an option.
    """
    if command == "report":
        typed = _folders_as_key(typed)
    for key in ("algo", "tune.space", "population.explore"):  # Hydra would use the last `algo`, and merge the others
        if len({text for text in typed if key_of(text) == key}) > 1:
            raise ConfigError(typed_twice_message(key, typed))
    for text in typed:
        if key_of(text) in NAMED:  # check now, before Hydra stores the overrides
            check_no_secret(key_of(text), text.partition("=")[2])
    if {"-m", "--multirun"} & {*options}:
        refuse_sweep(command)
    if command in OF_A_RUN and not {text for text in typed if key_of(text) == "run"} - {"run=null", "run="}:
        refuse_foreign_keys(command, map(key_of, typed), typed)
        raise ConfigError(f"{command} needs run=FOLDER, the folder of a run (outputs/DATE/TIME_…)")
    if options:
        options, keys = _as_keys(command, options)
        typed = [*typed, *keys]
    if command in WITHOUT_FOLDER:
        return options, ["hydra.run.dir=.", "hydra.output_subdir=null", *typed]
    if command == "eval":
        typed = [re.sub(r"^\+*env\.kwargs=(?=\s*{)", "eval.env_kwargs=", text) for text in typed]
        return options, [f"hydra.run.dir={in_quotes('outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}_eval_${pid:}')}", *typed]
    if command not in STUDIES:
        return options, typed
    studies = [text.partition("=")[2] for text in typed if key_of(text) == "run"]
    if studies:
        typed = _with_stored_arguments(Path(studies[-1]), command, typed)
    typed = [quoted(text) if key_of(text) == "candidates" else text for text in typed]
    folder = studies[-1] if studies else "studies/${now:%Y-%m-%d}/${now:%H-%M-%S}_" + command + "_${pid:}"
    return options, [f"hydra.run.dir={in_quotes(folder)}", *typed]


def _as_keys(command: str, options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Turn options that are settings into overrides: `--trust` is trust=true, `--test env` is doctor.test=env.

    Returns the other options, and the overrides.
    """
    if "--trust" in options and command not in TRUSTING:
        raise ConfigError(f"--trust has no effect with {command}; {', '.join(TRUSTING)} load models")
    others, keys = list[str](), ["trust=true"] * ("--trust" in options)
    remaining = iter(options)
    for option in remaining:
        if command == "doctor" and option.partition("=")[0] == "--test":
            keys.append(f"doctor.test={option.partition('=')[2] or next(remaining, '')}")
        elif option != "--trust":
            others.append(option)
    return others, keys


def _with_stored_arguments(folder: Path, command: str, typed: Sequence[str]) -> list[str]:
    """The stored arguments of the study in `folder`. Settings in `typed` replace stored ones: `seeds=10` adds seeds.

    Raises ConfigError: the folder has no study and `typed` names nothing to study, or another command made the study.
    """
    stored = read_json(folder / "study.json")
    if not stored and all(key_of(text).startswith(LIMITS) for text in typed):
        raise ConfigError(f"run={folder}: no study.json there; name a study's folder, or type settings of a new study")
    other, *more = OTHER_WORDS.get(str(stored.get("command")), [stored.get("command")])
    named = [text for text in (*typed, *more) if key_of(text) == "candidates"]
    ablates = [re.search(r"=\W*ablate\b", text) is not None for text in named]
    if stored and (other != command or any(each != (stored["command"] == "ablate") for each in ablates)):
        other = stored["command"]
        raise ConfigError(f"run={folder} is a study of {other}: {terminal.command()} {other} run={folder}")
    if not isinstance(stored.get("arguments", []), list):
        raise ConfigError(f"run={folder}: its study.json is not of fasttrain")
    keys = {key_of(text) for text in typed} - {""}
    before = [str(text) for text in stored.get("arguments", ())]
    if message := next(filter(None, (removal_message(key_of(text)) for text in before)), ""):
        raise ConfigError(f"run={folder} is a study of an older version ({message}); begin a new study")
    more = [] if any(key_of(text) == "candidates" for text in before) else more
    return [*(text for text in (*more, *before) if key_of(text) not in keys), *typed]


def quoted(override: str) -> str:
    """Put the value in quotes if it has none, because Hydra's grammar accepts no `=` in a value without quotes."""
    key, _, value = override.partition("=")
    bare = value[:1] not in ("'", '"')
    return f"{key}={in_quotes(value)}" if bare else override


def _folders_as_key(typed: Sequence[str]) -> list[str]:
    """`report A B` and `report run=A,B` → `run='A,B'`."""
    folders = [text if "/" in text else f"./{text}" for text in typed if "=" not in text or Path(text).is_dir()]
    overrides = [text for text in typed if "=" in text and not Path(text).is_dir()]
    if not folders:
        return [quoted(text) if key_of(text) == "run" and "," in text else text for text in overrides]
    named = [text.partition("=")[2] for text in overrides if key_of(text) == "run"]
    return [f"run={in_quotes(','.join([*named, *folders]))}", *(text for text in overrides if key_of(text) != "run")]


# --- An output folder that already holds a run, a sweep or a study is refused, continued or overwritten. The code below
# decides this for every command and for `train(…)`, before anything is written. The folder is cleared later.


class Request(NamedTuple):
    """A command with its configuration."""

    command: str
    config: Config
    sources: Mapping[str, str]
    overrides: list[str]
    folder: Path
    goes_on: Sequence[str] = ()  # if a study is continued: `run=FOLDER`, to read its stored arguments


def existing_to_resume(kind: str, way: str, folder: str | Path, key: str) -> Contents | None:
    """The contents of the output folder if the command continues them; None if the folder is free or is overwritten.

    Args:
        kind: what the command writes (run, sweep or study); empty if the command cannot continue one.
        way: the setting `on_existing`.
        key: the setting that names the folder, for messages.

    Raises:
        ConfigError: the folder holds something that must not be overwritten, or another process uses it.
    """
    check_path(key, str(folder))
    found = contents_of(Path(folder))
    if found is None or (found.kind == kind and way == "overwrite"):
        return None
    if found.kind == kind and way == "resume":
        return found
    ways = ", on_existing=resume continues it, on_existing=overwrite starts it again" * (found.kind == kind)
    raise ConfigError(f"{found.about(key, folder)}: use another folder{ways}")


def apply_on_existing(request: Request, typed: str | Path, key: str = "hydra.run.dir") -> Request | str:
    """The command to run after `on_existing` is applied, or a text that says that nothing is left to do.

    Args:
        typed: the folder as the user typed it, by the setting `key`.

    Raises:
        ConfigError: raised by `existing_to_resume`, or the run cannot be continued.
    """
    study, config = request.command in STUDIES, request.config
    if request.command == "tune" and config.run is not None and (Path(config.run) / "study.json").exists():
        return request  # an existing study is allowed: several processes may search in it
    way = "resume" if study and config.run is not None else config.on_existing
    if request.command == "train" and config.checkpoint.copy_to is not None:
        from fasttrain.saving.remote import fetch

        contents_of(Path(typed))  # refuses a folder in which a process works
        print(fetch(Path(typed), config.checkpoint.copy_to, way), end="")
    found = existing_to_resume("study" if study else "run" * (request.command == "train"), way, typed, key)
    if found is None or config.run is not None:
        return request
    if study:
        return request._replace(goes_on=[override("run", found.folder)])
    different = _changed_settings(found, found.about(key, typed), config)
    if isinstance(different, str):
        return different
    if different is None:
        return request._replace(config=dataclasses.replace(config, on_existing="overwrite"))
    values = {name: in_quotes(it) if isinstance(it, str) else terminal.spelt(it) for name, it in different.items()}
    texts = [override("run", found.folder), *(f"{name}={text}" for name, text in values.items())]
    sources = dict.fromkeys(("run", *different), TYPED)
    return Request("resume", dataclasses.replace(config, run=str(found.folder)), sources, texts, found.folder)


def _changed_settings(found: Contents, about: str, config: Config) -> dict[str, Any] | str | None:
    """The settings of `config` that differ from those of the run in the folder: dotted key → new value.

    Returns a text if nothing is left to do, and None if the run starts again because it wrote no checkpoint or model.

    Raises ConfigError: a setting that cannot change differs, or a run with a model has no checkpoint.
    """
    from fasttrain.runs.resume import may_change
    from fasttrain.saving.checkpoints import CheckpointFolder

    where, summary = found.folder, read_json(found.folder / "summary.json")
    different = changed_settings(where, config)
    if wrong := sorted(key for key in different if not may_change(key)):
        raise ConfigError(
            f"{about} whose {', '.join(wrong)} differ, which cannot change in a resumed run: use another "
            "folder, or on_existing=overwrite to start again"
        )
    if summary.get("status") == "done" and config.total_timesteps <= summary.get("env_steps", 0):
        return f"{where} holds this run, finished after {summary['env_steps']:,} steps: nothing is left to do"
    longer = summary.get("stopped_by") == "horizon"  # and total_timesteps was raised by a resume that was killed
    if summary.get("status") == "done" and "total_timesteps" not in different and not longer:
        return f"{where} holds this run, finished (by {summary.get('stopped_by')}): nothing is left to do"
    if CheckpointFolder(where / "checkpoints").newest() is None:
        if (where / "model.zip").exists():
            raise ConfigError(f"{about}, but no checkpoint from which to continue: use another folder")
        return None
    return different
