"""The PPO update: minibatches from the storage, the clipped loss, one optimizer step each; statistics read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import explained_variance
from torch import Tensor

from fasttrain.algos import losses
from fasttrain.algos.fast import FastState, clip_gradients, faster_adam
from fasttrain.algos.fused import APPROX_KL, CLIPPED, ENTROPY, LOSS, POLICY_LOSS, VALUE_LOSS, LossSettings
from fasttrain.algos.fused_policy import FusedPolicy
from fasttrain.algos.heads import Head, head_of
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage
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


def update(model: Any) -> None:
    """Train `model` (a PPO or MaskablePPO) for `n_epochs` on its filled storage, then log what SB3 logs."""
    fast: FastState = model._fast
    policy, storage = model.policy, model.rollout_buffer
    policy.set_training_mode(True)
    model._update_learning_rate(policy.optimizer)
    clip_range = model.clip_range(model._current_progress_remaining)
    clip_range_vf = None if model.clip_range_vf is None else model.clip_range_vf(model._current_progress_remaining)
    statistics = Statistics()
    kernels = fast.kernels_of(policy, model.observation_space)
    if kernels is not None:
        fast.clock.enter("train")
        _fused_epochs(model, kernels, clip_range, clip_range_vf, statistics)
    else:
        with faster_adam(policy.optimizer, fast.fused):
            _epochs(model, storage, clip_range, clip_range_vf, statistics)
    fast.clock.enter("log")
    _log(model, statistics, clip_range, clip_range_vf)


def _epochs(
    model: Any, storage: RolloutStorage, clip_range: float, clip_range_vf: float | None, statistics: Statistics
) -> None:
    """All epochs, or fewer where `target_kl` is exceeded."""
    clock: PhaseClock = model._fast.clock
    head = head_of(model.policy, model.action_space)
    parameters = list(model.policy.parameters())
    alike = len({(parameter.device, parameter.dtype) for parameter in parameters}) == 1
    for epoch in range(model.n_epochs):
        statistics.approx_kls.clear()
        clock.enter("buffer")
        for batch in storage.minibatches(model.batch_size):
            clock.enter("train_fwd")
            loss = minibatch_loss(model, head, batch, clip_range, clip_range_vf, statistics)
            if model.target_kl is not None:
                approx_kl = statistics.approx_kls[-1].cpu().numpy()
                if approx_kl > 1.5 * model.target_kl:
                    if model.verbose >= 1:
                        model.logger.info(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
                    model._n_updates += 1
                    return
            clock.enter("train_bwd")
            for parameter in parameters:
                parameter.grad = None
            torch.autograd.backward(loss)
            clock.enter("optim")
            _clip_and_step(model, parameters, alike)
            clock.enter("buffer")
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
    epochs, taken, begun = kernels.train(storage, model.n_epochs, batch_size, settings, model.max_grad_norm)
    model._n_updates += begun
    model._fast.gradient_updates += taken
    means = torch.from_numpy(np.concatenate(epochs))
    statistics.policy_losses = list(means[:, POLICY_LOSS])
    statistics.value_losses = list(means[:, VALUE_LOSS])
    statistics.entropy_losses = list(-means[:, ENTROPY])
    statistics.clip_fractions = list(means[:, CLIPPED])
    statistics.approx_kls = list(torch.from_numpy(epochs[-1][:, APPROX_KL]))
    statistics.loss = means[-1, LOSS]


def minibatch_loss(
    model: Any,
    head: Head,
    batch: RolloutBatch,
    clip_range: float,
    clip_range_vf: float | None,
    statistics: Statistics,
) -> Tensor:
    """The loss of one minibatch, in SB3's order of operations."""
    values, log_probs, entropy = head.evaluate(
        batch.observations, batch.actions, batch.action_masks, entropy_gradient=model.ent_coef != 0.0
    )
    advantages = losses.normalize(batch.advantages) if model.normalize_advantage else batch.advantages
    log_ratio = log_probs - batch.old_log_probs
    ratio = torch.exp(log_ratio)
    policy_loss = losses.policy_loss(advantages, ratio, clip_range)
    value_loss = losses.value_loss(values, batch.returns, batch.old_values, clip_range_vf)
    entropy_loss = losses.entropy_loss(entropy, log_probs)
    loss: Tensor = policy_loss + model.ent_coef * entropy_loss + model.vf_coef * value_loss

    statistics.policy_losses.append(policy_loss.detach())
    statistics.value_losses.append(value_loss.detach())
    statistics.entropy_losses.append(entropy_loss.detach())
    statistics.clip_fractions.append(losses.clip_fraction(ratio, clip_range))
    statistics.approx_kls.append(losses.approx_kl(ratio, log_ratio))
    statistics.loss = loss.detach()
    return loss


def _clip_and_step(model: Any, parameters: list[torch.nn.Parameter], alike: bool) -> None:
    """Clip and apply the gradients; `alike`: all parameters share one device and dtype."""
    if alike:
        clip_gradients([parameter.grad for parameter in parameters if parameter.grad is not None], model.max_grad_norm)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, model.max_grad_norm)
    model.policy.optimizer.step()
    model._fast.gradient_updates += 1


def _mean(values: list[Tensor]) -> float:
    """Mean in float64 of float32 scalars, as SB3 takes it of Python floats."""
    return float(np.mean(torch.stack(values).cpu().numpy().astype(np.float64)))


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
