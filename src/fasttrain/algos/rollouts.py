"""What collecting a rollout needs besides the policy: actions within bounds, and values for episodes that were cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from fasttrain.batch import BoolArray, FinishedEpisode, Float32Array
from fasttrain.engines.heads import ActingHead
from fasttrain.vec.base import SlotAdapter, SlotSource


def clip_actions(model: OnPolicyAlgorithm, actions: NDArray[Any]) -> NDArray[Any]:
    """What the envs get: Box actions within bounds, all others as drawn."""
    space = model.action_space
    if not isinstance(space, spaces.Box):
        return actions
    if model.policy.squash_output:
        actions = model.policy.unscale_action(actions)
        return actions
    clipped: NDArray[Any] = np.clip(actions, space.low, space.high)
    return clipped


def bootstrap_truncated(
    model: OnPolicyAlgorithm, head: ActingHead, finished: list[FinishedEpisode], rewards: Float32Array, values: Any
) -> None:
    """Add gamma × value of the last observation to the last reward of every episode that was cut.

    As SB3 does it, env by env, where every number is to be SB3's: one product of several rows rounds differently, by up
    to one unit in the last place. In one forward where `fused` gave that up.

    An episode that a fault cut (`lost`) says nothing about its last action: the reward is set to what was expected,
    `values` (N,) or (N, 1), so that the advantage is zero.

    Args:
        rewards: (N,) of this step, changed in place.
    """
    for episode in finished:
        if episode.lost:
            rewards[episode.env_index] = float(values.reshape(-1)[episode.env_index])
    cut = [
        episode
        for episode in finished
        if episode.truncated and not episode.lost and episode.final_observation is not None
    ]
    if not cut:
        return
    fused: bool = model._fast.fused  # type: ignore[attr-defined]
    for together in [cut] if fused else [[episode] for episode in cut]:
        last: Any = [episode.final_observation for episode in together]
        keyed = isinstance(last[0], dict)
        stacked = {key: np.stack([row[key] for row in last]) for key in last[0]} if keyed else np.stack(last)
        with torch.no_grad():
            found = head.values(model.policy.obs_to_tensor(stacked)[0]).cpu().numpy().reshape(-1)
        rewards[[episode.env_index for episode in together]] += np.float32(model.gamma) * found


def note_episodes(model: BaseAlgorithm, source: SlotSource, infos: list[dict[str, Any]], dones: BoolArray) -> None:
    """SB3's running statistics of episodes. Slot envs put nothing in the infos of envs that did not end."""
    if isinstance(source, SlotAdapter):
        model._update_info_buffer(infos, dones)
    elif source.slots.finished:
        ended = [episode.env_index for episode in source.slots.finished]
        model._update_info_buffer([infos[index] for index in ended], dones[ended])
