"""An LSTM, or another cell, through packed sequences by compiled kernels, for autograd; and who learns with it.

oneDNN, which torch calls, wants all sequences equally long: of episodes of 20 steps and minibatches of 2,048 two thirds
are padding or, in groups, small calls.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasttrain.batch import Int64Array
from fasttrain.engines.recurrent import RecurrentEngine, UnpaddedHead, why_padded
from fasttrain.engines.recurrent_policies import GRU, MinGRU
from fasttrain.kernel_cache import KernelCall
from fasttrain.kernels.gru import gru_backward, gru_forward, scan_backward, scan_forward
from fasttrain.kernels.lstm import lstm_backward, lstm_forward
from fasttrain.kernels.simd import PAD, TILE_ROWS

# Forward and backward of 2,048 rows in 91 sequences and of 128 in 8, in ms, kernels / oneDNN (2,048 padded 2.7 to 4.5
# times, 128 1.6 times): 64 units 2.2 / 6.5 and 0.24 / 0.38, 128 units 7.3 / 26 and 0.64 / 0.69, 256 units 42 / 120 and
# 3.4 / 3.6; in groups of like length oneDNN pads 1.2 times.
PAYS_UP_TO = 128
# Of a GRU, which has no oneDNN: kernels / torch in groups, the same rows, 64 units 2.4 / 22 and 0.34 / 5.7, 256 units
# 23 / 79 and 3.0 / 14, 512 units 87 / 216 and 14 / 55. Of a minGRU, kernels / scan by doubling: 64 units 1.1 / 5.6 and
# 0.14 / 1.1, 512 units 10 / 37 and 0.6 / 2.8.


class _LSTMLayer(torch.autograd.Function):
    """One layer: hidden states (B, H) of inputs (B, F), rows step by step."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor, c0: Tensor,
        sizes: Int64Array,
    ) -> Tensor:  # fmt: skip
        gates = torch.addmm(b_ih + b_hh, inputs, w_ih.t())
        shape = (len(inputs), w_hh.shape[1])
        befores, cells, squashed, hidden = (torch.empty(shape) for _ in range(4))
        rows, sums = _working(len(h0), shape[1], 4)
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
        d_rows, sums = _working(len(c0), units, 4)
        lstm_backward(
            np.array(gradients[0].numpy()), gates.numpy(), w_hh.numpy(), c0.numpy(), ctx.sizes, cells.numpy(),
            squashed.numpy(), d_gates.numpy(), d_rows, np.zeros_like(d_rows), sums, np.zeros(units, np.float32),
        )  # fmt: skip
        # Of the two ways to write a product with few columns the other takes 17 times as long (2,048 × 2: 897 µs, 54).
        d_ih, d_hh, d_bias = (inputs.t() @ d_gates).t(), d_gates.t() @ befores, d_gates.sum(0)
        d_inputs = d_gates @ w_ih if ctx.needs_input_grad[0] else None
        return d_inputs, d_ih, d_hh, d_bias, d_bias, None, None, None


class _GRULayer(torch.autograd.Function):
    """As `_LSTMLayer`."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor, sizes: Int64Array
    ) -> Tensor:
        units = w_hh.shape[1]
        bias = b_ih.clone()
        bias[: 2 * units] += b_hh[: 2 * units]
        gates = torch.addmm(bias, inputs, w_ih.t())
        befores, recalled, hidden = (torch.empty(len(inputs), units) for _ in range(3))
        gru_forward(
            gates.numpy(), w_hh.t().contiguous().numpy(), b_hh[2 * units :].numpy(), h0.numpy(), sizes,
            befores.numpy(), recalled.numpy(), hidden.numpy(), *_working(len(h0), units, 3),
        )  # fmt: skip
        ctx.save_for_backward(inputs, w_ih, w_hh, gates, befores, recalled)
        ctx.sizes = sizes
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, w_ih, w_hh, gates, befores, recalled = ctx.saved_tensors
        d_gates, units = torch.empty_like(gates), w_hh.shape[1]
        d_hidden = np.array(gradients[0].numpy(), order="C")
        gru_backward(
            d_hidden, gates.numpy(), w_hh.numpy(), ctx.sizes, befores.numpy(), recalled.numpy(),
            d_gates.numpy(), *_working(int(ctx.sizes[0]), units, 3), np.zeros(units, np.float32),
        )  # fmt: skip
        d_ih, d_b_ih = (inputs.t() @ d_gates).t(), d_gates.sum(0)
        d_inputs = d_gates @ w_ih if ctx.needs_input_grad[0] else None
        d_gates[:, 2 * units :] *= gates[:, :units]  # from here on of the hidden states' sums
        return d_inputs, d_ih, d_gates.t() @ befores, d_b_ih, d_gates.sum(0), None, None


class _Scan(torch.autograd.Function):
    """Hidden states (B, H) of what each row keeps and adds."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, added: Tensor, h0: Tensor, sizes: Int64Array) -> Tensor:
        befores, hidden, kept = torch.empty_like(added), added.clone(), kept.contiguous()
        scan_forward(kept.numpy(), h0.numpy(), sizes, befores.numpy(), hidden.numpy())
        ctx.save_for_backward(kept, befores)
        ctx.sizes = sizes
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kept, befores = ctx.saved_tensors
        d_hidden = gradients[0].clone(memory_format=torch.contiguous_format)
        scan_backward(d_hidden.numpy(), kept.numpy(), ctx.sizes)
        return d_hidden * befores, d_hidden, None, None


def _working(sequences: int, units: int, gates: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows that a step's products are made in, (S rounded up, H) and (…, gates × H)."""
    count = -(-sequences // TILE_ROWS) * TILE_ROWS
    return np.zeros((count, units), np.float32), np.zeros((count, gates * units), np.float32)


def packed(cell: Any, inputs: Tensor, states: Any, sizes: Int64Array) -> Tensor:  # (B, F) → (B, H)
    """All layers; `states` (h, c) of (L, S, H)."""
    for layer in range(cell.num_layers):
        if isinstance(cell, MinGRU):
            inputs = _Scan.apply(*cell.terms(layer, inputs), states[0][layer], sizes)  # type: ignore[no-untyped-call]
            continue
        names = (f"weight_ih_l{layer}", f"weight_hh_l{layer}", f"bias_ih_l{layer}", f"bias_hh_l{layer}")
        weights = [getattr(cell, name) for name in names]
        kind, parts = (_GRULayer, states[:1]) if isinstance(cell, nn.GRU) else (_LSTMLayer, states)
        inputs = kind.apply(inputs, *weights, *(part[layer] for part in parts), sizes)  # type: ignore[no-untyped-call]
    return inputs


class PackedHead(UnpaddedHead):
    """Sequences through the kernels, and everything else as in `UnpaddedHead`."""

    layout = "packed"

    def sequenced(self, lstm: Any, features: Tensor, states: Any, laid: Any) -> Tensor:
        return packed(lstm, features, states, laid.sizes)


def why_no_cells(policy: Any) -> str:
    """Empty if kernels can compute the policy's LSTMs, or other cells, else what these cannot do."""
    lstm = policy.lstm_actor
    if policy.device.type != "cpu" or next(lstm.parameters()).dtype != torch.float32:
        return "kernels compute in float32 on the CPU"
    if isinstance(lstm, MinGRU):
        return why_padded(policy)
    name = "a GRU" if isinstance(lstm, nn.GRU) else "an LSTM"
    if lstm.hidden_size % PAD:
        return f"{name} of {lstm.hidden_size} units: kernels take multiples of {PAD}"
    if any(type(each) not in (nn.LSTM, GRU) for each in (lstm, policy.lstm_critic or lstm)):
        return f"{name} of a class of its own"
    if not lstm.bias or lstm.proj_size or lstm.bidirectional or lstm.batch_first:
        return f"{name} with arguments of its own"
    return why_padded(policy)


def why_no_kernels(policy: Any) -> str:
    """What keeps the kernels from computing sequences for autograd; empty if nothing does."""
    cell = policy.lstm_actor
    if not (unfit := why_no_cells(policy)) and isinstance(cell, nn.LSTM) and cell.hidden_size > PAYS_UP_TO:
        return f"an LSTM of {cell.hidden_size} units: torch's own products are faster above {PAYS_UP_TO}"
    return unfit


class RecurrentKernelEngine(RecurrentEngine):
    """Of a recurrent policy for which `why_no_kernels` is empty."""

    kind: ClassVar[str] = "kernels"

    def new_head(self) -> UnpaddedHead:
        return PackedHead(self.policy)


def kernel_calls(cell: str) -> list[KernelCall]:
    """Calls of the kernels that the engine makes for that cell; types do not depend on sizes."""
    gates = 3 if cell == "gru" else 4
    one, four = np.zeros((1, PAD), np.float32), np.zeros((1, gates * PAD), np.float32)
    working, sums = _working(1, PAD, gates)
    sizes = np.ones(1, np.int64)
    wide, tall = np.zeros((PAD, gates * PAD), np.float32), np.zeros((gates * PAD, PAD), np.float32)
    nothing = np.zeros(PAD, np.float32)
    if cell == "mingru":
        return [KernelCall(scan_forward, (one, one, sizes, one, one)), KernelCall(scan_backward, (one, one, sizes))]
    if cell == "gru":
        into, back = (four, wide, nothing, one, sizes, one, one, one), (one, four, tall, sizes, one, one, four)
        return [
            KernelCall(gru_forward, (*into, working, sums)),
            KernelCall(gru_backward, (*back, working, sums, nothing)),
        ]
    forward = (four, wide, one, one, sizes, one, one, one, one, working, sums)
    backward = (one, four, tall, one, sizes, one, one, four, working, working, sums, nothing)
    return [KernelCall(lstm_forward, forward), KernelCall(lstm_backward, backward)]
