"""The command words: where each is implemented, which keys it alone reads, what it does to its arguments, and what
becomes of an output folder that holds a run, a sweep or a study already: refused, gone on with, or begun anew.

The latter is decided before Hydra opens the folder, which it does by writing into it.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain import terminal
from fasttrain.cli.compose import clear_error, search_path, typed_config, unswept
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import Held, held, override
from fasttrain.saving.files import read_json
from fasttrain.spec import plugins
from fasttrain.spec.checks import NAMED, check_no_secret, check_path
from fasttrain.spec.precedence import OUTPUT_KEYS, asked, given_twice, is_sweep, key_of, normalise, split_options
from fasttrain.spec.removed import texts_without_removed
from fasttrain.spec.setting import did_you_mean

MODULES = {
    "train": "fasttrain.runs.train",
    "resume": "fasttrain.runs.resume",
    "eval": "fasttrain.runs.evaluate",
    "play": "fasttrain.deploy.play",
    "check": "fasttrain.runs.check",
    "export": "fasttrain.deploy.export",
    "compare": "fasttrain.studies.compare",
    "tune": "fasttrain.studies.tune",
    "doctor": "fasttrain.studies.doctor",
    "report": "fasttrain.report.index",
}
# These take arguments of their own and compose no configuration; without a module: an integration of that name.
PLAIN = {"new": "fasttrain.cli.new", "watch": "fasttrain.report.watch", "zoo": ""}
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
    "candidates": Owner(("compare",), "to compare: fasttrain compare candidates=[baseline,speed]"),
    "seeds": Owner(("compare",), "a single run takes seed=…"),
    "gate.": Owner(("compare",), "to judge candidates: fasttrain compare candidates=[baseline,speed]"),
    "stop.": Owner(
        ("train", "resume", "compare", "doctor"), "to end a training early: fasttrain +profile=speed stop.max_minutes=…"
    ),
    "on_existing": Owner(("train", *STUDIES), "take another folder: hydra.run.dir=…"),
    "minutes": Owner(STUDIES, "a single run takes stop.max_minutes=…"),
    "warmup": Owner(("train",), "to compile the kernels of a run: fasttrain train warmup=only"),
    "tune.": Owner(("tune",), "to search for the best values: fasttrain tune +profile=speed"),
    "doctor.": Owner(("doctor",), "to look for the wall: fasttrain doctor +profile=speed"),
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
    """The command that `word` is, and what else it says.

    Raises:
        ConfigError: it is none.
    """
    if word in OTHER_WORDS:
        command, setting = OTHER_WORDS[word]
        return command, [setting]
    if word not in COMMANDS:
        hint = did_you_mean(word, (*COMMANDS, *OTHER_WORDS))
        raise ConfigError(f"unknown command '{word}'{hint}; the commands are {', '.join(COMMANDS)}")
    return word, []


def leaves_nothing(command: str, arguments: Sequence[str]) -> bool:
    """Whether the command has no output folder of its own."""
    return command in WITHOUT_FOLDER or (command == "train" and only_compiles(arguments))


def only_compiles(arguments: Sequence[str]) -> bool:
    """Whether `warmup` is typed with another value than off."""
    return any(key_of(text) == "warmup" and text.partition("=")[2].strip("'\"") != "off" for text in arguments)


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


def outdone(overrides: Sequence[str]) -> list[str]:
    """A line for each setting that was typed again with another value: the last one counts, as always with Hydra."""
    single = [text for text in overrides if "={" not in text and text[0] != "~"]  # of mappings all count
    last = {key_of(text): text for text in single}
    before = [text for text in single if last[key_of(text)].lstrip("+") != text.lstrip("+")]
    return [f"{text} was typed before {last[key_of(text)].lstrip('+')}, which counts" for text in before]


def refuse_chdir(hydra: Any) -> None:
    """Raises ConfigError where Hydra is to change the working directory: envs and folders are looked for in it."""
    if hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: fasttrain writes into the run's folder by itself, and finds your modules and "
            "folders from where the command was typed; leave it out"
        )


def prepare(command: str, arguments: Sequence[str]) -> list[str]:
    """What was typed after `command`, as Hydra is to see it: `candidates` as text, `--test env` and
    `--trust` as keys, the folder.

    Raises:
        ConfigError: a sweep of something that is no single run, or `--trust` for what loads no model.
    """
    if command == "report":
        arguments = _folders_as_key(arguments)
    overrides = split_options(arguments)[1]
    if len({text for text in overrides if key_of(text) == "algo"}) > 1:  # Hydra takes the last, without a word
        raise ConfigError(given_twice("algo", overrides))
    for text in overrides:
        if key_of(text) in NAMED:  # before Hydra writes down what was typed
            check_no_secret(key_of(text), text.partition("=")[2])
    if is_sweep(arguments) and (command not in SWEEPABLE or only_compiles(arguments)):
        raise ConfigError(f"-m sweeps over trainings; {command} {'warmup=only ' * (command == 'train')}cannot be swept")
    if command in OF_A_RUN and "run" not in map(key_of, arguments):
        refuse_foreign_keys(command, map(key_of, overrides), overrides)
        raise ConfigError(f"{command} needs run=FOLDER, the folder of a run (outputs/DATE/TIME_…)")
    if "--trust" in arguments:
        if command not in TRUSTING:
            raise ConfigError(f"--trust means nothing for {command}; {', '.join(TRUSTING)} load models")
        arguments = ["trust=true" if text == "--trust" else text for text in arguments]
    if leaves_nothing(command, arguments):
        return ["hydra.run.dir=.", "hydra.output_subdir=null", *arguments]
    if command == "eval":  # of which run, its files say
        arguments = [re.sub(r"^\+*env\.kwargs=(?=\s*{)", "eval.env_kwargs=", text) for text in arguments]
        return [f"hydra.run.dir={_in_quotes('outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}_eval_${pid:}')}", *arguments]
    if command == "doctor":
        return _test_as_key(arguments)
    if command in STUDIES:
        studies = [text.partition("=")[2] for text in split_options(arguments)[1] if key_of(text) == "run"]
        if studies:
            arguments = _study_goes_on(Path(studies[-1]), command, arguments)
        result = [quoted(text) if key_of(text) == "candidates" else text for text in arguments]
        folder = studies[-1] if studies else "studies/${now:%Y-%m-%d}/${now:%H-%M-%S}_" + command + "_${pid:}"
        return [f"hydra.run.dir={_in_quotes(folder)}", *result]
    return list(arguments)


def _study_goes_on(folder: Path, command: str, typed: Sequence[str]) -> list[str]:
    """What the study in `folder` was begun with, and what is typed now in its place: `seeds=10` adds seeds.

    Raises:
        ConfigError: there is none, and nothing is said that could begin it; or it is another command's.
    """
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
    return f"{key}={_in_quotes(value)}" if bare else override


def _in_quotes(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _folders_as_key(arguments: Sequence[str]) -> list[str]:
    """`report A B` and `report run=A,B` → `run='A,B'`."""
    options, typed = split_options(arguments)
    folders = [text if "/" in text else f"./{text}" for text in typed if "=" not in text or Path(text).is_dir()]
    rest = [text for text in typed if "=" in text and not Path(text).is_dir()]
    if not folders:
        return [*options, *(quoted(text) if key_of(text) == "run" and "," in text else text for text in rest)]
    named = [text.partition("=")[2] for text in rest if key_of(text) == "run"]
    return [*options, f"run={_in_quotes(','.join([*named, *folders]))}", *(t for t in rest if key_of(t) != "run")]


def _test_as_key(arguments: Sequence[str]) -> list[str]:
    """`--test env` and `--test=env` → `doctor.test=env`."""
    rest = (text.replace("--test=", "doctor.test=", 1) if text.startswith("--test=") else text for text in arguments)
    return [f"doctor.test={next(rest, '')}" if text == "--test" else text for text in rest]


Compose = Callable[..., Any]  # overrides → Hydra's whole configuration; False: its own part left out


def settled(command: str, arguments: Sequence[str], compose: Compose) -> tuple[str, list[str]] | str:
    """The command to run and its arguments, as Hydra is to see them; a text: there is nothing left to do, and why.

    Raises:
        ConfigError: the output folder holds something that this command would write over, or somebody works there.
    """
    from hydra.types import RunMode

    same = command, list(arguments)
    if leaves_nothing(command, arguments):
        return same
    overrides = split_options(normalise(arguments, os.environ))[1]
    swept = is_sweep(arguments)
    overrides = unswept(overrides) + search_path(arguments)
    if not swept and search_path(arguments) and compose(overrides).hydra.mode == RunMode.MULTIRUN:  # as a file says
        arguments = [*arguments, "hydra.mode=MULTIRUN"]
        return settled(command, prepare(command, arguments), compose)
    folder = _folder(OUTPUT_KEYS[swept], overrides, compose)
    found = None if folder is None else held(folder)
    if found is None:
        return same
    own = "study" if command in STUDIES else "sweep" if swept else "run"
    way, typed = "refuse", [text for text in overrides if command in STUDIES and key_of(text) == "run"]
    if found.kind == own and (typed or command in ("train", *STUDIES)):
        composed = compose(overrides, False)
        way = "resume" if typed else str(composed.on_existing)
        if way == "resume":
            return _going_on(found, command, arguments, composed)
        if way == "overwrite":
            return same
        if way != "refuse":
            typed_config(composed, overrides)  # says what there is
        ways = ", on_existing=resume goes on with it, on_existing=overwrite begins it anew"
    else:
        ways = ""
    raise ConfigError(f"{found.about()}: take another folder{ways}")


def _folder(key: str, overrides: Sequence[str], compose: Compose) -> Path | None:
    """Where the output goes, if that is not a folder of this very second."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    typed = [text for text in overrides if key_of(text) == key]
    if not typed and not any(key_of(text) == "hydra.searchpath" for text in overrides):
        return None
    try:
        value = OverridesParser.create().parse_override(typed[-1]).value() if typed else "${"
    except HydraException:
        return None
    if "${" in str(value):
        hydra = compose(overrides).hydra
        try:
            value = hydra.sweep.dir if key == OUTPUT_KEYS[True] else hydra.run.dir
        except OmegaConfBaseException as error:
            raise clear_error(error, overrides) from error
    check_path(key, str(value or ""))
    return Path(str(value))


def _going_on(found: Held, command: str, arguments: Sequence[str], composed: object) -> tuple[str, list[str]] | str:
    if found.kind == "sweep":
        before = read_json(found.folder / "sweep.json").get("arguments")
        if before is not None and texts_without_removed(before) != asked(arguments):
            raise ConfigError(f"{found.about()} of other arguments ({' '.join(before)}): take another folder")
        return command, list(arguments)
    if found.kind == "study":
        if any(key_of(text) == "run" for text in arguments):
            return command, list(arguments)
        return command, prepare(command, [override("run", found.folder), *asked(arguments)])
    return _run_again(found, arguments, composed)


def _run_again(found: Held, arguments: Sequence[str], composed: object) -> tuple[str, list[str]] | str:
    from fasttrain.runs.folders import changes
    from fasttrain.runs.resume import may_change
    from fasttrain.saving.checkpoints import CheckpointFolder

    config = typed_config(composed, arguments)
    where, summary = found.folder, read_json(found.folder / "summary.json")
    different = changes(where, config)
    if wrong := sorted(key for key in different if not may_change(key)):
        raise ConfigError(
            f"{found.about()} of other values of {', '.join(wrong)}, which cannot change on the way: take another "
            "folder, or on_existing=overwrite begins anew"
        )
    if summary.get("status") == "done" and config.total_timesteps <= summary.get("env_steps", 0):
        return f"{where} holds this run, finished after {summary['env_steps']:,} steps: nothing is left to do"
    if summary.get("status") == "done" and "total_timesteps" not in different:
        return f"{where} holds this run, finished (by {summary.get('stopped_by')}): nothing is left to do"
    if CheckpointFolder(where / "checkpoints").newest().folder is None:
        if (where / "model.zip").exists():
            raise ConfigError(f"{found.about()} without a checkpoint to go on from: take another folder")
        kept = [text for text in arguments if key_of(text) != "on_existing"]
        return "train", [*kept, "on_existing=overwrite"]  # it ended before there was anything to go on from
    values = {key: _in_quotes(it) if isinstance(it, str) else terminal.spelt(it) for key, it in different.items()}
    return "resume", prepare("resume", [override("run", where), *(f"{key}={text}" for key, text in values.items())])
