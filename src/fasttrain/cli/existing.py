"""An output folder that holds a run, a sweep or a study already: refused, gone on with, or begun anew.

Decided here, for every command and for `train(…)`, before anything is written into the folder. What is begun anew is
cleared when all else is known to be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.cli.commands import STUDIES
from fasttrain.errors import ConfigError
from fasttrain.runs.folders import Held, changes, held, in_quotes, override
from fasttrain.saving.files import read_json
from fasttrain.spec.checks import check_path
from fasttrain.spec.config import Config
from fasttrain.spec.precedence import TYPED, without_folder
from fasttrain.spec.removed import texts_without_removed
from fasttrain.terminal import spelt


class Asked(NamedTuple):
    """One command, as it is asked for."""

    command: str
    config: Config
    sources: Mapping[str, str]
    overrides: list[str]
    folder: Path
    goes_on: Sequence[str] = ()  # what names the study that is gone on with, whose own arguments are to be read too


def to_go_on_with(kind: str, way: str, folder: str | Path, key: str) -> Held | None:
    """What is in the folder, where it is to be gone on with; None where it is free, or begun anew.

    Args:
        kind: what the command leaves there: run, sweep or study; empty where it knows no way on.
        way: `on_existing`.
        key: by which the folder was given.

    Raises:
        ConfigError: it holds something that would be written over, or somebody works there.
    """
    check_path(key, str(folder))
    found = held(Path(folder))
    if found is None or (found.kind == kind and way == "overwrite"):
        return None
    if found.kind == kind and way == "resume":
        return found
    ways = ", on_existing=resume goes on with it, on_existing=overwrite begins it anew" * (found.kind == kind)
    raise ConfigError(f"{found.about(key, folder)}: take another folder{ways}")


def decided(asked: Asked, typed: str | Path, key: str = "hydra.run.dir") -> Asked | str:
    """The command that there is to run, for the one that is asked for: a text where nothing is left to do, and why.

    Args:
        typed: the folder as it was given, by `key`.

    Raises:
        ConfigError: as `to_go_on_with`; or the run that is there cannot go on like that.
    """
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
    values = {name: in_quotes(it) if isinstance(it, str) else spelt(it) for name, it in different.items()}
    texts = [override("run", found.folder), *(f"{name}={text}" for name, text in values.items())]
    sources = dict.fromkeys(("run", *different), TYPED)
    return Asked("resume", dataclasses.replace(config, run=str(found.folder)), sources, texts, found.folder)


def check_same_sweep(found: Held, arguments: Sequence[str]) -> None:
    """Raises ConfigError where the sweep in a folder was begun by other arguments."""
    before = read_json(found.folder / "sweep.json").get("arguments")
    if before is not None and sorted(texts_without_removed(before)) != sorted(without_folder(arguments)):
        raise ConfigError(f"{found.about()} of other arguments ({' '.join(before)}): take another folder")


def _changed(found: Held, about: str, config: Config) -> dict[str, Any] | str | None:
    """What a run is gone on with: the settings that have other values now. A text: nothing is left to do, and why.
    None: it ended before there was anything to go on from, so that it is begun anew.

    Raises:
        ConfigError: other values of settings that cannot change on the way, or no checkpoint.
    """
    from fasttrain.runs.resume import may_change
    from fasttrain.saving.checkpoints import CheckpointFolder

    where, summary = found.folder, read_json(found.folder / "summary.json")
    different = changes(where, config)
    if wrong := sorted(key for key in different if not may_change(key)):
        raise ConfigError(
            f"{about} of other values of {', '.join(wrong)}, which cannot change on the way: take another "
            "folder, or on_existing=overwrite begins anew"
        )
    if summary.get("status") == "done" and config.total_timesteps <= summary.get("env_steps", 0):
        return f"{where} holds this run, finished after {summary['env_steps']:,} steps: nothing is left to do"
    if summary.get("status") == "done" and "total_timesteps" not in different:
        return f"{where} holds this run, finished (by {summary.get('stopped_by')}): nothing is left to do"
    if CheckpointFolder(where / "checkpoints").newest().folder is None:
        if (where / "model.zip").exists():
            raise ConfigError(f"{about} without a checkpoint to go on from: take another folder")
        return None
    return different
