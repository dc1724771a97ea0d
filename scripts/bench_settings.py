#!/usr/bin/env python3
"""What the faster settings cost in learning, on Skull King: python3 scripts/bench_settings.py [--turns 3]

The tiers' own minibatch, epochs, learning rate and number of envs, all through the same engine, and `speed` with
stock's learning rate: trained for equal env steps, in turn, a seed a turn. Writes docs/results/faster-settings.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_machine
import captures

STEPS, EPISODES = 1_000_000, 2000
SETTINGS = {
    "stock": ("tier=baseline",),
    "balance": ("tier=balance",),
    "speed": ("tier=speed",),
    "speed, stock's learning rate": ("tier=speed", "algo.learning_rate=3e-4"),
}


def measure(settings: Sequence[str], seed: int) -> dict[str, float]:
    """One run in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = (f"total_timesteps={STEPS}", f"eval.episodes={EPISODES}", f"seed={seed}", "live=off")
        captures.fasttrain(folder, "+profile=speed", *settings, *steps, "hydra.run.dir=run")
        found = captures.summary_of(folder / "run")
    return {
        "steps_per_s": found["steps_per_s"],
        "win_rate": found["quality"]["win_rate"],
        "updates_per_step": found["updates"] / found["env_steps"],
    }


def table(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians, ratios turn by turn against the first, and win rates with what a seed makes of them."""
    first = next(iter(samples.values()))
    rows = {}
    for name, found in samples.items():
        rates = [sample["steps_per_s"] for sample in found]
        ratios = [sample["steps_per_s"] / base["steps_per_s"] for sample, base in zip(found, first, strict=True)]
        wins = [sample["win_rate"] for sample in found]
        rows[name] = {
            "steps_per_s": _spread(rates),
            "ratio": _spread(ratios),
            "win_rate": {"mean": statistics.mean(wins), "min": min(wins), "max": max(wins)},
            "updates_per_step": found[0]["updates_per_step"],
        }
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = max(1, parser.parse_args(arguments).turns)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for turn in range(turns):
        for name, settings in SETTINGS.items():
            sample = measure(settings, turn)
            samples[name].append(sample)
            rate, won = f"{sample['steps_per_s']:,.0f} steps/s", f"wins {100 * sample['win_rate']:.1f} %"
            print(f"  turn {turn + 1}/{turns}  {name:<30}{rate:>20}  {won}", flush=True)
    about = {"name": "faster-settings", **bench_machine.about()}
    command = f"python3 scripts/bench_settings.py --turns {turns}"
    settings = {"env_steps": STEPS, "episodes": EPISODES, "turns": turns}
    content = {**about, "command": command, **settings, "rows": table(samples)}
    captures.store(captures.RESULTS / "faster-settings.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
