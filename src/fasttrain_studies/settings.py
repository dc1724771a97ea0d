"""The settings of studies and sweeps. They are a part of every configuration, so this module imports little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.plugins import Owner, Part
from fasttrain.spec.setting import setting

METRICS = ("win_rate", "mean_reward", "tail")  # choices of gate.metric besides env.result.scores
WITH_SEEDS = ("compare", "tune")  # read `seeds` and `minutes`


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """When a candidate counts as no worse than its baseline (`compare`, `ablate`)."""

    margin: float | None = setting(
        None,
        "How much worse a candidate may be. null: 0.03 of a win rate, or 5 % of the baseline's mean reward.",
        least=0,
    )
    metric: str = setting(
        "auto",
        "Figure that is judged. auto: win_rate where there is one, else mean_reward; for DQN the tail of the "
        "training curve. Or tail, or one of env.result.scores.",
    )
    threshold: float | None = setting(
        None, "Reward or win rate for the time-to-threshold figure. null: 90 % of the rise of the baseline's curve."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """The search of `fasttrain tune`."""

    objective: str = setting(
        "steps_per_s",
        "What tune maximizes: reward, win_rate, steps_per_s or reward_per_hour. time_to:0.5 minimizes the time "
        "until 100 episodes have this mean return or win rate.",
    )
    space: dict[str, tuple[Any, ...] | dict[str, int | float | bool] | None] | None = setting(
        None,
        "What is searched: {batch_size: [256, 512], algo.learning_rate: {low: 1e-4, high: 1e-2, log: true}}. null "
        "stands for the usual values. Without tune.space, all usual keys are searched that you did not type.",
    )
    trials: int | None = setting(
        None, "Ends the search after this number of trials. null searches until minutes=… is over.", least=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """The limits of a sweep (`fasttrain -m`)."""

    max_parallel: int | Literal["auto"] = setting(
        "auto",
        "Trainings side by side on one machine, each on cores of its own: of a sweep by a launcher plugin of Hydra, of "
        "compare or of a population. auto: n_jobs of joblib, the cores divided by cpus_per_task of submitit, 1 of "
        "compare, the number of cores of a population.",
        least=1,
    )
    minutes: float | None = setting(None, "After this time no further cell of a sweep begins.", least=0)
    stop_on_error: bool = setting(False, "After a failed cell no further cell of a sweep begins.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulationConfig:
    """Several models that are trained side by side (`population=8`)."""

    size: int = setting(
        1,
        "Number of models, trained side by side; also typed as population=8. They differ in their seed, or by "
        "population.settings.",
        least=1,
        most=1000,
    )
    settings: tuple[dict[str, Any], ...] = setting(
        (),
        "Settings in which the models differ: [{algo.learning_rate: 1e-3}, {algo.learning_rate: 1e-4}]. With more "
        "models than entries, the entries repeat with the next seed.",
    )
    exchange_every: int = setting(
        0,
        "Env steps between two exchanges of population-based training. In an exchange the worst quarter of the models "
        "continues with the weights of the best quarter. 0: never.",
        least=0,
    )
    explore: dict[str, tuple[Any, ...] | dict[str, int | float | bool]] = setting(
        {},
        "Settings that an exchange changes, with their limits or values: {algo.ent_coef: {low: 1e-4, high: 0.1}}.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """The settings of `fasttrain doctor`: what it measures."""

    test: Literal["all", "env", "policy", "update", "replay", "transport", "logging"] = setting(
        "all", "Which part is measured. Also --test."
    )


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What studies add to a configuration."""

    candidates: str | None = setting(
        None,
        "What compare trains: [baseline, {name: mine, overrides: [num_envs=8]}]. The first is the "
        "baseline. ablate, or {ablate: [num_envs, vec_env]}, measures the profile's settings one by one.",
    )
    seeds: int = setting(5, "Number of seeds per candidate (usually 5), or per trial of tune (usually 2).", least=1)
    minutes: float | None = setting(
        None,
        "compare: minutes of each training, in place of equal env steps. tune and ablate: minutes of the whole study.",
        least=0.001,
    )
    gate: GateConfig = GateConfig()
    tune: TuneConfig = TuneConfig()
    sweep: SweepConfig = SweepConfig()
    population: PopulationConfig = PopulationConfig()
    doctor: DoctorConfig = DoctorConfig()


if TYPE_CHECKING:
    from fasttrain.spec import config

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(config.Config, StudySettings):
        """A configuration as studies see it."""

else:
    Config = object  # this module is imported before `Config` is made


def check_gate(config: Config) -> None:
    """Raises ConfigError if no figure has the name gate.metric."""
    if config.gate.metric not in ("auto", *METRICS, *config.env.result.scores):
        raise ConfigError(
            f"gate.metric={config.gate.metric}: expected auto, {', '.join(METRICS)}, or one of env.result.scores"
        )


class _Studies(Part):
    name, settings = "studies", StudySettings
    owners: ClassVar = {
        "candidates": Owner(("compare",), "to compare: fasttrain compare candidates=[baseline,speed]"),
        "seeds": Owner(WITH_SEEDS, "a single run takes seed=…"),
        "minutes": Owner(WITH_SEEDS, "a single run takes stop.max_minutes=…"),
        "gate.": Owner(("compare",), "to judge candidates: fasttrain compare candidates=[baseline,speed]"),
        "tune.": Owner(("tune",), "to search for the best values: fasttrain tune +profile=speed"),
        "population.": Owner(("population",), "to train several models: fasttrain population=8 +profile=speed"),
        "doctor.": Owner(("doctor",), "to look for the bottleneck: fasttrain doctor +profile=speed"),
    }
    rules = (check_gate,)


PART = _Studies()
