"""The DQN update: batches from the replay buffer, the TD error, one optimizer step each; the loss is read once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from fasttrain.algos.fast import faster_adam, reading_waits, step_clipped
from fasttrain.batch import Float64Array
from fasttrain.buffers.prefetch import Direct, Sampler
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.engines.causes import bad_gradients, blame, listed, why_replay
from fasttrain.engines.compiling import capturable
from fasttrain.engines.guard import Guard
from fasttrain.engines.kernels_q import FusedQ, why_not_fused
from fasttrain.engines.torch import Acceleration
from fasttrain.engines.torch_q import QAccelerator, QTerms, rule_of, tensors_of
from fasttrain.errors import EnvError
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.base import SlotSource, slots_of


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
    skipped_steps: int = 0  # of these none: gradient or loss was not finite, in float16 by overflow
    guard: Guard | None = field(default_factory=Guard)  # None: nothing not finite is looked for
    sampler: Sampler = field(default_factory=Direct)
    kernels: FusedQ | None = None
    acceleration: Acceleration = field(default_factory=Acceleration)  # of the eager path
    accelerator: QAccelerator | None = None
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

    def accelerator_of(self, policy: Any) -> QAccelerator:
        """The eager path's accelerator for `policy`, kept from update to update."""
        accelerator = self.accelerator
        if accelerator is None or not accelerator.serves(policy, self.acceleration):
            self.accelerator = accelerator = QAccelerator(policy, self.acceleration)
        return accelerator

    @property
    def warmup_s(self) -> float:
        """What torch.compile and capturing graphs took, outside of every phase."""
        return 0.0 if self.accelerator is None else self.accelerator.warmup_s

    def source_of(self, env: VecEnv) -> SlotSource:
        """The slots of `env`, kept from step to step."""
        if self.source is None or self.env is not env:
            self.env, self.source = env, slots_of(env)
        return self.source


def update(model: Any, gradient_steps: int, batch_size: int) -> None:
    """`gradient_steps` updates of `model` (a DQN of ours), then log what SB3 logs.

    Raises:
        DivergedError: round after round no update was finite; see `guard.py`.
        EnvError: a loss is not finite and nothing is guarded.
    """
    fast: QState = model._fast
    policy, storage = model.policy, model.replay_buffer
    policy.set_training_mode(True)
    model._update_learning_rate(policy.optimizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        storage.anneal(model._current_progress_remaining)
    kernels = fast.kernels_of(model) if model._vec_normalize_env is None else None
    if kernels is None:
        round_ = _eager(model, gradient_steps, batch_size)
    else:
        round_ = _fused(model, kernels, gradient_steps, batch_size)
    fast.clock.enter("log")
    fast.gradient_updates += gradient_steps
    model._n_updates += gradient_steps
    model.logger.record("train/n_updates", model._n_updates, exclude="tensorboard")
    _note(model, round_)


class Round(NamedTuple):
    """What came of some updates."""

    losses: Float64Array
    norms: Float64Array  # of gradients, where steps are watched; not finite: none was taken
    blamed: str  # loss or gradient that was not finite first, where the host could see it
    scaled: bool = False  # float16: an overflow now and then is normal


def _note(model: Any, done: Round) -> None:
    """Log the mean loss, in float64 of float32 scalars, as SB3 takes it of Python floats; count what was skipped."""
    fast: QState = model._fast
    losses = done.losses
    if not math.isfinite(sum(done.norms.tolist())):
        taken = np.isfinite(done.norms)
        fast.skipped_steps += int(np.count_nonzero(~taken))
        fast.gradient_updates -= int(np.count_nonzero(~taken))
        losses = losses[taken]
    if fast.skipped_steps:
        model.logger.record("train/skipped_steps", fast.skipped_steps)
    model.logger.record("train/loss", float(losses.mean()) if len(losses) else math.nan)
    if fast.guard is not None:
        fast.guard.note(model, done.norms, lambda: why_replay(model, done.blamed), expected=done.scaled)


def _eager(model: Any, gradient_steps: int, batch_size: int) -> Round:
    """One batch after the other."""
    fast: QState = model._fast
    clock, optimizer = fast.clock, model.policy.optimizer
    losses: list[Tensor] = []
    step = QStep(model)
    with clock.phase("other"):
        graph = fast.accelerator_of(model.policy).graph_of_update(step, model, batch_size)
    on = fast.fused or fast.acceleration != Acceleration()
    with faster_adam(optimizer, on) if graph is None else capturable(optimizer, graph.rates):
        batches = fast.sampler.batches(model.replay_buffer, gradient_steps, batch_size, model._vec_normalize_env)
        for _ in range(gradient_steps):
            clock.enter("replay_sample")
            batch = next(batches)
            if graph is not None and graph.fits(batch):
                clock.enter("train")
                statistics = graph(tensors_of(batch))
                terms = QTerms(statistics[0], statistics[2:] if step.rule.rated else None)
                step.watch(statistics[1])
            else:
                terms = step(batch)
            losses.append(terms.loss.detach())
            _rate(model, batch, terms.errors)
    return Round(_read(losses), _read(step.norms), step.blamed, step.scaler is not None)


def _read(scalars: list[Tensor]) -> Float64Array:
    numbers: Float64Array = torch.stack(scalars).cpu().numpy().astype(np.float64) if scalars else np.zeros(0)
    return numbers


class QStep:
    """Gradient and optimizer step of one batch."""

    def __init__(self, model: Any) -> None:
        self.model, self.clock = model, model._fast.clock
        self.accelerator: QAccelerator = model._fast.accelerator_of(model.policy)
        self.scaler = None if self.accelerator.precision is None else self.accelerator.precision.scaler
        self.rule = rule_of(model)
        self.guarded = model._fast.guard is not None
        self.key = (model.max_grad_norm, self.rule, self.guarded)  # what a graph of `whole` has fixed
        self.parameters = list(model.policy.parameters())
        self.norms: list[Tensor] = []  # of gradients; not finite: no step was taken
        self.blamed = ""  # loss or gradient that was not finite first, where the host could see it
        self.loss: Tensor | None = None  # of the last batch

    def __call__(self, batch: ReplayBatch) -> QTerms:
        """Learn from the batch."""
        terms, norm = self._learn(batch)
        self.loss = terms.loss
        self.watch(norm)
        return terms

    def watch(self, norm: Tensor) -> None:
        """Keep a gradient's norm for the end of the round."""
        if not self.guarded and self.scaler is None:
            return
        self.norms.append(norm.detach())
        on_host = not reading_waits(norm) and self.scaler is None and not self.blamed
        if on_host and not math.isfinite(norm.item()):
            good_loss = self.loss is not None and math.isfinite(self.loss.item())
            self.blamed = blame(good_loss, listed(bad_gradients(self.model.policy)))

    def _learn(self, batch: ReplayBatch) -> tuple[QTerms, Tensor]:
        optimizer = self.model.policy.optimizer
        self.clock.enter("train_fwd")
        terms = self.accelerator.loss(batch, self.rule)
        self.clock.enter("train_bwd")
        optimizer.zero_grad()
        torch.autograd.backward(terms.loss if self.scaler is None else self.scaler.scale(terms.loss))
        self.clock.enter("optim")
        loss = terms.loss if self.guarded else None
        return terms, step_clipped(optimizer, self.parameters, self.model.max_grad_norm, self.scaler, loss)

    def whole(self, batch: ReplayBatch) -> Tensor:  # (2,), or (2 + B,) of prioritized replay: loss, norm, TD errors
        """From the loss to the step with nothing decided on the host: what a CUDA graph captures."""
        clock, self.clock = self.clock, PhaseClock()  # a capture is no phase of training
        terms, norm = self._learn(batch)
        self.clock = clock
        first = torch.stack([terms.loss.detach(), norm.detach()])
        return first if terms.errors is None else torch.cat([first, terms.errors])


def _fused(model: Any, kernels: FusedQ, gradient_steps: int, batch_size: int) -> Round:
    """All updates in one call of the kernels, all their batches in one draw: other random numbers than batch by batch.

    Prioritized batches are drawn with the priorities of this moment; those of the errors follow at the end.

    Raises:
        EnvError: the loss is not finite and nothing is guarded.
    """
    guarded = model._fast.guard is not None
    clock: PhaseClock = model._fast.clock
    storage: ReplayStorage = model.replay_buffer
    clock.enter("replay_sample")
    block = model._fast.sampler.block(storage, gradient_steps, batch_size)
    clock.enter("train")
    losses, errors = kernels.train(
        block.observations, block.next_observations, block.actions, block.rows, block.next_rows, block.returns,
        block.discounts, block.ends, next_masks=block.next_masks, weights=block.weights, double=model.double_q,
        huber=model.loss == "huber", max_grad_norm=model.max_grad_norm, guarded=guarded,
    )  # fmt: skip
    if not guarded and not np.isfinite(losses).all():
        raise EnvError(
            f"the loss is not finite at step {model.num_timesteps} (a reward too large, or a value that is NaN?): "
            "lower the learning rate, or scale the rewards"
        )
    if isinstance(storage, PrioritizedReplayBuffer) and block.indices is not None:
        clock.enter("replay_sample")
        _set_priorities(storage, block.indices, errors.reshape(-1), block.generation, guarded)
    blamed = ""
    if kernels.skipped:
        blamed = blame(bool(np.isfinite(losses[np.isnan(kernels.norms)][0])), kernels.blamed)
    return Round(losses, kernels.norms if guarded else np.zeros(0), blamed)


def _rate(model: Any, batch: ReplayBatch, errors: Tensor | None) -> None:
    """New priorities for what was learned from, if they count."""
    if errors is None or batch.indices is None:
        return
    model._fast.clock.enter("replay_sample")
    guarded = model._fast.guard is not None
    _set_priorities(model.replay_buffer, batch.indices, errors.cpu().numpy(), batch.generation, guarded)


def _set_priorities(storage: Any, indices: Any, errors: NDArray[Any], generation: Any, guarded: bool) -> None:
    """Transitions whose error is not finite keep their priority, if that is looked for; else it is an error."""
    good = np.isfinite(errors) if guarded else np.ones(1, np.bool_)
    if good.all():
        storage.update_priorities(indices, errors, generation)
        return
    drawn_at = generation[good] if isinstance(generation, np.ndarray) and len(generation) == len(good) else generation
    storage.update_priorities(np.asarray(indices)[good], errors[good], drawn_at)
