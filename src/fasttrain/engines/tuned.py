"""What settings add to the eager way on PyTorch: mixed precision, page-locked transfers, torch.compile, CUDA graphs
and micro-batches.

`TorchBase` has what engines of actor-critics and of Q-networks share, `TunedActorCritic` the rest. With plain settings
nothing of this file runs: a transition then passes through `torch.py`, `heads.py` and `losses.py` alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.batch import select_rows
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
from fasttrain.engines.compiling import (
    CompiledHead,
    Compiler,
    GraphedUpdate,
    graphed_by_size,
    inductor,
    parameter_addresses,
    untouched,
)
from fasttrain.engines.devices import PinnedTransfer, Precision
from fasttrain.engines.engine import Engine, EngineSettings, PPOWork
from fasttrain.engines.heads import CategoricalHead, Head, head_of
from fasttrain.engines.losses import Coefficients, normalized
from fasttrain.perf.clock import PhaseClock
from fasttrain.spec.computing import GRAPH_MODES


class TorchBase(Engine):
    """Settings of the eager path put to work for one policy, and what came of it.

    Args:
        compiler: what compiles; torch's own by default.
        further: as `Engine`.
    """

    kind: ClassVar[str] = "torch"

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before)
        dtype = settings.amp_dtype
        self.precision = None if dtype is None else Precision(self.device.type, dtype)
        self.scaler: Any = None if self.precision is None else self.precision.scaler  # float16's, of gradients
        pinned = settings.pin_memory and self.device.type == "cuda"
        self.pinned = PinnedTransfer(self.device) if pinned else None
        self.compiler = compiler or inductor(settings.compile_mode or "default")
        self.graphed_update: GraphedUpdate | None = None
        self.failure = ""  # why nothing was compiled
        self.graph_failure = ""  # why there is no graph of the update, though one was asked for
        self._capture_failure = ""  # the same, where capturing was tried: it is not tried again
        self._warm = settings.compile_mode is None  # whether nothing is left to compile
        self._sizes: tuple[int, ...] = ()  # that everything was compiled for

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs were asked for and can be."""
        return self.device.type == "cuda" and self.settings.compile_mode in GRAPH_MODES

    def must_compile_for(self, sizes: tuple[int, ...]) -> bool:
        """Whether something is left to compile: nothing was yet, or for other numbers of rows than these.

        What does not compile is not tried again.
        """
        if self._sizes and not self.failure and self._sizes != sizes:
            self._warm = False
        return not self._warm

    @contextmanager
    def compiling(self, sizes: tuple[int, ...]) -> Iterator[None]:
        """Compile inside. The policy, the optimizer and the random state stay as they were; `warmup_s` is the time.

        If that fails, `failure` says why and nothing is raised.
        """
        begun = time.perf_counter()
        self._warm, self._sizes = True, sizes
        self.graphed_update = None  # of what was compiled before
        try:
            with untouched(self.policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns of its own parts: deprecated ones, for one
                yield
        except Exception as error:  # whatever a compiler does not like, training goes on without it
            self.failure = f"torch.compile failed: {_first_line(error)}"
        self.warmup_s += time.perf_counter() - begun

    def captured_update(self, step: Any, why_not: str, example: Callable[[], Any]) -> GraphedUpdate | None:
        """The graph of the whole update, ready for use; None where there can be none: `graph_failure` says why.

        With another `step.key` than it was captured with it is captured anew, on a batch that `example` makes.
        """
        if not self.graphs:
            return None
        self.graph_failure = self._capture_failure or why_not or _why_no_graph(self.policy, self.precision)
        if self.graph_failure:
            return None
        graph = self.graphed_update
        if graph is not None and graph.optimizer is self.policy.optimizer and graph.begin() and graph.key == step.key:
            return graph
        begun, clock = time.perf_counter(), step.clock
        step.clock = PhaseClock()  # a capture is no phase of training
        try:
            self.graphed_update = GraphedUpdate(step.whole, example(), self.policy, step.key)
        except Exception as error:
            self._capture_failure = self.graph_failure = f"no CUDA graph of the update: {_first_line(error)}"
            self.graphed_update = None
        step.clock = clock
        self.warmup_s += time.perf_counter() - begun
        return self.graphed_update

    def scaler_state(self) -> dict[str, Any] | None:
        return None if self.scaler is None else dict(self.scaler.state_dict())

    def load_scaler(self, state: Mapping[str, Any] | None) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))


class TunedActorCritic(TorchBase):
    """Compiled, graphed and in parts: what an actor-critic makes of its settings."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before, compiler)
        self.compiled: CompiledHead | None = None
        self._outputs: Any = None
        self._acting_addresses: tuple[int, ...] = ()  # of the parameters that graphs of acting read
        self._scalars: list[Tensor] = []

    def tuned_head(self, head: Head) -> Head:
        """The head as it shall act: compiled or graphed, where that came about."""
        if self.compiled is not None and self.compiled.serves(head) and isinstance(head, CategoricalHead):
            moved = self.graphs and self._acting_addresses != parameter_addresses(self.policy)
            head.acting = self.compiled.outputs if moved else self._outputs
        return head

    def scalars(self, numbers: Coefficients) -> Coefficients:
        """On the device, at a fixed place, where compiled code or graphs read them; else as they are."""
        if self.compiled is None and not self.graphs:
            return numbers
        if not self._scalars:
            self._scalars = [torch.zeros((), device=self.device) for _ in numbers]
        for scalar, number in zip(self._scalars, numbers, strict=True):
            if number is not None:
                scalar.fill_(number)
        given = (None if number is None else scalar for scalar, number in zip(self._scalars, numbers, strict=True))
        return Coefficients(*given)

    def compile_all(self, data: RolloutStorage, work: PPOWork, acting_sizes: list[int]) -> bool:
        """Compile acting and the loss for these sizes. False: nothing was left to compile."""
        total, acting_sizes = data.num_steps * data.num_envs, sorted(set(acting_sizes))
        sizes = (min(work.batch_size or total, total), *acting_sizes)
        if not self.must_compile_for(sizes):
            return False
        head = head_of(self.policy, self.policy.action_space, self.precision)
        with self.compiling(sizes):
            self.compiled = compiled = CompiledHead(head, self.compiler)
            self._compile_acting(compiled, data, acting_sizes)
            self._compile_loss(compiled, data, work)
        if self.failure:
            self.compiled, self._outputs = None, None
        return True

    def _compile_acting(self, compiled: CompiledHead, data: RolloutStorage, sizes: list[int]) -> None:
        """On observations of the storage's first step, whatever they are, repeated to the number of rows wanted."""
        if not isinstance(compiled.head, CategoricalHead):
            return
        compiled.acting_sizes = set(sizes)
        self.policy.set_training_mode(False)
        stored: Any = data.observations
        first = {key: part[0] for key, part in stored.items()} if isinstance(stored, dict) else stored[0]
        examples = [repeated(obs_as_tensor(first, self.device), size) for size in sizes]
        self._outputs = compiled.outputs
        with torch.no_grad():
            for example in examples:
                compiled.outputs(example)
        if self.graphs:
            self._outputs = graphed_by_size(compiled.outputs, examples)
            self._acting_addresses = parameter_addresses(self.policy)

    def _compile_loss(self, compiled: CompiledHead, data: RolloutStorage, work: PPOWork) -> None:
        batch = normalized(example_batch(data, work), work.normalize_advantage)
        self.policy.set_training_mode(True)
        compiled.batch_sizes = set(micro_sizes(len(batch.returns), self.settings.gradient_accumulation))
        coefficients = self.scalars(Coefficients.of(work))
        for size in compiled.batch_sizes:
            part = select_rows(batch, slice(0, size))
            torch.autograd.backward(compiled.loss(part, coefficients, work.ent_coef != 0.0).loss)

    def graph_of(self, step: Any, data: RolloutStorage, work: PPOWork) -> GraphedUpdate | None:
        """As `captured_update`, of a minibatch's `PPOStep`."""
        stops = "no CUDA graph of the update: algo.target_kl stops in the middle of one"
        why_not = "" if work.target_kl is None else stops
        return self.captured_update(step, why_not, lambda: example_batch(data, work))


def micro_sizes(size: int, parts: int) -> list[int]:
    """Rows of each of at most `parts` micro-batches, as even as can be."""
    parts = min(parts, size)
    return [size // parts + (index < size % parts) for index in range(parts)]


def micro_batches(batch: RolloutBatch, parts: int) -> Iterator[tuple[RolloutBatch, float]]:
    """The batch in consecutive parts, each with its share of the rows: a mean over all is the weighted sum of means."""
    total, start = len(batch.returns), 0
    for size in micro_sizes(total, parts):
        rows = slice(start, start + size)
        yield select_rows(batch, rows), size / total
        start += size


def accumulated(step: Any, batch: RolloutBatch) -> Tensor:  # (6,) terms
    """The gradient of a whole minibatch as the sum over its parts; `step` is its `PPOStep`."""
    step.forget_gradients()
    found = []
    for part, weight in micro_batches(batch, step.parts):
        step.clock.enter("train_fwd")
        terms = step.loss_of(part)
        found.append(terms.weighted(weight))
        step.clock.enter("train_bwd")
        step.backward(terms.loss * weight)
    total = torch.stack(found).sum(0)
    step.loss = total[0]
    return total


def _why_no_graph(policy: Any, precision: Precision | None) -> str:
    if precision is not None and precision.scaler is not None:
        return "no CUDA graph of the update: a gradient scaler decides on the host"
    if type(policy.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return "no CUDA graph of the update: not a plain Adam"
    learned = (parameter for group in policy.optimizer.param_groups for parameter in group["params"])
    if any(not parameter.requires_grad for parameter in learned):
        return "no CUDA graph of the update: some parameters are frozen"
    return ""


def repeated(observations: TensorObservations, size: int) -> TensorObservations:
    """Rows over and over, until there are `size`."""
    if isinstance(observations, dict):
        return {key: repeated(part, size) for key, part in observations.items()}  # type: ignore[misc]
    return observations[torch.arange(size, device=observations.device) % len(observations)]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def example_batch(data: RolloutStorage, work: PPOWork) -> RolloutBatch:
    """A minibatch of the size that training will use; numpy's random state stays as it was."""
    full, state = data.full, np.random.get_state()
    data.full = True  # whatever lies there is good enough
    batch = next(data.minibatches(work.batch_size))
    data.full = full
    np.random.set_state(state)
    return batch
