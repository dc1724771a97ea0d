"""Measures works: every measurement in a fresh process, in turn (A B C, A B C, …), and no ratio where work is unequal.

Turns make a machine that slows down slow everybody; ratios are taken turn by turn.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT
from benchmarks.work import Sample, Work

Samples = dict[str, list[Sample]]  # side → one a turn


@dataclass(frozen=True)
class Side:
    """A measurement of a work, by the sources of a checkout."""

    label: str
    measurement: str
    checkout: Path = ROOT


def sides_of(work: Work, peers: bool, against: Path | None = None) -> list[Side]:
    """Ours first; `against`: another checkout of fasttrain, beside it."""
    sides = [Side(name, name) for name in work.measurements if peers or name not in work.peers]
    if against is not None:
        ours = next(iter(work.measurements))
        sides.insert(1, Side(f"{ours}, other checkout", ours, against.resolve()))
    return sides


def measure(work: Work, side: Side, turn: int) -> Sample:
    """One measurement in a fresh process.

    A checkout with benchmarks of its own is measured by them, which know its insides; one without by these. Kernels are
    compiled before the first step, however short the training is. Raises SystemExit: it failed.
    """
    root = side.checkout if (side.checkout / "benchmarks" / "__main__.py").is_file() else ROOT
    places = [str(side.checkout / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "one", work.name, side.measurement, str(turn)],
        capture_output=True, text=True, cwd=root,
        env={"FASTTRAIN_ENGINE_SWITCH_AT": "0", **os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{work.name}, {side.label}: failed\n{done.stderr[-2000:]}{done.stdout[-1000:]}")
    sample: Sample = json.loads(done.stdout.strip().splitlines()[-1])
    return sample


def run(
    work: Work, sides: Sequence[Side], repeats: int, say: Callable[[str], None] = lambda _: None,
    measured: Callable[[Work, Side, int], Sample] = measure,
) -> dict[str, Any]:  # fmt: skip
    """All sides in turn. A side that cannot be measured here is left out, with its reason."""
    skipped: dict[str, str] = {}
    samples: Samples = {side.label: [] for side in sides}
    head = {"work": work.name, "text": work.text, "unit": work.unit, "target": work.target, "skipped": skipped}
    for side in [] if work.seeded else sides:  # compiles and fills the disk cache; not counted
        sample = measured(work, side, 0) if side.measurement == sides[0].measurement else {}
        if "skipped" in sample and side is sides[0]:
            skipped[side.label] = sample["skipped"]
            say(f"  {side.label}: {sample['skipped']}")
            return {**head, **compared(work, {}, side.label)}
    for turn in range(repeats):
        for side in sides:
            if side.label in skipped:
                continue
            sample = measured(work, side, turn)
            if "skipped" in sample:
                skipped[side.label] = sample["skipped"]
                say(f"  {side.label}: {sample['skipped']}")
                continue
            samples[side.label].append(sample)
            quality = f", quality {sample['quality']:.4g}" if "quality" in sample else ""
            say(f"  turn {turn + 1}/{repeats}  {side.label:<30} {sample['rate']:>14,.1f} {work.unit}{quality}")
    samples = {label: found for label, found in samples.items() if label not in skipped}
    return {**head, **compared(work, samples, sides[0].label)}


def compared(work: Work, samples: Samples, ours: str) -> dict[str, Any]:
    """Medians, ratios turn by turn, and differences of quality. Whoever did other work than ours gets no ratio."""
    if not samples.get(ours):
        return {"sides": {}, "ratios": {}, "unequal": {}}
    equal = {key: samples[ours][0][key] for key in work.equal}
    unequal = {
        label: done
        for label, found in samples.items()
        for done in ({key: sample[key] for key in equal} for sample in found)
        if done != equal
    }
    ratios = {
        label: {**spread(values := _pairwise(samples[ours], found)), "interval": ratio_interval(values)}
        for label, found in samples.items()
        if label != ours and ours not in unequal and label not in unequal
    }
    return {
        "equal": equal,
        "unequal": unequal,
        "sides": {label: _figures(found) for label, found in samples.items()},
        "ratios": ratios,
        **({"quality": qualities(work, samples, ours)} if work.seeded else {}),
    }


def qualities(work: Work, samples: Samples, ours: str) -> dict[str, Any]:
    """Paired differences of ours to each other side, with the verdict of `fasttrain compare`."""
    from fasttrain_studies.statistics import compare, margin_of

    values = {label: dict(enumerate(float(one["quality"]) for one in found)) for label, found in samples.items()}
    verdicts = {}
    for label in values.keys() - {ours}:
        found = compare(values[label], values[ours], margin_of(values[label], work.is_rate))
        numbers = {"difference": found.difference, "low": found.low, "high": found.high}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        verdicts[label] = {**finite, "margin": found.margin, "verdict": found.verdict}
    return {label: verdicts[label] for label in samples if label in verdicts}


def _pairwise(ours: Sequence[Sample], theirs: Sequence[Sample]) -> list[float]:
    return [one["rate"] / other["rate"] for one, other in zip(ours, theirs, strict=True)]


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Spreads of what is a number; of the rest what the first said."""
    found: dict[str, Any] = {}
    for key, first in samples[0].items():
        values = [sample.get(key) for sample in samples]
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        found[key] = spread(numbers) if len(numbers) == len(samples) else first
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "turns": len(values)}


def ratio_interval(ratios: Sequence[float]) -> list[float] | None:
    """Student's 95 % interval of the geometric mean; None of a single turn, which says nothing."""
    if len(ratios) < 2:
        return None
    from fasttrain.intervals import student  # not there in an old checkout, whose process only measures

    mean, half = student(np.log(ratios))
    return [float(np.exp(mean - half)), float(np.exp(mean + half))]


def judged(ratio: Mapping[str, Any]) -> str:
    """`slower` or `faster` only where the whole interval of the ratio says so."""
    if ratio["interval"] is None:
        return "one turn says nothing"
    low, high = ratio["interval"]
    return "slower" if high < 1 else "faster" if low > 1 else "no difference shown"
