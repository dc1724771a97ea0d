"""Collecting a rollout while groups of envs (a worker's, or a game with an engine) step on their own.

The policy acts for whoever is ready. Within a rollout fast groups run ahead of slow ones; every env still contributes
exactly T steps to every rollout, all taken by the same policy, so that no env and no short episode is favoured: only
the order of the random draws differs from collecting in lockstep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.causes import check_actions
from fasttrain.algos.engine import Engine
from fasttrain.algos.fast import bootstrap_truncated, clip_actions, note_episodes
from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import Int64Array, each_array, select_rows
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.vec.base import SlotSource, SlotVecEnv, copy_observations
from fasttrain.vec.groups import Groups, GroupStep


def groups_of(model: Any, source: SlotSource) -> Groups | None:
    """The envs in groups under schedule=first_ready; None where all step together."""
    if model.collector.schedule != "first_ready" or model.use_sde or not isinstance(source, SlotVecEnv):
        return None
    found: Groups | None = source.groups()
    return found


class GroupedRollout:
    """One rollout of T steps of N envs in groups.

    Args:
        model: the algorithm; `_last_obs` and `_last_episode_starts` are where it begins.
        groups: its env's rows in groups.
        storage: filled with what was acted on and what came of it.
        engine: acts.
        masked: whether the algorithm uses masks.
    """

    def __init__(self, model: Any, engine: Engine, groups: Groups, storage: RolloutStorage, masked: bool) -> None:
        self.model, self.engine, self.groups, self.storage, self.masked = model, engine, groups, storage, masked
        self.clock = model.collector.clock
        self.guarded = engine.guard is not None
        self.dims = action_dims(model.action_space) if masked else []
        self.begun = model.num_timesteps
        envs, steps = storage.num_envs, storage.num_steps
        self.every: Int64Array = np.arange(envs)
        self.taken: Int64Array = np.zeros(envs, np.int64)  # steps that each env has finished
        self.under_way: list[int] = []  # groups, in the order they were sent
        self.dones = np.zeros((steps, envs), np.bool_)
        self.missing: Int64Array = np.full(steps, envs)  # envs that have not finished a step
        self.infos: dict[int, list[dict[str, Any]]] = {}
        self.observations: Any = copy_observations(model._last_obs)
        self.memory: Memory | None = None if (memory := model.memory()) is None else memory.copied()
        # LSTM states including the steps under way; `memory` gets them as these steps are finished.
        self.ahead: Any = None if memory is None else memory.copied()
        storage.episode_starts[0] = model._last_episode_starts

    def collect(self, callback: BaseCallback) -> bool:
        """Until every env has T steps. False: the callback asked to stop."""
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
        """Draw the next actions of some groups in one forward, and send them off."""
        if not groups:
            return
        rows, slots = self.groups.rows_of(groups), self.groups.env.slots
        masks, now = None, self.begun + (int(self.taken[rows].max()) + 1) * self.storage.num_envs
        if self.masked:
            masks = slots.action_masks[rows]
            self.model.collector.empty_masks.check(masks, self.dims, now - self.storage.num_envs, self.every[rows])
        self.clock.enter("action")
        memory = None if self.memory is None else self.memory.of(rows)
        acted = self.engine.act(select_rows(self.observations, rows), masks, memory)
        if memory is not None:
            self.ahead.put(rows, acted.memory)
        stored: Any = acted.stored
        drawn = clip_actions(self.model, acted.actions)
        self.clock.enter("env_step")
        steps = self.taken[rows]
        if self.guarded:
            check_actions(drawn, self.model.policy, stored.observations, now, rows)
        self.groups.send_all(groups, drawn)
        self.under_way += groups
        self.clock.enter("buffer")
        self.storage.put(
            steps, rows, stored.observations, stored.actions, stored.values, stored.log_probs, stored.action_masks,
            stored.memory,
        )  # fmt: skip

    def _take(self, groups: list[int]) -> None:
        """Store the outcomes of some groups' steps."""
        outcomes, taken = self.groups.take(groups), {*groups}
        self.under_way = [group for group in self.under_way if group not in taken]
        self.clock.enter("buffer")
        for one in outcomes:
            self._store(one, self.every[one.rows] if isinstance(one.rows, slice) else one.rows)

    def _store(self, outcome: GroupStep, rows: Int64Array) -> None:
        """Store the outcome of the last action of these envs, which may be at different steps."""
        slots, storage, steps = self.groups.env.slots, self.storage, self.taken[rows]
        storage.rewards[steps, rows] = slots.rewards[rows]
        dones = slots.terminations[rows] | slots.truncations[rows]
        self.dones[steps, rows] = dones
        within = steps + 1 < storage.num_steps
        storage.episode_starts[steps[within] + 1, rows[within]] = dones[within]
        for step in {int(self.taken[episode.env_index]) for episode in outcome.finished}:
            finished = [episode for episode in outcome.finished if self.taken[episode.env_index] == step]
            if any(episode.truncated or episode.lost for episode in finished):  # reading waits for the device
                values = storage.row("values", step)
                after = None if self.ahead is None else self.ahead.states
                bootstrap_truncated(
                    self.engine, self.model.gamma, finished, storage.rewards[step], values, storage, step, after
                )
        each_array(lambda seen, now: seen.__setitem__(rows, now), self.observations, outcome.observations)
        if self.memory is not None:
            self.memory.put(rows, self.ahead.of(rows).states)
            self.memory.episode_starts[rows] = dones
        self._note(outcome, steps)
        self.taken[rows] += 1
        np.subtract.at(self.missing, steps, 1)

    def _note(self, outcome: GroupStep, steps: Int64Array) -> None:
        """Sort the infos by step; where there are records, all these envs are a worker's, at the same step."""
        for step in {*steps.tolist()}:
            if step not in self.infos:
                self.infos[step] = [{} for _ in range(self.storage.num_envs)]
            finished = [episode for episode in outcome.finished if self.taken[episode.env_index] == step]
            self.groups.env.fill_infos(self.infos[step], outcome.rows, outcome.records, finished)

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
        note_episodes(model, infos, dones)
        return True

    def _leave(self) -> None:
        """Where the next rollout begins; no group is under way."""
        self.groups.finish()
        self.model._last_obs = copy_observations(self.groups.env.slots.observations)
        if self.memory is None:
            slots = self.groups.env.slots
            self.model._last_episode_starts = slots.terminations | slots.truncations
        else:
            self.model.remember(self.memory.states)
            self.model._last_episode_starts = self.memory.episode_starts  # a first decision that was refused still is
