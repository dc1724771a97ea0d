"""An LSTM through packed sequences by compiled kernels, for autograd; and who acts and learns with it.

oneDNN, which torch calls, wants all sequences equally long: of episodes of 20 steps and minibatches of 2,048 two thirds
are padding or, in groups, small calls.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.batch import Int64Array
from fasttrain.engines.recurrent import RecurrentEngine, UnpaddedHead, why_padded
from fasttrain.kernel_cache import KernelCall
from fasttrain.kernels.lstm import lstm_backward, lstm_forward
from fasttrain.kernels.simd import PAD, TILE_ROWS

# Forward and backward of 2,048 rows in 91 sequences and of 128 in 8, in ms, kernels / oneDNN (2,048 padded 2.7 to 4.5
# times, 128 1.6 times): 64 units 2.2 / 6.5 and 0.24 / 0.38, 128 units 7.3 / 26 and 0.64 / 0.69, 256 units 42 / 120 and
# 3.4 / 3.6; in groups of like length oneDNN pads 1.2 times.
PAYS_UP_TO = 128


class _Layer(torch.autograd.Function):
    """One layer: hidden states (B, H) of inputs (B, F), rows step by step."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor, c0: Tensor,
        sizes: Int64Array,
    ) -> Tensor:  # fmt: skip
        gates = torch.addmm(b_ih + b_hh, inputs, w_ih.t())
        shape = (len(inputs), w_hh.shape[1])
        befores, cells, squashed, hidden = (torch.empty(shape) for _ in range(4))
        rows, sums = _working(len(h0), shape[1])
        weights = w_hh.t().contiguous().numpy()
        lstm_forward(
            gates.numpy(), weights, h0.numpy(), c0.numpy(), sizes, befores.numpy(), cells.numpy(), squashed.numpy(),
            hidden.numpy(), rows, sums,
        )  # fmt: skip
        ctx.save_for_backward(inputs, w_ih, w_hh, c0, gates, befores, cells, squashed)
        ctx.sizes = sizes
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, w_ih, w_hh, c0, gates, befores, cells, squashed = ctx.saved_tensors
        d_gates = torch.empty_like(gates)
        units = w_hh.shape[1]
        d_rows, sums = _working(len(c0), units)
        lstm_backward(
            np.array(gradients[0].numpy()), gates.numpy(), w_hh.numpy(), c0.numpy(), ctx.sizes, cells.numpy(),
            squashed.numpy(), d_gates.numpy(), d_rows, np.zeros_like(d_rows), sums, np.zeros(units, np.float32),
        )  # fmt: skip
        # Of the two ways to write a product with few columns the other takes 17 times as long (2,048 × 2: 897 µs, 54).
        d_ih, d_hh, d_bias = (inputs.t() @ d_gates).t(), d_gates.t() @ befores, d_gates.sum(0)
        d_inputs = d_gates @ w_ih if ctx.needs_input_grad[0] else None
        return d_inputs, d_ih, d_hh, d_bias, d_bias, None, None, None


def _working(sequences: int, units: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows that a step's products are made in, (S rounded up, H) and (…, 4H)."""
    count = -(-sequences // TILE_ROWS) * TILE_ROWS
    return np.zeros((count, units), np.float32), np.zeros((count, 4 * units), np.float32)


def packed_lstm(lstm: Any, inputs: Tensor, states: Any, sizes: Int64Array) -> Tensor:  # (B, F) → (B, H)
    """All layers; `states` (h, c) of (L, S, H)."""
    for layer in range(lstm.num_layers):
        names = (f"weight_ih_l{layer}", f"weight_hh_l{layer}", f"bias_ih_l{layer}", f"bias_hh_l{layer}")
        weights = [getattr(lstm, name) for name in names]
        inputs = _Layer.apply(inputs, *weights, states[0][layer], states[1][layer], sizes)  # type: ignore[no-untyped-call]
    return inputs


class PackedHead(UnpaddedHead):
    """Sequences through the kernels, and everything else as in `UnpaddedHead`."""

    layout = "packed"

    def sequenced(self, lstm: Any, features: Tensor, states: Any, laid: Any) -> Tensor:
        return packed_lstm(lstm, features, states, laid.sizes)


def why_no_lstm(policy: Any) -> str:
    """Empty if the policy's LSTMs can be computed by kernels, else what these cannot do."""
    lstm = policy.lstm_actor
    if policy.device.type != "cpu" or lstm.weight_hh_l0.dtype != torch.float32:
        return "kernels compute in float32 on the CPU"
    if lstm.hidden_size % PAD:
        return f"an LSTM of {lstm.hidden_size} units: kernels take multiples of {PAD}"
    if not lstm.bias or lstm.proj_size or lstm.bidirectional or lstm.batch_first:
        return "an LSTM with arguments of its own"
    return why_padded(policy)


def why_no_kernels(policy: Any) -> str:
    """What keeps the kernels from computing sequences for autograd; empty if nothing does."""
    units = policy.lstm_actor.hidden_size
    if not (unfit := why_no_lstm(policy)) and units > PAYS_UP_TO:
        return f"an LSTM of {units} units: torch's own products are faster above {PAYS_UP_TO}"
    return unfit


class RecurrentKernelEngine(RecurrentEngine):
    """Of a recurrent policy for which `why_no_kernels` is empty."""

    kind: ClassVar[str] = "kernels"

    def new_head(self) -> UnpaddedHead:
        return PackedHead(self.policy)


def kernel_calls() -> list[KernelCall]:
    """Calls of the kernels that the engine makes; types do not depend on sizes."""
    one, four, working, sums = (np.zeros((1, PAD), np.float32), np.zeros((1, 4 * PAD), np.float32), *_working(1, PAD))
    sizes = np.ones(1, np.int64)
    wide, tall = np.zeros((PAD, 4 * PAD), np.float32), np.zeros((4 * PAD, PAD), np.float32)
    nothing = np.zeros(PAD, np.float32)
    forward = (four, wide, one, one, sizes, one, one, one, one, working, sums)
    backward = (one, four, tall, one, sizes, one, one, four, working, working, sums, nothing)
    return [KernelCall(lstm_forward, forward), KernelCall(lstm_backward, backward)]
