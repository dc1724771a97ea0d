"""Collects a rollout while groups of envs step independently. A group: the envs of a worker or of a game engine.

The policy acts for the groups that are ready. Within a rollout fast groups run ahead of slow groups. Every env still
contributes exactly T steps to every rollout, all of them by the same policy, so that no env and no short episode is
favoured. Only the order of the random draws differs from collecting in lockstep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.causes import check_actions
from fasttrain.algos.engine import note_episodes
from fasttrain.algos.policy_view import clip_actions
from fasttrain.batch import BoolArray, Int64Array, each_array, select_rows
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.vec.base import SlotSource, SlotVecEnv, copy_observations
from fasttrain.vec.groups import Groups, GroupStep


def groups_of(model: Any, source: SlotSource) -> Groups | None:
    """The groups of envs that step independently; None if all envs step together."""
    if model.collector.schedule == "lockstep" or model.use_sde or not isinstance(source, SlotVecEnv):
        return None
    return source.groups()  # type: ignore[no-any-return]


class GroupedRollout:
    """One rollout of T steps of N envs in groups. `collect` fills the model's storage.

    Args:
        model: the algorithm; the rollout begins at its `_last_obs` and `_last_episode_starts`.
        groups: the groups of the model's envs.
        masked: whether the algorithm uses action masks.
    """

    def __init__(self, model: Any, groups: Groups, masked: bool) -> None:
        self.model, self.groups, self.masked = model, groups, masked
        self.actor = self._actor()  # acts, and gives the values of truncated episodes
        self.storage: RolloutStorage = model.rollout_buffer.storage
        self.clock = model.collector.clock
        self.first_step = model.num_timesteps
        envs, steps = self.storage.num_envs, self.storage.num_steps
        self.every: Int64Array = np.arange(envs)
        self.taken: Int64Array = np.zeros(envs, np.int64)  # (N,) steps that each env has finished
        self.under_way: list[int] = []  # groups that are stepping, in the order in which they got their actions
        self.dones = np.zeros((steps, envs), np.bool_)
        self.missing: Int64Array = np.full(steps, envs)  # (T,) how many envs have not finished each step
        self.infos: dict[int, list[dict[str, Any]]] = {}  # step → infos of all envs
        self.observations: Any = copy_observations(model._last_obs)
        memory = model.memory()
        self.memory: Memory | None = None if memory is None else memory.copied()
        # LSTM states after the steps that have begun. They are written to `memory` when these steps are finished.
        self.next_memory: Any = None if memory is None else memory.copied()
        self.storage.episode_starts[0] = model._last_episode_starts

    def _actor(self) -> Any:
        return self.model

    def collect(self, callback: BaseCallback) -> bool:
        """Collect until every env has T steps. False: the callback asked to stop."""
        reported = 0
        self._act(list(range(len(self.groups.rows))))
        while self.under_way:
            self.clock.enter("env_step")
            ready = self.groups.first_ready(self.under_way)
            self._take(ready)
            while reported < len(self.missing) and not self.missing[reported]:
                if not self._report(reported, callback):
                    self._take(self.under_way)
                    self._leave()
                    return False
                reported += 1
            self._act([group for group in ready if self.taken[self.groups.rows[group].start] < self.storage.num_steps])
        self.storage.complete()
        self._leave()
        return True

    def _act(self, groups: list[int]) -> None:
        """Draw the next actions of these groups in one forward pass, and send them to the envs."""
        if not groups:
            return
        rows, slots = self.groups.rows_of(groups), self.groups.env.slots
        masks, now = None, self.first_step + (int(self.taken[rows].max()) + 1) * self.storage.num_envs
        if self.masked:
            masks = slots.action_masks[rows]
            step = now - self.storage.num_envs
            self.model.collector.empty_masks.check(masks, self.model.dims, step, self.every[rows])
        self.clock.enter("action")
        memory = None if self.memory is None else self.memory.of(rows)
        acted = self.actor.engine.act(select_rows(self.observations, rows), masks, memory)
        if memory is not None:
            self.next_memory.put(rows, acted.lstm_states)
        stored: Any = acted.stored
        actions = clip_actions(self.model, acted.actions)
        self.clock.enter("env_step")
        if self.actor.engine.guard is not None:
            check_actions(actions, self.model.policy, stored.observations, now, rows)
        self.groups.send_all(groups, actions)
        self.under_way += groups
        self.clock.enter("buffer")
        self.storage.put(self.taken[rows], rows, stored)

    def _take(self, groups: list[int]) -> None:
        """Store the outcomes of these groups' steps."""
        outcomes, taken = self.groups.take(groups), {*groups}
        self.under_way = [group for group in self.under_way if group not in taken]
        self.clock.enter("buffer")
        for one in outcomes:
            self._store(one, self.every[one.rows] if isinstance(one.rows, slice) else one.rows)

    def _store(self, outcome: GroupStep, rows: Int64Array) -> None:
        """Store the outcome of the last actions of these envs. These envs may be at different steps."""
        slots, storage, steps = self.groups.env.slots, self.storage, self.taken[rows]
        storage.rewards[steps, rows] = slots.rewards[rows]
        dones = slots.terminations[rows] | slots.truncations[rows]
        within = steps + 1 < storage.num_steps
        storage.episode_starts[steps[within] + 1, rows[within]] = dones[within]
        for step in {int(self.taken[episode.env_index]) for episode in outcome.finished}:
            finished = [episode for episode in outcome.finished if self.taken[episode.env_index] == step]
            if any(episode.truncated or episode.lost for episode in finished):  # copying values makes the host wait
                after = None if self.next_memory is None else self.next_memory.states
                values = storage.row("values", step)
                self.actor.bootstrap_truncated(finished, storage.rewards[step], values, step, after)
        each_array(lambda seen, now: seen.__setitem__(rows, now), self.observations, outcome.observations)
        if self.memory is not None:
            self.memory.put(rows, self.next_memory.of(rows).states)
            self.memory.episode_starts[rows] = dones
        self._note(outcome, steps, rows, dones)
        self.taken[rows] += 1

    def _note(self, outcome: GroupStep, steps: Int64Array, rows: Int64Array, dones: BoolArray) -> None:
        """Store the infos by step. `outcome.records` are of one worker, whose envs are all at the same step."""
        self.dones[steps, rows] = dones
        np.subtract.at(self.missing, steps, 1)
        for step in {*steps.tolist()}:
            if step not in self.infos:
                self.infos[step] = [{} for _ in range(self.storage.num_envs)]
            finished = [episode for episode in outcome.finished if self.taken[episode.env_index] == step]
            self.groups.env.fill_infos(self.infos[step], outcome.rows, outcome.records, finished)

    def _report(self, step: int, callback: BaseCallback) -> bool:
        """Call the callback for a step that all groups have finished, as SB3 does after each vector step."""
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
        note_episodes(model, infos, dones)
        return True

    def _leave(self) -> None:
        """Set the model's state from which the next rollout begins. At this time no group is stepping."""
        self.groups.finish()
        self.model._last_obs = copy_observations(self.groups.env.slots.observations)
        if self.memory is None:
            slots = self.groups.env.slots
            self.model._last_episode_starts = slots.terminations | slots.truncations
        else:
            self.model.remember(self.memory.states)
            self.model._last_episode_starts = self.memory.episode_starts  # True before an episode's first step
