"""What runs in an actor of cluster=ray: envs and a copy of the policy, which collect a part of each rollout."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.utils import set_random_seed

from fasttrain.batch import BoolArray, Float32Array, each_array
from fasttrain.envs.masks import mask_width
from fasttrain.spec.config import Config
from fasttrain.vec.base import EmptyMasks
from fasttrain_vec.replacing import FAILED

# Attributes of a `RolloutStorage` that the learner gets, and the axis of the envs in their arrays.
STORED = {"observations": 1, "actions": 1, "values": 1, "log_probs": 1, "masks": 1, "states": 2}


class Work(NamedTuple):
    """What the learner sends to an actor for a rollout, besides the weights."""

    settings: Any  # the learner's `EngineSettings`
    noise: Any  # random numbers (T, n, K) for the actions, or a seed for an engine that draws its own
    num_steps: int
    masked: bool  # whether actions are drawn from the legal ones
    begun: int  # env steps of the training so far, for messages
    last: Any  # (n, ...) observations to begin with, as the policy gets them; None: where the last work ended
    statistics: Any  # see `statistics_of`


class News(NamedTuple):
    """What happened in an actor since its last rollout."""

    replaced: dict[str, int]  # envs and workers, by cause
    lost_steps: int
    empty_masks: int
    warnings: list[str]  # of masks without a legal action


NO_NEWS = News({}, 0, 0, [])


class Part(NamedTuple):
    """An actor's part of a rollout: T steps of n envs."""

    stored: dict[str, Any]  # name of `STORED` → (T, n, ...), `states`: (T, L, n, H); None: the storage has none
    rewards: Float32Array  # (T, n) with the values of truncated episodes added
    plain_rewards: Float32Array  # (T, n) as the envs gave them
    episode_starts: Float32Array  # (T, n)
    left_out: BoolArray  # (T, n) True: no transition
    dones: BoolArray  # (T, n)
    infos: list[tuple[int, int, dict[str, Any]]]  # step, env and info of each episode's end
    last: Any  # (n, ...) observations after the last step, as the policy gets them
    memory: Any  # (L, n, H) each, LSTM states after the last step; None: not recurrent
    statistics: Any  # those of this part alone; see `statistics_of`
    news: News
    seconds: float


class Held(RunningMeanStd):
    """Statistics of the learner, which do not change in an actor. `seen` has those of what the actor saw since."""

    def __init__(self, given: RunningMeanStd) -> None:
        self.mean, self.var, self.count = given.mean, given.var, given.count
        self.seen = RunningMeanStd(0.0, np.shape(given.mean))

    def update(self, arr: Any) -> None:
        self.seen.update(arr)


def statistics_of(model: Any) -> Any:
    """VecNormalize's statistics of observations (None: not normalised; a dict for a Dict space) and of returns."""
    layer = model.get_vec_normalize_env()
    return None if layer is None else (getattr(layer, "obs_rms", None), layer.ret_rms)


class Recorder(BaseCallback):
    """Keeps what the learner's callbacks get at each step."""

    def _on_rollout_start(self) -> None:
        self.rewards, self.dones = list[Any](), list[Any]()
        self.ends = list[tuple[int, int, dict[str, Any]]]()

    def _on_step(self) -> bool:
        self.rewards.append(self.locals["rewards"].copy())
        self.dones.append(np.array(self.locals["dones"], np.bool_))
        for index in np.flatnonzero(self.dones[-1]).tolist():
            self.ends.append((len(self.dones) - 1, index, self.locals["infos"][index]))
        return True


class Actor:
    """Envs and a model that only collects. It runs in a process of the cluster.

    Args:
        config: the training's configuration, with this actor's number of envs.
        seed: of the first env; the next one has seed + 1, and so on.
        places: folders of the learner's `sys.path`, for the modules of the user.
    """

    model: Any = None  # built at the first call, whose errors have a cause; those of a constructor have only a text

    def __init__(self, config: Config, seed: int, places: Sequence[str]) -> None:
        self.config, self.seed, self.places = config, seed, places

    def _build(self) -> None:
        from fasttrain.perf.clock import PhaseClock
        from fasttrain.runs.engine import set_threads
        from fasttrain.runs.envs import build_vec_env
        from fasttrain.runs.models import build_algorithm

        config, seed = self.config, self.seed
        sys.path += [place for place in self.places if place not in sys.path and os.path.isdir(place)]
        set_threads(1)
        self.recorder = Recorder()
        logs = Path(tempfile.mkdtemp(prefix="fasttrain_actor_")) if config.vec_env == "daemons" else None
        self.env = build_vec_env(config, config.num_envs, seed, folder=logs)
        game: Any = getattr(self.env.unwrapped, "game", None)
        if hasattr(game, "max_threads"):
            game.max_threads = 1
        self.model = build_algorithm(config, self.env, PhaseClock())
        set_random_seed(seed)  # SB3's constructor has seeded all with the training's seed
        self.model.collector.lends = False
        self.seen, self.warnings = NO_NEWS, list[str]()
        self.model.collector.empty_masks = EmptyMasks(config.env.on_empty_mask == "raise", self.warnings.append)
        self._use_engine(self.model.engine.settings, config.fused_update == "on")

    def _use_engine(self, settings: Any, kernels: bool) -> None:
        from fasttrain.runs.engine import learner_calls
        from fasttrain_kernels.kernel_cache import compile_all

        compile_all(learner_calls(dataclasses.replace(self.config, fused_update="on")) if kernels else [])
        self.model.use_engine(settings)
        if self.config.nan_guard == "off":
            self.model.engine.guard = None

    def spaces(self) -> tuple[Any, Any, int]:
        """Observation space, action space, and width of the masks (0: the envs have none)."""
        if self.model is None:
            self._build()
        masked, base = self.model.collector.source_of(self.model.env).masked, self.env.unwrapped
        return base.observation_space, base.action_space, mask_width(base.action_space) if masked else 0

    def reset(self, seed: int | None) -> tuple[Any, tuple[str, int]]:
        """Begin new episodes in all envs. Returns their observations, and the name of this machine and process.

        Args:
            seed: of the first env; None: the envs go on with their random numbers.
        """
        if self.model is None:
            self._build()
        base, model = self.env.unwrapped, self.model
        if seed is not None:
            base.seed(seed)
        first = model._last_obs = base.reset()
        model._last_episode_starts = np.ones(base.num_envs, np.bool_)
        model._setup_learn(1, self.recorder, reset_num_timesteps=False)  # as SB3's `learn` begins
        self.recorder.init_callback(model)
        return first, (socket.gethostname(), os.getpid())

    def _news(self) -> News:
        from fasttrain.runs.envs import env_times

        times, before = env_times(self.env, self.config, 0, False), self.seen
        causes, empty = dict(times.causes), self.model.collector.empty_masks.count
        if times.restarts and not causes:  # external engines do not tell causes
            causes = {FAILED: times.restarts}
        self.seen = News(causes, times.lost_steps, empty, [*self.warnings])
        new = {cause: more for cause in causes if (more := causes[cause] - before.replaced.get(cause, 0))}
        return News(new, times.lost_steps - before.lost_steps, empty - before.empty_masks, self.seen.warnings)

    def close(self) -> None:
        if self.model is not None:
            self.env.close()

    def collect(self, weights: Any, work: Work) -> Part:
        """Collect `work.num_steps` vector steps with these weights."""
        from fasttrain.algos.ppo import collect

        began, model = time.perf_counter(), self.model
        model.policy.load_state_dict(weights)
        if model.engine.settings != work.settings:
            self._use_engine(work.settings, work.settings.kind == "kernels")
        if isinstance(work.noise, int):
            torch.manual_seed(work.noise)
        else:
            model.engine_now().given = work.noise
        model.num_timesteps = work.begun
        if work.last is not None:
            model._last_obs = work.last
        if work.statistics is not None:
            layer = model.get_vec_normalize_env()
            layer.obs_rms, layer.ret_rms = each_array(Held, work.statistics)
        collect(model, model.env, self.recorder, work.num_steps, work.masked)
        storage, recorder = model.rollout_buffer.storage, self.recorder
        left_out = np.zeros(storage.rewards.shape, np.bool_) if storage.left_out is None else storage.left_out
        return Part(
            {name: getattr(storage, name, None) for name in STORED}, storage.rewards, np.stack(recorder.rewards),
            storage.episode_starts, left_out, np.stack(recorder.dones), recorder.ends, model._last_obs,
            each_array(lambda part: part.numpy(), getattr(model.memory(), "states", None)),
            each_array(lambda held: held.seen, statistics_of(model)), self._news(),
            time.perf_counter() - began,
        )  # fmt: skip
