#!/usr/bin/env python3
"""Does `+profile=speed` learn as well as stock? python3 scripts/learning.py [--tasks dqn] [--seeds 10] [--show]

--tasks: names of tasks, or `ppo` (the default: those without `dqn-`) or `dqn`. Each cell is one fresh `fasttrain`
process: a task, a side (baseline: stock classes in DummyVecEnv; speed), a seed. Same seeds, same env steps. A finished
cell is stored at once in docs/results/learning/TASK.json and is not run again while side and overrides stay the
same, so that the command can be stopped and given again. A candidate of your own:

    python3 scripts/learning.py --tasks cartpole --sides baseline,speed --name epochs2 --override algo.n_epochs=2

runs the candidate `epochs2` (the speed profile with that override) instead of `speed`. DQN's further settings:

    python3 scripts/learning.py --tasks dqn-lunarlander --sides baseline,speed,double-per

The gate: paired differences by seed (candidate − baseline) in the win rate of the final greedy policy, or in its mean
reward where the game has no winner; for DQN, whose greedy policy is another after every update (CartPole: 9 in one
moment, 500 in the next), in the mean of the last fifth of the training curve (`tail`). Margin: 3 percentage points, or
5 % of the baseline's mean reward. pass: the lower bound of the mean difference's 95 % interval is above −margin, over
at least 10 seeds; fail: the upper bound is below it; else "not enough seeds". A game that stock cannot play (stock DQN
ignores masks) has no baseline: the lower bound of the candidate's mean win rate must be above chance. Beside the gate
the same for the mean of the whole training curve, and how soon the mean of 100 episodes reached the task's threshold.
Seconds are those of the machine as it was: cells that did not get a core to themselves are counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.studies.statistics import (
    FAIL,
    OPEN,
    PASS,
    Comparison,
    compare,
    learning_curve,
    margin_of,
    median_time,
    t_interval,
    trail,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "learning"
MIN_PAIRS = 10  # a default that ships is asked for more seeds than a user's comparison
BASELINE = "baseline"
SIDES = {
    BASELINE: ("profile=baseline", "vec_env=dummy", "torch_threads=1"),
    "speed": ("profile=speed",),
    "balance": ("profile=balance",),
    "double-per": ("profile=speed", "algo.double_q=true", "algo.prioritized=true"),  # of DQN, beside the plain one
}


@dataclass(frozen=True)
class Task:
    """What both sides are asked to learn, and when it counts as learned."""

    overrides: tuple[str, ...]
    threshold: float  # of the mean over 100 training episodes: return, or win rate where there is one
    eval_episodes: int = 200
    chance: float | None = None  # there is no baseline: the win rate that must be beaten
    gated: str = "final"  # or "tail"


# Stock's 64 samples at 1e-4 once per vector step of 8 envs, with a target that moves every 10,000 steps, learn nothing
# in such a horizon: mean reward 9.2 in CartPole after 50,000 steps. So rate, target and buffer are set on both sides.
DQN = ("algo=dqn", "algo.learning_rate=5e-4", "algo.target_update_interval=500", "algo.buffer_size=50000")
TASKS = {
    "cartpole": Task(("env.id=CartPole-v1", "algo=ppo", "total_timesteps=100000"), 195.0),
    # gamma as in sb3-contrib's own test: the best action depends on the present state alone. 70 actions, 55 illegal.
    "invalid-actions": Task(
        (
            "env.entry_point=sb3_contrib.common.envs:InvalidActionEnvDiscrete",
            "env.kwargs.dim=70",
            "env.kwargs.n_invalid_actions=55",
            "algo=maskable_ppo",
            "algo.rollout_size=2048",
            "algo.gamma=0.1",
            "total_timesteps=20000",
        ),
        50.0,  # 100 episodes are half of the run: their mean trails behind
    ),
    "acrobot": Task(("env.id=Acrobot-v1", "algo=ppo", "total_timesteps=200000"), -100.0),
    # gamma, lambda and entropy of rl-zoo3: with SB3's own a lander learns to hover.
    "lunarlander": Task(
        (
            "env.id=LunarLander-v3",
            "algo=ppo",
            "algo.gamma=0.999",
            "algo.gae_lambda=0.98",
            "algo.ent_coef=0.01",
            "total_timesteps=300000",
        ),
        0.0,
    ),
    "skullking": Task(("total_timesteps=500000",), 0.4, eval_episodes=1000),
    # Too short for the large batches of `speed`, of which the plan warns.
    "skullking-short": Task(("total_timesteps=200000",), 0.4, eval_episodes=1000),
    "dqn-cartpole": Task(("env.id=CartPole-v1", *DQN, "total_timesteps=100000"), 195.0, gated="tail"),
    "dqn-acrobot": Task(("env.id=Acrobot-v1", *DQN, "total_timesteps=100000"), -100.0, gated="tail"),
    "dqn-lunarlander": Task(("env.id=LunarLander-v3", *DQN, "total_timesteps=200000"), 0.0, gated="tail"),
    # Four players: who plays at random wins a quarter of the games.
    "dqn-skullking": Task(
        (
            "algo=dqn",
            "env.kwargs.opponents=easy",
            "algo.learning_rate=5e-4",
            "algo.target_update_interval=2000",
            "algo.buffer_size=100000",
            "total_timesteps=200000",
        ),
        0.3,
        eval_episodes=1000,
        chance=0.25,
    ),
}
GROUPS = {
    "ppo": [name for name in TASKS if not name.startswith("dqn-")],
    "dqn": [name for name in TASKS if name.startswith("dqn-")],
}


def tasks_of(names: str) -> list[str]:
    """Tasks and groups of tasks, separated by commas. What is no group is left as it is."""
    return [task for name in names.split(",") for task in GROUPS.get(name, [name])]


# --- cells


def overrides_of(task: Task, side: str, more: Sequence[str] = ()) -> list[str]:
    """The command line of a cell, without its seed and folder."""
    known = SIDES.get(side, SIDES["speed"])
    return [*known, *task.overrides, "live=off", f"eval.episodes={task.eval_episodes}", *more]


def run_cell(task: Task, overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """One `fasttrain` process and what is kept of it.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "fasttrain", *overrides, f"seed={seed}", f"hydra.run.dir={folder / 'run'}"]
        before, begun = cpu_s(), time.perf_counter()
        with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder).returncode
            elapsed, used = time.perf_counter() - begun, cpu_s() - before
            if code:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)}: exit code {code}\n{log.read()[-3000:]}")
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
        with (folder / "run" / "episodes.csv").open(newline="", encoding="utf-8") as file:
            episodes = list(csv.DictReader(file))
    return {
        "seed": seed,
        **summarised(summary, episodes),
        "elapsed_s": round(elapsed, 1),
        "cpu_share": round(used / elapsed, 3),
    }


def cpu_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def summarised(summary: Mapping[str, Any], episodes: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """What is kept of a run: final quality, training curve, and when the mean of 100 episodes first reached what."""
    quality = summary["quality"]
    samples = "sampled" in quality  # DQN's policy has nothing to sample from
    column = "is_win" if quality["win_rate"] is not None and episodes and "is_win" in episodes[0] else "return"
    values = [float(episode[column]) for episode in episodes]
    steps = [int(episode["env_steps"]) for episode in episodes]
    return {
        "env_steps": summary["env_steps"],
        "updates": summary["updates"],
        "wall_s": summary["wall_s"],
        "startup_s": summary["startup_s"],
        "steps_per_s": summary["steps_per_s"],
        "final": {key: quality.get(key) for key in ("mean_reward", "win_rate", "score_diff", "episodes", "ci95")},
        **({"sampled": {key: quality["sampled"][key] for key in ("mean_reward", "win_rate")}} if samples else {}),
        "curve": [round(value, 4) for value in learning_curve(steps, values, summary["env_steps"])],
        "curve_of": column,
        "trail": [[steps[at], float(episodes[at]["wall_s"]), round(best, 4)] for at, best in trail(values)],
    }


def load(path: Path) -> list[dict[str, Any]]:
    """The stored cells of a task."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []


def add(path: Path, task: str, cell: dict[str, Any]) -> None:
    """Store one more cell; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [*load(path), cell]
    partial = path.with_suffix(f".{os.getpid()}.partial")
    lines = ",\n".join("  " + json.dumps(each) for each in cells)
    partial.write_text(f'{{"task": {json.dumps(task)}, "cells": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(partial, path)


def chosen(cells: Iterable[Mapping[str, Any]], side: str, overrides: Sequence[str]) -> dict[int, Mapping[str, Any]]:
    """Finished cells of one side with just these overrides, by seed."""
    return {cell["seed"]: cell for cell in cells if cell["side"] == side and cell["overrides"] == list(overrides)}


def source() -> str:
    """Which code was measured, as far as git knows."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# --- tables


def figure(cells: Mapping[int, Mapping[str, Any]], name: str) -> tuple[dict[int, float], bool]:
    """By seed the figure `final`, `sampled`, `curve` or `tail`, and whether it is a rate."""
    if name in ("curve", "tail"):
        curves = {seed: cell["curve"] for seed, cell in cells.items() if cell["curve"]}
        parts = {seed: curve[-(len(curve) // 5) :] if name == "tail" else curve for seed, curve in curves.items()}
        values = {seed: sum(part) / len(part) for seed, part in parts.items()}
        return values, all(cell["curve_of"] == "is_win" for cell in cells.values())
    is_rate = all(cell[name]["win_rate"] is not None for cell in cells.values())
    return {seed: cell[name]["win_rate" if is_rate else "mean_reward"] for seed, cell in cells.items()}, is_rate


def compared(
    baseline: Mapping[int, Mapping[str, Any]], candidate: Mapping[int, Mapping[str, Any]]
) -> dict[str, Comparison]:
    """The gate's figure and the others, over the seeds that both sides have."""
    found = {}
    sampled = all("sampled" in cell for cell in (*baseline.values(), *candidate.values()))
    for name in ("final", "sampled", "curve", "tail") if sampled else ("final", "curve", "tail"):
        theirs, is_rate = figure(baseline, name)
        ours, _ = figure(candidate, name)
        theirs = {seed: value for seed, value in theirs.items() if seed in ours}
        found[name] = compare(theirs, ours, margin_of(theirs, is_rate), MIN_PAIRS)
    return found


def times(cells: Mapping[int, Mapping[str, Any]], threshold: float) -> dict[str, Any]:
    """When half of the seeds had reached the threshold: [median, low, high] in env steps and seconds; None: never."""

    def finite(times: Sequence[float | None]) -> list[float | None]:
        median = median_time(times)
        return [None if math.isinf(value) else value for value in (median.value, median.low, median.high)]

    first = [next((point for point in cell["trail"] if point[2] >= threshold), None) for cell in cells.values()]
    return {
        "threshold": threshold,
        "reached": sum(point is not None for point in first),
        "seeds": len(cells),
        "env_steps": finite([point and point[0] for point in first]),
        "wall_s": finite([point and point[1] for point in first]),
        # A process that computes all the time has a share of 1 or more when it got its core.
        "disturbed": sum(cell["cpu_share"] < 0.9 for cell in cells.values()),
    }


def show(folder: Path, tasks: Sequence[str], sides: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """Print the tables of what is stored; returns them. `sides`: names with further overrides; None: all there is."""
    report: dict[str, Any] = {}
    for name in tasks:
        cells = load(folder / f"{name}.json")
        groups = {cell["side"]: cell["overrides"] for cell in cells}  # the last stored of each side
        if sides is not None:
            groups = {side: overrides_of(TASKS[name], side, more) for side, more in sides.items()}
        found = {side: chosen(cells, side, overrides) for side, overrides in groups.items()}
        found = {side: by_seed for side, by_seed in found.items() if by_seed}
        if not found:
            continue
        report[name] = {
            "times": {side: times(by_seed, TASKS[name].threshold) for side, by_seed in found.items()},
            "gate": {},
        }
        print(f"\n{name}: {', '.join(f'{side} {len(by_seed)} seeds' for side, by_seed in found.items())}")
        baseline = found.pop(BASELINE, {})
        for side, by_seed in found.items():
            if baseline.keys() & by_seed.keys():
                result = compared(baseline, by_seed)
                report[name]["gate"][side] = {figure: asdict(comparison) for figure, comparison in result.items()}
                _print_gate(side, result, TASKS[name].gated)
        for side, found_times in report[name]["times"].items():
            _print_times(side, found_times)
        chance = TASKS[name].chance
        if chance is not None:
            report[name]["beats_chance"] = {side: beats_chance(by_seed, chance) for side, by_seed in found.items()}
            for side, result in report[name]["beats_chance"].items():
                _print_chance(side, result)
    return report


def beats_chance(cells: Mapping[int, Mapping[str, Any]], chance: float) -> dict[str, Any]:
    """Whether the mean win rate of the final greedy policies, a value per seed, lies above `chance`."""
    rates = [cell["final"]["win_rate"] for cell in cells.values()]
    low, high = t_interval(np.array(rates))
    verdict = PASS if low > chance else FAIL if high < chance else OPEN
    return {"mean": sum(rates) / len(rates), "low": low, "high": high, "chance": chance, "verdict": verdict}


def _print_gate(side: str, result: Mapping[str, Comparison], gated: str) -> None:
    """A row per figure; the verdict of the one that counts in capitals."""
    titles = {
        "final": "final, greedy",
        "sampled": "final, sampled",
        "curve": "training curve",
        "tail": "its last fifth",
    }
    for name, c in result.items():
        interval = f"{c.difference:+.3f} [{c.low:+.3f}, {c.high:+.3f}]"
        verdict = c.verdict.upper() if name == gated else c.verdict
        print(
            f"  {side:<12}{titles[name]:<16}{c.baseline:>10.3f} → {c.candidate:>9.3f}   {interval:<30} "
            f"margin {c.margin:.3f}, {c.pairs} seeds: {verdict}"
        )


def _print_chance(side: str, result: Mapping[str, Any]) -> None:
    mean, low, high, chance = (f"{100 * result[key]:.1f}" for key in ("mean", "low", "high", "chance"))
    verdict = result["verdict"].upper()
    print(f"  {side:<12}final, greedy   wins {mean} % [{low}, {high}], by chance {chance} %: {verdict}")


def _print_times(side: str, found: Mapping[str, Any]) -> None:
    def text(values: Sequence[float | None], unit: str) -> str:
        median, low, high = (f"{value:,.0f}" if value is not None else "never" for value in values)
        return f"{median} [{low}, {high}] {unit}"

    disturbed = f"; {found['disturbed']} of them without a core of their own" if found["disturbed"] else ""
    print(
        f"  {side:<12}threshold {found['threshold']:g}: {found['reached']} of {found['seeds']} seeds, half of them by "
        f"{text(found['env_steps'], 'steps')}, {text(found['wall_s'], 's')}{disturbed}"
    )


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="ppo", help=f"of {','.join([*GROUPS, *TASKS])} (default ppo)")
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 … N-1 (default 10)")
    parser.add_argument("--sides", default="baseline,speed", help=f"of {','.join(SIDES)} (default baseline,speed)")
    parser.add_argument(
        "--override", action="append", default=[], help="for the candidate, with --name; may be repeated"
    )
    parser.add_argument("--name", help="the candidate's name; runs instead of speed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (default: docs/results/learning)")
    parser.add_argument("--show", action="store_true", help="print what is stored, run nothing")
    parser.add_argument("--json", type=Path, help="also write the tables' figures here")
    options = parser.parse_args(arguments)
    os.environ.setdefault("FASTTRAIN_ENGINE_SWITCH_AT", "0")  # compile first: what is measured is one engine
    tasks, sides = tasks_of(options.tasks), options.sides.split(",")
    unknown = [name for name in tasks if name not in TASKS] or [name for name in sides if name not in SIDES]
    if unknown:
        parser.error(f"no task or side {', '.join(unknown)}; tasks: {', '.join(TASKS)}; sides: {', '.join(SIDES)}")
    if bool(options.override) != bool(options.name) or options.name in SIDES:
        parser.error("--override and --name belong together, and the name must be a new one")
    wanted: dict[str, list[str]] = {side: [] for side in sides}
    if options.name:
        wanted = {(options.name if side == "speed" else side): [] for side in sides}
        wanted[options.name] = options.override
    if options.show:
        report = show(options.results, tasks)
    else:
        run(options.results, tasks, wanted, options.seeds)
        report = show(options.results, tasks, wanted)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def run(folder: Path, tasks: Sequence[str], sides: Mapping[str, Sequence[str]], seeds: int) -> None:
    """Every cell that is not stored yet; seed by seed, the sides in turn."""
    for name in tasks:
        path = folder / f"{name}.json"
        for seed in range(seeds):
            for side, more in sides.items():
                if side == BASELINE and TASKS[name].chance is not None:
                    continue
                overrides = overrides_of(TASKS[name], side, more)
                if seed in chosen(load(path), side, overrides):
                    continue
                cell = run_cell(TASKS[name], overrides, seed)
                about = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "source": source()}
                add(path, name, {"side": side, "overrides": overrides, **cell, **about})
                final = cell["final"]
                won = "" if final["win_rate"] is None else f", win rate {100 * final['win_rate']:.1f} %"
                done = f"{name} {side} seed {seed}: reward {final['mean_reward']:.3f}{won}"
                print(f"{done}; {cell['elapsed_s']:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
