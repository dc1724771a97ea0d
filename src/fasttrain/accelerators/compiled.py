"""torch.compile around the update and the acting of an algorithm, on CUDA with CUDA graphs where its mode brings them.

The loss is compiled together with the networks, so that its dozens of small operations become few, and its backward
with it. Nothing is copied: compiled code reads the policy's own parameters, so that what acts has what was learned.
It is compiled for the sizes it was warmed up with; a minibatch of another size (the rest of an epoch) goes the eager
way instead of compiling in the middle of training. What a subclass overrides is not compiled: `contract.changed`.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from fasttrain.accelerators.contract import changed, storage_of
from fasttrain.algos.engine import network_values
from fasttrain.algos.grouped import groups_of
from fasttrain.algos.policy_view import NetworkView, Outputs, PolicyView
from fasttrain.algos.ppo import ppo_terms, with_loss
from fasttrain.algos.step import Terms, micro_batches, normalized
from fasttrain.batch import each_array, select_rows
from fasttrain.buffers.prefetch import Replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
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


def prepare(model: Any, env: VecEnv) -> str:
    """Compile what the model's settings ask for, for the sizes of now, if that is still to do.

    Returns:
        why that failed, if it did just now: training goes on without; else nothing.
    """
    engine = model.engine_now()
    if engine.kind == "kernels" or not isinstance(storage_of(model), RolloutStorage | ReplayStorage):
        return ""
    kind = CompiledQ if hasattr(model, "replay_buffer") else CompiledPPO
    before, sizes, own = engine.compiled, kind.sizes_of(model, env), changed(model, kind.reproduces)
    if before is not None and (before.failure or (before.sizes == sizes and not own)):
        return ""
    engine.compiled = compiled = kind(engine, before and before.compiler)
    if own:
        compiled.failure = f"torch.compile: {own.partition(':')[0]}"
    else:
        compiled.compile(model, sizes)
    return str(compiled.failure)


class Coefficients(NamedTuple):
    """The numbers of PPO's loss as scalar tensors, so that a schedule compiles nothing anew."""

    clip_range: Any
    clip_range_vf: Any  # None: values are not clipped
    ent_coef: Any
    vf_coef: Any

    @classmethod
    def of(cls, work: Any) -> Coefficients:
        """Those of a `PPOWork`."""
        return cls(*(getattr(work, name) for name in cls._fields))


class Compiled(ABC):
    """Compiled forms of what an engine and the update of its algorithm do.

    Args:
        engine: the torch engine that they belong to.
        compiler: makes a compiled function of a plain one; torch's own by default.
    """

    reproduces: tuple[str, ...]  # methods of the algorithm

    def __init__(self, engine: Any, compiler: Compiler | None = None) -> None:
        self.engine, settings = engine, engine.settings
        graphs = engine.device.type == "cuda" and settings.compile_mode in GRAPH_MODES
        # Gradients that several backward passes add up must not lie in the memory of a graph.
        graphs = graphs and settings.gradient_accumulation == 1
        self.compiler = compiler or inductor(settings.compile_mode, graphs)
        self.failure = ""  # why nothing was compiled
        self.sizes: tuple[int, ...] = ()  # that everything was compiled for

    @staticmethod
    @abstractmethod
    def sizes_of(model: Any, env: VecEnv) -> tuple[int, ...]:
        """Numbers of rows: of a minibatch, and of what acts together."""

    @abstractmethod
    def compile(self, model: Any, sizes: tuple[int, ...]) -> None:
        """If that fails, `failure` says why and nothing is raised."""

    @contextmanager
    def compiling(self, sizes: tuple[int, ...]) -> Iterator[None]:
        """Compile inside. The policy, the optimizer and the random state stay as they were."""
        begun = time.perf_counter()
        self.sizes = sizes
        try:
            with untouched(self.engine.policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns of its own parts: deprecated ones, for one
                yield
        except Exception as error:  # whatever a compiler does not like, training goes on without it
            self.failure = f"torch.compile failed: {_first_line(error)}"
        self.engine.warmup_s += time.perf_counter() - begun


class CompiledPPO(Compiled):
    """The loss of a minibatch of PPO, and the outputs of a policy that acts by its networks alone."""

    reproduces = ("loss",)

    def __init__(self, engine: Any, compiler: Compiler | None = None) -> None:
        super().__init__(engine, compiler)
        self.view: PolicyView = engine.new_view()
        self.acting_sizes: set[int] = set()
        self.batch_sizes: set[int] = set()

    @cached_property
    def _loss(self) -> Any:
        return self.compiler(self._plain_loss)

    @cached_property
    def _outputs(self) -> Any:
        return self.compiler(self.view.outputs) if isinstance(self.view, NetworkView) else None

    @staticmethod
    def sizes_of(model: Any, env: VecEnv) -> tuple[int, ...]:
        rollout, groups = model.rollout_buffer.storage, groups_of(model, model.collector.source_of(env))
        acting = {env.num_envs, *(rows.stop - rows.start for rows in (groups.rows if groups else ()))}
        total = rollout.num_steps * rollout.num_envs
        return min(model.batch_size or total, total), *sorted(acting)

    def compile(self, model: Any, sizes: tuple[int, ...]) -> None:
        with self.compiling(sizes):
            rollout = model.rollout_buffer.storage
            self._compile_acting(rollout, sizes[1:])
            self._compile_loss(rollout, model.work())

    def _compile_acting(self, rollout: RolloutStorage, sizes: tuple[int, ...]) -> None:
        """On observations of the storage's first step, whatever they are, repeated to the number of rows wanted."""
        if self._outputs is None:
            return
        self.acting_sizes = set(sizes)
        self.engine.policy.set_training_mode(False)
        first = obs_as_tensor(select_rows(rollout.observations, 0), self.engine.device)
        with torch.no_grad():
            for size in sizes:
                self.outputs(repeated(first, size))

    def _compile_loss(self, rollout: RolloutStorage, work: Any) -> None:
        batch = normalized(example_rows(rollout, work), work.normalize_advantage)
        self.engine.policy.set_training_mode(True)
        accumulated = self.engine.settings.gradient_accumulation
        parts = {len(part.returns): part for part, _ in micro_batches(batch, accumulated)}
        self.batch_sizes = set(parts)
        loss = self.loss_with(work)
        for part in parts.values():
            torch.autograd.backward(loss(part)["loss"])

    def serves(self, view: PolicyView) -> bool:
        """Whether it was compiled for this very policy, acting in this way."""
        return not self.failure and type(view) is type(self.view) and view.policy is self.view.policy

    def attach(self, view: PolicyView) -> None:
        """Let the view act by compiled outputs, where it was compiled for it."""
        if isinstance(view, NetworkView) and self.serves(view):
            view.acting = self.outputs

    def outputs(self, observations: TensorObservations) -> Outputs:
        """Logits and values of the policy, compiled where the number of rows is one of `acting_sizes`."""
        chosen: Any = self._outputs if num_rows(observations) in self.acting_sizes else self.view.outputs  # type: ignore[attr-defined]
        found: Outputs = chosen(observations)
        return found

    def loss_of(self, model: Any, work: Any) -> Callable[[RolloutBatch], Terms] | None:
        """What gives the terms of a minibatch in place of evaluation and `loss`; None where plain code must."""
        if not self.sizes or changed(model, self.reproduces) or not self.serves(self.engine.new_view()):
            return None
        return self.loss_with(work)

    def loss_with(self, work: Any) -> Callable[[RolloutBatch], Terms]:
        """The coefficients lie on the device: compiled code would fix a number."""
        device, numbers = self.engine.device, Coefficients.of(work)
        scalars = (None if number is None else torch.tensor(float(number), device=device) for number in numbers)
        return partial(self.loss, coefficients=Coefficients(*scalars), entropy_gradient=work.ent_coef != 0.0)

    def loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        """PPO's loss with its terms, compiled where the number of rows is one of `batch_sizes`."""
        chosen = self._loss if len(batch.returns) in self.batch_sizes else self._plain_loss
        terms: Terms = chosen(batch, coefficients, entropy_gradient)
        return terms

    def _plain_loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        evaluated = self.view.evaluate(batch, entropy_gradient)
        terms = ppo_terms(batch, evaluated, coefficients.clip_range, coefficients.clip_range_vf)
        return with_loss(terms, batch, evaluated, coefficients)


class CompiledQ(Compiled):
    """Evaluation and loss of a batch of DQN, and the values by which it acts."""

    reproduces = ("evaluate", "loss")
    _terms: Any = None
    _values: Any = None

    @staticmethod
    def sizes_of(model: Any, env: VecEnv) -> tuple[int, ...]:
        return model.batch_size, env.num_envs

    def compile(self, model: Any, sizes: tuple[int, ...]) -> None:
        policy, precision = self.engine.policy, self.engine.precision
        batch, evaluate, loss = example_batch(model.replay(), model.batch_size), model.evaluate, model.loss

        def terms(batch: ReplayBatch) -> tuple[Any, dict[str, Tensor]]:
            evaluated = evaluate(batch)
            return each_array(Tensor.detach, evaluated), loss(batch, evaluated)

        def values(observations: TensorObservations) -> Tensor:
            return network_values(policy.q_net, observations, precision)

        with self.compiling(sizes):
            self._terms, self._values = self.compiler(terms), self.compiler(values)
            policy.set_training_mode(False)
            with torch.no_grad():
                self._values(repeated(batch.observations, sizes[1]))
            policy.set_training_mode(True)
            torch.autograd.backward(self._terms(batch)[1]["td_loss"])

    def values_of(self, observations: TensorObservations) -> Tensor | None:  # (N, A)
        """Q-values of all actions; None where another number of rows was compiled."""
        if self.failure or num_rows(observations) != self.sizes[1]:
            return None
        return self._values(observations)  # type: ignore[no-any-return]

    def terms_of(self, batch: ReplayBatch) -> tuple[Any, dict[str, Tensor]] | None:
        """What `evaluate` and `loss` give of the batch; None where another number of rows was compiled."""
        if self.failure or num_rows(batch.observations) != self.sizes[0]:
            return None
        return self._terms(tensors_of(batch))  # type: ignore[no-any-return]


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


def repeated(observations: TensorObservations, size: int) -> TensorObservations:
    """Rows over and over, until there are `size`."""
    found: TensorObservations = each_array(
        lambda part: part[torch.arange(size, device=part.device) % len(part)], observations
    )
    return found


def example_rows(data: RolloutStorage, work: Any) -> RolloutBatch:
    """A minibatch of the size that training will use; numpy's random state stays as it was."""
    full, state = data.full, np.random.get_state()
    data.full = True  # whatever lies there is good enough
    batch = next(data.minibatches(work.batch_size))
    data.full = full
    np.random.set_state(state)
    return batch


def example_batch(data: Replay, batch_size: int) -> ReplayBatch:
    """A batch of the shapes, types and place that training will see, whatever lies in the storage; nothing is drawn."""
    storage, first = data.storage, np.zeros(batch_size, np.int64)
    batch = storage.gather(first, first, data.normalizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        batch = batch._replace(weights=torch.ones((batch_size, 1), device=storage.device))
    return tensors_of(batch)


def tensors_of(batch: ReplayBatch) -> ReplayBatch:
    """The batch without what is only for the host: where it was drawn, and when."""
    return batch._replace(indices=None, generation=None)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
