"""What settings add to the eager way on PyTorch: mixed precision, torch.compile and micro-batches.

`TorchBase` has what engines of actor-critics and of Q-networks share, `TunedActorCritic` the rest. With plain settings
only its constructors run: a transition then passes through `torch.py`, `heads.py` and `losses.py` alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.batch import each_array, select_rows
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
from fasttrain.engines.compiling import CompiledHead, Compiler, inductor, untouched
from fasttrain.engines.devices import Precision
from fasttrain.engines.engine import Engine, EngineSettings, PPOWork
from fasttrain.engines.heads import CategoricalHead, Head, head_of
from fasttrain.engines.losses import Coefficients, normalized
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
        self.scaler = None if self.precision is None else self.precision.scaler
        graphs = self.device.type == "cuda" and settings.compile_mode in GRAPH_MODES
        # Gradients that several backward passes add up must not lie in the memory of a graph.
        graphs = graphs and settings.gradient_accumulation == 1
        self.compiler = compiler or inductor(settings.compile_mode or "default", graphs)
        self.failure = ""  # why nothing was compiled
        self._sizes: tuple[int, ...] = ()  # that everything was compiled for

    def must_compile_for(self, sizes: tuple[int, ...]) -> bool:
        """Whether something is left to compile: nothing was yet, or for other numbers of rows than these.

        What does not compile is not tried again.
        """
        return self.settings.compile_mode is not None and not self.failure and self._sizes != sizes

    @contextmanager
    def compiling(self, sizes: tuple[int, ...]) -> Iterator[None]:
        """Compile inside. The policy, the optimizer and the random state stay as they were; `warmup_s` is the time.

        If that fails, `failure` says why and nothing is raised.
        """
        begun = time.perf_counter()
        self._sizes = sizes
        try:
            with untouched(self.policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns of its own parts: deprecated ones, for one
                yield
        except Exception as error:  # whatever a compiler does not like, training goes on without it
            self.failure = f"torch.compile failed: {_first_line(error)}"
        self.warmup_s += time.perf_counter() - begun


class TunedActorCritic(TorchBase):
    """Compiled and in parts: what an actor-critic makes of its settings."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before, compiler)
        self.compiled: CompiledHead | None = None

    def tuned_head(self, head: Head) -> Head:
        """The head as it shall act: compiled, where that came about."""
        if self.compiled is not None and self.compiled.serves(head) and isinstance(head, CategoricalHead):
            head.acting = self.compiled.outputs
        return head

    def scalars(self, numbers: Coefficients) -> Coefficients:
        """On the device for compiled code, in which a number would be fixed; else as they are."""
        if self.compiled is None:
            return numbers
        given = (None if number is None else torch.tensor(float(number), device=self.device) for number in numbers)
        return Coefficients(*given)

    def prepare(self, data: RolloutStorage, work: PPOWork, acting_sizes: list[int]) -> str:
        total, acting_sizes = data.num_steps * data.num_envs, sorted(set(acting_sizes))
        sizes = (min(work.batch_size or total, total), *acting_sizes)
        if not self.must_compile_for(sizes):
            return ""
        head = head_of(self.policy, self.policy.action_space, self.precision)
        with self.compiling(sizes):
            self.compiled = compiled = CompiledHead(head, self.compiler)
            self._compile_acting(compiled, data, acting_sizes)
            self._compile_loss(compiled, data, work)
        if self.failure:
            self.compiled = None
        return self.failure

    def _compile_acting(self, compiled: CompiledHead, data: RolloutStorage, sizes: list[int]) -> None:
        """On observations of the storage's first step, whatever they are, repeated to the number of rows wanted."""
        if not isinstance(compiled.head, CategoricalHead):
            return
        compiled.acting_sizes = set(sizes)
        self.policy.set_training_mode(False)
        first = obs_as_tensor(select_rows(data.observations, 0), self.device)
        with torch.no_grad():
            for size in sizes:
                compiled.outputs(repeated(first, size))

    def _compile_loss(self, compiled: CompiledHead, data: RolloutStorage, work: PPOWork) -> None:
        batch = normalized(example_batch(data, work), work.normalize_advantage)
        self.policy.set_training_mode(True)
        parts = {len(part.returns): part for part, _ in micro_batches(batch, self.settings.gradient_accumulation)}
        compiled.batch_sizes = set(parts)
        coefficients = self.scalars(Coefficients.of(work))
        for part in parts.values():
            torch.autograd.backward(compiled.loss(part, coefficients, work.ent_coef != 0.0).loss)


def micro_batches(batch: RolloutBatch, parts: int) -> Iterator[tuple[RolloutBatch, float]]:
    """The batch in at most `parts` consecutive parts, as even as can be, each with its share of the rows: a mean over
    all is the weighted sum of means."""
    total = len(batch.returns)
    for rows in np.array_split(np.arange(total), min(parts, total)):
        yield select_rows(batch, slice(rows[0], rows[-1] + 1)), len(rows) / total


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


def repeated(observations: TensorObservations, size: int) -> TensorObservations:
    """Rows over and over, until there are `size`."""
    found: TensorObservations = each_array(
        lambda part: part[torch.arange(size, device=part.device) % len(part)], observations
    )
    return found


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
