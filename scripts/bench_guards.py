"""What all guards together cost, within one run: iterations with them and without in turn. Part `guards` of faults.py.

The guards are what a run could do without: `nan_guard`, which looks at every step's numbers, every gradient norm and
every action; what is kept for a crash, a state now and then and of Python envs each action; and checkpoints written
beside training. Other guards (masks without a legal action, workers' deadlines,
signals) cannot be switched off.
"""

from __future__ import annotations

import io
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.cli.compose import configured
from fasttrain.runs.envs import env_facts, this_machine
from fasttrain.runs.train import Run
from fasttrain.spec.plan import resolve
from fasttrain.vec.stock import NotedVecEnv

WORKS = {
    "Skull King, MaskablePPO": ("env=skullking",),
    "CartPole, DQN": ("env.id=CartPole-v1", "algo=dqn"),
    "CartPole, PPO": ("env.id=CartPole-v1", "algo=ppo"),
}
ITERATION_S = 0.1  # at least, of one timed stretch: many vector steps of DQN, a rollout of PPO
SETTLE = 20  # pairs that are not counted: kernels are compiled, threads are tried
CHECKPOINT_EVERY = 25  # pairs between two checkpoints
AFTERWARDS = 4  # stretches that a checkpoint's writing may slow down
A_MINUTE = 60.0  # s between checkpoints, for which their cost is told
LEAST = 0.99  # of the steps per second without guards
RESAMPLES = 2000


class Alternate(BaseCallback):
    """Stands first among a run's callbacks: ends a stretch where a rollout begins, and says how the next one goes.

    Which of a pair comes first is drawn: in a fixed order (with, without, without, with) `nan_guard` cost 2.5 %, in a
    drawn one 0.7 %, because some work of a run comes every few rollouts, such as trying threads.

    Attributes:
        times: seconds per env step of each pair: with the guard, without.
        checkpoint_s: seconds that a checkpoint took from training, of each that was written.
    """

    def __init__(self, run: Run, pairs: int, seed: int) -> None:
        super().__init__()
        self._run, self._wanted, self._rng = run, pairs, random.Random(seed)
        self.times: list[tuple[float, float]] = []
        self.checkpoint_s: list[float] = []
        self._pair: dict[bool, float] = {}
        self._guarded = True
        self._begun, self._from = time.perf_counter(), 0
        self._after: list[tuple[float, int]] | None = None  # stretches since a checkpoint: seconds, env steps
        self._settled = 0

    def _on_training_start(self) -> None:
        model: Any = self.model
        self._guard = model.engine.guard

    def _on_rollout_start(self) -> None:
        now, steps = time.perf_counter(), self.model.num_timesteps
        seconds, made = now - self._begun, steps - self._from
        if not made or seconds < ITERATION_S:
            return
        if self._after is not None:
            self._after.append((seconds, made))
            if len(self._after) == AFTERWARDS:
                self._end_of_checkpoint()
        else:
            self._pair[self._guarded] = seconds / made
            if len(self._pair) == 2:
                self._end_of_pair()
            else:
                self._guarded = not self._guarded
        self._switch()
        self._begun, self._from = time.perf_counter(), steps

    def _switch(self) -> None:
        model: Any = self.model
        model.engine.guard = self._guard if self._guarded else None
        self._run.checkpoints._too_large = not self._guarded  # nothing is kept then
        if isinstance(self._run.env, DummyVecEnv):  # without guards it notes nothing
            self._run.env.__class__ = NotedVecEnv if self._guarded else DummyVecEnv

    def _end_of_pair(self) -> None:
        pair, self._pair = self._pair, {}
        self._guarded = self._rng.random() < 0.5
        self._settled += 1
        if self._settled <= SETTLE:
            return
        self.times.append((pair[True], pair[False]))
        if len(self.times) % CHECKPOINT_EVERY == 0:
            self._run.callback._checkpoint._next = 0  # the run's own callback, next in turn, finds it due
            self._after, self._guarded = [], True

    def _end_of_checkpoint(self) -> None:
        usual = statistics.median(with_ for with_, _ in self.times[-CHECKPOINT_EVERY:])
        self.checkpoint_s.append(sum(seconds - made * usual for seconds, made in self._after or ()))
        self._after = None

    def _on_step(self) -> bool:
        return len(self.times) < self._wanted


def measure(pairs: int, seed: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Time `pairs` pairs of stretches of each work; `ratio` is the worst one's steps/s with all guards ÷ without.

    `bad`: works that surely lose more than they may; `checkpoint_s`: the longest that a checkpoint took from training.
    """
    found = {name: _one(name, pairs, seed, folder / str(place), say) for place, name in enumerate(WORKS)}
    worst = min(found.values(), key=lambda work: work["ratio"]["value"])
    return {
        "pairs": pairs,
        "works": found,
        "ratio": worst["ratio"],
        "checkpoint_s": max(work["checkpoint_s"] for work in found.values()),
        "bad": [
            f"{name}: with all guards at most {100 * work['ratio']['high']:.1f} % of the steps per second without"
            for name, work in found.items()
            if work["ratio"]["high"] < LEAST
        ],
    }


def _one(name: str, pairs: int, seed: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    run = _built(name, folder)
    alternate = Alternate(run, pairs, seed)
    run.model.learn(10**12, callback=[alternate, run.callback], log_interval=None)
    run.checkpoints.wait()
    run.model.logger.close()
    run.env.close()
    result = judged(alternate.times, alternate.checkpoint_s, seed)
    guard, both = (100 * (1 - result[key]["value"]) for key in ("nan_guard", "ratio"))
    say(f"{name}: nan_guard {guard:.2f} %, a checkpoint {result['checkpoint_s']:.3f} s; with one a minute {both:.2f} %")
    return result


def _built(name: str, folder: Path) -> Run:
    typed = ["+profile=speed", *WORKS[name], "total_timesteps=1e12", "checkpoint_every=1000000000000", "eval_every=0",
             "checkpoint_every_minutes=0"]  # fmt: skip
    config = configured(typed)
    folder.mkdir(parents=True)
    plan = resolve(config, {}, env_facts(config), this_machine())
    return Run(plan, folder, Console(file=io.StringIO()))


def judged(times: Sequence[tuple[float, float]], checkpoint_s: Sequence[float], seed: int) -> dict[str, Any]:
    """From seconds per env step (with, without) of each pair, and seconds lost per checkpoint."""
    rng = np.random.default_rng(seed)
    logs = np.log([without / with_ for with_, without in times])
    guard = _interval(np.median(logs[rng.integers(len(logs), size=(RESAMPLES, len(logs)))], axis=1), np.median(logs))
    lost = max(0.0, statistics.median(checkpoint_s)) / A_MINUTE if checkpoint_s else 0.0  # noise may be less than none
    both = {name: value * (1 - lost) for name, value in guard.items()}
    return {"nan_guard": guard, "checkpoint_s": lost * A_MINUTE, "ratio": both}


def _interval(resampled: Any, value: Any) -> dict[str, float]:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return {"value": float(np.exp(value)), "low": float(np.exp(low)), "high": float(np.exp(high))}
