"""What the guards cost together, within one run: stretches with them and without in turn.

The guards are what a run could do without: `nan_guard`, which looks at every step's numbers, every gradient norm and
every action; what is kept for a crash; and checkpoints written beside training, told for one a minute.
"""

from __future__ import annotations

import io
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.work import OURS, Sample, Work, works_of

JOBS = {
    "skullking": ("env=skullking",),
    "dqn": ("env.id=CartPole-v1", "algo=dqn"),
    "ppo": ("env.id=CartPole-v1", "algo=ppo"),
}
PAIRS = 200
ITERATION_S = 0.1  # at least, of one timed stretch: many vector steps of DQN, a rollout of PPO
SETTLE = 20  # pairs that are not counted: kernels are compiled, threads are tried
CHECKPOINT_EVERY = 25  # pairs between two checkpoints
AFTERWARDS = 4  # stretches that a checkpoint's writing may slow down


def measure(job: str) -> Sample:
    """Steps per second with all guards ÷ without, the median of pairs whose order is drawn.

    In a fixed order (with, without, without, with) `nan_guard` cost 2.5 %, in a drawn one 0.7 %, because some work of a
    run comes every few rollouts, such as trying threads.
    """
    from rich.console import Console
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    from fasttrain.cli.compose import configured
    from fasttrain.runs import callbacks, train
    from fasttrain.runs.envs import env_facts, this_machine
    from fasttrain.spec.plan import resolve
    from fasttrain.vec.stock import ActionLogVecEnv

    class Alternate(BaseCallback):
        """Stands first: ends a stretch where a rollout begins, and says how the next one goes."""

        def __init__(self, run: Any) -> None:
            super().__init__()
            self._run, self._rng, self._guarded, self._settled = run, random.Random(0), True, 0
            self.times: list[tuple[float, float]] = []  # seconds per env step of each pair: with, without
            self.lost: list[float] = []  # seconds that each checkpoint took from training
            self._pair: dict[bool, float] = {}
            self._after: list[tuple[float, int]] | None = None  # stretches since a checkpoint: seconds, env steps
            self._begun, self._from = time.perf_counter(), 0

        def _on_training_start(self) -> None:
            self._guard = self.model.engine.guard  # type: ignore[attr-defined]

        def _on_rollout_start(self) -> None:
            seconds, made = time.perf_counter() - self._begun, self.model.num_timesteps - self._from
            if not made or seconds < ITERATION_S:
                return
            if self._after is not None:
                self._after.append((seconds, made))
                if len(self._after) == AFTERWARDS:
                    usual = statistics.median(with_ for with_, _ in self.times[-CHECKPOINT_EVERY:])
                    self.lost.append(sum(spent - steps * usual for spent, steps in self._after))
                    self._after = None
            else:
                self._pair[self._guarded] = seconds / made
                self._guarded = not self._guarded
                if len(self._pair) == 2:
                    self._end_of_pair()
            self._switch()
            self._begun, self._from = time.perf_counter(), self.model.num_timesteps

        def _end_of_pair(self) -> None:
            pair, self._pair, self._guarded = self._pair, {}, self._rng.random() < 0.5
            self._settled += 1
            if self._settled > SETTLE:
                self.times.append((pair[True], pair[False]))
                if len(self.times) % CHECKPOINT_EVERY == 0:
                    self._run.course.checkpoint.following = 0  # the run's own callback, next in turn, finds it due
                    self._after, self._guarded = [], True

        def _switch(self) -> None:
            self.model.engine.guard = self._guard if self._guarded else None  # type: ignore[attr-defined]
            self._run.checkpoints._too_large = not self._guarded  # nothing is kept then
            if isinstance(self._run.env, DummyVecEnv):  # without guards it notes nothing
                self._run.env.__class__ = ActionLogVecEnv if self._guarded else DummyVecEnv

        def _on_step(self) -> bool:
            return len(self.times) < PAIRS

    never = ("total_timesteps=1e12", "checkpoint_every=1000000000000", "eval_every=0")
    config = configured(["+profile=speed", *JOBS[job], *never])
    with tempfile.TemporaryDirectory() as folder:
        plan = resolve(config, {}, env_facts(config), this_machine())
        run = train.build(plan, Path(folder), Console(file=io.StringIO()))
        alternate = Alternate(run)
        run.model.learn(10**12, callback=[alternate, *callbacks.callbacks_of(run)], log_interval=None)
        run.checkpoints.wait()
        run.model.logger.close()
        run.env.close()
    checkpoint_s = max(0.0, statistics.median(alternate.lost or [0.0]))  # noise may be less than none
    guard = statistics.median(without / with_ for with_, without in alternate.times)
    return {"rate": guard * (1 - checkpoint_s / 60), "nan_guard": guard, "checkpoint_s": checkpoint_s}


WORKS = works_of(
    *(
        Work(
            f"guards-{job}",
            f"All guards together, `+profile=speed {' '.join(typed)}`: steps per second with them ÷ without.",
            {OURS: partial(measure, job)},
            unit="of the steps per second",
            equal=(),
            target="T9",
        )
        for job, typed in JOBS.items()
    )
)
