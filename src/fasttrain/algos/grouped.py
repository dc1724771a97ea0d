"""Collecting a rollout while groups of workers step on their own.

Pipelined (two groups in turn): while one steps, the policy acts for the other, so that neither waits for the other.
First-ready (every worker a group): the policy acts for whoever is ready. Within a rollout fast workers run ahead of
slow ones; every env still contributes exactly T steps to every rollout, all taken by the same policy, so that no env
and no short episode is favoured: only the order of the random draws differs from collecting in lockstep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor

from fasttrain.algos.heads import ActingHead, MaskCheck
from fasttrain.algos.rollouts import bootstrap_truncated, clip_actions
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.base import copy_observations
from fasttrain.vec.groups import GroupStep, WorkerGroups


class GroupedRollout:
    """One rollout of T steps of N envs in groups.

    Args:
        model: the algorithm; `_last_obs` and `_last_episode_starts` are where it begins.
        groups: its env's workers in groups.
        storage: filled with what was acted on and what came of it.
        head: draws actions.
        check_masks: refuses masks without a legal action; None for an algorithm without masks.
        first_ready: serve whoever is ready, instead of the groups in turn.
    """

    def __init__(
        self,
        model: OnPolicyAlgorithm,
        groups: WorkerGroups,
        storage: RolloutStorage,
        head: ActingHead,
        check_masks: MaskCheck | None,
        clock: PhaseClock,
        first_ready: bool,
    ) -> None:
        self.model, self.groups, self.storage, self.head = model, groups, storage, head
        self.check_masks, self.clock, self.first_ready = check_masks, clock, first_ready
        count, steps = len(groups.rows), storage.num_steps
        self.taken = [0] * count  # steps that each group has finished
        self.under_way: list[int] = []  # in the order they were sent
        self.dones = np.zeros((steps, storage.num_envs), np.bool_)
        self.missing = [count] * steps  # groups that have not finished a step
        self.infos: dict[int, list[dict[str, Any]]] = {}
        self.observations: Any = [_rows(model._last_obs, rows) for rows in groups.rows]
        storage.episode_starts[0] = model._last_episode_starts

    def collect(self, callback: BaseCallback) -> bool:
        """Until every env has T steps. False: the callback asked to stop."""
        reported = 0
        for group in range(len(self.groups.rows)):
            self._act(group)
        while self.under_way:
            self.clock.enter("env_step")
            ready = self.groups.first_ready(self.under_way) if self.first_ready else self.under_way[:1]
            for group in ready:
                self._take(group)
            while reported < len(self.missing) and not self.missing[reported]:
                if not self._report(reported, callback):
                    self.groups.finish(self.under_way)
                    self._leave()
                    return False
                reported += 1
            for group in ready:
                if self.taken[group] < self.storage.num_steps:
                    self._act(group)
        self.groups.finish([])
        self.storage.complete()
        self._leave()
        return True

    def _act(self, group: int) -> None:
        """Draw the group's next actions and send them off."""
        rows, step, slots = self.groups.rows[group], self.taken[group], self.groups.env.slots
        masks = None
        if self.check_masks is not None:
            masks = slots.action_masks[rows].copy()  # type: ignore[index]
            self.check_masks(masks, self.model.num_timesteps)
        self.clock.enter("action")
        with torch.no_grad():
            observations = obs_as_tensor(self.observations[group], self.model.device)
            mask_tensor = None if masks is None else torch.from_numpy(masks).to(self.model.device)
            actions, values, log_probs = self.head.act(observations, mask_tensor)
        drawn = actions.cpu().numpy()
        self.clock.enter("env_step")
        self.groups.send(group, clip_actions(self.model, drawn))
        self.under_way.append(group)
        self.clock.enter("buffer")
        self.storage.put(step, rows, observations, actions, values, log_probs, mask_tensor)

    def _take(self, group: int) -> None:
        """What the group's step brought."""
        done = self.groups.wait(group)
        self.under_way.remove(group)
        self.clock.enter("buffer")
        rows, step, slots = done.rows, self.taken[group], self.groups.env.slots
        rewards = self.storage.rewards[step]
        rewards[rows] = slots.rewards[rows]
        dones = slots.terminations[rows] | slots.truncations[rows]
        self.dones[step, rows] = dones
        if step + 1 < self.storage.num_steps:
            self.storage.episode_starts[step + 1, rows] = dones
        bootstrap_truncated(self.model, done.finished, rewards, self.storage.values[step])
        self.observations[group] = copy_observations(self.groups.observations(group))
        self._note(step, done)
        self.taken[group] += 1
        self.missing[step] -= 1

    def _note(self, step: int, done: GroupStep) -> None:
        if step not in self.infos:
            self.infos[step] = [{} for _ in range(self.storage.num_envs)]
        self.groups.env.fill_infos(self.infos[step], done.rows, done.records, done.finished)

    def _report(self, step: int, callback: BaseCallback) -> bool:
        """Tell the callback of a step that all groups have finished, as SB3 does after each vector step."""
        model, storage = self.model, self.storage
        model.num_timesteps += storage.num_envs
        infos, dones, rewards = self.infos.pop(step), self.dones[step], storage.rewards[step]
        actions, values, log_probs = storage.actions[step], storage.values[step], storage.log_probs[step]
        self.clock.enter("log")
        callback.update_locals({**locals(), "n_steps": step})
        if not callback.on_step():
            return False
        self.clock.enter("buffer")
        model._update_info_buffer(infos, dones)
        return True

    def _leave(self) -> None:
        """Where the next rollout begins."""
        self.model._last_obs = copy_observations(self.groups.env.slots.observations)
        slots = self.groups.env.slots
        self.model._last_episode_starts = slots.terminations | slots.truncations


def _rows(observations: Any, rows: slice) -> Any:
    if isinstance(observations, dict):
        return {key: part[rows] for key, part in observations.items()}
    return observations[rows]
