"""Results as a dated page of Markdown in `benchmarks/reports/`, which nobody edits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
REPORTS = Path(__file__).resolve().parent / "reports"
SHOWN = {  # further figures of a side → how they are told
    "startup_s": "start-up {:.1f} s", "wall_s": "{:.2f} s", "cpu_s": "{:.1f} s of CPU",
    "p95_ms": "P95 of a decision {:.1f} ms",
    "share_of_ideal": "{:.0%} of cores ÷ env time", "gpu_share": "GPU busy {:.0%}", "sample_us": "sample {:.1f} µs",
    "update_us": "update {:.1f} µs", "finish_s": "finish {:.1f} s", "tracker_share": "{:.2%} in the tracker",
    "quality": "quality {:.4g}", "checkpoint_s": "a checkpoint {:.3f} s",
}  # fmt: skip


def load(file: Path) -> list[dict[str, Any]]:
    """The results of a file, one JSON object a line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def page(results: Iterable[Result]) -> str:
    """The page."""
    results = list(results)
    dates = sorted({result["date"] for result in results})
    lines = [f"# Measured on {' and '.join(dates)}", ""]
    heads: list[str] = []
    for result in results:
        versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
        head = f"{result['machine']}; commit {result['commit']}; {versions}. `{result['command']}`"
        if head not in heads[-1:]:
            heads.append(head)
            lines += [head, ""]
        lines += section(result)
    return "\n".join(lines).rstrip() + "\n"


def section(result: Result) -> list[str]:
    """One work: a row a side."""
    target = f" ({result['target']})" if result["target"] else ""
    lines = [f"## {result['work']}{target}", "", result["text"], ""]
    if result["sides"]:
        lines += [f"| | {result['unit']} | [min, max] | ratio to it, turn by turn | further |", "|---|---|---|---|---|"]
    for label, figures in result["sides"].items():
        rate, ratio = figures["rate"], result["ratios"].get(label)
        against = f"{number(ratio['median'])}× [{number(ratio['min'])}, {number(ratio['max'])}]" if ratio else ""
        further = [text.format(figures[key]["median"]) for key, text in SHOWN.items() if _is_spread(figures.get(key))]
        further += [f"{key}: {number(found['median'])}" for key, found in figures.items() if "×" in key]
        found = (result.get("quality") or {}).get(label)
        further += [quality_text(found)] if found else []
        extremes = f"[{number(rate['min'])}, {number(rate['max'])}]"
        lines.append(f"| {label} | {number(rate['median'])} | {extremes} | {against} | {'; '.join(further)} |")
    if result["sides"]:
        turns = next(iter(result["sides"].values()))["rate"]["turns"]
        equal = ", ".join(f"{key} {value}" for key, value in result["equal"].items())
        lines += ["", f"Turns: {turns}. Equal work: {equal or 'as described'}."]
    lines += [f"{label}: no ratio, it did other work ({done})." for label, done in result["unequal"].items()]
    lines += [f"{label} was not measured: {reason}." for label, reason in result["skipped"].items()]
    lines += [f"Verdict: {result['verdict']}."] if "verdict" in result else []
    return [*lines, ""]


def quality_text(found: Mapping[str, Any]) -> str:
    """A difference of quality with its interval and verdict."""
    bounds = "" if found["low"] is None else f" [{found['low']:+.4g}, {found['high']:+.4g}]"
    return f"ours {found['difference']:+.4g}{bounds}, margin {found['margin']:.4g}: {found['verdict']}"


def _is_spread(value: Any) -> bool:
    return isinstance(value, dict) and "median" in value


def number(value: float) -> str:
    """Three digits: `154,000`, `11.6`, `0.706`."""
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 100 else text


def write(file: Path) -> Path:
    """The page of a file of results, `benchmarks/reports/DATE-NAME.md`.

    Raises:
        SystemExit: there is such a page with other contents. A page is a record: it is not written over.
    """
    results = load(file)
    if not results:
        raise SystemExit(f"{file} holds no results")
    date = max(result["date"] for result in results)
    place = REPORTS / f"{date}-{file.stem.removeprefix(date).strip('-') or 'results'}.md"
    text = page(results)
    if place.exists() and place.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{place.name} is there already, with other figures: name the file of results otherwise")
    place.write_text(text, encoding="utf-8")
    return place
