#!/usr/bin/env python3
"""Do recurrent policies learn what needs memory? python3 scripts/learning_recurrent.py TASK … [--seeds 10] [--show]

Tasks: T-mazes of length 10, 50 and 200 and CartPole and Pendulum without velocities (scripts/memory_envs.py says what
is seen and paid there), MiniGrid-MemoryS7 (needs the extra minigrid), and Skull King without a record of the cards that
were played. Arms of a task, with the same seeds, env steps and hyperparameters:

  fasttrain   `+profile=speed algo=recurrent_ppo`, an LSTM of 64 units, by compiled kernels
  stock       sb3_contrib.RecurrentPPO in DummyVecEnv; CartPole, T-mazes of length 10 and 50
  no memory   fasttrain's PPO, a feed-forward layer of 64 units in the LSTM's place
  GRU         `algo.cell=gru`, in the T-maze of length 10 and CartPole

In the T-mazes of length 50 and 200 ours and stock's have one LSTM for policy and value, which is initialised so that it
keeps things for about as long (memory_envs.LastingPolicy); by torch's own initialization, with one LSTM or two, nothing
was learned of length 50 in 500,000 steps of a first trial. Hyperparameters were looked for with fasttrain's runs, on
the seeds 0 to 2, and are stock's too.

Skull King's arms have equal wall time, not equal steps: MaskablePPO that is shown all cards that were played, the same
without that, and MaskableRecurrentPPO without that.

Each cell, an arm and a seed, is one fresh `fasttrain` process on one thread that at its end plays episodes with seeds
of their own, greedily. It is stored at once in docs/results/learning-recurrent-TASK.json and not run again while its
overrides stay the same, so that the command can be stopped and given again; all arms have a seed before any has the
next. `gate` is the verdict of `fasttrain compare` on fasttrain against stock: paired differences by seed in the share
of goals reached (margin 3 points) or in the mean return (5 % of stock's).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import bench_machine
import learning
from fasttrain.saving.files import write_whole
from fasttrain.studies.statistics import Comparison, compare, margin_of, t_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
COMMON = ("live=off", "report=false", "checkup=off", "torch_threads=1")
POINTS = 10  # of a stored training curve
FASTTRAIN, STOCK, NO_MEMORY, GRU = "fasttrain", "stock", "no memory", "GRU"
LSTM = ("algo=recurrent_ppo", "algo.lstm_hidden_size=64")
SHARED = ("algo.shared_lstm=true", "algo.enable_critic_lstm=false")
ARMS = {
    FASTTRAIN: ("+profile=speed", *LSTM),
    STOCK: ("profile=baseline", *LSTM),
    NO_MEMORY: ("+profile=speed", "algo=ppo", "algo.net_arch=[64,64,64]"),
    GRU: ("+profile=speed", *LSTM, "algo.cell=gru"),
}
GATED, UNGATED = (FASTTRAIN, STOCK, NO_MEMORY), (FASTTRAIN, NO_MEMORY)
EVERY = (*GATED, GRU)


@dataclass(frozen=True)
class Task:
    """What all arms are asked to learn. `measure`: of the final greedy policy."""

    overrides: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    seeds: int
    episodes: int
    measure: str = "win_rate"


def single_envs(
    entry: str, arms: Iterable[str], seeds: int, episodes: int, *more: str, measure: str = "win_rate"
) -> Task:
    """A task whose envs are stepped one by one in the trainer's process, by every arm."""
    chosen = {name: ARMS[name] for name in arms}
    return Task((entry, "vec_env=dummy", *more), chosen, seeds, episodes, measure)


def t_maze(length: int, arms: Iterable[str], seeds: int, *more: str) -> Task:
    """Its episodes fit into a rollout, so that gradients reach the entrance."""
    return single_envs(
        "env.entry_point=memory_envs:t_maze", arms, seeds, 500, f"env.kwargs.length={length}", "algo.gamma=0.99",
        "algo.n_epochs=10", "algo.target_kl=0.03", *more,
    )  # fmt: skip


def lasting(task: Task, steps: int) -> Task:
    """The same with one LSTM for both nets, in stock too, that keeps things for so long from the beginning."""
    policy = ("algo.policy=memory_envs:LastingPolicy", f"algo.policy_kwargs.steps={steps}", *SHARED)
    arms = {name: (*arm, *policy) if LSTM[0] in arm else arm for name, arm in task.arms.items()}
    return replace(task, arms=arms)


SHOWN_ALL, SHOWN_LITTLE, REMEMBERED = "all cards shown, no memory", "no memory", "memory"
TASKS = {
    "tmaze-10": t_maze(
        10, EVERY, 10, "num_envs=32", "algo.rollout_size=2048", "batch_size=256", "algo.learning_rate=linear_0.001",
        "algo.ent_coef=0.02", "total_timesteps=150000",
    ),
    "cartpole": single_envs(
        "env.entry_point=memory_envs:cartpole", EVERY, 10, 200, "num_envs=16", "algo.rollout_size=2048",
        "batch_size=512", "algo.n_epochs=10", "algo.gamma=0.98", "algo.learning_rate=linear_0.002",
        "env.normalize=[reward]", "total_timesteps=150000", measure="mean_reward",
    ),
    "tmaze-50": lasting(
        t_maze(
            50, GATED, 10, "num_envs=32", "algo.rollout_size=8192", "batch_size=512",
            "algo.learning_rate=linear_0.001", "algo.ent_coef=0.05", "total_timesteps=500000",
        ),
        50,
    ),
    "pendulum": single_envs(
        "env.entry_point=memory_envs:pendulum", UNGATED, 10, 200, "num_envs=16", "algo.rollout_size=3200",
        "batch_size=640", "algo.n_epochs=10", "algo.gamma=0.95", "algo.learning_rate=linear_0.001",
        "total_timesteps=300000", measure="mean_reward",
    ),
    "skullking": Task(
        (
            "+profile=speed", "num_envs=256", "algo.rollout_size=16384", "batch_size=1024", "algo.n_epochs=4",
            "algo.learning_rate=1e-3", "total_timesteps=1e9", "stop.max_minutes=2",
        ),
        {
            SHOWN_ALL: ("algo=maskable_ppo",),
            SHOWN_LITTLE: ("algo=maskable_ppo", "env.kwargs.card_memory=false"),
            REMEMBERED: (
                "algo=maskable_recurrent_ppo", "algo.lstm_hidden_size=64", *SHARED, "env.kwargs.card_memory=false",
            ),
        },
        3,
        2000,
    ),
    "tmaze-200": lasting(
        t_maze(
            200, UNGATED, 5, "num_envs=32", "algo.rollout_size=16384", "batch_size=1024",
            "algo.learning_rate=linear_0.001", "algo.ent_coef=0.05", "total_timesteps=1000000",
        ),
        200,
    ),
    "memory-s7": single_envs(
        "env.id=minigrid:MiniGrid-MemoryS7-v0", UNGATED, 5, 200,
        "env.wrappers=[minigrid.wrappers:ImgObsWrapper,gymnasium.wrappers:FlattenObservation,"
        '{wrapper: "gymnasium.wrappers:DtypeObservation", dtype: "numpy:float32"}]',
        "num_envs=16", "algo.rollout_size=2048", "batch_size=256", "algo.n_epochs=5", "algo.ent_coef=0.01",
        "algo.learning_rate=linear_0.001", "total_timesteps=200000", measure="mean_reward",
    ),
}  # fmt: skip


# --- cells


def overrides_of(task: Task, arm: str) -> list[str]:
    """The command line of a cell, without its seed and folder."""
    return [*task.arms[arm], *task.overrides, *COMMON, f"eval.episodes={task.episodes}"]


def path_of(name: str) -> Path:
    """Where a task's cells are stored."""
    return RESULTS / f"learning-recurrent-{name}.json"


def of(cells: Iterable[Mapping[str, Any]], arm: str, overrides: Sequence[str]) -> dict[int, Mapping[str, Any]]:
    """Finished cells of one arm with just these overrides, by seed."""
    wanted = sorted(overrides)  # no key stands there twice
    return {cell["seed"]: cell for cell in cells if cell["arm"] == arm and sorted(cell["overrides"]) == wanted}


def found_of(name: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Arm → seed → cell, of a task's stored cells that are as it is described today."""
    return {arm: of(cells, arm, overrides_of(TASKS[name], arm)) for arm in TASKS[name].arms}


def tenths(curve: Sequence[float]) -> list[float]:
    """A curve of some multiple of ten points, in ten."""
    return [round(float(part.mean()), 4) for part in np.array_split(np.asarray(curve), POINTS)] if len(curve) else []


def kept(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored of a run: the whole of it but for the trail; the curve in tenths."""
    return {**{key: value for key, value in cell.items() if key != "trail"}, "curve": tenths(cell["curve"])}


def run(names: Sequence[str], seeds: int | None, arms: Sequence[str] | None = None) -> None:
    """Every cell that is not stored yet, seed by seed."""
    for name in names:
        task = TASKS[name]
        for seed in range(task.seeds if seeds is None else seeds):
            for arm in task.arms:
                path, overrides = path_of(name), overrides_of(task, arm)
                stored = learning.load(path)
                if (arms is not None and arm not in arms) or seed in of(stored, arm, overrides):
                    continue
                cell = kept(learning.run_cell(learning.Task((), 0.0), overrides, seed))
                store(path, name, [*stored, {"arm": arm, "overrides": overrides, **cell, "source": learning.source()}])
                final = cell["final"][task.measure]
                print(f"{name}, {arm}, seed {seed}: {final:.3f}; {cell['elapsed_s']:.0f} s", flush=True)


def store(path: Path, name: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """All cells, a line each, the gate's verdict, and where and when the last was measured."""
    verdict = gate(name, cells)
    head = {
        "work": path.stem,
        **bench_machine.about(),
        "command": f"python3 scripts/learning_recurrent.py {name}",
        "measure": TASKS[name].measure,
        "gate": None if verdict is None else asdict(verdict),
    }
    lines = ",\n".join("  " + json.dumps(cell) for cell in cells)
    # Bounds of a single seed are infinite, which JSON has no word for.
    text = json.dumps(head).replace("-Infinity", "null").replace("Infinity", "null")
    write_whole(path, f'{text[:-1]}, "cells": [\n{lines}\n]}}\n')


# --- figures


def finals(cells: Mapping[int, Mapping[str, Any]], measure: str) -> dict[int, float]:
    """By seed what the final greedy policy reached."""
    return {seed: float(cell["final"][measure]) for seed, cell in cells.items()}


def curves(cells: Mapping[int, Mapping[str, Any]], measure: str) -> dict[int, float]:
    """By seed the mean of the training curve, which the luck of one final policy moves little."""
    return {seed: float(np.mean(cell["curve"])) for seed, cell in cells.items() if cell["curve"]}


def gate(
    name: str,
    cells: Sequence[Mapping[str, Any]],
    figure: Callable[[Mapping[int, Mapping[str, Any]], str], dict[int, float]] = finals,
) -> Comparison | None:
    """Fasttrain against stock, as `fasttrain compare` judges; None where stock has no arm, or no seed yet."""
    found, measure = found_of(name, cells), TASKS[name].measure
    theirs, ours = (figure(found.get(arm, {}), measure) for arm in (STOCK, FASTTRAIN))
    if not theirs.keys() & ours.keys():
        return None
    return compare(theirs, ours, margin_of(theirs, measure == "win_rate"))


def figures(cells: Mapping[int, Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """Of an arm what a table shows: the mean over seeds with its interval, lowest and highest, curve and seconds."""
    values = np.array(list(finals(cells, measure).values()))
    parts = [cell["curve"] for cell in cells.values() if cell["curve"]]
    scores = [cell["final"].get("score_diff") for cell in cells.values()]
    return {
        "seeds": len(cells),
        "mean": float(values.mean()),
        "interval": t_interval(values),
        "range": (float(values.min()), float(values.max())),
        "score_diff": None if None in scores else float(np.mean(scores)),
        "env_steps": float(np.median([cell["env_steps"] for cell in cells.values()])),
        "wall_s": float(np.median([cell["wall_s"] for cell in cells.values()])),
        "cpu_s": float(np.median([cell["elapsed_s"] * cell["cpu_share"] for cell in cells.values()])),
        "curve": [float(part) for part in np.mean(parts, axis=0)] if parts else [],
    }


def show(names: Iterable[str]) -> None:
    """Print what is stored."""
    for name in names:
        cells = learning.load(path_of(name))
        for arm, by_seed in found_of(name, cells).items():
            if by_seed:
                print(f"{name}, {arm}: {json.dumps(figures(by_seed, TASKS[name].measure))}")
        if verdict := gate(name, cells):
            print(f"{name}: {verdict.verdict.upper()}, {json.dumps(asdict(verdict))}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", metavar="TASK", help=f"of {', '.join(TASKS)}, or all")
    parser.add_argument("--seeds", type=int, help="seeds 0 … N-1 (default: the task's own number)")
    parser.add_argument("--arms", nargs="+", help="of the task's arms (default: all)")
    parser.add_argument("--show", action="store_true", help="print what is stored, run nothing")
    options = parser.parse_args(arguments)
    names = list(TASKS) if options.tasks == ["all"] else options.tasks
    if unknown := [name for name in names if name not in TASKS]:
        parser.error(f"no task {', '.join(unknown)}; tasks: {', '.join(TASKS)}, all")
    os.environ["FASTTRAIN_ENGINE_SWITCH_AT"] = "0"  # compile first: what is measured is one engine
    os.environ["OMP_NUM_THREADS"] = "1"
    places = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))  # where a cell finds memory_envs
    if not options.show:
        run(names, options.seeds, options.arms)
    show(names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
