"""Continuous actions of a diagonal Gaussian, drawn and rated row by row from the means that the policy's head gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fasttrain.batch import Float32Array
from fasttrain.jit import njit_inline
from fasttrain.kernels.nets import Layout

HALF_LOG_2_PI = np.float32(0.5 * math.log(2 * math.pi))


@njit_inline
def log_stds_of(flat: Float32Array, layout: Layout) -> Float32Array:
    """A view (A,) of the log standard deviations among parameters or gradients; (0,) where actions are choices."""
    at = max(layout.log_std, 0)
    return flat[at : at + (layout.dims.sum() if layout.log_std >= 0 else 0)]


@njit_inline
def draw_point(log_stds: Float32Array, normals: Float32Array, means: Float32Array, point: Float32Array) -> Any:
    """A continuous action (A,) of a diagonal Gaussian into `point`; returns its log-probability."""
    log_prob = np.float32(0)
    for d in range(len(log_stds)):
        point[d] = means[d] + np.exp(log_stds[d]) * normals[d]
        log_prob -= np.float32(0.5) * normals[d] * normals[d] + log_stds[d] + HALF_LOG_2_PI
    return log_prob


@njit_inline
def rate_point(log_stds: Float32Array, point: Float32Array, probs: Float32Array) -> tuple[Any, Any]:
    """Log-probability of a continuous action (A,) and entropy, of one row, from the Gaussian's means (A,) in probs[1].

    probs (4, A) then holds what makes the slopes in the means those of `rate` in its logits: zeros in rows 0 and 2, and
    in row 3 (action - mean) ÷ variance.
    """
    log_prob, entropy = np.float32(0), np.float32(0)
    for d in range(len(log_stds)):
        precision = np.exp(-log_stds[d])
        z = (point[d] - probs[1, d]) * precision
        log_prob -= np.float32(0.5) * z * z + log_stds[d] + HALF_LOG_2_PI
        entropy += np.float32(0.5) + HALF_LOG_2_PI + log_stds[d]
        probs[0, d], probs[2, d], probs[3, d] = np.float32(0), np.float32(0), z * precision
    return log_prob, entropy


@njit_inline
def add_log_std_slopes(
    slope: Any, entropy_share: Any, log_stds: Float32Array, probs: Float32Array, out: Float32Array
) -> None:
    """The row's gradients in the log standard deviations, added to `out` (A,).

    Args:
        slope: of the loss in the row's log-probability.
        entropy_share: by which a nat of entropy lowers the loss.
        probs: as `rate_point` left it.
    """
    for d in range(len(log_stds)):
        z = probs[3, d] * np.exp(log_stds[d])
        out[d] += slope * (z * z - np.float32(1)) - entropy_share
