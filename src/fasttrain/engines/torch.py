"""What makes the eager path of a policy faster: settings, and what they ask for, kept from rollout to rollout."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.buffers.rollout import RolloutBatch, TensorObservations
from fasttrain.engines.compiling import (
    Coefficients,
    CompiledHead,
    Compiler,
    GraphedUpdate,
    LossOf,
    graphed_by_size,
    inductor,
    loss_terms,
    micro_sizes,
    normalized,
    parameter_addresses,
    rows_of,
    untouched,
)
from fasttrain.engines.devices import PinnedTransfer, Precision, Transfer
from fasttrain.engines.heads import ActingHead, CategoricalHead, ChunkedHead, head_of
from fasttrain.spec.computing import GRAPH_MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """What the eager path shall do besides what stock does. As made: nothing, and the numbers are those of stock."""

    amp_dtype: torch.dtype | None = None  # of the networks: bfloat16, or float16 on CUDA
    compile_mode: str | None = None  # a mode of torch.compile; on CUDA all but "default" mean CUDA graphs as well
    gradient_accumulation: int = 1  # micro-batches per minibatch
    inference_batch_size: int | None = None  # envs per forward while acting; not with gSDE, whose noise is per env
    pin_memory: bool = False  # page-locked buffers between host and CUDA
    fused_adam: bool = False  # torch's fused kernel on the CPU, 99 µs a step of [64, 64], not 275; others bring it too


class BaseAccelerator:
    """What actor-critic policies and Q-networks share: the settings put to work for one policy, and what came of it.

    Args:
        policy: an SB3 policy.
        settings: what is wanted.
        compiler: what compiles; torch's own by default.
    """

    def __init__(self, policy: Any, settings: Acceleration, compiler: Compiler | None = None) -> None:
        self.policy, self.settings, self.device = policy, settings, policy.device
        dtype = settings.amp_dtype
        self.precision = None if dtype is None else Precision(self.device.type, dtype)
        pinned = settings.pin_memory and self.device.type == "cuda"
        self.transfer = PinnedTransfer(self.device) if pinned else Transfer(self.device)
        self.compiler = compiler or inductor(settings.compile_mode or "default")
        self.graphed_update: GraphedUpdate | None = None
        self.warm = settings.compile_mode is None  # whether nothing is left to compile
        self.warmup_s = 0.0  # compiling took so long
        self.failure = ""  # why nothing was compiled
        self.graph_failure = ""  # why there is no graph of the update, though one was asked for
        self._capture_failure = ""  # the same, where capturing was tried: it is not tried again
        self._sizes: tuple[int, ...] = ()  # that everything was compiled for

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs were asked for and can be."""
        return self.device.type == "cuda" and self.settings.compile_mode in GRAPH_MODES

    def serves(self, policy: Any, settings: Acceleration) -> bool:
        """Whether it was made for this policy, where it lies now, and these settings."""
        return policy is self.policy and settings == self.settings and policy.device == self.device

    def must_compile_for(self, sizes: tuple[int, ...]) -> bool:
        """Whether something is left to compile: nothing was yet, or for other numbers of rows than these.

        What does not compile is not tried again.
        """
        if self._sizes and not self.failure and self._sizes != sizes:
            self.warm = False
        return not self.warm

    @contextmanager
    def compiling(self, sizes: tuple[int, ...]) -> Iterator[None]:
        """Compile inside. The policy, the optimizer and the random state stay as they were; `warmup_s` is the time.

        If that fails, `failure` says why and nothing is raised.
        """
        begun = time.perf_counter()
        self.warm, self._sizes = True, sizes
        self.graphed_update = None  # of what was compiled before
        try:
            with untouched(self.policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns of its own parts: deprecated ones, for one
                yield
        except Exception as error:  # whatever a compiler does not like, training goes on without it
            self.failure = f"torch.compile failed: {_first_line(error)}"
        self.warmup_s += time.perf_counter() - begun

    def captured_update(
        self, step: Callable[[Any], Tensor], key: tuple[Any, ...], why_not: str, example: Callable[[], Any]
    ) -> GraphedUpdate | None:
        """The graph of the whole update, ready for use; None where there can be none: `graph_failure` says why.

        `key`: what the graph has fixed; with another it is captured anew, on a batch that `example` makes.
        """
        if not self.graphs:
            return None
        self.graph_failure = self._capture_failure or why_not or _why_no_graph(self.policy, self.precision)
        if self.graph_failure:
            return None
        graph = self.graphed_update
        if graph is not None and graph.optimizer is self.policy.optimizer and graph.begin() and graph.key == key:
            return graph
        begun = time.perf_counter()
        try:
            self.graphed_update = GraphedUpdate(step, example(), self.policy, key)
        except Exception as error:
            self._capture_failure = self.graph_failure = f"no CUDA graph of the update: {_first_line(error)}"
            self.graphed_update = None
        self.warmup_s += time.perf_counter() - begun
        return self.graphed_update


class Accelerator(BaseAccelerator):
    """Of an actor-critic policy."""

    def __init__(self, policy: Any, settings: Acceleration, compiler: Compiler | None = None) -> None:
        super().__init__(policy, settings, compiler)
        self.compiled: CompiledHead | None = None
        self._outputs: Any = None
        self._acting_addresses: tuple[int, ...] = ()  # of the parameters that graphs of acting read
        self._scalars: list[Tensor] = []

    def acting_head(self, action_space: Any) -> ActingHead:
        """Draws actions."""
        head = head_of(self.policy, action_space, self.precision)
        if self.compiled is not None and self.compiled.serves(head) and isinstance(head, CategoricalHead):
            moved = self.graphs and self._acting_addresses != parameter_addresses(self.policy)
            head.acting = self.compiled.outputs if moved else self._outputs
        size = self.settings.inference_batch_size
        if size is None or getattr(self.policy, "use_sde", False):  # a part of the envs would share one gSDE noise
            return head
        return ChunkedHead(head, size)

    def loss_of(self, action_space: Any, entropy_gradient: bool) -> LossOf:
        """The loss of a (micro-)batch, compiled where that was asked for and came about."""
        head = head_of(self.policy, action_space, self.precision)
        compiled = self.compiled
        if compiled is not None and compiled.serves(head):
            return lambda batch, coefficients: compiled.loss(batch, coefficients, entropy_gradient)
        return lambda batch, coefficients: loss_terms(head, batch, coefficients, entropy_gradient)

    def coefficients(self, numbers: Coefficients) -> Coefficients:
        """Plain numbers for the eager way; scalars on the device, at a fixed place, for compiled code and graphs."""
        if self.compiled is None and not self.graphs:
            return numbers
        if not self._scalars:
            self._scalars = [torch.zeros((), device=self.device) for _ in numbers]
        for scalar, number in zip(self._scalars, numbers, strict=True):
            if number is not None:
                scalar.fill_(number)
        given = (None if number is None else scalar for scalar, number in zip(self._scalars, numbers, strict=True))
        return Coefficients(*given)

    def needs_warm_up(self, model: Any, acting_sizes: Iterable[int]) -> bool:
        """Whether something is left to compile, for the sizes the model has now."""
        return self.must_compile_for(_sizes_of(model, acting_sizes))

    def warm_up(self, model: Any, acting_sizes: Iterable[int]) -> None:
        """Compile everything for the model's shapes, now; if that fails, everything goes the eager way."""
        head = head_of(self.policy, model.action_space, self.precision)
        with self.compiling(_sizes_of(model, acting_sizes)):
            self.compiled = compiled = CompiledHead(head, self.compiler)
            self._warm_up_acting(model, compiled, sorted(set(acting_sizes)))
            self._warm_up_loss(model, compiled)
        if self.failure:
            self.compiled, self._outputs = None, None

    def _warm_up_acting(self, model: Any, compiled: CompiledHead, sizes: list[int]) -> None:
        """On observations of the storage, repeated to the number of rows wanted."""
        if not isinstance(compiled.head, CategoricalHead):
            return
        limit = self.settings.inference_batch_size
        if limit is not None:
            sizes = sorted({part for size in sizes for part in (min(size, limit), size % limit) if part})
        compiled.acting_sizes = set(sizes)
        self.policy.set_training_mode(False)
        examples = [repeated(_first_step(model), size) for size in sizes]
        self._outputs = compiled.outputs
        with torch.no_grad():
            for example in examples:
                compiled.outputs(example)
        if self.graphs:
            self._outputs = graphed_by_size(compiled.outputs, examples)
            self._acting_addresses = parameter_addresses(self.policy)

    def _warm_up_loss(self, model: Any, compiled: CompiledHead) -> None:
        batch = _example_batch(model)
        self.policy.set_training_mode(True)
        compiled.batch_sizes = set(micro_sizes(len(batch.returns), self.settings.gradient_accumulation))
        now = model._current_progress_remaining
        clip_range_vf = None if model.clip_range_vf is None else model.clip_range_vf(now)
        numbers = Coefficients(model.clip_range(now), clip_range_vf, model.ent_coef, model.vf_coef)
        coefficients = self.coefficients(numbers)
        batch = normalized(batch, model.normalize_advantage)
        for size in compiled.batch_sizes:
            part = RolloutBatch(*(rows_of(part, slice(0, size)) for part in batch))
            torch.autograd.backward(compiled.loss(part, coefficients, model.ent_coef != 0.0).loss)

    def graph_of_update(self, step: Any, model: Any) -> GraphedUpdate | None:
        """The graph of the whole update; see `captured_update`."""
        stops = "no CUDA graph of the update: algo.target_kl stops in the middle of one"
        why_not = "" if model.target_kl is None else stops
        return self.captured_update(step.whole, step.key, why_not, lambda: _example_batch(model))


def _why_no_graph(policy: Any, precision: Precision | None) -> str:
    if precision is not None and precision.scaler is not None:
        return "no CUDA graph of the update: a gradient scaler decides on the host"
    if type(policy.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return "no CUDA graph of the update: not a plain Adam"
    learned = (parameter for group in policy.optimizer.param_groups for parameter in group["params"])
    if any(not parameter.requires_grad for parameter in learned):
        return "no CUDA graph of the update: some parameters are frozen"
    return ""


def _sizes_of(model: Any, acting_sizes: Iterable[int]) -> tuple[int, ...]:
    """Rows of a minibatch, then those of every forward while acting."""
    storage = model.rollout_buffer
    total = storage.num_steps * storage.num_envs
    return min(model.batch_size or total, total), *sorted(set(acting_sizes))


def _first_step(model: Any) -> TensorObservations:
    """Observations (N, ...) of the storage's first step, whatever they are."""
    stored = model.rollout_buffer.observations
    step = {key: part[0] for key, part in stored.items()} if isinstance(stored, dict) else stored[0]
    return obs_as_tensor(step, model.device)


def repeated(observations: TensorObservations, size: int) -> TensorObservations:
    """Rows over and over, until there are `size`."""
    if isinstance(observations, dict):
        return {key: repeated(part, size) for key, part in observations.items()}  # type: ignore[misc]
    return observations[torch.arange(size, device=observations.device) % len(observations)]


def _example_batch(model: Any) -> RolloutBatch:
    """A minibatch of the size that training will use; numpy's random state stays as it was."""
    storage = model.rollout_buffer
    full, state = storage.full, np.random.get_state()
    storage.full = True  # whatever lies there is good enough
    batch = next(storage.minibatches(model.batch_size))
    storage.full = full
    np.random.set_state(state)
    return batch  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
