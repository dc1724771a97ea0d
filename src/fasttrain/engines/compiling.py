"""What makes a minibatch one call: torch.compile, on CUDA with CUDA graphs where its mode brings them.

The loss is compiled together with the networks, so that its dozens of small operations become few, and its backward
with it. Nothing is copied: compiled code reads the policy's own parameters, so that what acts has what was learned.
It is compiled for the sizes it was warmed up with; a minibatch of another size (the rest of an epoch) goes the eager
way instead of compiling in the middle of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fasttrain.batch import each_array
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations
from fasttrain.engines.heads import CategoricalHead, Head, Outputs, loss_terms
from fasttrain.engines.losses import Coefficients, Terms

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
        """`loss_terms`, compiled where the number of rows is one of `batch_sizes`."""
        chosen = self._loss if len(batch.returns) in self.batch_sizes else self._plain_loss
        terms: Terms = chosen(batch, coefficients, entropy_gradient)
        return terms

    def _plain_loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        return loss_terms(self.head, batch, coefficients, entropy_gradient)


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
