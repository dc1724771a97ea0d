"""A command whose output folder holds a run, a sweep or a study: refused, gone on with, or begun anew.

Decided before Hydra opens the folder, which it does by writing into it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fasttrain.cli import commands
from fasttrain.cli.compose import clear_error, search_path, typed_config, unswept
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import Held, held, override
from fasttrain.saving.files import read_json
from fasttrain.spec.checks import check_path
from fasttrain.spec.overrides import OUTPUT_KEYS, asked, key_of, normalise, split_options

Compose = Callable[[Sequence[str]], Any]  # overrides → Hydra's whole configuration, its own part included


def settled(command: str, arguments: Sequence[str], compose: Compose) -> tuple[str, list[str]] | str:
    """The command to run and its arguments, as Hydra is to see them; a text: there is nothing left to do, and why.

    Raises:
        ConfigError: the output folder holds something that this command would write over, or somebody works there.
    """
    same = command, list(arguments)
    if command in commands.WITHOUT_FOLDER:
        return same
    options, overrides = split_options(normalise(arguments, os.environ))
    swept = bool({"-m", "--multirun"} & set(options))
    overrides = unswept(overrides) + search_path(arguments)
    folder = _folder(OUTPUT_KEYS[swept], overrides, compose)
    found = None if folder is None else held(folder)
    if found is None:
        return same
    own = "study" if command in commands.STUDIES else "sweep" if swept else "run"
    way, typed = "refuse", [text for text in overrides if key_of(text) == "study"]
    if found.kind == own and (typed or command in ("train", *commands.STUDIES)):
        composed = compose(overrides)
        way = "resume" if typed else str(composed.on_existing)
        if way == "resume":
            return _going_on(found, command, arguments, composed)
        if way == "overwrite":
            return same
        if way != "refuse":
            _configured(composed, overrides)  # says what there is
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


def _going_on(found: Held, command: str, arguments: Sequence[str], composed: Any) -> tuple[str, list[str]] | str:
    if found.kind == "sweep":
        before = read_json(found.folder / "sweep.json").get("arguments")
        if before is not None and before != asked(arguments):
            raise ConfigError(f"{found.about()} of other arguments ({' '.join(before)}): take another folder")
        return command, list(arguments)
    if found.kind == "study":
        if any(key_of(text) == "study" for text in arguments):
            return command, list(arguments)
        return command, commands.prepare(command, [override("study", found.folder), *asked(arguments)])
    return _run_again(found, arguments, composed)


def _run_again(found: Held, arguments: Sequence[str], composed: Any) -> tuple[str, list[str]] | str:
    from fasttrain.runs.folders import changes
    from fasttrain.runs.resume import may_change
    from fasttrain.saving.checkpoints import CheckpointFolder

    config = _configured(composed, arguments)
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
    values = [f"{key}={_spelt(value)}" for key, value in different.items()]
    return "resume", commands.prepare("resume", [override("run", where), *values])


def _configured(composed: Any, overrides: Sequence[str]) -> Any:
    """The typed configuration; raises ConfigError where that says what is wrong."""
    from omegaconf import OmegaConf, open_dict

    task = composed.copy()
    OmegaConf.set_readonly(task, False)
    with open_dict(task):
        del task["hydra"]  # has references that are known only while it runs
    return typed_config(task, overrides)


def _spelt(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
