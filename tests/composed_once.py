"""What Hydra makes of files that do not change is made once a session: it is half of a small training's time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import DictConfig

from fasttrain.cli.compose import conf_dir
from fasttrain_engines.backend import BACKEND
from fasttrain_games import CONF

listed, joined = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
OURS = {"pkg://hydra.conf", "structured://", *(f"file://{it}" for it in (conf_dir(), CONF, BACKEND.conf))}
_lists: dict[str, DefaultsList] = {}
_configs: dict[str, tuple[DictConfig, list[Any]]] = {}


def patch(patched: pytest.MonkeyPatch) -> None:
    """Until `patched` ends. Values given on a command line are set in a copy, by Hydra itself, as ever."""
    patched.setattr(config_loader_impl, "create_defaults_list", _list)
    patched.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", _config)


def _places(repo: Any) -> tuple[str, ...]:
    """Where its files lie; empty if one place is a folder of a test, whose files may change."""
    places = tuple(f"{source.scheme()}://{source.path}" for source in repo.get_sources())
    return places if {*places} <= OURS else ()


def _list(repo: Any, config_name: str | None, overrides_list: Sequence[Any], **how: Any) -> DefaultsList:
    """Which files are chosen: the same for the same choices, whatever values are set beside them."""
    asked = Overrides(repo, list(overrides_list))
    if not (places := _places(repo)):
        return listed(repo, config_name, list(overrides_list), **how)
    choices = asked.override_choices, asked.append_group_defaults, asked.deletions
    key = repr((places, config_name, sorted(how.items()), *choices))
    if key not in _lists:
        _lists[key] = listed(repo, config_name, list(overrides_list), **how)
    kept = _lists[key]
    return DefaultsList(kept.defaults, kept.defaults_tree, asked.config_overrides, kept.overrides)


def _config(self: ConfigLoaderImpl, defaults: Sequence[Any], repo: Any) -> DictConfig:
    """What the chosen files say together, the caller's own."""
    if not (places := _places(repo)):
        return joined(self, list(defaults), repo)
    key = repr((places, defaults))
    if key not in _configs:
        _configs[key] = joined(self, list(defaults), repo), getattr(self, "files", [])
    found, self.files = _configs[key]  # type: ignore[attr-defined]
    return copy.deepcopy(found)
