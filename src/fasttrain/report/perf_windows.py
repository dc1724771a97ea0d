"""Where the time of a run went, along the run: perf.json → windows of phases. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.perf.clock import PHASES
from fasttrain.report.words import as_mapping, as_number, as_rows

Floats = NDArray[np.float64]
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
