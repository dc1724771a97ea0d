"""`init_from`: begin a training with the weights of another model. `Exchange`: continue with those of a better run.

In an exchange of population-based training the study leaves exchange.json and a copy of the better model in the folder
of the run. `fasttrain resume` uses both, if the run's newest checkpoint is the one after which the exchange was
decided. Later checkpoints contain the result.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.save_util import data_to_json, recursive_getattr
from stable_baselines3.common.vec_env import VecNormalize

from fasttrain.errors import ConfigError, naming
from fasttrain.runs.envs import MOST_STATISTICS_BYTES
from fasttrain.runs.models import MOST_MEMBERS, MOST_WEIGHT_BYTES, read_model_file, statistics_of
from fasttrain.saving.archives import open_archive, read_arrays, read_member, read_tensors
from fasttrain.saving.env_state import load_moments
from fasttrain.saving.files import parse_json, read_json, write_json
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.policies import one_of, own_config

MODEL = "model.zip"  # the model's file in a run's folder
MOST_NAMED = 4  # most tensors that a message names
OPTIMIZER, STATISTICS = "optimizer", "statistics"


def with_absolute_paths(config: Config) -> Config:
    """The configuration with absolute paths of other models, because a run can be resumed from another folder."""

    def absolute(values: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: values.get(key) for key in ("init_from", "teacher", "algo.teacher")}
        paths = {key: os.path.abspath(path) for key, path in given.items() if path and os.path.exists(path)}
        nested = {"algo": absolute(values["algo"])} if isinstance(values.get("algo"), Mapping) else {}
        return {**values, **paths, **nested}

    own = absolute({"init_from": config.init_from, "teacher": getattr(config.algo, "teacher", None)})
    algo = replace(config.algo, teacher=own["teacher"]) if own["teacher"] else config.algo  # type: ignore[call-arg]
    policies = {name: absolute(each) for name, each in config.policies.items()}
    return replace(config, init_from=own["init_from"], algo=algo, policies=policies)


def check_init_from(config: Config) -> None:
    """Raises ConfigError if a model cannot be read. Called before environments start, because their start is slow."""
    for name in config.policies:
        with naming(f"policies.{name}"):
            check_init_from(own_config(config, name))
    if config.init_from is not None:
        _read(config, config.init_from)


def _read(config: Config, init_from: str) -> tuple[Path, Mapping[str, Any], Mapping[str, torch.Tensor]]:
    file = Path(init_from)
    file = file / MODEL if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"init_from={init_from}: there is no file {file}; name a run's folder or a zip")
    facts, stored = read_model_file(file)
    members = dict.fromkeys(name.split(".")[1] for name in stored if name.startswith("members."))
    if members and not config.policies:
        raise ConfigError(f"init_from={init_from}: {one_of(file, members)}")
    return file, facts, stored


def warm_start(config: Config, model: BaseAlgorithm, say: Callable[[str], object]) -> None:
    """Copy the weights of `init_from` into a new model, where names and shapes agree. `say` prints which tensors.

    Raises:
        ConfigError: the file cannot be read or has other spaces; no tensor fits; or only some fit and
            `init_from_strict` is on.
    """
    for name, member in getattr(model, "members", {}).items():
        with naming(f"policies.{name}"):
            warm_start(own_config(config, name), member, lambda text, name=name: say(f"policies.{name}: {text}"))  # type: ignore[misc]
    if config.init_from is None:
        return
    file, facts, stored = _read(config, config.init_from)
    _check_spaces(facts, model, file)
    own = model.policy.state_dict()
    taken = {name: tensor for name, tensor in stored.items() if name in own and own[name].shape == tensor.shape}
    if bad := next((name for name, tensor in taken.items() if not bool(torch.isfinite(tensor).all())), None):
        raise ConfigError(f"init_from: the weights in {file} are not finite ({bad[:100]}); name another model")
    left = differences(own, stored)
    if not taken or (left and config.init_from_strict):
        what = "no part of it fits this run's network" if not taken else "init_from_strict=true, and not all of it fits"
        raise ConfigError(f"init_from: {file}: {what}: {_named(left)}")
    model.policy.load_state_dict({**own, **taken})
    _take_more(config, model, file, whole=not left)
    say(
        f"init_from: {len(taken)} of the {len(own)} tensors of the policy come from {file}"
        + (f". Not taken: {_named(left)}" if left else "")
    )
    if config.env.normalize and STATISTICS not in config.init_from_also and statistics_of(file).is_file():
        say("init_from: env.normalize begins with new statistics; init_from_also=[statistics] takes those of the model")


def _check_spaces(facts: Mapping[str, Any], model: BaseAlgorithm, file: Path) -> None:
    """Raises ConfigError if the model was trained with another observation or action space."""
    shown = {}
    for name in ("observation_space", "action_space"):
        here = parse_json(data_to_json({name: getattr(model, name)}).encode(), name)[name]
        there = facts.get(name)
        shown[name] = [_look(each) for each in (there, here)]
    if all(there and there != here for there, here in shown.values()):
        (seen, sees), (did, does) = shown.values()
        raise ConfigError(
            f"init_from: {file} is of another game: its observations are {seen} and its actions {did}; here they are "
            f"{sees} and {does}"
        )


def _look(space: object) -> str:
    """A short text such as `Box (4,)` or `Discrete 5` for a space, or for the JSON that SB3 stores of a space."""
    if not isinstance(space, Mapping):
        return ""
    kind = str(space.get(":type:", "")).rpartition(".")[2].rstrip("'>")
    sizes = [str(space[key]) for key in ("_shape", "n", "nvec", "spaces") if space.get(key) not in (None, [], ())]
    return f"{kind} {' '.join(sizes)}"[:200]


def differences(own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> list[str]:
    """A text for each tensor that only one of the two networks has, or that has different shapes in them."""
    here, there = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (own, stored))
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return [f"{name[:100]} is {there.get(name, 'missing')} there, {here.get(name, 'missing')} here" for name in names]


def _named(left: list[str]) -> str:
    more = f"; and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    return "; ".join(left[:MOST_NAMED]) + more


def _take_more(config: Config, model: BaseAlgorithm, file: Path, whole: bool) -> None:
    """Load what `init_from_also` names: the optimizer's state and the statistics of `env.normalize`."""
    if OPTIMIZER in config.init_from_also:
        if not whole:
            raise ConfigError("init_from_also: the networks differ, so optimizer states do not fit; remove optimizer")
        names = [f"{name}.pth" for name in model._get_torch_save_params()[0] if name.endswith("optimizer")]
        with open_archive(file, str(file), most_members=MOST_MEMBERS) as archive:
            for name in names:
                state = read_tensors(read_member(archive, name, MOST_WEIGHT_BYTES, str(file)), f"{file}: its {name}")
                optimizer: Any = recursive_getattr(model, name.removesuffix(".pth"))
                rates = [group["lr"] for group in optimizer.param_groups]
                try:
                    optimizer.load_state_dict(state)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(f"init_from_also=[optimizer]: {name} of {file} does not fit: {error}") from error
                for group, rate in zip(optimizer.param_groups, rates, strict=True):  # keep this run's learning rate
                    group["lr"] = rate
    if STATISTICS in config.init_from_also:
        normalizer = model.get_vec_normalize_env()
        if not isinstance(normalizer, VecNormalize):
            raise ConfigError("init_from_also=[statistics]: this run normalizes nothing; use env.normalize=[obs] too")
        if not statistics_of(file).is_file():
            raise ConfigError(f"init_from_also=[statistics]: there is no {statistics_of(file).name} beside {file}")
        load_moments(normalizer, read_arrays(statistics_of(file), MOST_STATISTICS_BYTES))


FILE, WEIGHTS = "exchange.json", "exchange.zip"


class Exchange(NamedTuple):
    """What a run takes over. `settings`: new values by dotted key, all below `algo.`; `at`: env steps of the run."""

    at: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, env_steps: int) -> Exchange | None:
        """The exchange that was decided for the run in `folder` at its checkpoint of `env_steps`; None without one."""
        stored = read_json(folder / FILE)
        return cls(env_steps, stored["settings"]) if stored.get("at") == env_steps else None

    def leave(self, folder: Path, better: Path) -> None:
        """Store the exchange in the folder of a run, with the model of the run in the folder `better`."""
        model = better / MODEL
        if statistics_of(model).is_file():
            shutil.copyfile(statistics_of(model), statistics_of(folder / WEIGHTS))
        shutil.copyfile(model, folder / WEIGHTS)
        write_json(folder / FILE, {"at": self.at, "settings": dict(self.settings)})

    def changed(self, plan: RunSpec) -> RunSpec:
        """The plan with the new settings."""
        values = {key.removeprefix("algo."): value for key, value in self.settings.items()}
        rows = [
            row._replace(effective=self.settings[row.flag], source="exchange") if row.flag in self.settings else row
            for row in plan.rows
        ]
        return plan._replace(config=replace(plan.config, algo=replace(plan.config.algo, **values)), rows=tuple(rows))

    def take_weights(self, folder: Path, config: Config, model: BaseAlgorithm, say: Callable[[str], object]) -> None:
        """Load policy, optimizer and the statistics of `env.normalize` of the better run. Raises ConfigError."""
        also: Any = (OPTIMIZER, *[STATISTICS] * bool(config.env.normalize))
        own = replace(config, init_from=str(folder / WEIGHTS), init_from_strict=True, init_from_also=also)
        warm_start(own, model, lambda text: say(text.replace("init_from", "exchange", 1)))
