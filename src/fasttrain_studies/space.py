"""What `fasttrain tune` searches: values or a range of each setting, and which combinations are tried."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.saving.files import read_json
from fasttrain.spec.algorithms import RANGES
from fasttrain.spec.checks import BY_NAME, NOT_APPLICABLE, train_frequency
from fasttrain.spec.reading import all_keys
from fasttrain.spec.setting import convert, declared, did_you_mean
from fasttrain_studies.settings import Config
from fasttrain_studies.study import OWN_KEYS


class Range(NamedTuple):
    """All numbers from `low` to `high`; only integers if `low` and `high` are integers."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Searched(NamedTuple):
    """Values to try: `values`, `factors` × the profile's value v, or from v ÷ `log` to v × `log` (log scale)."""

    values: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    log: float = 0.0


SIZES = Searched(factors=(0.25, 0.5, 1, 2, 4))
SEARCHED = {
    "learning_rate": Searched(log=10),
    "gamma": Searched(values=(0.9, 0.95, 0.98, 0.99, 0.995, 0.999)),
    "gae_lambda": Searched(values=(0.8, 0.9, 0.95, 0.98, 1.0)),
    "clip_range": Searched(values=(0.1, 0.2, 0.3)),
    "ent_coef": Searched(values=(0.0, 0.0001, 0.001, 0.01)),
    "exploration_fraction": Searched(values=(0.05, 0.1, 0.2, 0.4)),
    "exploration_final_eps": Searched(values=(0.01, 0.05, 0.1)),
    "n_epochs": Searched(factors=(0.25, 0.5, 1, 2)),
    "updates_per_step": Searched(factors=(0.5, 1, 2)),
    **dict.fromkeys(("num_envs", "batch_size", "rollout_size", "n_steps", "warmup_steps", "tau"), SIZES),
    "target_update_interval": SIZES,
}
Space = dict[str, "list[Any] | Range"]
Point = dict[str, Any]
PROFILE = "profile"
ROLLOUTS = 10  # longer rollouts are tried only if a training still has 10 of them
COMPUTING = ("workers", "torch_threads", "fused_update", "use_amp", "use_compile")  # change only the speed
BOTH = ("num_envs", "batch_size", "updates_per_step")  # these settings change the speed and the learning


def check_ranges(config: Config, of: str, space: Mapping[str, Any]) -> None:
    """Raises ConfigError if the setting `of` has an unknown key, or a value that this key cannot have."""
    for key, values in space.items():
        where, example = f"{of}: {key}", "{low: 1e-4, high: 1e-2, log: true}"
        check_key(of, key)
        if isinstance(values, dict):
            low, high, log = (values.get(name) for name in ("low", "high", "log"))
            rest, least = {*values} - {"low", "high", "log"}, 0 if log else -math.inf
            if rest or log not in (None, True, False) or low is None or high is None or not least < low < high:
                raise ConfigError(f"{where}={values}: a range is {example}, low < high, and 0 < low if log is true")
            values = (low, high)
        elif values is not None and not values:
            raise ConfigError(f"{where} has no values to try")
        if values is None and key.split(".")[-1] not in (*SEARCHED, *COMPUTING):
            raise ConfigError(f"{of}: {key} has no usual values; write {{{key}: [first, second]}}")
        converted(config, where, key, values or ())


def check_key(of: str, key: str) -> None:
    """Raises ConfigError if the key is no setting of a training."""
    if key not in (known := all_keys()):
        raise ConfigError(f"{of}: unknown key '{key}'{did_you_mean(key, known)}")
    if key.split(".")[0] in OWN_KEYS:
        raise ConfigError(f"{of}: {key} is no setting of a training; remove it")


def converted(config: Config, where: str, key: str, values: Iterable[object]) -> list[Any]:
    """The values in the type of their setting. Raises ConfigError if the setting cannot have such a value."""
    *groups, name = key.split(".")
    group = type(reduce(getattr, groups, config))
    one = {each.name: each for each in fields(group)}.get(name)
    if one is None:
        raise ConfigError(f"{where} is no setting of {config.algo.name}")
    found = [convert(value, get_type_hints(group)[name], where) for value in values]
    for value in found:
        declared(one).check(where, value)
    return found


def start_of(config: Config, folder: Path) -> Point:
    """The values where the search starts: the effective flags of the run in `folder`, and the settings below `algo.`"""
    flags = {row["flag"]: row["effective"] for row in read_json(folder / "plan.json")["flags"]}
    return {**{f"algo.{name}": getattr(config.algo, name, None) for name in [*config.algo.spec.keys()]}, **flags}


def space_of(config: Config, start: Point, cores: int, typed: Container[str], speed: bool, learning: bool) -> Space:
    """The space of `tune.space`, or the usual one: settings that change the speed, the learning or both.

    `start`: as `start_of` returns it; `cores`: usable cores; `typed`: keys set by the user, not in the usual space.
    """
    around = _around(config, start)
    of_speed = {**{key: around[key] for key in BOTH if key in around}, **_computing(config, start, cores)}
    of_learning = {key: own for key, own in around.items() if key != "num_envs"}
    if config.tune.space is None:
        usual = (of_speed if speed else {}) | (of_learning if learning else {})
        return {key: own for key, own in usual.items() if key not in typed}
    space, every = Space(), of_speed | of_learning
    for key, wanted in config.tune.space.items():
        if wanted is None and key not in every:
            raise ConfigError(f"tune.space: {key} has no usual values here; write {{{key}: [first, second]}}")
        space[key] = every[key] if wanted is None else range_of(config, key, wanted)
    return space


def range_of(config: Config, key: str, wanted: Any) -> list[Any] | Range:
    """The user's list or range for `key`, which `check_ranges` has accepted. A range gets the type of the setting."""
    if not isinstance(wanted, dict):
        return [*wanted]
    low, high = converted(config, key, key, (wanted["low"], wanted["high"]))
    return Range(low, high, bool(wanted.get("log")))


def _around(config: Config, start: Point) -> Space:
    """Values around those of `start` (`SEARCHED`), for settings that the algorithm has."""
    space, spec = Space(), config.algo.spec
    episodes = spec.off_policy and train_frequency(config.algo.train_freq)[1] == "episode"
    one_env = episodes or spec.flags.get("num_envs") == 1  # SB3 or sb3-contrib allows one env
    for name, searched in SEARCHED.items():
        flag = BY_NAME.get(name)
        key = f"algo.{name}" if flag is None else name
        unused = (flag is not None and not flag.fits(spec)) or (name == "num_envs" and one_env)
        number = start.get(key)  # schedules, auto, null and -1 (an update for each transition) are not searched
        if unused or not isinstance(number, (int, float)) or number < 0:
            continue
        if name == "rollout_size" and config.algo.n_steps:
            continue
        if searched.log and number:
            space[key] = Range(float(number) / searched.log, float(number) * searched.log, True)
            continue
        low, high = RANGES.get(name, (None, None)) if flag is None else (flag.least, flag.most)
        if key in ("algo.rollout_size", "algo.n_steps") and spec.on_policy:  # longer rollouts leave too few updates
            high = max(number, config.total_timesteps / ROLLOUTS / (start["num_envs"] if name == "n_steps" else 1))
        every = {*searched.values, number, *(type(number)(number * factor) for factor in searched.factors)}
        fit = [it for it in sorted(every) if (low is None or it >= low) and (high is None or it <= high)]
        if len(fit) > 1:
            space[key] = fit
    return space


def _computing(config: Config, start: Point, cores: int) -> Space:
    """The settings that change only the speed."""
    space = dict[str, list[Any]]()
    if start["vec_env"] == "shared":
        space["workers"] = sorted({int(start["workers"]), max(1, cores // 2), cores, 2 * cores})
    if start["torch_threads"] not in ("default", NOT_APPLICABLE):
        space["torch_threads"] = sorted({1, cores, int(start["torch_threads"])})
    if start["fused_update"] != NOT_APPLICABLE and config.engine == "fast" and config.algo.spec.fast:
        space["fused_update"] = ["on", "off"]
    for switch in COMPUTING[-2:] if config.device.startswith("cuda") else ():
        if start[switch] != NOT_APPLICABLE:
            space[switch] = ["on" if start[switch] == "off" else start[switch], "off"]
    return {key: values for key, values in space.items() if len(values) > 1}


def update_ratio(config: Config, point: Point, start: Point) -> float:
    """Gradient updates per env step with the settings `point`. `start` has the values of all other settings."""
    value = {**start, **point}
    if config.algo.spec.off_policy:
        count, unit = train_frequency(config.algo.train_freq)
        if value["updates_per_step"] < 0:
            return 1.0
        return float(value["updates_per_step"]) / float(value["num_envs"]) / (count if unit == "step" else 1)
    if not config.algo.spec.on_policy:  # only ARS: its updates per env step do not depend on num_envs
        return 1.0
    rollout, epochs = _rollout(value), value.get("algo.n_epochs") or 1
    batch_size = (config.algo.spec.minibatches and value.get("batch_size")) or rollout
    return float(epochs * math.ceil(rollout / batch_size) / rollout)


def _rollout(value: Point) -> int:
    """Transitions of a rollout."""
    num_envs = int(value["num_envs"])
    return num_envs * int(value["algo.n_steps"] or max(1, round(value["algo.rollout_size"] / num_envs)))


def not_worth(config: Config, point: Point, start: Point, least_ratio: float) -> str:
    """Why `point` is not tried; empty if it is. `least_ratio`: a point needs 98 % of these updates per env step."""
    value = {**start, **point}
    rollout = config.algo.spec.on_policy and (_rollout(value) if value["algo.n_steps"] else value["algo.rollout_size"])
    batch_size = (config.algo.spec.minibatches and value.get("batch_size")) or 1
    if rollout and rollout < max(value["num_envs"], batch_size):
        return "a rollout is smaller than the minibatch"
    if "workers" in point and point["workers"] > value["num_envs"]:
        return "more workers than environments"
    if point.get("fused_update") == "on" and {point.get("use_amp"), point.get("use_compile")} - {None, "off"}:
        return "the kernels compute without use_amp and use_compile"
    few = least_ratio > 0 and update_ratio(config, point, start) < 0.98 * least_ratio
    return "fewer updates per env step than the profile" if few else ""


def changes(point: Point, start: Point) -> Point:
    """The settings of `point` with other values than in `start`."""
    return {key: value for key, value in point.items() if key not in start or start[key] != value}


def label_of(point: Point) -> str:
    """`num_envs=64 gamma=0.98`; `profile` for no change."""
    return " ".join(f"{key.removeprefix('algo.')}={value}" for key, value in point.items()) or PROFILE


def text_of(own: list[Any] | Range) -> str:
    """`64/128`, or `0.0001–0.01`."""
    return "/".join(map(str, own)) if isinstance(own, list) else f"{own.low:g}–{own.high:g}"
