"""Compares candidates: reads results of finished trainings, computes speed and quality with intervals, and judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasttrain.runs.logs import read_episodes
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.infos import WIN_KEYS
from fasttrain_studies import statistics
from fasttrain_studies.settings import GateConfig
from fasttrain_studies.study import Cell

RISE = 0.9  # default threshold, as a share of the rise of the baseline's training curve
TAIL = 0.2  # last part of a training curve; its mean depends less on chance than one final policy
EVERY_BYTE = 10**12  # file size up to which episodes.csv is read as a whole
WINDOW = 100  # episodes in each running mean of the curve, as in the live view
OF_TRAINING = ("steps_per_s", "env_steps", "updates", "reward_per_hour")  # others: in `quality` of the summary
# Figures that are shown as the interquartile mean over seeds, with a bootstrap interval.
FIGURES = (*OF_TRAINING, "win_rate", "mean_reward", "score_diff", "draw_rate", "mean_turns", "tail", "elo")


@dataclass(frozen=True)
class Outcome:
    """The results of one run, with its E training episodes in the order in which they ended."""

    seed: int
    summary: dict[str, Any]
    curve_of: str  # "win rate" if the env reports wins, else "return"
    env_steps: statistics.Floats  # (E,) env steps of the run at the end of each episode
    wall_s: statistics.Floats  # (E,)
    values: statistics.Floats  # (E,) 0 or 1 for a win rate, else returns

    def figure(self, name: str) -> float | None:
        """One of `FIGURES`, or another result of the final evaluation. None if it is not reported."""
        if name == "tail":
            return self.tail()
        group = self.summary if name in OF_TRAINING else self.summary["quality"]
        value = (self.summary.get("self_play") or {}).get(name) if name == "elo" else group.get(name)
        return None if value is None else float(value)

    def tail(self) -> float | None:
        """Mean over the last fifth of the training curve; None without an episode."""
        curve = statistics.learning_curve(self.env_steps, self.values, self.total)  # type: ignore[arg-type]
        return float(np.mean(curve[-round(len(curve) * TAIL) :])) if curve else None

    @property
    def total(self) -> float:
        return float(self.summary["env_steps"])

    def efficiency(self, env_steps: float) -> float | None:
        """Mean of the training curve up to `env_steps` (sample efficiency); None without an episode."""
        within = self.env_steps <= env_steps
        curve = statistics.learning_curve(self.env_steps[within], self.values[within], env_steps)  # type: ignore[arg-type]
        return float(np.mean(curve)) if curve else None

    def begins_with(self) -> float | None:
        """Mean of the first 100 episodes; None with fewer."""
        return float(self.values[:WINDOW].mean()) if len(self.values) >= WINDOW else None

    def time_to(self, threshold: float) -> tuple[float, float] | None:
        """(env steps, training seconds) when a mean of 100 episodes first reached the threshold; None: never."""
        for index, best in statistics.trail(self.values, WINDOW, levels=1000):  # type: ignore[arg-type]
            if best >= threshold:
                return float(self.env_steps[index]), float(self.wall_s[index])
        return None


def read_outcome(cell: Cell) -> Outcome:
    episodes = read_episodes(cell.folder / "episodes.csv", whole_bytes=EVERY_BYTE)
    numbers = episodes.numbers
    won = next((numbers[name] for name in WIN_KEYS if name in numbers), None)
    by_wins = won is not None and cell.summary["quality"].get("win_rate") is not None
    nothing = np.zeros(0)
    return Outcome(
        seed=cell.seed or 0,
        summary=cell.summary,
        curve_of="win rate" if by_wins else "return",
        env_steps=numbers.get("env_steps", nothing),
        wall_s=numbers.get("wall_s", nothing),
        values=won if by_wins and won is not None else numbers.get("return", nothing),
    )


@dataclass(frozen=True)
class Row:
    """One candidate over all its seeds. A figure is None if the env does not report it, or if there is no baseline."""

    name: str
    outcomes: Mapping[int, Outcome]
    figures: dict[str, statistics.Interval | None]  # FIGURES, the env's own scores, and sample_efficiency
    end_reason: dict[str, float]
    time_s: statistics.Interval | None  # seconds until the threshold; infinite: half of the seeds never reached it
    time_steps: statistics.Interval | None
    speed_up: statistics.Ratio | None
    comparison: statistics.Comparison | None
    faster: bool | None

    @property
    def verdict(self) -> str | None:
        """The verdict on quality: pass, fail or not enough seeds; None for the baseline."""
        return None if self.comparison is None else self.comparison.verdict

    def to_dict(self) -> dict[str, Any]:
        found = self.comparison
        intervals: dict[str, statistics.Interval | None] = {
            **self.figures,
            "time_to_threshold_s": self.time_s,
            "time_to_threshold_steps": self.time_steps,
            "speed_up": self.speed_up,
            "difference": None if found is None else statistics.Interval(found.difference, found.low, found.high),
        }
        return {
            "name": self.name,
            "seeds": sorted(self.outcomes),
            **{key: value and value.to_dict() for key, value in intervals.items()},
            "end_reason": self.end_reason,
            "bootstrap": found and list(found.bootstrap),
            "verdict": self.verdict,
            "seeds_needed": found and found.seeds_needed,
            "faster": self.faster,
        }


def speed_ratio(ours: Mapping[int, Cell], theirs: Mapping[int, Cell]) -> statistics.Ratio | None:
    """Speed of `ours` ÷ speed of `theirs`, paired by seed; None if no seed is finished on both sides."""
    return statistics.ratio_interval(*({seed: cell.rate for seed, cell in cells.items()} for cells in (ours, theirs)))


def choose_metric(outcomes: Sequence[Outcome], gate: GateConfig, algorithms: Sequence[str]) -> str:
    """The figure that is judged. For DQN and runs without an evaluation it is the tail of the training curve: the
    greedy policy of DQN changes with every update (CartPole: return 9 or 500).
    """
    if gate.metric != "auto":
        return gate.metric
    unknown = all(outcome.figure("mean_reward") is None for outcome in outcomes)
    if unknown or any(ALGORITHMS[name].greedy for name in algorithms):
        return "tail"
    return "win_rate" if all(outcome.figure("win_rate") is not None for outcome in outcomes) else "mean_reward"


def choose_threshold(baseline: Sequence[Outcome], gate: GateConfig) -> float | None:
    """`gate.threshold`, else 90 % of the rise of the baseline's training curve (median of its seeds). None: no rise."""
    if gate.threshold is not None:
        return gate.threshold
    found = []
    for outcome in baseline:
        first, last = outcome.begins_with(), outcome.tail()
        if first is not None and last is not None and last > first:
            found.append(first + RISE * (last - first))
    return float(np.median(found)) if 2 * len(found) > len(baseline) else None


def judge(
    candidates: Mapping[str, Mapping[int, Outcome]], gate: GateConfig, metric: str, threshold: float | None
) -> list[Row]:
    """A row for every candidate that has an outcome. `candidates`: name → seed → outcome, the baseline first."""
    first = next(iter(candidates))
    every = [outcome for of_seed in candidates.values() for outcome in of_seed.values()]
    how = gate, metric, threshold, min((outcome.total for outcome in every), default=0.0)
    others = {name: {} if name == first else candidates[first] for name in candidates}
    return [_row(name, outcomes, others[name], how) for name, outcomes in candidates.items() if outcomes]


def _row(
    name: str,
    outcomes: Mapping[int, Outcome],
    baseline: Mapping[int, Outcome],
    how: tuple[GateConfig, str, float | None, float],
) -> Row:
    gate, metric, threshold, common = how
    runs = list(outcomes.values())
    own_scores = [name for outcome in runs for name in outcome.summary["quality"].get("scores", ())]
    names = dict.fromkeys([*FIGURES, *own_scores])
    figures = {name: _interval([outcome.figure(name) for outcome in runs]) for name in names}
    figures["sample_efficiency"] = _interval([outcome.efficiency(common) for outcome in runs])
    reached = [None if threshold is None else outcome.time_to(threshold) for outcome in runs]
    ends: Counter[str] = Counter()  # end reason → its share in the final evaluations of all seeds
    for outcome in runs:
        for reason, share in outcome.summary["quality"].get("end_reason", {}).items():
            ends[reason] += share / len(runs)
    speed_up = statistics.ratio_interval(*(values_of(side, "steps_per_s") for side in (outcomes, baseline)))
    return Row(
        name=name,
        outcomes=outcomes,
        figures=figures,
        end_reason=dict(ends.most_common()),
        time_s=None if threshold is None else statistics.median_time([at and at[1] for at in reached]),
        time_steps=None if threshold is None else statistics.median_time([at and at[0] for at in reached]),
        speed_up=speed_up,
        comparison=compared(outcomes, baseline, gate, metric),
        faster=None if speed_up is None else speed_up.value >= statistics.MIN_SPEED_UP,
    )


def _interval(values: Sequence[float | None]) -> statistics.Interval | None:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return statistics.interval_of(known) if len(known) == len(values) and len(known) else None


def values_of(outcomes: Mapping[int, Outcome], metric: str) -> dict[int, float]:
    """The metric by seed, without seeds that do not report it."""
    found = {seed: outcome.figure(metric) for seed, outcome in outcomes.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def compared(
    outcomes: Mapping[int, Outcome], baseline: Mapping[int, Outcome], gate: GateConfig, metric: str
) -> statistics.Comparison | None:
    """The comparison over the seeds that report the metric on both sides; None if no seed does."""
    ours, theirs = values_of(outcomes, metric), values_of(baseline, metric)
    if not ours.keys() & theirs.keys():
        return None
    usual = statistics.margin_of(theirs, is_rate(metric, next(iter(baseline.values())).curve_of))
    return statistics.compare(theirs, ours, usual if gate.margin is None else gate.margin)


def is_rate(metric: str, curve_of: str) -> bool:
    """Whether the metric is a win rate (0..1). `curve_of`: as in `Outcome`."""
    return metric == "win_rate" or (metric == "tail" and curve_of == "win rate")
