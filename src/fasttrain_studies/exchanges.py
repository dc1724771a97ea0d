"""Population-based training: at fixed env steps the worst models continue as changed copies of the best ones.

Between two exchanges each model trains alone (`fasttrain resume … stop.at_steps=…`), so that a killed population can
continue. An exchange copies weights, optimizer and statistics; replay buffer, envs and random numbers stay. Source:
Jaderberg et al., Population Based Training of Neural Networks, 2017.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.errors import ConfigError
from fasttrain.runs.warm_start import Exchange
from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.saving.files import read_json
from fasttrain.spec.precedence import key_of
from fasttrain.terminal import spelt
from fasttrain_studies.beside import run_beside
from fasttrain_studies.settings import Config
from fasttrain_studies.space import Range, check_ranges, range_of
from fasttrain_studies.study import Cell, Place, Study, Wanted, merged, run_cell

OF = "population.explore"
# Settings that change neither the shape of a network or a buffer nor the number of envs.
EXPLORED = ("learning_rate", "ent_coef", "gamma", "gae_lambda", "clip_range", "clip_range_vf", "vf_coef", "n_epochs",
            "max_grad_norm", "target_kl", "tau", "target_update_interval")  # fmt: skip
SHARE = 4  # one in four models is replaced
FACTORS = (0.8, 1.25)
DONE, AT = "exchanges", "exchanged_at"  # entries of study.json


def check(config: Config) -> None:
    """Raises ConfigError if the exchanges of `config.population` are not possible."""
    own, usable = config.population, [f"algo.{name}" for name in EXPLORED if hasattr(config.algo, name)]
    if not own.exchange_every:
        return
    if config.policies:
        raise ConfigError("population.exchange_every: a training with policies.… has no exchanges; remove one of them")
    if not config.eval.episodes:
        raise ConfigError("eval.episodes=0: exchanges rank the models by evaluations; remove eval.episodes")
    for key in dict.fromkeys(key for point in own.settings for key in point):
        if key not in usable:
            raise ConfigError(f"population.settings: {key} differs between models that exchange their weights; with "
                              f"population.exchange_every possible are {', '.join(usable)}")  # fmt: skip
    if own.exchange_every < (rollout := _rollout_of(config)):
        raise ConfigError(f"population.exchange_every={own.exchange_every:,} is shorter than a rollout of {rollout:,} "
                          "env steps, after which a model first learns")  # fmt: skip
    if own.exchange_every >= config.total_timesteps:
        raise ConfigError(
            f"population.exchange_every={own.exchange_every:,}: the training ends before, at total_timesteps="
            f"{config.total_timesteps:,}"
        )
    if wrong := [key for key in own.explore if key not in usable]:
        raise ConfigError(f"{OF}: {', '.join(wrong)} cannot change in a training; possible are {', '.join(usable)}")
    check_ranges(config, OF, own.explore)


def _rollout_of(config: Config) -> int:
    """Env steps of a rollout; 0 for algorithms that learn from replay."""
    if not config.algo.spec.on_policy:
        return 0
    steps = config.algo.n_steps
    return int(config.algo.rollout_size if steps is None else steps * config.num_envs)


def spread(config: Config, members: Sequence[Wanted]) -> list[Wanted]:
    """The models with first values of `population.explore`. The first model has the profile's values."""
    spread = [*members[:1]]
    for number, member in enumerate(members[1:], 1):
        random = np.random.default_rng([config.seed, number])
        typed = {key_of(text) for each in config.population.settings for text in map("{}=".format, each)}
        more = [f"{key}={spelt(_drawn(of, random))}" for key, of in _ranges(config).items() if key not in typed]
        spread.append(member._replace(overrides=tuple(merged(member.overrides, more))))
    return spread


def _ranges(config: Config) -> dict[str, list[Any] | Range]:
    return {key: range_of(config, key, values) for key, values in config.population.explore.items()}


def changing(config: Config) -> list[str]:
    """The settings that an exchange may change: those of `population.settings` and of `population.explore`."""
    own = config.population
    typed = [key for point in own.settings for key in point]
    return list(dict.fromkeys([*typed, *own.explore])) if own.exchange_every else []


def _drawn(of: list[Any] | Range, random: np.random.Generator) -> Any:
    """A value of the range, at random."""
    if isinstance(of, list):
        return of[int(random.integers(len(of)))]
    if of.whole:
        return int(random.integers(int(of.low), int(of.high) + 1))
    low, high = np.log([of.low, of.high]) if of.log else (of.low, of.high)
    value = random.uniform(low, high)
    return float(f"{np.exp(value) if of.log else value:.4g}")


def moved(value: object, of: list[Any] | Range, random: np.random.Generator) -> Any:
    """A value next to `value`: the number × 0.8 or × 1.25, or a neighbour in the list."""
    if isinstance(of, list):
        step = int(random.choice([-1, 1]))
        return of[min(max(of.index(value) + step, 0), len(of) - 1)] if value in of else _drawn(of, random)
    if not isinstance(value, (int, float)) or not value:
        return _drawn(of, random)
    scaled = min(max(value * float(random.choice(FACTORS)), of.low), of.high)
    return round(scaled) if of.whole else float(f"{scaled:.4g}")


def train(study: Study, config: Config, members: Sequence[Wanted], parallel: int) -> None:
    """Train all models, with an exchange every `population.exchange_every` env steps.

    A model that ends with an error stays as it is: it takes part in no further exchange. Raises KeyboardInterrupt after
    a signal.
    """
    every, total = config.population.exchange_every, config.total_timesteps
    spent = dict[Path, float]()  # seconds of the earlier parts of a training
    for number, until in enumerate([*range(every, total, every), total], 1):
        last = until == total
        todo = [each for each in _well(study, members) if _steps(study.folder_of(each)) < until]
        go_on = partial(_segment, study, None if last else until, spent)
        for member, cell in run_beside(study, todo, parallel, go_on, "" if last else f" to {until:,}"):
            if not last and not cell.done:
                study.keep(member, cell)
        if not last and until not in study.notes.get(AT, []):
            exchange(study, config, _well(study, members), until, number)
    for member in _well(study, members):  # models that ended after their study was killed
        if study.find(member) is None and _steps(study.folder_of(member)) >= total:
            study.keep(member, study.cell_in_folder(member))


def _well(study: Study, members: Sequence[Wanted]) -> list[Wanted]:
    """The models that have not ended with an error."""
    for each in members:
        crashed = read_json(study.folder_of(each) / "summary.json").get("status") == "crashed"
        if crashed and not study.failed([each]):  # after its study was killed
            study.keep(each, study.cell_in_folder(each))
    return [each for each in members if not study.failed([each])]


def _segment(
    study: Study, until: int | None, spent: dict[Path, float], member: Wanted, place: Place
) -> tuple[Cell, bool]:
    """Train a model to `until` env steps (None: to the end), from its newest checkpoint if it has one."""
    folder, at = study.folder_of(member), f"stop.at_steps={spelt(until)}"
    study.wait_for(folder)
    if CheckpointFolder(folder / "checkpoints").newest() is not None:
        command, typed = "resume", [f"run={folder}", at]
    else:
        command, typed = "train", [*merged(study.usual(member), study.overrides_of(member)), at]
    cell, stopped = run_cell(command, typed, folder, member.label, member.seed, place=place)
    spent[folder] = cell.seconds = cell.seconds + spent.get(folder, 0.0)
    cell.overrides = study.overrides_of(member)
    return cell, stopped


def _steps(folder: Path) -> int:
    """Env steps of the model in the folder: at its end if it ended by itself, else those of its newest checkpoint."""
    summary = read_json(folder / "summary.json")
    newest = CheckpointFolder(folder / "checkpoints").newest()
    at_end = int(summary["env_steps"]) if summary.get("status") == "done" else 0
    return max(at_end, 0 if newest is None else int(newest.name.rpartition("_")[2]))


def metric_of(qualities: Collection[Mapping[str, Any]]) -> str:
    """The result that ranks models: the win rate if every model reports it, else the mean reward."""
    known = all(quality.get("win_rate") is not None for quality in qualities)
    return "win_rate" if qualities and known else "mean_reward"


def exchange(study: Study, config: Config, members: Sequence[Wanted], until: int, number: int) -> None:
    """Give each of the worst models the weights and settings of one of the best, and change some settings a little.

    `number`: number of this exchange, from 1. It decides the changes together with the seed.
    """
    summaries = [read_json(study.folder_of(member) / "summary.json") for member in members]
    for member, summary in zip(members, summaries, strict=True):
        if summary.get("status") != "done" or summary["env_steps"] < until:
            study.say(f"no exchange at {until:,} steps: {member.label} seed {member.seed} did not come so far")
            return
    going_on = [index for index, summary in enumerate(summaries) if summary["env_steps"] < config.total_timesteps]
    qualities = {index: summaries[index]["quality"] for index in going_on}
    metric = metric_of(qualities.values())
    values = {index: float(value) for index, quality in qualities.items() if (value := quality.get(metric)) is not None}
    ranked = sorted(values, key=lambda index: -values[index])
    rows = study.notes.setdefault(DONE, [])
    for place in range(min(max(1, len(members) // SHARE), len(ranked) // 2)):
        better, worse = ranked[place], ranked[-1 - place]
        if values[better] == values[worse]:
            study.say(f"no exchange at {until:,} steps: the best and the worst model have the same {metric}")
            break
        source, target = (study.folder_of(members[index]) for index in (better, worse))
        random = np.random.default_rng([config.seed, number, worse])
        algo = read_json(source / "plan.json")["config"]["algo"]
        settings = {key: algo.get(key.removeprefix("algo.")) for key in changing(config)}
        settings |= {key: moved(algo.get(key.removeprefix("algo.")), of, random) for key, of in _ranges(config).items()}
        point = CheckpointFolder(target / "checkpoints").newest()
        if point is None:
            continue
        Exchange(int(point.name.rpartition("_")[2]), settings).leave(target, source)
        names = [f"{each.label} seed {each.seed}" for each in (members[worse], members[better])]
        rows.append({"env_steps": until, "model": names[0], "value": values[worse], "source": names[1],
                     "value_of_source": values[better], "settings": settings})  # fmt: skip
        told = ", ".join(f"{key.removeprefix('algo.')}={value}" for key, value in settings.items())
        study.say(f"exchange at {until:,} steps: {names[0]} ({values[worse]:.3g}) continues with the weights of "
                  f"{names[1]} ({values[better]:.3g}){f', {told}' * bool(told)}")  # fmt: skip
    study.notes[AT] = [*study.notes.get(AT, []), until]
    study.store()
