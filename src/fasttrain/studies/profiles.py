"""Profiles that a study writes: flat values with the evidence beside them, to be used as `+profile=NAME`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from fasttrain.config import Config, OwnConfig
from fasttrain.flags import FLAGS
from fasttrain.terminal import command

OWN = tuple(f"own.{field.name}" for field in fields(OwnConfig))


def settings(config: Config) -> dict[str, Any]:
    """What a profile may choose: every flag, and the own values of algorithm and game, by dotted key."""
    own = {key: getattr(config.own, key.removeprefix("own.")) for key in OWN}
    return {**{flag.name: getattr(config, flag.name) for flag in FLAGS}, **own}


def write_profile(study: Path, name: str, values: Mapping[str, Any], head: str, notes: Mapping[str, str]) -> Path:
    """`study`/conf/profile/NAME.yaml; `notes` become comments behind the keys they are about."""
    folder = study / "conf" / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# @package _global_", *(f"# {line}".rstrip() for line in head.splitlines())]
    own = {key: value for key, value in values.items() if key.startswith("own.")}
    for key, value in values.items():
        if key not in own:
            lines.append(_line(key, value, notes.get(key, "")))
    if own:
        lines.append("own:")
        lines += ["  " + _line(key.removeprefix("own."), value, notes.get(key, "")) for key, value in own.items()]
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _line(key: str, value: Any, note: str) -> str:
    text = yaml.safe_dump({key: value}, default_flow_style=False, allow_unicode=True).strip()
    return f"{text} # {note}" if note else text


def use_profile(study: Path, name: str) -> list[str]:
    """The arguments that run with such a profile, wherever else the user's configuration lies."""
    place = str(study / "conf").replace("\\", "/").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{place}']", f"+profile={name}"]


def way_to_use(study: Path, name: str) -> str:
    """What to type to train with it."""
    return f"{command()} --config-dir {shlex.quote(str(study / 'conf'))} +profile={name}"
