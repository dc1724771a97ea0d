"""Collecting a rollout while groups of workers step on their own.

Pipelined (two groups in turn): while one steps, the policy acts for the other, so that neither waits for the other.
First-ready (every worker a group): the policy acts for whoever is ready. Within a rollout fast workers run ahead of
slow ones; every env still contributes exactly T steps to every rollout, all taken by the same policy, so that no env
and no short episode is favoured: only the order of the random draws differs from collecting in lockstep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.fast import bootstrap_truncated, clip_actions
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.engines.engine import Engine
from fasttrain.engines.guard import check_actions
from fasttrain.vec.base import SlotSource, copy_observations
from fasttrain.vec.groups import GroupStep, WorkerGroups
from fasttrain.vec.shared import SharedMemoryVecEnv


def groups_of(model: Any, source: SlotSource) -> WorkerGroups | None:
    """The workers in groups, as the collector's schedule has it; None where all step together."""
    if model.use_sde or not isinstance(source, SharedMemoryVecEnv):
        return None
    groups = {"pipelined": 2, "first_ready": source.num_workers}.get(model.collector.schedule, 1)
    wanted = min(groups, source.num_workers)
    return WorkerGroups(source, wanted) if wanted > 1 else None


class GroupedRollout:
    """One rollout of T steps of N envs in groups.

    Args:
        model: the algorithm; `_last_obs` and `_last_episode_starts` are where it begins.
        groups: its env's workers in groups.
        storage: filled with what was acted on and what came of it.
        engine: acts.
        masked: whether the algorithm uses masks.
    """

    def __init__(self, model: Any, engine: Engine, groups: WorkerGroups, storage: RolloutStorage, masked: bool) -> None:
        self.model, self.engine, self.groups, self.storage, self.masked = model, engine, groups, storage, masked
        self.clock, self.first_ready = model.collector.clock, model.collector.schedule == "first_ready"
        self.guarded = engine.guard is not None
        self.begun = model.num_timesteps
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
        everyone = list(range(len(self.groups.rows)))
        for first in [everyone] if self.first_ready else [[group] for group in everyone]:
            self._act(first)
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
            self._act([group for group in ready if self.taken[group] < self.storage.num_steps])
        self.groups.finish([])
        self.storage.complete()
        self._leave()
        return True

    def _act(self, groups: list[int]) -> None:
        """Draw the next actions of some groups in one forward, and send them off."""
        if not groups:
            return
        parts, slots = [self.groups.rows[group] for group in groups], self.groups.env.slots
        masks = None
        if self.masked:  # the workers have seen to it that every row has a legal action
            masks = np.concatenate([slots.action_masks[rows] for rows in parts])  # type: ignore[index]
        self.clock.enter("action")
        acted = self.engine.act(_joined([self.observations[group] for group in groups]), masks)
        stored: Any = acted.stored
        drawn = clip_actions(self.model, acted.actions)
        self.clock.enter("env_step")
        ends = np.cumsum([rows.stop - rows.start for rows in parts])
        mine = [slice(end - (rows.stop - rows.start), end) for rows, end in zip(parts, ends.tolist(), strict=True)]
        if self.guarded:
            for group, rows, part in zip(groups, parts, mine, strict=True):
                step = self.begun + (self.taken[group] + 1) * self.storage.num_envs
                check_actions(drawn[part], self.model.policy, _rows(stored.observations, part), step, rows.start)
        for group, part in zip(groups, mine, strict=True):
            self.groups.send(group, drawn[part])
            self.under_way.append(group)
        self.clock.enter("buffer")
        for group, rows, part in zip(groups, parts, mine, strict=True):
            self.storage.put(
                self.taken[group], rows, _rows(stored.observations, part), stored.actions[part], stored.values[part],
                stored.log_probs[part], None if stored.action_masks is None else stored.action_masks[part],
            )  # fmt: skip

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
        if any(episode.truncated or episode.lost for episode in done.finished):  # reading waits for the device
            values = self.storage.row("values", step)
            bootstrap_truncated(self.engine, self.model.gamma, done.finished, rewards, values)
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
        infos, dones = self.infos.pop(step), self.dones[step]
        self.clock.enter("log")
        callback.update_locals(
            {"n_steps": step, "infos": infos, "dones": dones, "rewards": storage.rewards[step],
             "actions": storage.row("actions", step), "values": storage.row("values", step),
             "log_probs": storage.row("log_probs", step)}
        )  # fmt: skip
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


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], dict):
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)
