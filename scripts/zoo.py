#!/usr/bin/env python3
"""Do settings reach the rewards that RL Baselines3 Zoo publishes? python3 scripts/zoo.py tuned|entries [--seeds 3]

tuned: conf/tuned of this repository, each as `fasttrain +profile=speed +tuned=NAME`; needs the extra minigrid for one.
entries: some of rl_zoo3, imported by `fasttrain zoo import` and run by the faster of the two commands that
it prints; needs rl_zoo3 or, as --hyperparams DIR, the folder of that name in its wheel.

Each cell is a fresh `fasttrain` process that plays 500 episodes with the final greedy policy. A finished cell is stored
at once in docs/results/zoo-tuned.json or zoo-entries.json and is not run again while its command stays the same. What
the zoo publishes is one run an entry: https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import bench_machine
import learning
from fasttrain.saving.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
COMMON = ("live=off", "report=false", "eval.episodes=500")


@dataclass(frozen=True)
class Published:
    """What the zoo's benchmark says of an env: mean reward, and by which of its algorithms."""

    env: str
    algo: str
    reward: float
    seeds: int = 1


# Of the zoo's algorithms that which is best; the zoo publishes nothing for DoorKey, whose best reward is about 0.965.
TUNED = {
    "cartpole": Published("CartPole-v1", "ppo", 500.0),
    "acrobot": Published("Acrobot-v1", "ppo", -73.506),
    "mountaincar": Published("MountainCar-v0", "dqn", -100.849, seeds=3),
    "mountaincar_continuous": Published("MountainCarContinuous-v0", "sac", 94.679),
    "pendulum": Published("Pendulum-v1", "sac", -156.995),
    "lunarlander": Published("LunarLander-v3", "ppo", 242.119),
    "doorkey": Published("MiniGrid-DoorKey-5x5-v0", "", 0.96),
}
ENTRIES = {
    f"{task.algo}-{task.env}": task
    for task in (
        Published("CartPole-v1", "ppo", 500.0, seeds=3),
        Published("LunarLander-v3", "ppo", 242.119, seeds=3),
        Published("Pendulum-v1", "sac", -156.995, seeds=3),
        Published("Acrobot-v1", "ppo", -73.506),
        Published("MountainCar-v0", "ppo", -110.423, seeds=3),
        Published("Pendulum-v1", "ppo", -172.225),
        Published("MountainCar-v0", "dqn", -100.849, seeds=3),
        Published("CartPole-v1", "qrdqn", 500.0),
        Published("CartPole-v1", "ars", 500.0),
        Published("CartPole-v1", "a2c", 500.0),
        Published("Pendulum-v1", "td3", -151.855),
    )
}


def imported(task: Published, hyperparams: Path, folder: Path) -> list[str]:
    """The overrides of the faster command that `fasttrain zoo import` prints."""
    file = hyperparams / f"{task.algo}.yml"
    command = [sys.executable, "-m", "fasttrain", "zoo", "import", str(file), "--env", task.env, "--algo", task.algo]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.endswith("    faster")), None)
    if line is None:
        raise SystemExit(f"{' '.join(command)}: {done.stderr or done.stdout}")
    words = line.split()[1:-1]
    return [str(folder / "conf") if word == "conf" else word for word in words]


def first_reached(cell: Mapping[str, Any], reward: float) -> float | None:
    """Seconds until the mean of 100 training episodes was as high as that."""
    return next((seconds for _, seconds, best in cell["trail"] if best >= reward), None)


def run(group: str, tasks: Mapping[str, Published], seeds: int | None, hyperparams: Path) -> None:
    """Every cell that is not stored yet."""
    path = RESULTS / f"zoo-{group}.json"
    for name, task in tasks.items():
        for seed in range(seeds or task.seeds):
            with tempfile.TemporaryDirectory() as folder:
                if group == "tuned":
                    overrides = ["+profile=speed", f"+tuned={name}"]
                else:
                    overrides = imported(task, hyperparams, Path(folder))
                plain = [word.replace(f"{folder}/", "") for word in overrides]
                if any(cell["seed"] == seed for cell in of(learning.load(path), name, plain)):
                    continue
                cell = learning.run_cell(learning.Task((), task.reward), [*overrides, *COMMON], seed)
            reached_s = first_reached(cell, task.reward)
            del cell["trail"]
            done = {"task": name, "overrides": plain, **cell, "reached_s": reached_s, "source": learning.source()}
            store(path, group, [*learning.load(path), done])
            reward = cell["final"]["mean_reward"]
            print(f"{name} seed {seed}: {reward:.3f}, zoo {task.reward:g}; {cell['wall_s']:.0f} s", flush=True)


def store(path: Path, group: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """All cells, a line each, and where and when the last was measured."""
    head = {"work": f"zoo-{group}", **bench_machine.about(), "command": f"python3 scripts/zoo.py {group}"}
    lines = ",\n".join("  " + json.dumps(cell) for cell in cells)
    write_whole(path, f'{json.dumps(head)[:-1]}, "cells": [\n{lines}\n]}}\n')


def of(
    cells: Sequence[Mapping[str, Any]], task: str, overrides: Sequence[str] | None = None
) -> list[Mapping[str, Any]]:
    """The cells of a task, all or with just these overrides."""
    return [cell for cell in cells if cell["task"] == task and overrides in (None, cell["overrides"])]


def figures(task: Published, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a task's cells what a table shows. `reached`: seeds whose 95 % interval does not lie below the published."""
    finals = [cell["final"] for cell in cells]
    rewards = [final["mean_reward"] for final in finals]
    seconds = [cell["reached_s"] for cell in cells]
    return {
        "seeds": len(cells),
        "env_steps": int(np.median([cell["env_steps"] for cell in cells])),
        "rewards": [min(rewards), float(np.median(rewards)), max(rewards)],
        "reached": sum(final["ci95"]["mean_reward"][1] >= task.reward for final in finals),
        "steps_per_s": float(np.median([cell["steps_per_s"] for cell in cells])),
        "wall_s": float(np.median([cell["wall_s"] for cell in cells])),
        "reached_s": None if None in seconds else float(np.median(seconds)),
    }


def show(group: str, tasks: Mapping[str, Published]) -> None:
    """Print what is stored."""
    cells = learning.load(RESULTS / f"zoo-{group}.json")
    for name, task in tasks.items():
        if found := of(cells, name):
            print(f"{name}: zoo {task.reward:g}", json.dumps(figures(task, found)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=("tuned", "entries"))
    parser.add_argument("--seeds", type=int, help="seeds 0 … N-1 (default: 3 of tuned, 1 or 3 of entries)")
    parser.add_argument("--only", nargs="*", help="names of tasks")
    parser.add_argument("--hyperparams", type=Path, help="folder with rl_zoo3's ppo.yml and so on")
    parser.add_argument("--show", action="store_true", help="print what is stored, run nothing")
    options = parser.parse_args(arguments)
    os.environ.setdefault("FASTTRAIN_ENGINE_SWITCH_AT", "0")  # compile first: what is measured is one engine
    tasks = TUNED if options.group == "tuned" else ENTRIES
    if unknown := [name for name in options.only or () if name not in tasks]:
        parser.error(f"no task {', '.join(unknown)}; tasks: {', '.join(tasks)}")
    tasks = {name: task for name, task in tasks.items() if not options.only or name in options.only}
    if not options.show:
        hyperparams = options.hyperparams or Path(getattr(find_spec("rl_zoo3"), "origin", None) or ".").parent
        where = hyperparams if options.hyperparams else hyperparams / "hyperparams"
        run(options.group, tasks, options.seeds or (3 if options.group == "tuned" else None), where)
    show(options.group, tasks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
