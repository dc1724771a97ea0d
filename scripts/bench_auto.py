"""`benchmark.py auto`: what the profiles choose, against the better of stock's own choices and every explicit one.

A cell is an env, an algorithm and a machine, quiet or with a process burning each core. Stock chooses among DummyVecEnv
and SubprocVecEnv (start method fork: it is start-up that forkserver makes slow) and, where ours computes by torch too,
between one torch thread and torch's own number. All sides have the same envs, minibatches and updates, and are timed
from the first env step to the end of the last whole rollout and its update. Whoever was far behind in the first turn is
not asked again. Runs of ours whose plans came to the same are one side: what was measured of them differs by the
machine's noise alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import bench_machine
from bench_vecenv import Waiting, Working

SECONDS = 4.0  # of each measurement
NUM_ENVS = 8
HOPELESS = 0.7  # of the best of its kind in the first turn: not measured again
ENOUGH, AUTO_ENOUGH = 1.0, 0.9


class Computing(Working):
    """100 µs of CPU time a step."""


class Engine(Waiting):
    """Waits 2 ms a step."""

    def __init__(self) -> None:
        super().__init__(0.3)


class Pictures(gym.Env[Any, Any]):
    """84×84 images of four frames, as Atari's, that cost nothing."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.image = 0, self.np_random.integers(0, 255, (4, 84, 84), np.uint8)
        return self.image, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.image, float(action), self.steps >= 100, False, {}


class Parts(Working):
    """Two keys of a Dict and no cost."""

    def __init__(self) -> None:
        super().__init__(0.0)
        box = self.observation_space
        self.observation_space = gym.spaces.Dict({"board": box, "hand": gym.spaces.MultiBinary(16)})

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**kwargs)
        return self._parts(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = super().step(action)
        return (self._parts(observation), *rest)  # type: ignore[return-value]

    @staticmethod
    def _parts(board: Any) -> dict[str, Any]:
        return {"board": board, "hand": np.ones(16, np.int8)}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


@dataclass(frozen=True)
class Task:
    """An env and the net on it; `ppo` and `dqn` are (rollout steps, minibatch, epochs) and (updates a step, batch)."""

    env: Any
    ours: tuple[str, ...]
    net: int | None = 64  # two layers of so many units; None: the policy's own
    policy: str = "MlpPolicy"
    ppo: tuple[int, int, int] = (128, 256, 4)
    dqn: tuple[int, int] = (8, 64)
    buffer: int = 50_000
    threads_matter: bool = False  # torch computes, no kernels
    others: tuple[str, ...] = ()  # more explicit choices


def _entry(name: str) -> tuple[str, ...]:
    return ("env=gym", f"env.entry_point=bench_auto:{name}")


CARTPOLE = ("env=gym", "env.id=CartPole-v1")
COMPUTED = ("fused_update=on use_amp=off", "fused_update=off use_amp=off")
TASKS: dict[str, Task] = {
    "cartpole": Task(cartpole, CARTPOLE),
    "mlp-256": Task(cartpole, CARTPOLE, net=256, others=COMPUTED),
    "mlp-1024": Task(cartpole, CARTPOLE, net=1024, dqn=(1, 64), threads_matter=True, others=COMPUTED),
    "computes-100us": Task(Computing, _entry("Computing")),
    "waits-2ms": Task(Engine, _entry("Engine")),
    "dict": Task(Parts, _entry("Parts"), policy="MultiInputPolicy", threads_matter=True),
    "pictures": Task(
        Pictures,
        _entry("Pictures"),
        net=None,
        policy="CnnPolicy",
        ppo=(32, 64, 4),
        dqn=(1, 32),
        buffer=5_000,
        threads_matter=True,
    ),
}
if find_spec("envpool"):
    pong = ("env=gym", "env.id=Pong-v5", "env.backend=envpool")
    TASKS["pong"] = replace(TASKS["pictures"], env=None, ours=pong)


# --- the sides


def contestants(task: Task, algo: str) -> dict[str, list[str]]:
    """Group → names. `speed` is our `auto`; an explicit choice is what `speed` does with these overrides."""
    threads = ["1", "all"] if task.threads_matter else ["all"]
    vec_envs = ["dummy", "subproc"] if task.env else ["envpool"]
    explicit = [f"torch_threads={1 if count == '1' else _cores()}" for count in threads] if task.threads_matter else []
    explicit += task.others
    if task.env:
        explicit += ["vec_env=dummy", "vec_env=shared"]
    return {
        "ours": ["balance", "speed"],
        "stock": [f"stock {vec_env} {count}" for vec_env in vec_envs for count in threads],
        "explicit": explicit,
    }


def _cores() -> int:
    from fasttrain.machine import usable_cores

    return usable_cores()


def measure(name: str, task_name: str, algo: str) -> dict[str, Any]:
    """Env steps per second of one side, in a process of its own; ours also what it chose."""
    task = TASKS[task_name]
    if name.startswith("stock"):
        command = [sys.executable, __file__, *name.split()[1:], task_name, algo]
        return dict(json.loads(_output(command, None).splitlines()[-1]))
    profile, overrides = (name, []) if name in ("balance", "speed") else ("speed", name.split())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fasttrain", f"+profile={profile}", *task.ours, *_settings(task, algo)]
        _output([*command, *overrides, f"hydra.run.dir={folder}/run", "report=false", "live=off"], folder)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
    return {"rate": summary["steps_per_s"], "chosen": _chosen(summary["plan"])}


def _settings(task: Task, algo: str) -> list[str]:
    settings = [
        f"algo={algo}",
        f"num_envs={NUM_ENVS}",
        f"total_timesteps={10_000_000}",
        f"stop.max_minutes={SECONDS / 60:.4f}",
        "eval.episodes=2",
        "eval_every=0",
    ]
    settings += [f"algo.net_arch=[{task.net},{task.net}]"] if task.net else []
    if algo == "ppo":
        steps, batch_size, epochs = task.ppo
        return [*settings, f"algo.n_steps={steps}", f"batch_size={batch_size}", f"algo.n_epochs={epochs}"]
    updates, batch_size = task.dqn
    return [
        *settings,
        f"updates_per_step={updates}",
        f"batch_size={batch_size}",
        "warmup_steps=500",
        f"algo.buffer_size={task.buffer}",
        "algo.exploration_initial_eps=0.05",
        "algo.exploration_final_eps=0.05",
    ]


def _chosen(plan: Any) -> dict[str, Any]:
    rows = plan["flags"] if isinstance(plan, Mapping) else plan
    wanted = ("vec_env", "workers", "schedule", "torch_threads", "fused_update", "use_amp", "log_every")
    return {row["flag"]: row["effective"] for row in rows if row["flag"] in wanted}


def _output(command: list[str], folder: str | None) -> str:
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    surroundings = {**os.environ, "FASTTRAIN_ENGINE_SWITCH_AT": "0", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=surroundings)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: failed\n{done.stderr[-2000:]}{done.stdout[-1000:]}")
    return done.stdout.strip()


def stock(vec_env: str, threads: str, task_name: str, algo: str) -> dict[str, Any]:
    """Stock SB3 on the same task for `SECONDS`."""
    import torch
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    if threads == "1":
        torch.set_num_threads(1)
    task = TASKS[task_name]
    venv: Any
    if task.env is None:
        from fasttrain.vec.envpool import EnvPoolVecEnv

        venv = EnvPoolVecEnv("Pong-v5", NUM_ENVS)
    else:
        factories = [lambda: Monitor(task.env())] * NUM_ENVS
        venv = DummyVecEnv(factories) if vec_env == "dummy" else SubprocVecEnv(factories, start_method="fork")  # type: ignore[arg-type]

    class Clock(BaseCallback):
        """Notes the end of every rollout and its update, and stops the training in time."""

        began = ended = 0.0
        steps = 0

        def _on_rollout_start(self) -> None:
            self.ended, self.steps = time.perf_counter(), self.num_timesteps
            self.began = self.began or self.ended

        def _on_step(self) -> bool:
            return self.ended - self.began < SECONDS

    arguments: dict[str, Any] = {"policy_kwargs": {"net_arch": [task.net, task.net]} if task.net else {}}
    model: Any
    if algo == "ppo":
        steps, batch_size, epochs = task.ppo
        model = PPO(task.policy, venv, n_steps=steps, batch_size=batch_size, n_epochs=epochs, device="cpu", **arguments)
    else:
        updates, batch_size = task.dqn
        model = DQN(
            task.policy, venv, gradient_steps=updates, train_freq=1, batch_size=batch_size, learning_starts=500,
            buffer_size=task.buffer, exploration_initial_eps=0.05, exploration_final_eps=0.05, device="cpu",
            **arguments,
        )  # fmt: skip
    clock = Clock()
    model.learn(10_000_000, callback=clock)
    venv.close()
    return {"rate": clock.steps / (clock.ended - clock.began)}


# --- the matrix


def run_cell(task: str, algo: str, busy: bool, repeats: int) -> dict[str, Any]:
    """All sides in turn; rates by turn, and what the profiles make of the best of the others."""
    groups = contestants(TASKS[task], algo)
    rates: dict[str, list[float]] = {name: [] for names in groups.values() for name in names}
    chosen: dict[str, list[Any]] = {name: [] for group in ("ours", "explicit") for name in groups[group]}
    with bench_machine.burners(_cores() if busy else 0):
        for turn in range(repeats):
            for group, names in groups.items():
                best = max((rates[name][0] for name in names if rates[name]), default=0.0)
                for name in names:
                    if turn and group != "ours" and rates[name][0] < HOPELESS * best:
                        continue
                    found = measure(name, task, algo)
                    rates[name].append(found["rate"])
                    if group != "stock":
                        chosen[name].append(found["chosen"])
    return {"task": task, "algo": algo, "busy": busy, "rates": rates, "chosen": chosen, **judged(groups, rates, chosen)}


def judged(
    groups: Mapping[str, list[str]], rates: Mapping[str, list[float]], chosen: Mapping[str, list[Any]]
) -> dict[str, Any]:
    """Ratios of medians: the profiles to stock's best, `speed` to the best of what was chosen explicitly."""
    alike: dict[str, list[float]] = {}  # rates by what a run came to
    for name, plans in chosen.items():
        for rate, plan in zip(rates[name], plans, strict=True):
            alike.setdefault(json.dumps(plan, sort_keys=True), []).append(rate)

    def rate_of(name: str) -> float:
        own = [json.dumps(plan, sort_keys=True) for plan in chosen.get(name, [])]
        return statistics.median([rate for plan in sorted(set(own)) for rate in alike[plan]] if own else rates[name])

    best_stock = max(groups["stock"], key=rate_of)
    best_explicit = max(groups["explicit"], key=rate_of)
    return {
        "best_stock": best_stock,
        "best_explicit": best_explicit,
        "balance": rate_of("balance") / rate_of(best_stock),
        "speed": rate_of("speed") / rate_of(best_stock),
        "auto": rate_of("speed") / rate_of(best_explicit),
    }


HEAD = f"{'cell':<30}{'stock, best':>22}{'balance':>9}{'speed':>8}   {'explicit, best':<28}{'auto':>6}"


def line(cell: Mapping[str, Any]) -> str:
    """One row of the table; `!` where a bound is missed."""
    name = f"{cell['algo']} {cell['task']}{' busy' if cell['busy'] else ''}"
    stock_rate = statistics.median(cell["rates"][cell["best_stock"]])
    missed = min(cell["balance"], cell["speed"]) < ENOUGH or cell["auto"] < AUTO_ENOUGH
    told = f"{cell['best_stock'].removeprefix('stock ')} {stock_rate:,.0f}/s"
    return (
        f"{name:<30}{told:>22}{cell['balance']:>8.2f}×{cell['speed']:>7.2f}×   {cell['best_explicit']:<28}"
        f"{100 * cell['auto']:>5.0f} %{' !' if missed else ''}"
    )


def run(repeats: int, folder: Path, only: str | None) -> int:
    """Measure the matrix and store it as auto.json, cell by cell; 1 if a cell misses a bound.

    `only`: a part of the cells' names, to measure these alone; the others stay as they were stored.
    """
    path = folder / "auto.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"] if only and path.exists() else []
    cells = {(cell["task"], cell["algo"], cell["busy"]): cell for cell in stored}
    wanted = [(task, algo, busy) for busy in (False, True) for algo in ("ppo", "dqn") for task in TASKS]
    if only:
        wanted = [key for key in wanted if only in f"{key[1]} {key[0]} {'busy' if key[2] else 'quiet'}"]
    print(f"{len(wanted)} cells, about {len(wanted) * 1.6 * repeats:.0f} minutes\n{HEAD}", flush=True)
    for key in wanted:
        cells[key] = run_cell(*key, repeats)
        print(line(cells[key]), flush=True)
        skipped = {} if "pong" in TASKS else {"skipped": {"pong": "EnvPool is not installed"}}
        command = f"python3 scripts/benchmark.py auto --repeats {repeats}"
        result = {"work": "auto", **bench_machine.about(), "command": command, **skipped, "cells": list(cells.values())}
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(line(cell).endswith("!") for cell in cells.values()) else 0


def show(path: Path) -> None:
    """The stored table."""
    if not path.exists():
        return
    result = json.loads(path.read_text(encoding="utf-8"))
    print(f"\nauto  ({result['machine']}; {result['command']})\n{HEAD}")
    for cell in result["cells"]:
        print(line(cell))
    for name, why in result.get("skipped", {}).items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    print(json.dumps(stock(*sys.argv[1:])))
