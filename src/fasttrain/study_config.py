"""The parts of the configuration that only commands over many runs read; `config.py` has the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """What a candidate must show beside its baseline (`compare`, `ablate`)."""

    margin: float | None = None  # in the metric's unit; None: 0.03 of a win rate, 5 % of the baseline's mean reward
    metric: str = "auto"  # win_rate where there is one, else mean_reward; or tail: training's; or one of env.score_keys
    min_pairs: int = 5  # fewer seeds prove nothing, whatever their interval says
    min_speed_up: float = 1.1  # below it a candidate is not worth its trade-offs
    threshold: float | None = None  # of reward, or win rate: time to it; None: 90 % of the baseline's rise


@dataclass(frozen=True, kw_only=True, slots=True)
class AblateConfig:
    """Flag by flag from baseline to the profile."""

    minutes: float = 10.0  # for everything
    flags: tuple[str, ...] = ()  # only these; empty: all that differ
    name: str = "measured"  # profile/NAME.yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """Search for the most steps/s."""

    minutes: float = 10.0  # for everything
    space: dict[str, tuple[Any, ...]] | None = None  # key → values to try; None: made from machine and profile
    min_update_ratio: float | None = None  # gradient updates per env step; None: the profile's own
    max_memory_gb: float | None = None  # resident, children included; None: 80 % of what is free at the start
    sampler: Literal["random", "optuna"] = "random"
    name: str = "tuned"  # profile/NAME.yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What `fasttrain doctor` measures."""

    test: Literal["all", "env", "policy", "update", "replay", "transport", "logging"] = "all"
    seconds: float = 3.0  # per part
    tries: int = 1  # how many of its advices it tries itself, 0 = none
