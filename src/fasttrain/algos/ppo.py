"""PPO and MaskablePPO: SB3's classes with a faster rollout and a faster update, and the same numbers.

Each class overrides `_setup_model`, `collect_rollouts`, `train` and the exclude list of `save`; `_Fast` holds what both
share. `learn`, `predict`, `load`, `set_env`, schedules, loggers and callbacks are SB3's own.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.fast import FastState, has_stock_buffer, storage_of
from fasttrain.algos.grouped import GroupedRollout
from fasttrain.algos.overlap import OverlappedUpdate
from fasttrain.algos.rollouts import bootstrap_truncated, clip_actions, note_episodes
from fasttrain.algos.update import MinibatchStep, Statistics, clip_ranges, update
from fasttrain.batch import BoolArray
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.engines.causes import check_actions, check_rollout, check_step
from fasttrain.engines.devices import Transfer
from fasttrain.engines.guard import GuardedHead
from fasttrain.engines.heads import ActingHead, MaskCheck
from fasttrain.engines.torch import Acceleration
from fasttrain.errors import EnvError, EnvSpecError, NoMasksError
from fasttrain.vec.base import SlotAdapter, SlotSource, copy_observations
from fasttrain.vec.groups import WorkerGroups


class _Fast(OnPolicyAlgorithm):
    """What PPO and MaskablePPO share; it stands before the stock class among their bases."""

    _fast: FastState
    _masked: ClassVar[bool]

    def _setup_model(self) -> None:
        super()._setup_model()
        _attach(self, self._masked)

    def train(self) -> None:
        if not has_stock_buffer(self):
            return super().train()
        with self._fast.clock.phase("buffer"):
            train(self)

    def use_kernels(self, threads: int = 1) -> None:
        """Act and learn through compiled kernels where the policy allows it: faster, equal up to rounding and draws."""
        self._fast.fused, self._fast.max_threads = True, threads

    def accelerate(self, settings: Acceleration) -> None:
        """Where no kernels serve: mixed precision, torch.compile, CUDA graphs, pinned memory, smaller pieces."""
        self._fast.acceleration = settings

    def overlap_updates(self, cores: int) -> None:
        """Update in a thread while the next rollout is collected, with weights one update old; see `overlap.py`.

        Comes after `use_kernels` and `accelerate`. The kernels' threads go to the update, one core is left to acting.
        """
        self._fast.overlap = OverlappedUpdate(self, max(1, min(self._fast.max_threads, cores - 1)))
        self._fast.max_threads = 1

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_fast"]


class PPO(_Fast, stable_baselines3.PPO):
    """Drop-in for `stable_baselines3.PPO`."""

    _masked = False

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        if not has_stock_buffer(self):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        _warm_up_or_warn(self, env, n_rollout_steps)
        with self._fast.clock.phase("buffer"):
            return collect(self, env, callback, n_rollout_steps, use_masking=False)


class MaskablePPO(_Fast, sb3_contrib.MaskablePPO):
    """Drop-in for `sb3_contrib.MaskablePPO`. A state without a legal action is an `EnvError`, not a random guess."""

    _masked = True

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        if not has_stock_buffer(self):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps, use_masking)
        _warm_up_or_warn(self, env, n_rollout_steps)
        with self._fast.clock.phase("buffer"):
            return collect(self, env, callback, n_rollout_steps, use_masking)


def _attach(model: OnPolicyAlgorithm, masked: bool) -> None:
    """Give the model its fast state and swap SB3's rollout buffer, which is freed, for ours."""
    model._fast = FastState(masked=masked)  # type: ignore[attr-defined]
    if has_stock_buffer(model):
        storage_of(model, model.n_steps, model.n_envs)


def train(model: OnPolicyAlgorithm) -> None:
    """Update on the filled storage, now or beside the next rollout; the last one of `learn` has nothing beside it."""
    overlap = model._fast.overlap  # type: ignore[attr-defined]
    if overlap is None or model.num_timesteps >= model._total_timesteps:
        update(model)
    else:
        overlap.start()


def warm_up(model: OnPolicyAlgorithm, env: VecEnv) -> str:
    """Compile and capture what `accelerate` asked for, if that is still to do, or to do for other sizes than before.

    Its time belongs to no phase.

    Returns:
        why training goes on eagerly, if compiling failed just now; else nothing.
    """
    fast: FastState = model._fast  # type: ignore[attr-defined]
    accelerator = fast.accelerator_of(model.policy)
    if accelerator.settings.compile_mode is None or fast.kernels_of(model.policy, model.observation_space) is not None:
        return ""
    groups = None if model.use_sde else fast.groups_of(fast.source_of(env))
    sizes = [env.num_envs, *([rows.stop - rows.start for rows in groups.rows] if groups else ())]
    if not accelerator.needs_warm_up(model, sizes):
        return ""
    with fast.clock.phase("other"):
        accelerator.warm_up(model, sizes)
        if accelerator.graphs:
            accelerator.graph_of_update(MinibatchStep(model, *clip_ranges(model), Statistics()), model)
    return accelerator.failure


def _warm_up_or_warn(model: OnPolicyAlgorithm, env: VecEnv, n_rollout_steps: int) -> None:
    storage_of(model, n_rollout_steps, env.num_envs)  # whose sizes are those to compile for
    if failure := warm_up(model, env):
        warnings.warn(f"{failure}; training goes on without", stacklevel=4)


def collect(
    model: OnPolicyAlgorithm, env: VecEnv, callback: BaseCallback, n_rollout_steps: int, use_masking: bool
) -> bool:
    """Fill the model's storage with `n_rollout_steps` vector steps. False: a callback asked to stop.

    The names of SB3's local variables (`infos`, `dones`, `new_obs`, …) are kept where callbacks read them.
    """
    fast: FastState = model._fast  # type: ignore[attr-defined]
    clock, policy = fast.clock, model.policy
    if model._last_obs is None or model._last_episode_starts is None:
        raise RuntimeError("there is no observation to start from: call learn(), which resets the env first")
    rollout_buffer = storage_of(model, n_rollout_steps, env.num_envs)
    source = _source(fast, env, model._last_episode_starts, use_masking)
    check_masks = MaskCheck(model.action_space) if use_masking else None
    policy.set_training_mode(False)
    rollout_buffer.reset()
    if model.use_sde:
        policy.reset_noise(env.num_envs)
    callback.update_locals({**locals(), "self": model})  # `env` and others that stay, once and not at every step
    with clock.phase("log"):
        callback.on_rollout_start()  # before the head draws a rollout's random numbers: checkpoints are taken there
    groups = None if model.use_sde else fast.groups_of(source)
    head = _acting_head(model, None if groups else rollout_buffer)
    try:
        going_on = _fill(model, source, groups, rollout_buffer, head, check_masks, callback)
        if going_on:
            clock.enter("buffer")
            with torch.no_grad():
                values = head.values(obs_as_tensor(model._last_obs, model.device))
            rollout_buffer.compute_returns_and_advantages(values, model._last_episode_starts)
    finally:
        if fast.overlap is not None:
            clock.enter("train")
            fast.overlap.finish()
    if not going_on:
        return False
    clock.enter("log")
    callback.update_locals({**locals(), "self": model})
    callback.on_rollout_end()
    return True


def _fill(
    model: OnPolicyAlgorithm,
    source: SlotSource,
    groups: WorkerGroups | None,
    rollout_buffer: RolloutStorage,
    head: ActingHead,
    check_masks: MaskCheck | None,
    callback: BaseCallback,
) -> bool:
    """T steps of all envs into the storage. False: the callback asked to stop."""
    if groups is None:
        return _collect_in_lockstep(model, source, rollout_buffer, head, check_masks, callback)
    fast: FastState = model._fast  # type: ignore[attr-defined]
    transfer = fast.accelerator_of(model.policy).transfer
    masked = check_masks is not None
    rollout = GroupedRollout(model, groups, rollout_buffer, head, masked, fast.clock, fast.first_ready, transfer)
    return rollout.collect(callback)


def _collect_in_lockstep(
    model: OnPolicyAlgorithm,
    source: SlotSource,
    rollout_buffer: RolloutStorage,
    head: ActingHead,
    check_masks: MaskCheck | None,
    callback: BaseCallback,
) -> bool:
    """T times: act for all envs, step all envs, store. False: the callback asked to stop."""
    fast: FastState = model._fast  # type: ignore[attr-defined]
    clock, policy = fast.clock, model.policy
    transfer: Transfer = fast.accelerator_of(policy).transfer
    normalizer = model._vec_normalize_env
    for n_steps in range(rollout_buffer.num_steps):
        clock.enter("env_step")  # reading the masks is the env's work
        action_masks = None
        if check_masks is not None:
            place = rollout_buffer.place_masks(n_steps)
            action_masks = _read_masks(source, check_masks, model.num_timesteps, place)
        clock.enter("action")
        if model.use_sde and model.sde_sample_freq > 0 and n_steps % model.sde_sample_freq == 0:
            policy.reset_noise(source.num_envs)
        with torch.no_grad():
            obs_tensor = transfer.observations(model._last_obs)
            mask_tensor = None if action_masks is None else transfer.masks(action_masks)
            action_tensor, values, log_probs = _act(model, head, obs_tensor, mask_tensor)
        actions = transfer.actions(action_tensor)
        clipped_actions = clip_actions(model, actions)
        if fast.guard is not None:
            check_actions(clipped_actions, policy, obs_tensor, model.num_timesteps + source.num_envs)
        clock.enter("env_step")
        source.step_slots(clipped_actions)
        model.num_timesteps += source.num_envs
        clock.enter("buffer")
        slots = source.slots
        lent = rollout_buffer.place_observations(n_steps + 1) if fast.lends_observations else None
        new_obs: Any = _kept(source, lent)
        rewards = np.array(slots.rewards, np.float32)
        dones = slots.terminations | slots.truncations
        infos = source.infos()
        if fast.guard is not None and (slots.finished or normalizer is not None):
            # Of last observations only those count that are going to be rated, and they are not kept; nor are the
            # numbers that a normalizer was given.
            cut = [episode for episode in slots.finished if episode.truncated and not episode.lost]
            check_step(new_obs, rewards, cut, model.num_timesteps, normalizer)
        clock.enter("log")
        callback.update_locals({**locals(), "self": model})
        if not callback.on_step():
            return False
        clock.enter("buffer")
        note_episodes(model, source, infos, dones)
        bootstrap_truncated(model, head, slots.finished, rewards, values)
        starts: Any = model._last_episode_starts
        # The storage's own `add`, for tensors; the buffer's is stock's, for arrays.
        RolloutStorage.add(rollout_buffer, obs_tensor, action_tensor, rewards, starts, values, log_probs, mask_tensor)
        model._last_obs, model._last_episode_starts = new_obs, dones
    if fast.guard is not None and normalizer is None:
        check_rollout(rollout_buffer, new_obs, model.num_timesteps)
    return True


def _act(model: OnPolicyAlgorithm, head: ActingHead, observations: Any, masks: Any) -> tuple[Any, Any, Any]:
    try:
        return head.act(observations, masks)
    except EnvError:  # for want of finite outputs: if that is the observation's fault, say which and since when
        if model._fast.guard is not None:  # type: ignore[attr-defined]
            check_step(model._last_obs, np.zeros(1, np.float32), (), model.num_timesteps)  # type: ignore[arg-type]
        raise


def _acting_head(model: OnPolicyAlgorithm, storage: RolloutStorage | None) -> ActingHead:
    """The compiled kernels with the weights as they are now, or the policy's own modules.

    `storage` is what they may take for the rows they acted on, step by step; None if they act in another order.
    """
    fast: FastState = model._fast  # type: ignore[attr-defined]
    kernels = fast.kernels_of(model.policy, model.observation_space)
    if kernels is None:
        head = fast.accelerator_of(model.policy).acting_head(model.action_space)
        return head if fast.guard is None else GuardedHead(head, model.policy)
    kernels.begin_rollout(storage)
    return kernels


def _source(fast: FastState, env: VecEnv, episode_starts: NDArray[Any], use_masking: bool) -> SlotSource:
    source = fast.source_of(env)
    if use_masking and not source.masked:
        raise NoMasksError(
            f"{type(env).__name__} has no action masks: give the env an action_masks() method, wrap it in "
            "sb3_contrib's ActionMasker, or call learn(use_masking=False)"
        )
    if isinstance(source, SlotAdapter):
        source.begin_episodes(np.asarray(episode_starts, np.bool_))
    return source


def _read_masks(source: SlotSource, check: MaskCheck, step: int, place: BoolArray | None) -> BoolArray:
    """A checked copy of the masks (N, A), in `place` if given: the step that follows overwrites the slots."""
    masks = source.read_masks()
    if masks is None:
        raise EnvSpecError(f"the env had action masks when the rollout began and has none at step {step}")
    check(masks, step)
    if place is None:
        return np.array(masks)
    np.copyto(place, masks)
    return place


def _kept(source: SlotSource, place: Any) -> Any:
    """The observations in the slots, safe from the next step: in `place` if given, so that storing costs no copy."""
    observations = source.slots.observations
    if not source.reuses_arrays:
        return observations
    if place is None:
        return copy_observations(observations)
    if isinstance(observations, dict):
        for key, part in observations.items():
            np.copyto(place[key], part)
    else:
        np.copyto(place, observations)
    return place
