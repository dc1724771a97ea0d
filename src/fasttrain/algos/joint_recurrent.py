"""Several recurrent policies in one game. A policy keeps its LSTM states until its next decision.

The joint model has the LSTM states of all policies side by side. At its decisions a policy changes its own units. When
an episode begins, all states are zero. All policies have the same kind of cell and the same number of layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.algos.joint import Joint, JointEngine, JointStorage
from fasttrain.algos.recurrent import MaskableRecurrentPPO, RecurrentPPO, states_within
from fasttrain.batch import BoolArray, Int64Array, each_array
from fasttrain.buffers.recurrent import Memory, RecurrentStorage
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.errors import ConfigError


class JointRecurrentEngine(JointEngine):
    """A `JointEngine` of recurrent policies."""

    def own(self, memory: Memory, number: int, rows: Any) -> Memory:
        units = self.policy.units[number]
        states = each_array(lambda part: part[:, rows, units].contiguous(), memory.states)
        return Memory(states, memory.episode_starts[rows])

    def after(self, memory: Memory, changed: list[tuple[int, Any, RNNStates]]) -> RNNStates:
        states: RNNStates = each_array(torch.clone, states_within(memory))
        for number, rows, own in changed:
            units = self.policy.units[number]
            each_array(lambda part, now: part.__setitem__((slice(None), rows, units), now), states, own)  # noqa: B023
        return states


class _MemberStorage(RecurrentStorage):
    def begins(self, order: Int64Array) -> BoolArray:  # (rows,) → (rows,)
        """As `RecurrentStorage.begins`, but a sequence ends only with its episode, not at rows of other policies."""
        episodes = self.episode_starts.cumsum(axis=0).reshape(-1)[order]
        begins: BoolArray = np.ones(len(order), np.bool_)
        begins[1:] = (np.diff(order % self.num_envs) != 0) | (np.diff(episodes) != 0) | (np.diff(order) < 0)
        return begins


class JointRecurrentStorage(JointStorage, RecurrentStorage):
    """A `JointStorage` with LSTM states before each step. A policy's sequence goes on after steps of other policies."""

    def __init__(self, *args: Any, model: Any, **further: Any) -> None:
        super().__init__(*args, model=model, **further)
        for member, units in zip(model.members.values(), model.policy.units, strict=True):
            storage: Any = member.rollout_buffer.storage
            storage._states = tuple(part[..., units] for part in self._states)
            storage.__class__ = _MemberStorage  # the policy's model made a RecurrentStorage


class _JointRecurrent(Joint):
    _storage: ClassVar[type[RolloutStorage]] = JointRecurrentStorage
    _engine_class = JointRecurrentEngine

    def _setup_model(self: Any) -> None:
        super()._setup_model()
        self._last_lstm_states = self.blank_memory(self.n_envs).states

    def remembered(self: Any) -> dict[str, Any]:
        each = [member.remembered() for member in self.members.values()]
        layers, total = each[0]["state_shape"][0], sum(own["state_shape"][1] for own in each)
        if any({**own, "state_shape": own["state_shape"][0]} != {**each[0], "state_shape": layers} for own in each):
            raise ConfigError("recurrent policies need the same cell, layers and kind of critic; they may "
                              "differ in algo.lstm_hidden_size")  # fmt: skip
        return {**each[0], "state_shape": (layers, total), "model": self}


class JointRecurrentPPO(_JointRecurrent, RecurrentPPO):
    """Several RecurrentPPO models in one game."""


class JointMaskableRecurrentPPO(_JointRecurrent, MaskableRecurrentPPO):
    """Several MaskableRecurrentPPO models in one game."""
