"""FastState: all state that the fast PPO algorithms keep besides SB3's, in the one attribute `_fast` of the model.

`_fast` is excluded from saving, so that a saved zip holds nothing that stock SB3 does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.buffers.stock import STOCK_ROLLOUTS, rollout_class
from fasttrain.engines.guard import Guard
from fasttrain.engines.heads import action_dims
from fasttrain.engines.kernels import FusedPolicy, why_not_fused
from fasttrain.engines.torch import Acceleration, Accelerator
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.base import SlotSource, slots_of
from fasttrain.vec.groups import WorkerGroups
from fasttrain.vec.shared import SharedMemoryVecEnv


class Overlap(Protocol):
    """An update that may be under way (`overlap.OverlappedUpdate`, which stands above this module)."""

    @property
    def warmup_s(self) -> float:
        """What compiling for it took."""

    def start(self) -> None:
        """Train on the filled storage in a thread."""

    def finish(self) -> None:
        """Take the result over; nothing happens if no update is under way."""


@dataclass(slots=True)
class FastState:
    """The clock may be replaced by the run, so that one clock covers training and everything around it.

    `fused` off: every number is that of SB3. On: an MLP policy on the CPU acts and learns through the kernels of
    `fused.py`; any other policy still gets torch's fused Adam (64 µs a step of a [64, 64] policy, not 230; weights
    drift by 3e-8 in 100 steps).
    """

    masked: bool  # MaskablePPO
    clock: PhaseClock = field(default_factory=PhaseClock)
    fused: bool = False
    max_threads: int = 1  # of the kernels
    gradient_updates: int = 0  # optimizer steps so far
    skipped_steps: int = 0  # of these none: gradient or loss was not finite, in float16 by overflow
    guard: Guard | None = field(default_factory=Guard)  # None: nothing not finite is looked for
    kernels: FusedPolicy | None = None
    acceleration: Acceleration = field(default_factory=Acceleration)  # of the eager path
    accelerator: Accelerator | None = None
    lends_observations: bool = False  # callbacks see `new_obs` in the storage, for one rollout, not a copy to keep
    overlap: Overlap | None = None  # updates beside collecting
    pipeline: int = 1  # groups of workers that step in turn while the policy acts for the others
    first_ready: bool = False  # every worker a group, served as it is ready
    env: VecEnv | None = None
    source: SlotSource | None = None  # `env` seen as slots

    def kernels_of(self, policy: Any, observation_space: spaces.Space[Any]) -> FusedPolicy | None:
        """The kernels for `policy`, kept from rollout to rollout; None where they cannot stand in for it."""
        if not self.fused or why_not_fused(policy, observation_space):
            return None
        kernels = self.kernels
        if kernels is None or not kernels.serves(policy) or kernels.max_threads != self.max_threads:
            self.kernels = kernels = FusedPolicy(policy, self.max_threads)
        return kernels

    def accelerator_of(self, policy: Any) -> Accelerator:
        """The eager path's accelerator for `policy`, kept from rollout to rollout."""
        accelerator = self.accelerator
        if accelerator is None or not accelerator.serves(policy, self.acceleration):
            self.accelerator = accelerator = Accelerator(policy, self.acceleration)
        return accelerator

    @property
    def warmup_s(self) -> float:
        """What torch.compile and capturing graphs took, outside of every phase."""
        own = 0.0 if self.accelerator is None else self.accelerator.warmup_s
        return own if self.overlap is None else own + self.overlap.warmup_s

    def source_of(self, env: VecEnv) -> SlotSource:
        """The slots of `env`, kept from rollout to rollout."""
        if self.source is None or self.env is not env:
            self.env, self.source = env, slots_of(env)
        return self.source

    def groups_of(self, source: SlotSource) -> WorkerGroups | None:
        """The workers in groups; None where all step together."""
        if not isinstance(source, SharedMemoryVecEnv):
            return None
        wanted = min(source.num_workers if self.first_ready else self.pipeline, source.num_workers)
        return WorkerGroups(source, wanted) if wanted > 1 else None


def has_stock_buffer(model: OnPolicyAlgorithm) -> bool:
    """False for a rollout buffer class of the user's own: what it does is unknown, so SB3's own loops must serve it."""
    return model.rollout_buffer_class in STOCK_ROLLOUTS and not model.rollout_buffer_kwargs


def storage_of(model: OnPolicyAlgorithm, num_steps: int, num_envs: int) -> RolloutStorage:
    """The model's storage for T × N transitions; allocated anew where steps, envs, gamma or lambda have changed."""
    fast: FastState = model._fast  # type: ignore[attr-defined]
    current: Any = model.rollout_buffer
    wanted = (num_steps, num_envs, model.gamma, model.gae_lambda)
    if isinstance(current, RolloutStorage) and current.settings == wanted:
        return current
    storage = rollout_class(model.observation_space, fast.masked)(
        num_steps,
        num_envs,
        model.observation_space,
        model.action_space,
        device=model.device,
        gamma=model.gamma,
        gae_lambda=model.gae_lambda,
        mask_width=sum(action_dims(model.action_space)) if fast.masked else None,
    )
    model.rollout_buffer = storage  # type: ignore[assignment]
    return storage


def gradient_norm(gradients: list[Tensor]) -> Tensor:  # ()
    """Of all together; dense gradients of one device and dtype take the same operations, with fewer calls."""
    if _are_alike(gradients):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        return norm
    return torch.nn.utils.get_total_norm(gradients)


def clip_gradients(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """With `gradient_norm` what `torch.nn.utils.clip_grad_norm_` does, by the same operations: 33 µs, not 54."""
    if _are_alike(gradients):
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradient.device))


def _are_alike(gradients: list[Tensor]) -> bool:
    return len({(gradient.device, gradient.dtype) for gradient in gradients}) == 1


def step_clipped(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    max_norm: float,
    scaler: Any = None,
    loss: Tensor | None = None,
) -> Tensor:
    """Clip the gradients of `parameters` and let the optimizer step, through the gradient scaler if there is one.

    Args:
        loss: of a guarded step, which is taken only where it and the gradient's norm are finite; else weights and
            optimizer state stay as they are, and on the CPU the gradients too. A scaler does that by itself.

    Returns:
        the norm before clipping, (); not finite where no step was taken.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(gradients)
    on_device = False
    if loss is not None and scaler is None:
        norm = torch.add(norm, loss.detach(), alpha=0.0)  # NaN where the loss is not finite, else the norm itself
        on_device = reading_waits(norm) and all(group.get("fused") for group in optimizer.param_groups)
        # Reading costs 1 µs on the CPU. On CUDA it waits for the device, where Adam is not fused: stock waits 5 times.
        if not on_device and not math.isfinite(norm.item()):
            return norm
    clip_gradients(gradients, max_norm, norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    elif on_device:
        step_if(torch.isfinite(norm), optimizer)
    else:
        optimizer.step()
    return norm


def reading_waits(tensor: Tensor) -> bool:
    """Whether the host must wait for a device to know the numbers."""
    return tensor.device.type != "cpu"


def step_if(good: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step of a fused Adam that takes place only where `good` () is true. The host never knows: graphs can do it."""
    scaled: Any = optimizer
    scaled.found_inf = torch.logical_not(good).float()  # what a GradScaler tells it
    try:
        optimizer.step()
    finally:
        del scaled.found_inf


@contextmanager
def faster_adam(optimizer: torch.optim.Optimizer, fused: bool) -> Iterator[None]:
    """Let a plain Adam on the CPU use its fused kernel, or else its `foreach` loop, inside the block.

    `foreach` equals SB3's default loop bit by bit. The flags are put back after, so that a saved optimizer is a stock
    one; whoever set a flag themselves keeps it.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        yield
        return
    chosen = {"fused": True} if fused else {"foreach": True}
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        on_cpu = all(p.device.type == "cpu" and p.is_floating_point() for p in group["params"])
        plain = not (
            group.get("fused") or group.get("foreach") or group.get("capturable") or group.get("differentiable")
        )
        if on_cpu and plain:
            changed.append((group, {key: group.get(key) for key in chosen}))
            group.update(chosen)
    try:
        yield
    finally:
        for group, before in changed:
            group.update(before)
