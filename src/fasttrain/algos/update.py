"""The PPO update: minibatches from the storage, the clipped loss, one optimizer step each; statistics read once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import explained_variance
from torch import Tensor

from fasttrain.algos.fast import FastState, faster_adam, reading_waits, step_clipped
from fasttrain.batch import Float64Array
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage
from fasttrain.engines.causes import bad_gradients, blame, listed, why_rollout
from fasttrain.engines.compiling import Coefficients, capturable, micro_batches, normalized
from fasttrain.engines.kernels import FusedPolicy
from fasttrain.engines.torch import Acceleration
from fasttrain.kernels.ppo import (
    APPROX_KL,
    CLIPPED,
    ENTROPY,
    GRAD_NORM,
    LOSS,
    NO_STEP,
    POLICY_LOSS,
    VALUE_LOSS,
    LossSettings,
)
from fasttrain.perf.clock import PhaseClock


@dataclass(slots=True)
class Statistics:
    """Scalars of the minibatches, kept on the device as tensors: reading one would wait for the device."""

    policy_losses: list[Tensor] = field(default_factory=list)
    value_losses: list[Tensor] = field(default_factory=list)
    entropy_losses: list[Tensor] = field(default_factory=list)
    clip_fractions: list[Tensor] = field(default_factory=list)
    approx_kls: list[Tensor] = field(default_factory=list)  # of the last epoch only, as SB3 logs it
    loss: Tensor | None = None
    norms: list[Tensor] = field(default_factory=list)  # of gradients, where steps are watched; not finite: none taken
    blamed: str = ""  # loss or gradient that was not finite first, where the host could see it

    def note(self, terms: Iterable[Tensor]) -> None:
        """Take in one minibatch's `Terms`."""
        loss, *parts = terms
        self.loss = loss.detach()
        series = (self.policy_losses, self.value_losses, self.entropy_losses, self.clip_fractions, self.approx_kls)
        for values, value in zip(series, parts, strict=True):
            values.append(value)


def update(model: Any) -> None:
    """Train `model` (a PPO or MaskablePPO) for `n_epochs` on its filled storage, then log what SB3 logs.

    Raises:
        DivergedError: round after round no update was finite; see `guard.py`.
    """
    fast: FastState = model._fast
    policy, storage = model.policy, model.rollout_buffer
    policy.set_training_mode(True)
    model._update_learning_rate(policy.optimizer)
    clip_range, clip_range_vf = clip_ranges(model)
    statistics = Statistics()
    kernels = fast.kernels_of(policy, model.observation_space)
    if kernels is not None:
        fast.clock.enter("train")
        _fused_epochs(model, kernels, clip_range, clip_range_vf, statistics)
    else:
        with faster_adam(policy.optimizer, fast.fused or fast.acceleration != Acceleration()):
            _epochs(model, storage, clip_range, clip_range_vf, statistics)
    fast.clock.enter("log")
    norms = _note_norms(model, statistics)
    _log(model, statistics, clip_range, clip_range_vf)
    if fast.guard is not None:
        precision = None if kernels is not None else fast.accelerator_of(policy).precision
        scaled = precision is not None and precision.scaler is not None
        kl = float(model.logger.name_to_value["train/approx_kl"])
        fast.guard.note(model, norms, lambda: why_rollout(model, statistics.blamed), kl, expected=scaled)


def clip_ranges(model: Any) -> tuple[float, float | None]:
    """Clip ranges of ratio and values by their schedules."""
    now = model._current_progress_remaining
    return model.clip_range(now), None if model.clip_range_vf is None else model.clip_range_vf(now)


class MinibatchStep:
    """Gradient and optimizer step of one minibatch, in one go or in micro-batches."""

    def __init__(self, model: Any, clip_range: float, clip_range_vf: float | None, statistics: Statistics) -> None:
        fast: FastState = model._fast
        accelerator = fast.accelerator_of(model.policy)
        self.model, self.clock, self.statistics = model, fast.clock, statistics
        self.parts = accelerator.settings.gradient_accumulation
        self.scaler = None if accelerator.precision is None else accelerator.precision.scaler
        self.loss_of = accelerator.loss_of(model.action_space, model.ent_coef != 0.0)
        numbers = Coefficients(clip_range, clip_range_vf, model.ent_coef, model.vf_coef)
        self.coefficients = accelerator.coefficients(numbers)
        # What a graph of `whole` has fixed.
        self.guarded = fast.guard is not None
        self.key = (
            model.max_grad_norm, clip_range_vf is None, model.ent_coef != 0.0, model.normalize_advantage, self.guarded
        )  # fmt: skip
        self.parameters = list(model.policy.parameters())
        self.loss: Tensor | None = None  # of the last minibatch

    def gradients(self, batch: RolloutBatch) -> bool:
        """Fill the gradients and note the statistics. False: `target_kl` is exceeded, no step shall be taken."""
        batch = normalized(batch, self.model.normalize_advantage)
        if self.parts > 1:
            found = self._accumulated(batch)
            self.loss = found[0]
            self.statistics.note(found)
            return not self._diverged()
        self.clock.enter("train_fwd")
        terms = self.loss_of(batch, self.coefficients)
        self.loss = terms.loss
        self.statistics.note(terms)
        if self._diverged():
            return False
        self.clock.enter("train_bwd")
        self._forget_gradients()
        self._backward(terms.loss)
        return True

    def apply(self) -> Tensor:  # () norm of the gradients; not finite where no step was taken
        """Clip the gradients and let the optimizer step, if they and the loss are finite."""
        loss = self.loss if self.guarded else None
        policy = self.model.policy
        return step_clipped(policy.optimizer, self.parameters, self.model.max_grad_norm, self.scaler, loss)

    def watch(self, norm: Tensor) -> None:
        """Keep what `apply` said for the end of the round."""
        if not self.guarded and self.scaler is None:
            return
        self.statistics.norms.append(norm)
        on_host = not reading_waits(norm) and not self.statistics.blamed
        if on_host and self.scaler is None and not math.isfinite(norm.item()):
            good_loss = self.loss is not None and math.isfinite(self.loss.item())
            self.statistics.blamed = blame(good_loss, listed(bad_gradients(self.model.policy)))

    def whole(self, batch: RolloutBatch) -> Tensor:  # (7,) statistics, and the gradient's norm
        """From the loss to the step with nothing decided on the host: what a CUDA graph captures."""
        clock, self.clock = self.clock, PhaseClock()  # a capture is no phase of training
        statistics = self._accumulated(normalized(batch, self.model.normalize_advantage))
        self.loss = statistics[0]
        norm = self.apply()
        self.clock = clock
        return torch.cat([statistics, norm.detach().reshape(1)])

    def _accumulated(self, batch: RolloutBatch) -> Tensor:  # (6,) statistics
        """The gradient of the whole batch as the sum over its parts."""
        self._forget_gradients()
        found = []
        for part, weight in micro_batches(batch, self.parts):
            self.clock.enter("train_fwd")
            terms = self.loss_of(part, self.coefficients)
            found.append(terms.weighted(weight))
            self.clock.enter("train_bwd")
            self._backward(terms.loss * weight)
        return torch.stack(found).sum(0)

    def _diverged(self) -> bool:
        """Reading the divergence waits for the device, which is why only `target_kl` does it."""
        target = self.model.target_kl
        return target is not None and bool(self.statistics.approx_kls[-1].cpu().numpy() > 1.5 * target)

    def _forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))


def _epochs(
    model: Any, storage: RolloutStorage, clip_range: float, clip_range_vf: float | None, statistics: Statistics
) -> None:
    """All epochs, or fewer where `target_kl` is exceeded."""
    fast: FastState = model._fast
    clock: PhaseClock = fast.clock
    step = MinibatchStep(model, clip_range, clip_range_vf, statistics)
    with clock.phase("other"):
        graph = fast.accelerator_of(model.policy).graph_of_update(step, model)
    optimizer = model.policy.optimizer
    with nullcontext() if graph is None else capturable(optimizer, graph.rates):
        for epoch in range(model.n_epochs):
            statistics.approx_kls.clear()
            clock.enter("buffer")
            for batch in storage.minibatches(model.batch_size):
                if graph is not None and graph.fits(batch):
                    clock.enter("train")
                    *terms, norm = graph(batch).unbind()
                    statistics.note(terms)
                    step.watch(norm)
                elif step.gradients(batch):
                    clock.enter("optim")
                    step.watch(step.apply())
                else:
                    _note_stop(model, epoch, statistics)
                    return
                fast.gradient_updates += 1
                clock.enter("buffer")
            model._n_updates += 1


def _note_stop(model: Any, epoch: int, statistics: Statistics) -> None:
    if model.verbose >= 1:
        approx_kl = statistics.approx_kls[-1].cpu().numpy()
        model.logger.info(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
    model._n_updates += 1


def _fused_epochs(
    model: Any, kernels: FusedPolicy, clip_range: float, clip_range_vf: float | None, statistics: Statistics
) -> None:
    """All epochs in compiled kernels."""
    settings = LossSettings(
        clip_range=clip_range,
        clip_range_vf=-1.0 if clip_range_vf is None else clip_range_vf,
        ent_coef=model.ent_coef,
        vf_coef=model.vf_coef,
        normalize_advantage=model.normalize_advantage,
        target_kl=-1.0 if model.target_kl is None else model.target_kl,
    )
    storage = model.rollout_buffer
    batch_size = model.batch_size or storage.num_steps * storage.num_envs
    guarded = model._fast.guard is not None
    epochs, taken, begun = kernels.train(storage, model.n_epochs, batch_size, settings, model.max_grad_norm, guarded)
    model._n_updates += begun
    means = torch.from_numpy(np.concatenate(epochs))
    tried = means[:, GRAD_NORM] != NO_STEP
    model._fast.gradient_updates += int(tried.sum()) if guarded else taken
    statistics.norms = [means[tried, GRAD_NORM]] if guarded else []
    bad = np.flatnonzero(np.isnan(means[:, GRAD_NORM].numpy()))
    statistics.blamed = blame(bool(torch.isfinite(means[bad[0], LOSS])), kernels.blamed) if guarded and len(bad) else ""
    statistics.policy_losses = list(means[:, POLICY_LOSS])
    statistics.value_losses = list(means[:, VALUE_LOSS])
    statistics.entropy_losses = list(-means[:, ENTROPY])
    statistics.clip_fractions = list(means[:, CLIPPED])
    statistics.approx_kls = list(torch.from_numpy(epochs[-1][:, APPROX_KL]))
    statistics.loss = means[-1, LOSS]


def _mean(values: list[Tensor]) -> float:
    """Mean in float64 of float32 scalars, as SB3 takes it of Python floats."""
    return float(np.mean(torch.stack(values).cpu().numpy().astype(np.float64)))


def _note_norms(model: Any, statistics: Statistics) -> Float64Array:  # one for each step that was asked for
    """Gradient norms, read from the device once; steps that were not taken are counted as skipped."""
    if not statistics.norms:
        return np.zeros(0)
    fast: FastState = model._fast
    norms: Float64Array = (
        torch.cat([norm.reshape(-1) for norm in statistics.norms]).detach().cpu().numpy().astype(np.float64)
    )
    skipped = int(np.count_nonzero(~np.isfinite(norms)))
    fast.skipped_steps += skipped
    fast.gradient_updates -= skipped
    if fast.skipped_steps:
        model.logger.record("train/skipped_steps", fast.skipped_steps)
    return norms


def _log(model: OnPolicyAlgorithm, statistics: Statistics, clip_range: float, clip_range_vf: float | None) -> None:
    """The keys of SB3's log. Everything is read from the device here, once."""
    storage: Any = model.rollout_buffer
    explained = explained_variance(storage.values.T.reshape(-1), storage.returns.T.reshape(-1))
    record = model.logger.record
    record("train/entropy_loss", _mean(statistics.entropy_losses))
    record("train/policy_gradient_loss", _mean(statistics.policy_losses))
    record("train/value_loss", _mean(statistics.value_losses))
    record("train/approx_kl", np.mean(torch.stack(statistics.approx_kls).cpu().numpy()))
    record("train/clip_fraction", _mean(statistics.clip_fractions))
    record("train/loss", statistics.loss.item() if statistics.loss is not None else float("nan"))
    record("train/explained_variance", explained)
    if hasattr(model.policy, "log_std"):
        record("train/std", torch.exp(model.policy.log_std).mean().item())
    record("train/n_updates", model._n_updates, exclude="tensorboard")
    record("train/clip_range", clip_range)
    if clip_range_vf is not None:
        record("train/clip_range_vf", clip_range_vf)
