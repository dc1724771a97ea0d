"""What makes a minibatch one call: torch.compile, on CUDA with CUDA graphs where its mode brings them.

The loss is compiled together with the networks, so that its dozens of small operations become few, and its backward
with it. Nothing is copied: compiled code reads the policy's own parameters, so that what acts has what was learned.
It is compiled for the sizes it was warmed up with; a minibatch of another size (the rest of an epoch) goes the eager
way instead of compiling in the middle of training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from fasttrain.batch import each_array
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations
from fasttrain.engines.devices import Precision
from fasttrain.engines.engine import Engine, EngineSettings
from fasttrain.engines.heads import CategoricalHead, Head, Outputs
from fasttrain.engines.losses import Coefficients, Terms, ppo_terms, with_loss
from fasttrain.spec.computing import GRAPH_MODES

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def inductor(mode: str, graphs: bool) -> Compiler:
    """torch.compile for fixed sizes; `graphs`: with the CUDA graphs that the mode brings.

    A graph writes into the same memory at every call. What is kept for longer is therefore a copy.
    """
    if not graphs:
        inner = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)
        return lambda function: torch.compile(function, mode=inner, dynamic=False)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        graphed = torch.compile(function, mode=mode, dynamic=False)

        def copied(*arguments: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return each_array(torch.clone, graphed(*arguments))

        return copied

    return compiled


class CompiledHead:
    """Compiled forms of one head's work.

    Args:
        head: the head whose policy is compiled.
        compiler: makes a compiled function of a plain one.
    """

    def __init__(self, head: Head, compiler: Compiler) -> None:
        self.head = head
        self.acting_sizes: set[int] = set()
        self.batch_sizes: set[int] = set()
        self._loss = compiler(self._plain_loss)
        self._outputs = compiler(head.outputs) if isinstance(head, CategoricalHead) else None

    def serves(self, head: Head) -> bool:
        """Whether it was compiled for this very policy, acting in this way."""
        return type(head) is type(self.head) and head.policy is self.head.policy

    def outputs(self, observations: TensorObservations) -> Outputs:
        """Logits and values of the policy, compiled where the number of rows is one of `acting_sizes`."""
        if self._outputs is not None and num_rows(observations) in self.acting_sizes:
            return self._outputs(observations)  # type: ignore[no-any-return]
        return self.head.outputs(observations)  # type: ignore[attr-defined, no-any-return]

    def loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        """PPO's loss with its terms, compiled where the number of rows is one of `batch_sizes`."""
        chosen = self._loss if len(batch.returns) in self.batch_sizes else self._plain_loss
        terms: Terms = chosen(batch, coefficients, entropy_gradient)
        return terms

    def _plain_loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        evaluated = self.head.evaluate(batch, entropy_gradient)
        terms = ppo_terms(batch, evaluated, coefficients.clip_range, coefficients.clip_range_vf)
        return with_loss(terms, batch, evaluated, coefficients)


def num_rows(observations: TensorObservations) -> int:
    """How many observations these are."""
    return len(next(iter(observations.values())) if isinstance(observations, dict) else observations)


@contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Afterwards the policy is as it was: parameters, running statistics, gradients, mode; and torch's random state."""
    tensors = [*policy.parameters(), *policy.buffers()]
    saved = [tensor.detach().clone() for tensor in tensors]
    gradients = [parameter.grad for parameter in policy.parameters()]
    training = policy.training
    devices = sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, saved, strict=True):
                    tensor.copy_(before)
            for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
                parameter.grad = gradient
            policy.set_training_mode(training)


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


def repeated(observations: TensorObservations, size: int) -> TensorObservations:
    """Rows over and over, until there are `size`."""
    found: TensorObservations = each_array(
        lambda part: part[torch.arange(size, device=part.device) % len(part)], observations
    )
    return found


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
