"""One vector step of DQN: choose actions, step the envs, store a transition per env, until an update is due."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import RolloutReturn, TrainFreq
from stable_baselines3.common.utils import should_collect_more_steps

from fasttrain.algos.fast import Came, note_episodes, read_masks
from fasttrain.batch import LAST_MASKS, BoolArray, FinishedEpisode, draw_choices, each_array, opened
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.engines.causes import check_step
from fasttrain.engines.heads import action_dims
from fasttrain.vec.base import SlotSource, copy_observations


def collect(
    model: Any,
    source: SlotSource,
    masked: bool,
    storage: ReplayStorage,
    callback: BaseCallback,
    train_freq: TrainFreq,
    learning_starts: int,
    log_interval: int | None,
) -> RolloutReturn:
    """As SB3's `collect_rollouts`: act, step, store, until there is enough for the next update.

    `rollout_start` of callbacks comes before anything is asked of the engine, which may be exchanged there.
    """
    collector, clock = model.collector, model.collector.clock
    num_collected_steps, num_collected_episodes = 0, 0
    model.policy.set_training_mode(False)
    with clock.phase("log"):
        callback.on_rollout_start()
    while should_collect_more_steps(train_freq, num_collected_steps, num_collected_episodes):
        clock.enter("env_step")  # reading the masks is the env's work
        masks = read_masks(collector, source, model.action_space, model.num_timesteps) if masked else None
        masks = None if masks is None else opened(masks, action_dims(model.action_space))
        clock.enter("action")
        actions = _choose(model, learning_starts, source.num_envs, masks)
        came = collector.step(source, actions)
        model.num_timesteps += source.slots.transitions
        num_collected_steps += 1
        if model.engine.guard is not None:  # last observations are stored, even of episodes that ended by the rules
            normalizer = model._vec_normalize_env
            check_step(came.observations, came.rewards, source.slots.finished, model.num_timesteps, normalizer)
        clock.enter("log")
        callback.update_locals(
            {"num_collected_steps": num_collected_steps, "num_collected_episodes": num_collected_episodes,
             "actions": actions, "buffer_actions": actions, "new_obs": came.observations, "rewards": came.rewards,
             "dones": came.dones, "infos": came.infos}
        )  # fmt: skip
        if not callback.on_step():
            return RolloutReturn(num_collected_steps * source.num_envs, num_collected_episodes, continue_training=False)
        clock.enter("buffer")
        note_episodes(model, came.infos, came.dones)
        _store(model, source, storage, actions, came, masked)
        model._update_current_progress_remaining(model.num_timesteps, model._total_timesteps)
        model._on_step()
        for _ in range(np.count_nonzero(came.dones)):
            num_collected_episodes += 1
            model._episode_num += 1
            if log_interval is not None and model._episode_num % log_interval == 0:
                model.dump_logs()
    with clock.phase("log"):
        callback.on_rollout_end()
    return RolloutReturn(num_collected_steps * source.num_envs, num_collected_episodes, continue_training=True)


def _choose(model: Any, learning_starts: int, count: int, masks: BoolArray | None) -> NDArray[Any]:
    """ε-greedy as SB3: one draw decides for the whole vector step; before `learning_starts` all is random."""
    if model.num_timesteps < learning_starts or np.random.rand() < model.exploration_rate:
        return random_actions(model.action_space, count, masks, model.collector.local_random_actions)
    chosen: NDArray[Any] = model.engine_now().act(model._last_obs, masks).actions
    return chosen


def random_actions(
    space: spaces.Space[Any], count: int, masks: BoolArray | None, at_once: bool
) -> NDArray[Any]:  # (count,) or (count, K)
    """Uniform over the (legal) actions of each row: by the space's own sampler, or all in one draw of its stream."""
    dims = action_dims(space)
    if not at_once:
        if masks is None:
            return np.array([space.sample() for _ in range(count)])
        ends = np.cumsum(dims)[:-1]
        given = masks.astype(np.int8)
        rows = [row if isinstance(space, spaces.Discrete) else tuple(np.split(row, ends)) for row in given]
        return np.array([space.sample(mask=row) for row in rows])
    rng = space.np_random
    size = (count, len(dims))
    drawn = rng.integers(0, dims, size=size) if masks is None else draw_choices(rng, dims, count, masks)
    return drawn[:, 0] if isinstance(space, spaces.Discrete) else drawn


def _store(
    model: Any, source: SlotSource, storage: ReplayStorage, actions: NDArray[Any], came: Came, masked: bool
) -> None:
    """One transition per env. What normalising wrappers changed is stored as it was, as SB3 does."""
    normalizer, finished = model._vec_normalize_env, source.slots.finished
    seen, rewards, dones = came.observations, came.rewards, came.dones
    if normalizer is None:
        model._last_original_obs = model._last_obs
    else:
        seen, rewards = normalizer.get_original_obs(), normalizer.get_original_reward()
    next_obs = copy_observations(seen) if finished else seen
    for episode in finished:
        _put_last(next_obs, episode, normalizer)
    timeouts = source.slots.truncations & ~source.slots.terminations
    next_masks = opened(_next_masks(source, dones), action_dims(model.action_space)) if masked else None
    before: Any = model._last_original_obs
    with storage.lock:
        storage.put(before, next_obs, actions, rewards, dones, timeouts, next_masks)
        resets = () if source.slots.resets is None else np.flatnonzero(source.slots.resets).tolist()
        if lost := [*(episode.env_index for episode in finished if episode.lost), *resets]:
            storage.discard(lost)
    model._last_obs = came.observations
    if normalizer is not None:
        model._last_original_obs = seen


def _next_masks(source: SlotSource, dones: BoolArray) -> BoolArray:  # (N, A)
    """Masks of the states that the step led to: of an episode's last state what the env told of it, or all legal."""
    masks = np.array(source.read_masks())
    masks[dones] = True
    for episode in source.slots.finished:
        last = episode.info.get(LAST_MASKS)
        if last is not None and episode.truncated:
            masks[episode.env_index] = last
    return masks


def _put_last(next_obs: Any, episode: FinishedEpisode, normalizer: Any) -> None:
    """The episode's last observation in the place of the next one's first."""
    last: Any = episode.final_observation
    if last is None:
        return
    if normalizer is not None:
        last = normalizer.unnormalize_obs(last)
    each_array(lambda part, seen: part.__setitem__(episode.env_index, seen), next_obs, last)
