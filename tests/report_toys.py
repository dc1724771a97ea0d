"""Folders of runs, sweeps and studies, written by hand: small, with numbers that can be checked."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from fasttrain_report.page import Page, Table

HOSTILE = '<script>alert("x")</script>$\\frac{$ & _\u202e\ud800 \x1b[31m'  # markup, TeX, direction, half a surrogate


def write_episodes(
    file: Path, count: int = 400, reasons: tuple[str, ...] = ("won", "lost"), wins: bool = True, lift: float = 0.0
) -> None:
    """Returns rise from 0 to 4 (plus `lift`), the second half is won, episodes of 10 steps, 100 of them a second."""
    with file.open("w", newline="", encoding="utf-8", errors="surrogatepass") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["episode", "env_steps", "env", "return", "length", "wall_s", "end_reason"] + ["is_win"] * wins)
        for n in range(1, count + 1):
            row = [n, 10 * n, n % 4, lift + 4 * n / count, 10, n / 100, reasons[n % len(reasons)]]
            writer.writerow(row + [int(2 * n > count)] * wins)


def quality(win_rate: float | None = 0.5, mean_reward: float = 2.0, reasons: Any = None) -> dict[str, Any]:
    """As `evaluate.summarise` gives it."""
    return {
        "episodes": 100, "mean_reward": mean_reward, "win_rate": win_rate, "draw_rate": None, "score_diff": None,
        "end_reason": {"won": 0.5, "lost": 0.5} if reasons is None else reasons, "mean_length": 10.0,
        "mean_turns": None,
        "ci95": {
            "mean_reward": [mean_reward - 0.25, mean_reward + 0.25],
            "win_rate": None if win_rate is None else [win_rate - 0.1, win_rate + 0.1],
            "score_diff": None,
        },
    }  # fmt: skip


def summary(speed: float = 1234.5, **more: Any) -> dict[str, Any]:
    """summary.json of a run of 4,000 steps."""
    return {
        "schema": 1, "version": "0.1.0", "status": "done", "env_steps": 4000, "wall_s": 4.0, "steps_per_s": speed,
        "updates": 40, "update_ratio": 0.01, "startup_s": 2.0, "quality": quality(), "seed": 7,
        "overrides": ["+profile=speed", "total_timesteps=4000"],
        "utilization": {"cpu": 0.75, "gpu": None, "memory_bytes": 500_000_000},
        "limits": {"env_only_steps_per_s": 5000.0, "policy_only_steps_per_s": None, "update_only_steps_per_s": 2500.0},
    } | more  # fmt: skip


def perf(windows: int = 4) -> dict[str, Any]:
    """perf.json: env_step 0.2 s, train 0.4 s, other 0.2 s of each 1,000 steps; windows of 1 s."""
    phases = {"env_step_ms": 200.0, "train_ms": 400.0, "other_ms": 200.0}
    total = {"steps_per_s": 1250.0, "env_steps": 4000, "updates": 40, "update_ratio": 0.01, "wall_s": 3.2, **phases}
    rows = [
        {"env_steps": 1000 * (n + 1), "wall_s": 0.8 * (n + 1), "steps_per_s": 1250.0, "updates": 10 * (n + 1), **phases,
         "cpu": 0.5 + n / 10, "gpu": None, "memory_bytes": 400e6}
        for n in range(windows)
    ]  # fmt: skip
    return {"total": total, "lines": [], "windows": rows}


PLAN = {
    "flags": [
        {"flag": "vec_env", "requested": "auto", "effective": "native", "source": "profile speed", "class": "exact",
         "reason": "the game has a native batch"},
        {"flag": "num_workers", "requested": "auto", "effective": "not applicable", "source": "default",
         "class": "exact", "reason": ""},
    ],
    "config": {"env": {"id": "Toy-v0"}, "algo": {"name": "ppo"}, "seed": 7, "device": "cpu"},
}  # fmt: skip


def write_run(folder: Path, **more: Any) -> Path:
    """A run that is done."""
    folder.mkdir(parents=True, exist_ok=True)
    write_episodes(folder / "episodes.csv")
    for name, content in (("summary", summary(**more)), ("perf", perf()), ("plan", PLAN)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "evaluations.csv").write_text(
        "env_steps,wall_s,episodes,mean_reward,mean_reward_low,mean_reward_high,win_rate,win_rate_low,win_rate_high,"
        "score_diff\n2000,2.0,100,1.0,0.75,1.25,0.25,0.15,0.35,\n"
    )
    return folder


def write_sweep(folder: Path, swept: dict[str, list[Any]], broken: int | None = None) -> Path:
    """All combinations of two keys or one; cell n makes 1,000 (n + 1) steps/s and wins 0.9 − n / 10."""
    keys = list(swept)
    pairs = [(a, b) for a in swept[keys[0]] for b in (swept[keys[1]] if len(keys) > 1 else [None])]
    cells = []
    for n, values in enumerate(pairs):
        overrides = ["+profile=speed", *(f"{k}={v}" for k, v in zip(keys, values, strict=False))]
        failed = n == broken
        cells.append({
            "cell": n, "overrides": overrides, "exit_code": int(failed), "status": "failed" if failed else "done",
            "steps_per_s": None if failed else 1000.0 * (n + 1), "speed_up": None if failed else n + 1.0,
            "error": "the board fell" if failed else "", "folder": str(folder / str(n)), "update_ratio": 0.01,
            "wall_s": 4.0, "startup_s": 2.0,
            "summary": {} if failed else summary(1000.0 * (n + 1), quality=quality(0.9 - n / 10)),
        })  # fmt: skip
        (folder / str(n)).mkdir(parents=True)
    stored = {"schema": 1, "swept": keys, "speed_up_against": "cell 0", "cells": cells}
    (folder / "sweep.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder


def spread(value: float, half: float) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def write_comparison(folder: Path, name: str = "fast") -> Path:
    """`base` against `name`, two seeds: 2.5 times as fast, 2 points worse, the margin is 3; its threshold is reached
    by the first only."""
    rows, cells = [], []
    for place, label in enumerate(("base", name)):
        for seed in (1, 2):
            cell = folder / "cells" / f"{place}_{seed}"
            cell.mkdir(parents=True)
            write_episodes(cell / "episodes.csv", lift=float(seed))
            text = json.dumps(summary(1000.0 + 1500 * place, quality=quality(0.5 + seed / 10)))
            (cell / "summary.json").write_text(text, encoding="utf-8")
            cells.append({"label": label, "seed": seed, "status": "done", "exit_code": 0, "error": "", "seconds": 5.0,
                          "folder": f"cells/{place}_{seed}", "overrides": []})  # fmt: skip
        rows.append({
            "name": label, "seeds": [1, 2], "steps_per_s": spread(1000.0 + 1500 * place, 50.0),
            "speed_up": spread(2.5, 0.125) if place else None, "mean_reward": spread(2.0, 0.5),
            "win_rate": spread(0.65 - 0.02 * place, 0.05), "score_diff": None, "draw_rate": 0.125, "mean_turns": None,
            "end_reason": {"won": 0.75, "lost": 0.25}, "reward_per_hour": spread(1800.0, 10.0),
            "time_to_threshold_s": {"value": None, "low": None, "high": None} if place else spread(1.5, 0.25),
            "difference": spread(-0.02, 0.005) if place else None, "verdict": "pass" if place else None,
            "faster": True if place else None, "elo": None,
        })  # fmt: skip
    gate = {"metric": "win_rate", "margin": 0.03, "threshold": 0.5, "min_speed_up": 1.1, "min_pairs": 5}
    candidates = [{"name": "base", "overrides": []}, {"name": name, "overrides": []}]
    stored = {"schema": 1, "command": "compare", "arguments": [f"candidates=[base,{name}]"], "gate": gate,
              "candidates": candidates, "rows": rows, "cells": cells}  # fmt: skip
    (folder / "study.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder


def charts_of(page: Page) -> dict[str, Any]:
    return {chart.name: chart for section in page.sections for chart in section.charts}


def texts(table: Table) -> list[list[str]]:
    return [[f"{cell.text} {cell.note}".strip() for cell in row] for row in table.cells]
