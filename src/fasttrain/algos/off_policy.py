"""What DQN and SAC share: the loop that acts, steps and stores, and the log of an update.

DQN and SAC each define `_choose`, loss and update themselves.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import RolloutReturn, TrainFreq
from stable_baselines3.common.utils import should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.causes import check_step, why_replay
from fasttrain.algos.engine import Engine, EnvStep, Fast, Statistics, note_episodes
from fasttrain.batch import Slots
from fasttrain.buffers.hindsight import HindsightStorage
from fasttrain.buffers.prefetch import Direct, Prefetching, Replay
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.stock import STOCK_REPLAYS, replay_of, storage_of
from fasttrain.vec.base import SlotSource, slots_of

Learn = TypeVar("Learn", bound=Callable[..., Any])


def without_threads_left(learn: Learn) -> Learn:
    """Wrap SB3's `learn`, and end the background threads after it."""

    @wraps(learn)
    def learn_and_close(self: OffPolicy, *args: Any, **kwargs: Any) -> Any:
        self.collector.watch = None
        try:
            return learn(self, *args, **kwargs)
        finally:
            self.collector.sampler.close()

    return learn_and_close  # type: ignore[return-value]


class OffPolicy(Fast, OffPolicyAlgorithm):
    """The base of DQN and SAC. If the replay buffer is no `ReplayStorage`, SB3's own loops run."""

    dims: list[int]  # sizes of the sub-actions; their sum is a mask's width
    use_masking = False
    prioritized: Mapping[str, Any] | None = None  # arguments of prioritized replay; None: uniform replay

    def _setup_model(self) -> None:
        infos_stored = self.replay_buffer_kwargs.get("copy_info_dict")  # only SB3's HerReplayBuffer stores infos
        if self.replay_buffer is None and self.replay_buffer_class in STOCK_REPLAYS and not infos_stored:
            masked = self.use_masking and self.env is not None and slots_of(self.env).masked
            self.replay_buffer = replay_of(self, sum(self.dims) if masked else None)
        super()._setup_model()
        self._attach()

    def overrides(self, base: type[OffPolicy], *methods: str) -> dict[str, bool]:
        """For each of these methods of `base`: "CLASS.METHOD is overridden" → whether this is true."""
        kind = type(self)
        return {f"{kind.__name__}.{name} is overridden": getattr(kind, name) is not getattr(base, name)
                for name in methods}  # fmt: skip

    # --- collecting

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: ActionNoise | None = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        """Act, step and store until the next update is due."""
        source = self.collector.source_of(env)
        masked = self.use_masking and source.masked
        storage: Any = self.replay_buffer
        if masked or not isinstance(storage, ReplayStorage):
            storage = storage_of(self, sum(self.dims) if masked else None)
        if storage is None:
            return super().collect_rollouts(
                env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
            )
        if self.engine.settings.compile_mode is not None and (failure := self.prepare(env)):
            warnings.warn(f"{failure}; training continues without torch.compile", stacklevel=3)
        callback.update_locals(  # variables of SB3's loop that are the same in all steps
            {"self": self, "env": env, "callback": callback, "train_freq": train_freq, "replay_buffer": storage,
             "action_noise": action_noise, "learning_starts": learning_starts, "log_interval": log_interval,
             "continue_training": True}
        )  # fmt: skip
        with self.collector.clock.phase("buffer"):
            done = self._collect(source, storage, callback, train_freq, action_noise, learning_starts, log_interval)
        if isinstance(storage, HindsightStorage) and not storage.can_draw:  # updates need an ended episode
            self.learning_starts = max(self.learning_starts, self.num_timesteps)
        return done

    def _collect(
        self,
        source: SlotSource,
        storage: ReplayStorage,
        callback: BaseCallback,
        train_freq: TrainFreq,
        action_noise: ActionNoise | None,
        learning_starts: int,
        log_interval: int | None,
    ) -> RolloutReturn:
        collector, clock, num_envs = self.collector, self.collector.clock, source.num_envs
        actor: Any = self.actor if self.use_sde else None
        num_steps, num_episodes = 0, 0
        if self.engine.kind == "torch" or self.policy.training:
            self.policy.set_training_mode(False)  # compiled kernels ignore this mode
        if actor is not None:
            actor.reset_noise(num_envs)
        with clock.phase("log"):
            callback.on_rollout_start()  # callbacks may change the engine
        while should_collect_more_steps(train_freq, num_steps, num_episodes):
            clock.enter("action")
            if actor is not None and self.sde_sample_freq > 0 and num_steps % self.sde_sample_freq == 0:
                actor.reset_noise(num_envs)
            chosen = source.fill(self) if source.fill else self._choose(source, action_noise, learning_starts)
            actions, buffer_actions = chosen
            step = collector.step(source, actions)
            self.num_timesteps += source.slots.transitions
            num_steps += 1
            if self.engine.guard is not None:  # the envs' newest observations are stored too, so check them
                normalizer = self._vec_normalize_env
                check_step(step.observations, step.rewards, source.slots.finished, self.num_timesteps, normalizer)
            clock.enter("log")
            callback.update_locals(
                {"num_collected_steps": num_steps, "num_collected_episodes": num_episodes, "actions": actions,
                 "buffer_actions": buffer_actions, "new_obs": step.observations, "rewards": step.rewards,
                 "dones": step.dones, "infos": step.infos}
            )  # fmt: skip
            if not callback.on_step():
                return RolloutReturn(num_steps * num_envs, num_episodes, continue_training=False)
            clock.enter("buffer")
            note_episodes(self, step.infos, step.dones)
            with storage.lock:
                self._store(source, storage, buffer_actions, step)
                if any(no_transition := left_out(source.slots)):
                    storage.discard(*no_transition)
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()  # DQN updates exploration rate and target network here
            for env in step.dones.nonzero()[0]:
                num_episodes += 1
                self._episode_num += 1
                if action_noise is not None:
                    action_noise.reset(**({"indices": [env]} if num_envs > 1 else {}))
                if log_interval is not None and self._episode_num % log_interval == 0:
                    self.dump_logs()
        with clock.phase("log"):
            callback.on_rollout_end()
        return RolloutReturn(num_steps * num_envs, num_episodes, continue_training=True)

    @abstractmethod
    def _choose(
        self, source: SlotSource, action_noise: ActionNoise | None, learning_starts: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Actions (N, ...) for the envs, and those for the replay buffer. Before `learning_starts` they are random."""

    def _store(self, source: SlotSource, storage: ReplayStorage, actions: NDArray[Any], step: EnvStep) -> None:
        """Store one transition of each env, as SB3 does it."""
        self._store_transition(storage, actions, *step)

    # --- learning

    def replay(self) -> Replay:
        """The replay buffer with its sampler. Updates take batches from it."""
        buffer: Any = self.replay_buffer
        return Replay(buffer, self.collector.sampler, self._vec_normalize_env)

    def prefetch_batches(self, deterministic: bool = False, depth: int = 1) -> None:
        """Draw the next update's batches in a thread; see `Prefetching`.

        With `deterministic` no thread is used: its timing would decide which transitions are in a batch.
        """
        self.collector.sampler.close()
        self.collector.sampler = Direct() if deterministic else Prefetching(self.seed, depth)

    def _record(self, engine: Engine, done: Statistics) -> None:
        """Log the means over all updates that were not skipped, in float64 as SB3 does it."""
        engine.clock.enter("log")
        record, self._n_updates = self.logger.record, self._n_updates + done.epochs
        for name, values in done.terms.items():
            if done.skipped and len(values) == len(done.norms):  # fewer: some batches lack the term
                values = values[np.isfinite(done.norms)]
            record(f"train/{name}", float(values.mean(dtype=np.float64)) if len(values) else np.nan)
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        if engine.skipped_steps:
            record("train/skipped_steps", engine.skipped_steps)
        if engine.guard is not None:
            engine.guard.note(self, done.norms, lambda: why_replay(self, done.blamed), expected=done.expected_skips)


def left_out(slots: Slots) -> tuple[list[int], list[int], list[int]]:
    """Env lists: a fault lost the step; the step ignored its action; the episode's next step will ignore its action."""
    resets, rests = ([] if rows is None else rows.nonzero()[0].tolist() for rows in (slots.resets, slots.rests))
    lost = [episode.env_index for episode in slots.finished if episode.lost]
    return lost, resets, [env for env in rests if not (slots.terminations[env] or slots.truncations[env])]
