"""SequenceKernelEngine: the `KernelEngine` for a recurrent actor-critic with LSTMs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from fasttrain.accelerators.kernels import CPU, KernelEngine, noted_calls, zeros
from fasttrain.accelerators.layout import Place, lay_out
from fasttrain.algos.engine import RECURRENT
from fasttrain.batch import Float32Array, Int64Array
from fasttrain.buffers.recurrent import Memory, RecurrentStorage
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.nets import Layout
from fasttrain_kernels.ppo import Scratch
from fasttrain_kernels.recurrent import Cells, Lstms, Past, Remembered, Sequences
from fasttrain_kernels.simd import PAD, TILE_ROWS


class SequenceKernelEngine(KernelEngine):
    """The engine for a recurrent policy that `eligible.py` accepts."""

    float32_only = RECURRENT

    def _laid_out(self, policy: Any) -> tuple[Layout, list[Place], int, int]:
        lstms: list[Any] = [policy.lstm_actor, *([] if policy.lstm_critic is None else [policy.lstm_critic])]
        units, inputs, size = lstms[0].hidden_size, lstms[0].input_size, 0
        places, offsets = list[Place](), list[list[int]]()
        for lstm in lstms:
            grids = (lstm.weight_ih_l0, inputs), (lstm.weight_hh_l0, units), (lstm.bias_ih_l0, 1), (lstm.bias_hh_l0, 1)
            offsets.append([])
            for parameter, rows in grids:
                offsets[-1].append(size)
                places.append(Place(parameter, size, rows, 4 * units, transposed=parameter.dim() == 2))
                size += rows * 4 * units
        where = np.array(offsets)
        self.lstms = Lstms(units, *(np.ascontiguousarray(where[:, column]) for column in (0, 1, slice(2, 4))))
        self._cells: dict[int, Cells] = {}  # number of threads → working memory
        nets = [[*net[0::2]] for net in (policy.mlp_extractor.policy_net, policy.mlp_extractor.value_net)]
        return lay_out(policy, inputs, [units, units], nets, places, size)

    def _remembered(self, memory: Memory, scratch: Scratch) -> tuple[Remembered, RNNStates]:
        before = [np.ascontiguousarray(part[0]) for part in (*memory.states.pi, *memory.states.vf)]
        after = [torch.empty(memory.states.pi[0].shape) for _ in range(2 * len(self.lstms.inputs))]
        after += after[: 4 - len(after)]
        past = Past(tuple(before), np.asarray(memory.episode_starts, np.float32))  # type: ignore[arg-type]
        views: Any = tuple(part[0].numpy() for part in after)
        remembered = Remembered(self.lstms, past, views, self._cells_for(scratch, len(scratch.ones)))
        return remembered, RNNStates((after[0], after[1]), (after[2], after[3]))

    def _sequences(self, data: RecurrentStorage, order: Int64Array, batch_size: int, scratch: Scratch) -> Sequences:
        cells = self._cells_for(scratch, min(batch_size, len(order)))
        return Sequences(data.begins(order), self.lstms, Past(*data.past()), cells)

    def _cells_for(self, scratch: Scratch, count: int) -> Cells:
        """Working memory for minibatches of up to `count` rows, with one part for each thread, as in `scratch`."""
        parts, lstms, units = len(scratch.gradients), len(self.lstms.inputs), self.lstms.units
        cells = self._cells.get(parts)
        if cells is None or cells.order.shape[1] < count:
            # A thread's part has room for the whole minibatch: one thread may get all rows. Pages of `empty` arrays
            # that are never written take no memory. Zeros for 8 parts, 2,048 rows and 256 units would take 464 MB.
            high = -(-count // TILE_ROWS) * TILE_ROWS
            self._cells[parts] = cells = Cells(
                order=np.zeros((parts, count), np.int64),
                places=np.zeros((parts, 5, count + 2), np.int64),
                begun=empty(parts, lstms, 2, count, units),
                gates=empty(parts, lstms, count, 4 * units),
                outputs=empty(parts, lstms, 5, count, units),
                rows=zeros(parts, 3, high, units),
                sums=zeros(parts, high, 4 * units),
                bias=zeros(parts, 4 * units),
            )
        return cells


def empty(*shape: int) -> Float32Array:
    """An array that is not initialised, from torch, because torch aligns memory with cache lines."""
    array: Float32Array = torch.empty(shape).numpy()
    return array


def kernel_calls() -> list[KernelCall]:
    """All calls of kernels by a `SequenceKernelEngine`."""
    shape = (1, PAD)
    blank = Memory.blank(1, shape, CPU)
    return noted_calls(SequenceKernelEngine, RecurrentActorCriticPolicy, RecurrentStorage, blank,
                       state_shape=shape, own_critic=True)  # fmt: skip
