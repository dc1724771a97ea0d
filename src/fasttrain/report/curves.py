"""From many episodes to a curve, and from perf.json to windows of phases: where the time of a run went. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttrain.perf.clock import PHASES
from fasttrain.report.words import as_mapping, as_number, as_rows

Floats = NDArray[np.float64]
MOST_BINS = 100  # more points than a 420 pt wide chart resolves make the page larger, not clearer
EPISODES_PER_BIN = 20
QUANTILES = (0.1, 0.9)
Z_95 = 1.959964


class Curve(NamedTuple):
    """A value over x with the bounds of its band."""

    x: Floats
    y: Floats
    low: Floats
    high: Floats


def groups(count: int, most: int = MOST_BINS) -> list[slice]:
    """Consecutive stretches of `count` observations, each of about `EPISODES_PER_BIN` or more; at most `most`."""
    if count == 0:
        return []
    bins = max(min(count, 8), min(most, count // EPISODES_PER_BIN))
    edges = np.linspace(0, count, bins + 1).astype(int).tolist()
    return [slice(low, high) for low, high in pairwise(edges)]


def spread_curve(x: Floats, y: Floats, most: int = MOST_BINS) -> Curve:
    """Mean and the middle 80 % of `y` along `x`."""
    parts = groups(len(x), most)
    bounds = [np.quantile(y[part], QUANTILES) for part in parts]
    return Curve(
        np.array([x[part].mean() for part in parts]),
        np.array([y[part].mean() for part in parts]),
        np.array([low for low, _ in bounds]),
        np.array([high for _, high in bounds]),
    )


def rate_curve(x: Floats, hits: Floats, most: int = MOST_BINS) -> Curve:
    """Share of hits along `x` with Wilson's 95 % interval of each stretch."""
    parts = groups(len(x), most)
    counts = np.array([part.stop - part.start for part in parts], dtype=np.float64)
    rates = np.array([hits[part].mean() for part in parts])
    middle = (rates + Z_95**2 / (2 * counts)) / (1 + Z_95**2 / counts)
    half = Z_95 / (1 + Z_95**2 / counts) * np.sqrt(rates * (1 - rates) / counts + Z_95**2 / (4 * counts**2))
    return Curve(np.array([x[part].mean() for part in parts]), rates, middle - half, middle + half)


def name_shares(x: Floats, names: Sequence[str], most: int) -> tuple[Floats, dict[str, Floats]]:
    """Shares of the `most` commonest names along `x`; the others together as `others`."""
    totals = Counter(names)
    kept = [name for name, _ in totals.most_common(most if len(totals) <= most else most - 1)]
    parts = groups(len(x))
    at = np.array([x[part].mean() for part in parts])
    counted = [Counter(names[part]) for part in parts]
    lengths = np.array([part.stop - part.start for part in parts], dtype=np.float64)
    shares = {name: np.array([count[name] for count in counted]) / lengths for name in kept}
    if len(kept) < len(totals):
        shares["others"] = 1.0 - sum(shares.values(), np.zeros(len(parts)))
    return at, shares


def across_seeds(curves: Sequence[Curve], points: int = 80) -> Curve | None:
    """Mean of several runs' curves on the stretch of x that all of them have, with Student's 95 % interval.

    One run has no interval: its band is the line itself. None where there is nothing in common.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return None
    low, high = max(float(c.x[0]) for c in curves), min(float(c.x[-1]) for c in curves)
    if not low <= high:
        return None
    at = np.linspace(low, high, points)
    values = np.array([np.interp(at, curve.x, curve.y) for curve in curves])
    mean = values.mean(axis=0)
    if len(curves) == 1:
        return Curve(at, mean, mean, mean)
    from scipy.special import stdtrit  # scipy.stats takes half a second to load

    half = float(stdtrit(len(curves) - 1, 0.975)) * values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return Curve(at, mean, mean - half, mean + half)


def pareto_front(speed: Sequence[float], quality: Sequence[float]) -> list[int]:
    """Indices of what nothing else beats in both, by rising speed."""
    order = sorted(range(len(speed)), key=lambda i: (-speed[i], -quality[i]))
    front: list[int] = []
    best = -np.inf
    for index in order:
        if quality[index] > best:
            front.append(index)
            best = quality[index]
    return front[::-1]


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean and Student's 95 % interval; one value has none."""
    array = np.array(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return mean, None, None
    from scipy.special import stdtrit

    half = float(stdtrit(len(array) - 1, 0.975)) * float(array.std(ddof=1)) / len(array) ** 0.5
    return mean, mean - half, mean + half


MOST_WINDOWS = 120  # a run of hours writes thousands; what a chart shows apart is about this many
TINY_SHARE = 0.01  # phases below it are one part of the chart, "rest"


@dataclass(frozen=True, slots=True)
class Windows:
    """Consecutive stretches of training: W windows.

    `ends` in seconds of training where the file says so (`in_seconds`), else numbers of [PERF] lines.
    """

    ends: Floats  # (W,)
    phases: dict[str, Floats]  # seconds (or shares) of each phase, (W,)
    steps_per_s: Floats  # (W,)
    cpu: Floats  # 0..1, NaN unknown
    gpu: Floats
    memory_bytes: Floats
    in_seconds: bool

    def __len__(self) -> int:
        return len(self.ends)

    def shares(self) -> dict[str, Floats]:
        """Of the main thread's time, by phase, the small ones together as `rest`, if that can be seen at all."""
        total = np.maximum(sum(self.phases.values(), np.zeros(len(self))), 1e-12)
        whole = float(total.sum())
        shown = [name for name, used in self.phases.items() if float(used.sum()) >= TINY_SHARE * whole]
        parts = {name: self.phases[name] / total for name in shown if name != "other"}
        rest = 1.0 - sum(parts.values(), np.zeros(len(self)))
        return {**parts, "rest": np.maximum(rest, 0.0)} if float((rest * total).sum()) > 0.002 * whole else parts


def windows_of(perf: Mapping[str, Any]) -> Windows | None:
    """From "windows", else from the [PERF] lines; None where there are fewer than two."""
    rows = as_rows(perf.get("windows"))
    found = _from_windows(rows) if rows else None
    lines = perf.get("lines")
    if found is None and isinstance(lines, list):
        found = _from_lines([str(line) for line in lines])
    return found if found is not None and len(found) > 1 else None


def phase_ms(total: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds per 1,000 env steps of each phase that took any time."""
    found = {phase: as_number(total.get(f"{phase}_ms")) for phase in PHASES}
    return {phase: value for phase, value in found.items() if value}


def _from_windows(rows: Sequence[Mapping[str, Any]]) -> Windows | None:
    rows = [row for row in rows if as_number(row.get("wall_s")) is not None]
    rows = [row for row in rows if as_number(row.get("env_steps")) is not None]
    ends, steps = _column(rows, "wall_s"), np.diff(_column(rows, "env_steps"), prepend=0.0)
    lasted = np.diff(ends, prepend=0.0)
    good = (lasted > 0) & (steps > 0)
    rows = [row for row, kept in zip(rows, good.tolist(), strict=True) if kept]
    if not rows:
        return None
    ends, steps, lasted = ends[good], steps[good], lasted[good]
    phases = {phase: np.nan_to_num(_column(rows, f"{phase}_ms")) * steps / 1e6 for phase in PHASES}
    parts = _merged(len(rows))

    def summed(values: Floats) -> Floats:
        return np.array([values[part].sum() for part in parts])

    def mean(name: str) -> Floats:
        values = _column(rows, name)
        return np.array([_mean(values[part], lasted[part]) for part in parts])

    return Windows(
        ends=np.array([ends[part[-1]] for part in parts]),
        phases={phase: summed(values) for phase, values in phases.items() if values.any()},
        steps_per_s=summed(steps) / summed(lasted),
        cpu=mean("cpu"),
        gpu=mean("gpu"),
        memory_bytes=mean("memory_bytes"),
        in_seconds=True,
    )


def _from_lines(lines: Sequence[str]) -> Windows | None:
    rows = [dict(re.findall(r"(\w+(?:/s)?) ([\d.]+)(?=[ %)M]|$)", line)) for line in lines if line.startswith("[PERF]")]
    rows = [row for row in rows if as_number(row.get("steps/s"))]
    if not rows:
        return None
    parts = _merged(len(rows))

    def mean(name: str) -> Floats:
        values = _column(rows, name)
        return np.array([_mean(values[part], np.ones(len(part))) for part in parts])

    phases = {phase: np.nan_to_num(mean(f"{phase}_ms")) for phase in PHASES}
    return Windows(
        ends=np.array([part[-1] + 1.0 for part in parts]),
        phases={phase: values for phase, values in phases.items() if values.any()},
        steps_per_s=mean("steps/s"),
        cpu=mean("cpu") / 100,
        gpu=mean("gpu") / 100,
        memory_bytes=mean("mem") * 2**20,
        in_seconds=False,
    )


def _merged(count: int) -> list[NDArray[np.intp]]:
    """Which of `count` windows become one."""
    return np.array_split(np.arange(count), min(MOST_WINDOWS, count))


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    found = (as_number(row.get(name)) for row in rows)
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


def _mean(values: Floats, weights: Floats) -> float:
    known = np.isfinite(values)
    return float(np.average(values[known], weights=weights[known])) if known.any() else float("nan")


def perf_cells(total: Mapping[str, Any]) -> list[tuple[str, float, float, float | None]]:
    """Rows of the [PERF] table: name, ms per 1,000 steps, share of the wall time, steps/s if it were alone."""
    phases = phase_ms(total)
    wall = sum(phases.values())
    rows: list[tuple[str, float, float, float | None]] = []

    def add(name: str, value: float) -> None:
        rows.append((name, value, value / wall if wall else 0.0, 1e6 / value if value else None))

    for phase, value in phases.items():
        add(f"{phase}_ms", value)
        if phase == "env_step":
            inside = ("enemy_turn_ms", "slowest_worker_ms", "transport_ms", "waiting_ms")
            for name in inside:
                if part := as_number(total.get(name)):
                    add(f"of it {name}", part)
    if rows:
        add("total", wall)
    if beside := as_number(as_mapping(total.get("beside")).get("update_ms")):
        add("beside it update_ms", beside)
    return rows
