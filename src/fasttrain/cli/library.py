"""`fasttrain.train(…)`: train from a script or a notebook, with all settings of the command line.

    from fasttrain import train

    run = train("CartPole-v1", algo="ppo", profile="speed", total_timesteps=100_000)
    run.summary["quality"]["mean_reward"], run.model.predict(observation)

If envs run in workers, a script must call `train` under `if __name__ == "__main__":`, because workers import the file.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.base_class import BaseAlgorithm

from fasttrain.algos.devices import use_channels_last
from fasttrain.cli import draw_report, refuse_while_imported
from fasttrain.cli.commands import Request, apply_on_existing, refuse_foreign_keys
from fasttrain.cli.compose import composer, conf_dir
from fasttrain.errors import ConfigError, FastTrainError
from fasttrain.runs import resume
from fasttrain.runs.engine import set_threads
from fasttrain.runs.parts import Parts
from fasttrain.runs.train import open_run, train_to_end
from fasttrain.saving.files import read_json
from fasttrain.spec import plugins
from fasttrain.spec.plain import from_dict, to_dict
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.precedence import effective_values, read, with_names_as_typed
from fasttrain.spec.reading import from_mapping


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    spec: RunSpec  # the configuration that was used, and the plan
    model: BaseAlgorithm  # its envs are closed; `set_env` gives the model new envs
    summary: dict[str, Any]  # summary.json
    perf: dict[str, Any]  # perf.json
    folder: Path

    def __repr__(self) -> str:
        quality, speed = self.summary["quality"], self.summary["steps_per_s"]
        result = f"mean reward {quality['mean_reward']:.4g}" if quality["episodes"] else "not evaluated"
        status, steps = self.summary["status"], self.summary["env_steps"]
        return f"<{self.spec.config.algo.name}, {status}: {steps:,} steps at {speed:,.0f}/s, {result}; {self.folder}>"


def train(
    env: str | type | RunSpec | None = None,
    *,
    algo: str | None = None,
    profile: str | None = None,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Trained:
    """Train like the command `fasttrain train`, with the same output and files. Environment variables set no flags.

    Args:
        env: a registered Gymnasium id, `module:Class`, the name of a game, or a class. Or the `RunSpec` of another run
            (`Trained.spec`): its settings are used again, except those that the other arguments change.
        algo: `ppo`, `maskable_ppo`, `dqn`, …; the default is that of the command line.
        profile: `baseline`, `exact`, `balance`, `speed`, `debug`, or None.
        folder: the output folder; by default a new one below `outputs`. A folder with a run is an error, unless
            `on_existing` is "resume" (continue the run) or "overwrite" (start again).
        settings: settings by dotted key, `{"algo.gamma": 0.98, "env.kwargs.size": 5}`. Classes and functions are
            stored by their import paths, so that `eval` and `resume` can import them.
        flags: settings without a dot in their name, such as `num_envs=16`.

    Returns:
        The trained model, with the summary and the folder of the run.

    Raises:
        ConfigError: the settings are wrong, or `folder` holds a run.
        FastTrainError: the training failed. The message says what was saved.
    """
    refuse_while_imported()
    values = {**_env_settings(env), **(settings or {}), **flags}
    files = {"env": _group(values.get("env.game") if env is None else env), "algo": algo, "+profile": profile}
    words = [f"{name}={value}" for name, value in files.items() if value]
    if isinstance(env, RunSpec) and (algo or profile):
        raise ConfigError("train: a RunSpec has its algorithm and profile; remove algo and profile")
    typed = [*words, *(f"{key}={value}" for key, value in values.items())]
    with _names_as_typed(typed):
        given = read(words, {}, values=values)
        if isinstance(env, RunSpec):
            known = {row.flag: row.source for row in env.rows}
            stored, sources = effective_values(from_dict(to_dict(env.config)), (), given, known)
            config = from_mapping(stored)
        else:
            with composer() as hydra:
                config, sources = hydra.configured(given)
    refuse_foreign_keys("train", sources, typed)
    where = Path(folder).absolute() if folder else _new_folder(config.env.name, config.algo.name)
    if config.warmup == "only":
        raise ConfigError('train: warmup="only" is for the command: fasttrain train warmup=only')
    request = apply_on_existing(Request("train", config, sources, typed, where), folder or where, "folder")
    if isinstance(request, str):
        raise ConfigError(f"train: {request}")
    where.mkdir(parents=True, exist_ok=True)
    switch_at = env.engine_switch_at if isinstance(env, RunSpec) else None
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with _names_as_typed(typed), _ready(request, switch_at) as (run, texts):
            train_to_end(run, texts, draw_report)
    finally:
        set_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != strict:
            torch.use_deterministic_algorithms(strict)
    run.model.env = None
    use_channels_last(run.model.policy, False)  # for the user's code, which may script or save the networks
    return Trained(run.plan, run.model, read_json(where / "summary.json"), read_json(where / "perf.json"), where)


@contextmanager
def _names_as_typed(typed: Sequence[str]) -> Iterator[None]:
    """Add the typed name of a setting to errors that call the setting by another name."""
    try:
        yield
    except FastTrainError as error:
        error.args = (with_names_as_typed(str(error), typed, {}),)
        raise


def _group(env: str | type | RunSpec | None) -> str:
    """The value of `env=`: the game's name, `gym` for any other env; empty if no env is named."""
    if env is None or isinstance(env, RunSpec):
        return ""
    known = (conf_dir() / "env" / f"{env}.yaml").is_file() or env in plugins.names(plugins.GAMES)
    return str(env) if known else "gym"


def _env_settings(env: str | type | RunSpec | None) -> dict[str, Any]:
    if isinstance(env, type):
        place: dict[str, Any] = {"env.entry_point": f"{env.__module__}:{env.__qualname__}"}
        if env.__module__ == "__main__":  # a class in a notebook or the script itself: other processes cannot import it
            place |= {"workers": 0, "checkup": "off", "eval_async": False}
        return place
    if not isinstance(env, str) or _group(env) != "gym":
        return {}
    is_id = ":" not in env or env.rpartition("-v")[2].isdigit()
    return {"env.id" if is_id else "env.entry_point": env}


@contextmanager
def _ready(request: Request, switch_at: int | None) -> Iterator[tuple[Parts, list[str]]]:
    """Build the run, new or resumed. Yields the run and all overrides that were ever typed for it."""
    if request.command != "resume":
        with open_run(request.config, request.sources, request.folder, request.overrides, switch_at) as run:
            yield run, request.overrides
        return
    with resume.open_run(request.config, request.sources, request.overrides) as resumed:
        if resumed is None:
            raise ConfigError(f"train: the run in {request.folder} has all its steps: nothing is left to do")
        yield resumed


def _new_folder(env: str, algo: str) -> Path:
    now = datetime.datetime.now()
    first = Path("outputs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}_{env}_{algo}_{os.getpid()}").absolute()
    others = (first.with_name(f"{first.name}_{number}") for number in itertools.count(2))  # if `first` exists
    return next(each for each in itertools.chain([first], others) if not each.exists())
