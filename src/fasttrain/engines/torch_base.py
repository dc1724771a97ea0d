"""What the PyTorch engines of actor-critics and of Q-networks share: precision, transfers, compiling, CUDA graphs."""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from fasttrain.buffers.rollout import TensorObservations
from fasttrain.engines.causes import bad_gradients, blame, listed
from fasttrain.engines.compiling import Compiler, GraphedUpdate, capturable, inductor, untouched
from fasttrain.engines.devices import PinnedTransfer, Precision, Transfer
from fasttrain.engines.engine import Engine, EngineSettings
from fasttrain.engines.optimizing import faster_adam, reading_waits, step_clipped
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
        self.device = policy.device
        dtype = settings.amp_dtype
        self.precision = None if dtype is None else Precision(self.device.type, dtype)
        pinned = settings.pin_memory and self.device.type == "cuda"
        self.transfer = PinnedTransfer(self.device) if pinned else Transfer(self.device)
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

    @property
    def scaler(self) -> Any:
        """float16's gradient scaler, if there is one."""
        return None if self.precision is None else self.precision.scaler

    def fits(self, policy: Any) -> bool:
        return policy is self.policy and policy.device == self.device

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

    def captured_update(self, step: TorchStep, why_not: str, example: Callable[[], Any]) -> GraphedUpdate | None:
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
        begun = time.perf_counter()
        try:
            self.graphed_update = GraphedUpdate(step.whole, example(), self.policy, step.key)
        except Exception as error:
            self._capture_failure = self.graph_failure = f"no CUDA graph of the update: {_first_line(error)}"
            self.graphed_update = None
        self.warmup_s += time.perf_counter() - begun
        return self.graphed_update

    def stepping(self, graph: GraphedUpdate | None) -> AbstractContextManager[None]:
        """Adam as it shall step inside; a saved optimizer is a stock one."""
        optimizer = self.policy.optimizer
        return faster_adam(optimizer, not self.settings.exact) if graph is None else capturable(optimizer, graph.rates)

    def scaler_state(self) -> dict[str, Any] | None:
        return None if self.scaler is None else dict(self.scaler.state_dict())

    def load_scaler(self, state: Mapping[str, Any] | None) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))


class TorchStep(ABC):
    """What one minibatch's step of either kind needs, and what it leaves for the end of the round.

    Args:
        engine: whose policy learns.
        max_grad_norm: to which gradients are clipped.
        fixed: further numbers that a graph of `whole` has fixed.
    """

    def __init__(self, engine: TorchBase, max_grad_norm: float, *fixed: Any) -> None:
        self.engine, self.clock, self.max_grad_norm = engine, engine.clock, max_grad_norm
        self.guarded = engine.guard is not None
        self.key = (max_grad_norm, self.guarded, *fixed)
        self.parameters = list(engine.policy.parameters())
        self.norms: list[Tensor] = []  # of gradients, where steps are watched; not finite: no step was taken
        self.taken = 0
        self.blamed = ""  # loss or gradient that was not finite first, where the host could see it
        self.loss: Tensor | None = None  # of the last minibatch

    def whole(self, batch: Any) -> Tensor:
        """From the loss to the step with nothing decided on the host: what a CUDA graph captures."""
        clock, self.clock = self.clock, PhaseClock()  # a capture is no phase of training
        try:
            return self._whole(batch)
        finally:
            self.clock = clock

    @abstractmethod
    def _whole(self, batch: Any) -> Tensor:
        """As `whole`, on no clock."""

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss, scaled in float16."""
        scaler = self.engine.scaler
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))

    def apply(self) -> Tensor:  # () norm of the gradients; not finite where no step was taken
        """Clip the gradients and let the optimizer step, if they and the loss are finite."""
        loss = self.loss if self.guarded else None
        optimizer = self.engine.policy.optimizer
        return step_clipped(optimizer, self.parameters, self.max_grad_norm, self.engine.scaler, loss)

    def watch(self, norm: Tensor) -> None:
        """Keep what `apply` said for the end of the round."""
        self.taken += 1
        if not self.guarded and self.engine.scaler is None:
            return
        self.norms.append(norm.detach())
        on_host = not reading_waits(norm) and self.engine.scaler is None and not self.blamed
        if on_host and not math.isfinite(norm.item()):
            good_loss = self.loss is not None and math.isfinite(self.loss.item())
            self.blamed = blame(good_loss, listed(bad_gradients(self.engine.policy)))


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
