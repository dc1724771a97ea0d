"""A run on the bench: built as training builds it, trained for a moment, ready to have its parts run one by one.

`RecordedVecEnv` plays what some steps of another vector env brought over and over, at no cost of its own. With it an
algorithm can collect as in training while its envs take no time: what remains is choosing and storing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from rich.console import Console
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs

from fasttrain.batch import BoolArray, FinishedEpisode, Float32Array, Observations, Slots
from fasttrain.perf.limits import Flow
from fasttrain.perf.stock import StockPhases, is_stock
from fasttrain.runs.callbacks import SnapshotCallback
from fasttrain.runs.envs import uses_masks
from fasttrain.runs.train import Run
from fasttrain.spec.config import Config, StopConfig
from fasttrain.spec.flags import EnvFacts, Machine
from fasttrain.spec.plan import Plan
from fasttrain.spec.stepping import WAITS_BELOW
from fasttrain.vec.base import SlotAdapter, SlotSource, SlotVecEnv, copy_observations, slots_of
from fasttrain.vec.shared import SharedMemoryVecEnv


class Frame(NamedTuple):
    """One vector step."""

    observations: Observations  # (N, ...) after the step
    action_masks: BoolArray | None  # (N, A)
    rewards: Float32Array  # (N,)
    terminations: BoolArray
    truncations: BoolArray
    finished: list[FinishedEpisode]
    infos: list[dict[str, Any]]

    @property
    def dones(self) -> BoolArray:
        """(N,) ended in this step, as SB3 says it."""
        return self.terminations | self.truncations


class RandomActions:
    """Random legal actions in no time: from a few tables of random numbers that are drawn once.

    Drawing afresh took 0.3 ms for 256 envs of 71 actions, thrice the envs' own step: their caches were cold and their
    threads asleep by then, and the step measured up to twice as slow as in training.
    """

    TABLES = 16

    def __init__(self, space: spaces.Space[Any], num_envs: int, seed: int) -> None:
        self.space, self._turn = space, 0
        rng = np.random.default_rng(seed)
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            dims = np.atleast_1d(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)
            self._bounds: list[tuple[int, int]] = list(pairwise([0, *np.cumsum(dims).tolist()]))
            shape = (self.TABLES, num_envs, int(dims.sum()))
            self._keys = 1.0 - rng.random(shape, np.float32)  # above 0, which is what an illegal action gets
            self._free = [self._best(keys) for keys in self._keys]
        else:
            self._free = [np.stack([space.sample() for _ in range(num_envs)]) for _ in range(self.TABLES)]

    def draw(self, masks: BoolArray | None, rows: slice = slice(None)) -> NDArray[Any]:  # (n, ...)
        """Actions of the envs in `rows`; `masks` are theirs, (n, A), or None."""
        self._turn = (self._turn + 1) % self.TABLES
        if masks is None:
            return self._free[self._turn][rows]
        return self._best(self._keys[self._turn][rows] * masks)

    def _best(self, keys: NDArray[Any]) -> NDArray[Any]:
        parts = [keys[:, first:stop].argmax(axis=1) for first, stop in self._bounds]
        return np.stack(parts, axis=1).reshape(len(keys), *(self.space.shape or ()))


def record(
    source: SlotSource, draw: Callable[[BoolArray | None], NDArray[Any]], masked: bool, steps: int
) -> list[Frame]:
    """Step `source` with the actions that `draw` gives for its masks; copies of what came of it."""
    frames = []
    for _ in range(steps):
        source.step_slots(draw(source.read_masks() if masked else None))
        slots = source.slots
        masks = source.read_masks() if masked else None
        frames.append(
            Frame(
                copy_observations(slots.observations),
                None if masks is None else np.array(masks),
                np.array(slots.rewards, np.float32),
                np.array(slots.terminations),
                np.array(slots.truncations),
                list(slots.finished),
                list(source.infos()),
            )
        )
    return frames


class RecordedVecEnv(SlotVecEnv):
    """Plays `frames` in a circle, whatever the actions; `reuses_arrays` as the env they are of."""

    def __init__(
        self,
        frames: Sequence[Frame],
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        reuses_arrays: bool = True,
    ) -> None:
        num_envs = len(frames[0].rewards)
        self.frames, self.reuses_arrays, self._next = frames, reuses_arrays, 0
        self.num_envs = num_envs  # get_attr("render_mode") in SB3's constructor needs it
        self.slots = Slots(
            observations=frames[-1].observations,
            actions=np.zeros((num_envs, *(action_space.shape or ())), action_space.dtype),
            rewards=frames[-1].rewards,
            terminations=frames[-1].terminations,
            truncations=frames[-1].truncations,
            action_masks=frames[-1].action_masks,
        )
        super().__init__(num_envs, observation_space, action_space)

    def reset(self) -> VecEnvObs:
        self._next = 0
        self.slots.observations = self.frames[-1].observations
        self.slots.action_masks, self.slots.finished = self.frames[-1].action_masks, []
        return copy_observations(self.slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        frame, slots = self.frames[self._next % len(self.frames)], self.slots
        self._next += 1
        slots.observations, slots.rewards, slots.action_masks = frame.observations, frame.rewards, frame.action_masks
        slots.terminations, slots.truncations, slots.finished = frame.terminations, frame.truncations, frame.finished

    def infos(self) -> list[dict[str, Any]]:
        return self.frames[(self._next - 1) % len(self.frames)].infos

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        """There are no envs to call; every answer is None."""
        return [None] * len(self.env_indices(indices))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [None] * len(self.env_indices(indices))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        pass

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        return [False] * len(self.env_indices(indices))

    def close(self) -> None:
        pass


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
    if config.algo.spec.off_policy:
        algo = config.algo
        settled: dict[str, Any] = {"buffer_size": min(algo.buffer_size, max(BUFFER, config.num_envs))}
        if hasattr(algo, "exploration_final_eps"):
            settled["exploration_initial_eps"] = algo.exploration_final_eps
        changes["algo"] = dataclasses.replace(algo, **settled)
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
        self.off_policy = self.config.algo.spec.off_policy
        self.masked = uses_masks(self.config)
        self.env: VecEnv = model.env
        self.random = RandomActions(self.env.action_space, self.config.num_envs, self.config.seed)
        self.source: SlotSource = slots_of(self.env) if self.stock else model.collector.source_of(self.env)
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
        if algo.spec.off_policy:
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
        groups = shared is not None and (config.schedule not in ("lockstep", "auto"))
        # A probe on a busy machine takes waiting for a core for waiting: only envs that mostly wait leave cores free.
        computing = facts.cpu_share if facts.cpu_share < WAITS_BELOW else 1.0
        env_cores = 1.0 if shared is None else min(machine.cores, shared.num_workers) * computing
        return Flow(bool(groups), config.overlap, machine.cores, env_cores)
