"""A run on the bench: built as training builds it, trained for a moment, ready to have its parts run one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.config import Config, DQNConfig, StopConfig
from fasttrain.flags import EnvFacts, Machine
from fasttrain.perf.limits import Flow
from fasttrain.perf.stock import StockPhases, is_stock
from fasttrain.plan import Plan
from fasttrain.runs.build import uses_masks
from fasttrain.runs.opponents import SnapshotCallback
from fasttrain.runs.train import Run
from fasttrain.stepping import WAITS_BELOW
from fasttrain.vec.adapter import SlotAdapter, slots_of
from fasttrain.vec.base import SlotSource, copy_observations
from fasttrain.vec.recorded import Frame, RandomActions, RecordedVecEnv, record
from fasttrain.vec.shared import SharedMemoryVecEnv

FILLED = 20_000  # transitions in a replay buffer before its updates are timed: more than a cache line of each
BUFFER = 50_000  # at most so large: two configurations are there at once
WARMUP = 1_000
FRAMES, FRAMES_BYTES = 64, 2**26  # recorded vector steps, and their memory


class Beat(BaseCallback):
    """Stands last among the callbacks: measures whole iterations, from one rollout's start to another's, then stops.

    What `learn` does before the first and after the last belongs to no iteration.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._wanted_s = seconds
        self._first: tuple[float, int] | None = None
        self.seconds, self.steps = 0.0, 0
        self.done = False

    def _on_rollout_start(self) -> None:
        now, steps = time.perf_counter(), self.model.num_timesteps
        if self._first is None:
            self._first = now, steps
            return
        self.seconds, self.steps = now - self._first[0], steps - self._first[1]
        self.done = self.seconds >= self._wanted_s

    def _on_step(self) -> bool:
        return not self.done


def steady(config: Config) -> Config:
    """The configuration in the steady state of its training: nothing stops it, warm-up and exploring are over."""
    changes: dict[str, Any] = {
        "stop": StopConfig(), "eval_every": 0, "checkpoint_every": 0, "checkpoint_every_minutes": 0.0, "live": "off",
        "profiler": "off", "report": False, "warmup_steps": min(config.warmup_steps, WARMUP),
    }  # fmt: skip
    if isinstance(config.algo, DQNConfig):
        algo = config.algo
        changes["algo"] = dataclasses.replace(
            algo,
            exploration_initial_eps=algo.exploration_final_eps,
            buffer_size=min(algo.buffer_size, max(BUFFER, config.num_envs)),
        )
    return dataclasses.replace(config, **changes)


class Rig:
    """One configuration, built.

    Args:
        plan: the configuration as it is planned; trained in its steady state.
        folder: made anew; what the run writes and says goes there (`said.txt`).
        torch_threads: torch's own number, for a configuration that leaves it alone.
    """

    def __init__(self, plan: Plan, folder: Path, torch_threads: int | None = None) -> None:
        folder.mkdir(parents=True)
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self._said = (folder / "said.txt").open("w", encoding="utf-8")
        plan = plan._replace(config=steady(plan.config))
        with contextlib.redirect_stdout(self._said):  # a logger keeps the stream it was made with
            self.run = Run(plan, folder, Console(file=self._said, width=140))
        self.config: Config = self.run.plan.config
        model: Any = self.run.model
        self.model, self.stock = model, is_stock(model)
        self.off_policy = isinstance(self.config.algo, DQNConfig)
        self.masked = uses_masks(self.config)
        self.env: VecEnv = model.env
        self.random = RandomActions(self.env.action_space, self.config.num_envs, self.config.seed)
        self.source: SlotSource = slots_of(self.env) if self.stock else model._fast.source_of(self.env)
        self._threads = torch.get_num_threads()
        self._frames: list[Frame] = []
        self._begun = False
        self.slow_update = False  # one takes longer than a window

    def activate(self) -> None:
        """Put back what configurations that are built at the same time share."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def close(self) -> None:
        """End workers; files are flushed."""
        self.model.logger.close()
        self.run.env.close()
        self._said.close()

    @property
    def num_envs(self) -> int:
        return self.config.num_envs

    @property
    def shared(self) -> SharedMemoryVecEnv | None:
        """The workers, where there are such."""
        return self.source if isinstance(self.source, SharedMemoryVecEnv) else None

    def callbacks(self) -> list[BaseCallback]:
        """As `Run.learn` has them."""
        before: list[BaseCallback] = [StockPhases(self.run.clock)] if self.stock else []
        if self.run.pool is not None:
            before.append(SnapshotCallback(self.run.pool, self.config.self_play.every, self.run.clock))
        return [*before, self.run.callback]

    def train(self, seconds: float) -> float:
        """Train for about `seconds`, an iteration at least; seconds per env step."""
        beat = Beat(seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.learn(
                self.config.total_timesteps,
                callback=[*self.callbacks(), beat],
                log_interval=None,
                reset_num_timesteps=not self._begun,
            )
        self._begun = True
        return beat.seconds / max(1, beat.steps)

    def warm_up(self, seconds: float) -> float | None:
        """Train until everything that is compiled, chosen or filled on the way is so; at most about `seconds`.

        Returns seconds per env step where a single iteration took longer than that: then it was no warm-up alone.
        """
        until = time.perf_counter() + seconds
        step_s = self.train(min(0.2, seconds / 4))
        slow = time.perf_counter() > until
        algo = self.config.algo
        if isinstance(algo, DQNConfig):
            wanted = min(FILLED, algo.buffer_size, self.config.total_timesteps)
            with self.updates_off():
                while self.model.replay_buffer.size() * self.num_envs < wanted and time.perf_counter() < until:
                    self.train(seconds / 10)
        if not self._frames:
            self._frames = self._record()
        return step_s if slow else None

    @contextlib.contextmanager
    def updates_off(self) -> Iterator[None]:
        """DQN only collects inside."""
        starts, self.model.learning_starts = self.model.learning_starts, 2**62
        try:
            yield
        finally:
            self.model.learning_starts = starts

    # --- envs without the run

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Envs, or the algorithm, are used by themselves inside; afterwards training goes on where the envs are."""
        model = self.model
        steps = model.num_timesteps
        if isinstance(self.source, SlotAdapter):
            self.source.begin_episodes(np.asarray(model._last_episode_starts, np.bool_))
        try:
            yield
        finally:
            slots = self.source.slots
            model.num_timesteps = steps
            model._last_obs = copy_observations(slots.observations)
            model._last_episode_starts = slots.terminations | slots.truncations
            normalizer = model.get_vec_normalize_env()
            model._last_original_obs = None if normalizer is None else normalizer.get_original_obs()

    def _record(self) -> list[Frame]:
        observations = self.source.slots.observations
        parts = observations.values() if isinstance(observations, dict) else [observations]
        steps = max(2, min(FRAMES, FRAMES_BYTES // max(1, sum(part.nbytes for part in parts))))
        with self.apart():
            return record(self.source, self.random.draw, self.masked, steps)

    @property
    def frames(self) -> list[Frame]:
        """Some of the envs' steps by random legal actions."""
        return self._frames

    def recorded(self) -> RecordedVecEnv:
        """The envs, costing nothing."""
        return RecordedVecEnv(
            self._frames, self.env.observation_space, self.env.action_space, self.source.reuses_arrays
        )

    # --- how its parts go together

    def flow(self, facts: EnvFacts, machine: Machine) -> Flow:
        """How the run overlaps its parts."""
        config, shared = self.config, self.shared
        groups = shared is not None and (config.async_envs or config.pipeline not in (1, "auto"))
        # A probe on a busy machine takes waiting for a core for waiting: only envs that mostly wait leave cores free.
        computing = facts.cpu_share if facts.cpu_share < WAITS_BELOW else 1.0
        env_cores = 1.0 if shared is None else min(machine.cores, shared.num_workers) * computing
        return Flow(bool(groups), config.overlap, machine.cores, env_cores)
