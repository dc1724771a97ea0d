"""The picture of the stored PPO results for the README; matplotlib is needed for nothing else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS, OTHERS = "#1f6feb", "#9aa4b2"
COLUMNS = 3  # of learning.png, so that it can be read in a README
TITLES = {
    "skullking-train": "Skull King, MaskablePPO",
    "ppo-cartpole-8": "CartPole-v1, 8 envs",
    "ppo-cartpole-64": "CartPole-v1, 64 envs",
}


def draw(results: Path, learning_results: Path) -> int:
    """Write ppo.png and, where runs are stored, learning.png and zoo-tuned.png into `results`; the exit code."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return 2
    matplotlib.use("Agg")
    found = {name: results / f"{name}.json" for name in TITLES if (results / f"{name}.json").exists()}
    if found:
        _speed(
            {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items()}, results / "ppo.png"
        )
    curves = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))["cells"] for path in learning_results.glob("*.json")
    }
    if curves:
        _curves(dict(sorted(curves.items())), results / "learning.png")
    if (tuned := results / "zoo-tuned.json").exists():
        tasks: dict[str, list[dict[str, Any]]] = {}
        for cell in json.loads(tuned.read_text(encoding="utf-8"))["cells"]:
            tasks.setdefault(cell["task"], []).append({**cell, "side": "speed"})
        _curves(tasks, results / "zoo-tuned.png")
    if not found and not curves:
        print(f"no picture: nothing is stored in {results}")
        return 2
    return 0


def _speed(works: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """A bar a contestant, with its lowest and highest turn."""
    from matplotlib import pyplot as plt

    heights = [1 + len(work["theirs"]) for work in works.values()]
    figure, axes = plt.subplots(
        len(works),
        1,
        figsize=(7.5, 1.0 + 0.36 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, work) in zip(axes[:, 0], works.items(), strict=True):
        rates = {"fasttrain": work["ours"], **work["theirs"]}
        order = sorted(rates, key=lambda each: rates[each]["median"])
        medians = [rates[each]["median"] for each in order]
        errors = [
            [rates[each]["median"] - rates[each]["min"] for each in order],
            [rates[each]["max"] - rates[each]["median"] for each in order],
        ]
        axis.barh(
            order, medians, xerr=errors, color=[OURS if each == "fasttrain" else OTHERS for each in order], capsize=2
        )
        for row, each in enumerate(order):
            axis.annotate(
                f" {medians[row]:,.0f}", (rates[each]["max"], row), va="center", fontsize=8, xytext=(3, 0),
                textcoords="offset points",
            )  # fmt: skip
        axis.set_title(f"{TITLES[name]}: env steps per second", fontsize=10, loc="left")
        axis.set_xlim(0, 1.15 * max(rate["max"] for rate in rates.values()))
        _plain(axis)
    figure.savefig(target, dpi=150)
    plt.close(figure)
    print(f"written: {target}")


def _curves(tasks: Mapping[str, list[dict[str, Any]]], target: Path) -> None:
    """Each side's training curve: the median over seeds and the range of the middle half, of three seeds of all."""
    from matplotlib import pyplot as plt

    across = min(COLUMNS, len(tasks))
    down = -(-len(tasks) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.2 * across, 2.6 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, (name, cells) in zip(axes.flat, tasks.items(), strict=False):
        for side, color in (("baseline", OTHERS), ("speed", OURS)):
            curves = [cell["curve"] for cell in cells if cell["side"] == side and cell["curve"]]
            if not curves:
                continue
            total = statistics.median(cell["env_steps"] for cell in cells if cell["side"] == side)
            steps = [(at + 0.5) * total / len(curves[0]) for at in range(len(curves[0]))]
            columns = list(zip(*curves, strict=True))
            axis.plot(steps, [statistics.median(column) for column in columns], color=color, label=side)
            ranges = [[min(column), max(column)] for column in columns]
            if len(curves) > 3:
                ranges = [statistics.quantiles(column, n=4)[::2] for column in columns]
            axis.fill_between(steps, *zip(*ranges, strict=True), color=color, alpha=0.2)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("env steps", fontsize=8)
        _plain(axis)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(target, dpi=150)
    plt.close(figure)
    print(f"written: {target}")


def _plain(axis: Any) -> None:
    """Thousands as k, no frame."""
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
