"""What makes a minibatch one call: torch.compile, CUDA graphs.

The loss is compiled together with the networks, so that its dozens of small operations become few, and its backward
with it. Nothing is copied: compiled code reads the policy's own parameters, so that what acts has what was learned.
It is compiled for the sizes it was warmed up with; a minibatch of another size (the rest of an epoch) goes the eager
way instead of compiling in the middle of training.

A CUDA graph replays kernels on fixed memory. So its inputs are copied into place, coefficients and learning rates are
tensors, and Adam counts its steps on the device. Parameters and optimizer state are the policy's own: what one graph
learned, the other acts with. Actions are drawn outside, from a random state that goes on; what a network draws inside
(dropout) goes on too, because the capture registers the device's generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fasttrain.batch import each_array
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations
from fasttrain.engines.heads import CategoricalHead, Head, Outputs, loss_terms
from fasttrain.engines.losses import Coefficients, Terms

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def inductor(mode: str) -> Compiler:
    """torch.compile for fixed sizes. CUDA graphs are ours (`graphs`), around the optimizer's step too."""
    inner = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)
    return lambda function: torch.compile(function, mode=inner, dynamic=False)


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


@contextmanager
def state_untouched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Afterwards the optimizer's state holds the numbers it held, in the memory it has now; what is new is zero."""
    before = {id(parameter): copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    try:
        yield
    finally:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    saved = before.get(id(parameter), {}).get(name)
                    value.zero_() if saved is None else value.copy_(saved)


Networks = Callable[[TensorObservations], Any]  # one tensor, or several
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
WARM_UP_RUNS = 3  # what is made on the first runs (handles, workspaces, optimizer state) must not be captured


def cuda_capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Run `function` a few times, then capture it: how to replay it, and the outputs that every replay overwrites."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs


class GraphedOutputs:
    """A policy's networks for one number of rows.

    Args:
        outputs: the networks, as they are called eagerly.
        observations: an example, which fixes shapes and types.
        capture: how a function becomes a replay.
    """

    def __init__(
        self,
        outputs: Networks,
        observations: TensorObservations,
        capture: Capture = cuda_capture,
    ) -> None:
        self._place = each_array(torch.clone, observations)
        with torch.no_grad():
            self._replay, self._outputs = capture(lambda: outputs(self._place))

    def __call__(self, observations: TensorObservations) -> Any:
        """What the networks put out, one tensor or several, in memory of their own."""
        each_array(Tensor.copy_, self._place, observations)
        self._replay()
        return each_array(torch.clone, self._outputs)


class GraphedUpdate:
    """One minibatch from loss to optimizer step, for minibatches of one size.

    Args:
        step: the work on a batch as the storage hands it out; returns one tensor of statistics.
        batch: an example, a NamedTuple of tensors (or dicts of them, or None), which fixes shapes and types.
        policy: whose parameters are learned; its optimizer is an Adam.
        key: the numbers that are fixed in the graph; with others it must be captured anew.
        capture: how a function becomes a replay.
    """

    def __init__(
        self,
        step: Callable[[Any], Tensor],
        batch: Any,
        policy: Any,
        key: tuple[Any, ...] = (),
        capture: Capture = cuda_capture,
    ) -> None:
        self.key, self.replays = key, 0
        self._place = each_array(torch.clone, batch)
        self.optimizer = policy.optimizer
        self.rates = [torch.tensor(float(group["lr"]), device=policy.device) for group in self.optimizer.param_groups]
        with untouched(policy), capturable(self.optimizer, self.rates), state_untouched(self.optimizer):
            self._replay, self._statistics = capture(lambda: step(self._place))
        self.addresses = addresses(self.optimizer)

    def begin(self) -> bool:
        """Take over the learning rates of now. False: parameters or optimizer state have moved, so capture anew."""
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(float(group["lr"]))
        return self.addresses == addresses(self.optimizer)

    def stepping(self) -> AbstractContextManager[None]:
        """Adam as the graph wants it, inside."""
        return capturable(self.optimizer, self.rates)

    def fits(self, batch: Any) -> bool:
        """Whether the batch has the number of rows that was captured."""
        return num_rows(batch.observations) == num_rows(self._place.observations)

    def __call__(self, batch: Any) -> Tensor:
        """Learn from a batch; what `step` returned."""
        each_array(Tensor.copy_, self._place, batch)
        self._replay()
        self.replays += 1
        statistics: Tensor = self._statistics.clone()
        return statistics


@contextmanager
def capturable(optimizer: torch.optim.Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Let Adam run inside a graph: nothing of it is read by the host, learning rates and step counts lie on the device.

    The options are put back after, so that a saved optimizer is a stock one; the counts stay where they are.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        on_cuda = rate.device.type == "cuda"  # elsewhere torch refuses these options
        group.update({"lr": rate, "capturable": on_cuda, "fused": on_cuda, "foreach": False})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(rate.device)
    try:
        yield
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update({key: old[key] for key in ("lr", "capturable", "fused", "foreach")})


def addresses(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Where parameters and the optimizer's state lie: a graph knows no other place."""
    found: list[int] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(parameter.data_ptr())
            state = optimizer.state.get(parameter) or {}
            found += [value.data_ptr() for value in state.values() if isinstance(value, Tensor)]
    return tuple(found)


def parameter_addresses(policy: Any) -> tuple[int, ...]:
    """Where the policy's parameters lie."""
    return tuple(parameter.data_ptr() for parameter in policy.parameters())


def graphed_by_size(outputs: Networks, examples: list[TensorObservations], capture: Capture = cuda_capture) -> Networks:
    """The networks as one graph per number of rows among the examples; eager for any other."""
    graphs = {num_rows(example): GraphedOutputs(outputs, example, capture) for example in examples}

    def chosen(observations: TensorObservations) -> Any:
        graph = graphs.get(num_rows(observations))
        return outputs(observations) if graph is None or torch.is_grad_enabled() else graph(observations)

    return chosen
