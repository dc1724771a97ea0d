"""The DQN update: batches from the replay buffer, the TD error, one optimizer step each; the loss is read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from fasttrain.algos.fast import clip_gradients, faster_adam
from fasttrain.algos.fused_q_policy import FusedQ, why_not_fused
from fasttrain.algos.heads import action_dims
from fasttrain.algos.losses import td_error_loss, td_target
from fasttrain.algos.q_networks import best_values, chosen_values, greedy
from fasttrain.buffers.prefetch import Direct, Sampler
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.errors import EnvError
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.adapter import slots_of
from fasttrain.vec.base import SlotSource


@dataclass(slots=True)
class QState:
    """All that our DQN keeps besides SB3's, in the one attribute `_fast`; never saved.

    `fused` off: with plain settings every number is that of SB3. On: an MLP policy on the CPU acts and learns through
    the kernels of `fused_q.py`; any other policy still gets torch's fused Adam.
    """

    clock: PhaseClock = field(default_factory=PhaseClock)
    fused: bool = False
    local_random_actions: bool = False  # random actions of all envs in one draw
    gradient_updates: int = 0
    warmup_s: float = 0.0
    sampler: Sampler = field(default_factory=Direct)
    kernels: FusedQ | None = None
    env: VecEnv | None = None
    source: SlotSource | None = None  # `env` seen as slots

    def kernels_of(self, model: Any) -> FusedQ | None:
        """The kernels for the model's policy, kept from update to update; None where they cannot stand in for it."""
        if not self.fused:
            return None
        kernels = self.kernels
        if kernels is not None and kernels.serves(model.policy):
            return kernels
        unfit = why_not_fused(model.policy, model.observation_space, model.action_space)
        self.kernels = None if unfit else FusedQ(model.policy)
        return self.kernels

    def source_of(self, env: VecEnv) -> SlotSource:
        """The slots of `env`, kept from step to step."""
        if self.source is None or self.env is not env:
            self.env, self.source = env, slots_of(env)
        return self.source


def update(model: Any, gradient_steps: int, batch_size: int) -> None:
    """`gradient_steps` updates of `model` (a DQN of ours), then log what SB3 logs."""
    fast: QState = model._fast
    policy, storage = model.policy, model.replay_buffer
    policy.set_training_mode(True)
    model._update_learning_rate(policy.optimizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        storage.anneal(model._current_progress_remaining)
    kernels = fast.kernels_of(model) if model._vec_normalize_env is None else None
    if kernels is None:
        loss = _eager(model, gradient_steps, batch_size)
    else:
        loss = _fused(model, kernels, gradient_steps, batch_size)
    fast.clock.enter("log")
    fast.gradient_updates += gradient_steps
    model._n_updates += gradient_steps
    model.logger.record("train/n_updates", model._n_updates, exclude="tensorboard")
    model.logger.record("train/loss", loss)


def _eager(model: Any, gradient_steps: int, batch_size: int) -> float:
    """One batch after the other; their mean loss, in float64 of float32 scalars, as SB3 takes it of Python floats."""
    fast: QState = model._fast
    losses: list[Tensor] = []
    with faster_adam(model.policy.optimizer, fast.fused):
        batches = fast.sampler.batches(model.replay_buffer, gradient_steps, batch_size, model._vec_normalize_env)
        for _ in range(gradient_steps):
            fast.clock.enter("replay_sample")
            losses.append(_step(model, next(batches)))
    return float(np.mean(torch.stack(losses).cpu().numpy().astype(np.float64)))


def _fused(model: Any, kernels: FusedQ, gradient_steps: int, batch_size: int) -> float:
    """All updates in one call of the kernels, all their batches in one draw: other random numbers than batch by batch.

    Prioritized batches are drawn with the priorities of this moment; those of the errors follow at the end.

    Raises:
        EnvError: the loss is not finite.
    """
    clock: PhaseClock = model._fast.clock
    storage: ReplayStorage = model.replay_buffer
    clock.enter("replay_sample")
    block = model._fast.sampler.block(storage, gradient_steps, batch_size)
    clock.enter("train")
    losses, errors = kernels.train(
        block.observations, block.next_observations, block.actions, block.rows, block.next_rows, block.returns,
        block.discounts, block.ends, next_masks=block.next_masks, weights=block.weights, double=model.double_q,
        huber=model.loss == "huber", max_grad_norm=model.max_grad_norm,
    )  # fmt: skip
    if not np.isfinite(losses).all():
        raise EnvError(
            f"the loss is not finite at step {model.num_timesteps} (a reward too large, or a value that is NaN?): "
            "lower the learning rate, or scale the rewards"
        )
    if isinstance(storage, PrioritizedReplayBuffer) and block.indices is not None:
        clock.enter("replay_sample")
        storage.update_priorities(block.indices, errors.reshape(-1), block.generation)
    return float(losses.mean())


def _step(model: Any, batch: ReplayBatch) -> Tensor:  # () loss
    """One gradient and optimizer step."""
    clock: PhaseClock = model._fast.clock
    policy, storage = model.policy, model.replay_buffer
    dims = action_dims(model.action_space)
    clock.enter("train_fwd")
    target = targets(model, batch, dims)
    current = chosen_values(model.q_net(batch.observations), batch.actions, dims)
    loss = td_error_loss(current, target, model.loss, batch.weights)
    clock.enter("train_bwd")
    policy.optimizer.zero_grad()
    torch.autograd.backward(loss)
    clock.enter("optim")
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    clip_gradients(gradients, model.max_grad_norm)
    policy.optimizer.step()
    if isinstance(storage, PrioritizedReplayBuffer) and batch.indices is not None:
        clock.enter("replay_sample")
        errors = (current.detach() - target).abs().mean(dim=1)
        storage.update_priorities(batch.indices, errors.cpu().numpy(), batch.generation)
    return loss.detach()


@torch.no_grad()
def targets(model: Any, batch: ReplayBatch, dims: list[int]) -> Tensor:  # (B, 1)
    """What the values of the actions taken should be: r + discount × V(next), V by the target network.

    The next action is the target network's best, or with `double_q` the online network's (van Hasselt et al. 2016). Of
    several sub-actions V is the mean of their maxima (Tavakoli et al. 2018).
    """
    masks = batch.next_action_masks
    values = model.q_net_target(batch.next_observations)
    if model.double_q:
        chosen = greedy(model.q_net(batch.next_observations), masks, dims)
        best = chosen_values(values, chosen, dims)
    else:
        best = best_values(values, masks, dims)
    discounts = model.gamma if batch.discounts is None else batch.discounts
    return td_target(batch.rewards, batch.dones, discounts, best.mean(dim=1, keepdim=True))
