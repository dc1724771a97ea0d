#!/usr/bin/env python3
"""Speed, ours and theirs in turn: python3 scripts/benchmark.py WORK [--repeats 5] [--json FILE]

WORK is one of the works below, `all`, or `show` (the table of what was measured last, from scripts/results/).
Every measurement is a fresh process; ours and each opponent take turns (A B C, A B C, …), so that a machine that slows
down slows all of them; the ratio is taken turn by turn and its median reported. Work that is not equal gets no ratio.

  skullking-step    native Skull King, random legal actions, observations and masks written, against the single-env
                    class in a plain loop and in SB3's DummyVecEnv
  skullking-train   `fasttrain +profile=speed` against stock sb3-contrib MaskablePPO on the single-env class, at
                    the same hyperparameters, envs, steps and updates; DummyVecEnv, and with --peers
                    SubprocVecEnv too (64 processes of 350 MB; several times slower than DummyVecEnv here)
  vecenv            all works vecenv-*: SharedMemoryVecEnv against SB3's vector envs and Gymnasium's AsyncVectorEnv:
                    collecting with masks from 64 envs of 100 µs, stepping alone at 8, 64 and 256 envs, and what
                    vec_env=auto takes for CartPole (scripts/bench_vecenv.py)
  groups            all works groups-*: collecting a rollout pipelined and first-ready against in step
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench_vecenv

RESULTS = Path(__file__).resolve().parent / "results"
SKULLKING = "fasttrain/SkullKing-v0"
# One set of hyperparameters for ours and stock: the speed profile's, on a number of envs that stock can hold too.
TRAIN = {"num_envs": 64, "rollout_size": 16_384, "batch_size": 1024, "n_epochs": 4, "rollouts": 4}


# --- measurements: each runs in its own process and returns {rate, env_steps, updates, samples_per_update, …}


def native_step() -> dict[str, Any]:
    """256 native games, actions drawn by a compiled helper outside the timed calls."""
    import numpy as np

    from fasttrain.envs.skullking.game import SkullKingGame
    from fasttrain.jit import njit
    from fasttrain.vec.native import NativeVecEnv

    @njit
    def draw(masks: Any, noise: Any, actions: Any) -> None:
        for i in range(len(masks)):
            left = int(noise[i] * masks[i].sum())
            for action in range(masks.shape[1]):
                if masks[i, action]:
                    if left == 0:
                        actions[i] = action
                        break
                    left -= 1

    num_envs, rng = 256, np.random.default_rng(0)
    env = NativeVecEnv(SkullKingGame(num_envs))
    env.seed(0)
    env.reset()
    actions = np.zeros(num_envs, np.int64)

    def run(steps: int) -> float:
        spent = 0.0
        for _ in range(steps):
            draw(env.slots.action_masks, rng.random(num_envs), actions)
            begun = time.perf_counter()
            env.step_slots(actions)
            spent += time.perf_counter() - begun
        return spent

    run(200)
    steps = 8000
    seconds = run(steps)
    return {"rate": steps * num_envs / seconds, **_no_training()}


def single_step(vectorised: bool) -> dict[str, Any]:
    """The single-env class, 8 of them, in a plain loop or in DummyVecEnv."""
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.vec_env import DummyVecEnv

    import fasttrain.envs  # noqa: F401 - registers the game

    rng = np.random.default_rng(0)
    num_envs, steps = 8, 2000
    envs: list[Any] = []
    if vectorised:
        venv: Any = DummyVecEnv([lambda: gym.make(SKULLKING) for _ in range(num_envs)])
        venv.seed(0)
        venv.reset()
    else:
        envs = [gym.make(SKULLKING) for _ in range(num_envs)]
        for seed, env in enumerate(envs):
            env.reset(seed=seed)
    spent = 0.0
    for step in range(steps + 100):
        masks = venv.env_method("action_masks") if vectorised else [e.unwrapped.action_masks() for e in envs]
        actions = [int(rng.choice(np.flatnonzero(mask))) for mask in masks]
        begun = time.perf_counter()
        if vectorised:
            venv.step(np.array(actions))
        else:
            for env, action in zip(envs, actions, strict=True):
                *_, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        if step >= 100:
            spent += time.perf_counter() - begun
    return {"rate": steps * num_envs / spent, **_no_training()}


def _no_training() -> dict[str, Any]:
    return {"env_steps": "rate", "updates": 0, "samples_per_update": 0}


def fasttrain_run(*overrides: str) -> dict[str, Any]:
    """A whole `fasttrain` run; its own summary says what it did."""
    from fasttrain.cli import main

    total = TRAIN["rollout_size"] * TRAIN["rollouts"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *overrides,
            f"num_envs={TRAIN['num_envs']}",
            f"batch_size={TRAIN['batch_size']}",
            f"algo.rollout_size={TRAIN['rollout_size']}",
            f"algo.n_epochs={TRAIN['n_epochs']}",
            f"total_timesteps={total}",
            "eval.episodes=100",
            f"hydra.run.dir={folder}",
        ]
        if main(arguments) != 0:
            raise SystemExit(1)
        summary = json.loads((Path(folder) / "summary.json").read_text())
        returns = [line.split(",")[3] for line in (Path(folder) / "episodes.csv").read_text().splitlines()[1:]]
    return {
        "rate": summary["steps_per_s"],
        "env_steps": summary["env_steps"],
        "updates": summary["updates"],
        "samples_per_update": TRAIN["batch_size"],
        "quality": statistics.fmean(map(float, returns[-500:])),
        "covered_share": summary["perf"]["covered_share"],
    }


def stock_run(subproc: bool) -> dict[str, Any]:
    """What an SB3 user writes: MaskablePPO on the single-env class."""
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    import fasttrain.envs  # noqa: F401 - registers the game

    updates = 0

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1

    env = make_vec_env(
        "fasttrain.envs:" + SKULLKING,
        n_envs=TRAIN["num_envs"],
        seed=0,
        vec_env_cls=SubprocVecEnv if subproc else DummyVecEnv,
    )
    n_steps = TRAIN["rollout_size"] // TRAIN["num_envs"]
    model = MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=n_steps,
        batch_size=TRAIN["batch_size"],
        n_epochs=TRAIN["n_epochs"],
        seed=0,
        device="cpu",
    )
    model.policy.optimizer.register_step_post_hook(count)
    begun = time.perf_counter()
    model.learn(TRAIN["rollout_size"] * TRAIN["rollouts"])
    seconds = time.perf_counter() - begun
    env.close()
    returns = [episode["r"] for episode in model.ep_info_buffer or []]
    return {
        "rate": model.num_timesteps / seconds,
        "env_steps": model.num_timesteps,
        "updates": updates,
        "samples_per_update": TRAIN["batch_size"],
        "quality": statistics.fmean(returns),
    }


PEERS_ONLY = {"sb3-contrib, SubprocVecEnv"}
Measurement = Callable[[], dict[str, Any]]
WORKS: dict[str, dict[str, Measurement]] = {
    "skullking-step": {
        "fasttrain": native_step,
        "single env, plain loop": lambda: single_step(False),
        "single env, DummyVecEnv": lambda: single_step(True),
    },
    "skullking-train": {
        "fasttrain": lambda: fasttrain_run("+profile=speed"),
        "sb3-contrib, DummyVecEnv": lambda: stock_run(False),
        "sb3-contrib, SubprocVecEnv": lambda: stock_run(True),
    },
    **bench_vecenv.WORKS,
}


def works_of(name: str) -> list[str]:
    """`all`, one work, or the works that begin with `name-`."""
    if name == "all":
        return list(WORKS)
    return [name] if name in WORKS else [work for work in WORKS if work.startswith(f"{name}-")]


# --- the harness


def measure(work: str, contestant: str) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, work, "--one", contestant]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{work}, {contestant}: failed\n{done.stderr[-2000:]}{done.stdout[-1000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_work(work: str, repeats: int, peers: bool) -> dict[str, Any]:
    """All contestants in turn, `repeats` times; refuses a ratio of unequal work."""
    ours, *theirs = [name for name in WORKS[work] if peers or name not in PEERS_ONLY]
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in (ours, *theirs)}
    measure(work, ours)  # compiles and fills the disk cache; not counted
    for turn in range(repeats):
        for name in samples:
            samples[name].append(measure(work, name))
            print(f"  turn {turn + 1}/{repeats}  {name:<28} {samples[name][-1]['rate']:>14,.0f} steps/s", flush=True)
    equal = {key: samples[ours][0][key] for key in ("env_steps", "updates", "samples_per_update")}
    for name in theirs:
        for sample in samples[name]:
            if {key: sample[key] for key in equal} != equal:
                raise SystemExit(f"{work}: {name} did other work than ours ({sample} against {equal}): no ratio")
    rates = {name: [sample["rate"] for sample in found] for name, found in samples.items()}
    best = max(theirs, key=lambda name: statistics.median(rates[name]))
    ratios = {name: spread([a / b for a, b in zip(rates[ours], rates[name], strict=True)]) for name in theirs}
    quality = {name: [s["quality"] for s in found] for name, found in samples.items() if "quality" in found[0]}
    noted = {
        key: spread([sample[key] for sample in samples[ours]])
        for key in ("covered_share", "share_of_ideal")
        if key in samples[ours][0]
    }
    return {
        "work": work,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {name: version(name) for name in ("torch", "numpy", "numba", "stable-baselines3", "sb3-contrib")},
        "command": f"python3 scripts/benchmark.py {work} --repeats {repeats}{' --peers' if peers else ''}",
        "unit": "env steps per second",
        "ours": spread(rates[ours]),
        "theirs": {name: spread(rates[name]) for name in theirs},
        "best_of_theirs": best,
        "ratio": ratios[best],
        "ratios": ratios,
        "equal_work": equal,
        "quality": {name: spread(values) for name, values in quality.items()},
        **noted,
        **({"chosen": samples[ours][0]["chosen"]} if "chosen" in samples[ours][0] else {}),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show() -> None:
    """The table of all stored results."""
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        ratio = result["ratio"]
        print(f"\n{result['work']}  ({result['machine']}; {result['command']})")
        print(f"  {'fasttrain':<30}{result['ours']['median']:>14,.0f} steps/s")
        for name, theirs in result["theirs"].items():
            print(f"  {name:<30}{theirs['median']:>14,.0f} steps/s{result['ratios'][name]['median']:>9.2f}×")
        print(f"  against {result['best_of_theirs']}: {ratio['median']:.2f}× [{ratio['min']:.2f}, {ratio['max']:.2f}]")
        if "covered_share" in result:
            print(f"  [PERF] phases cover {100 * result['covered_share']['min']:.2f} % of the wall time or more")
        if "share_of_ideal" in result:
            low, median, high = (100 * result["share_of_ideal"][key] for key in ("min", "median", "max"))
            print(f"  {median:.0f} % of cores ÷ env time [{low:.0f}, {high:.0f}]")
        if "chosen" in result:
            print(f"  vec_env=auto took {result['chosen']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", help="a work, the beginning of several (vecenv), all, or show")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result (default: scripts/results/WORK.json)")
    parser.add_argument("--peers", action="store_true", help="also the opponents that are slow or heavy to run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work != "show" and not works_of(arguments.work):
        parser.error(f"no work {arguments.work!r}; choose from {', '.join(WORKS)}, all, show")
    if arguments.one:
        print(json.dumps(WORKS[arguments.work][arguments.one]()))
        return 0
    if arguments.work == "show":
        show()
        return 0
    for work in works_of(arguments.work):
        print(work, flush=True)
        result = run_work(work, max(1, arguments.repeats), arguments.peers)
        target = arguments.json or RESULTS / f"{work}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
