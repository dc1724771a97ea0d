"""torch.compile for acting and updates; on CUDA with CUDA graphs, if the compile mode uses them.

The loss is compiled together with the networks, so that dozens of small operations are fused, also in the backward
pass. Compiled code uses the policy's own parameters, without copies. It is compiled for fixed numbers of rows. A
smaller minibatch at the end of an epoch is computed eagerly, so that nothing is compiled in the middle of training.
Methods that a subclass overrides are not compiled; see `contract.first_change`.
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

from fasttrain.accelerators.contract import first_change, storage_of
from fasttrain.algos.grouped import groups_of
from fasttrain.algos.policy_view import NetworkView, Outputs, PolicyView
from fasttrain.algos.ppo import ppo_terms, with_loss
from fasttrain.algos.q_networks import network_values
from fasttrain.algos.step import Terms, micro_batches, normalize_advantages
from fasttrain.batch import each_array, select_rows
from fasttrain.buffers.prefetch import Replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
from fasttrain.spec.computing import GRAPH_MODES

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def inductor(mode: str, graphs: bool) -> Compiler:
    """torch.compile for fixed shapes. `graphs`: whether to use the CUDA graphs of `mode`, a mode of torch.compile.

    A CUDA graph writes results into the same memory at every call, so the results are copied.
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
    """Compile acting and loss for the model's minibatch size and number of envs, unless this is already done.

    Returns:
        why compiling failed in this call, or an empty text. After a failure training continues without compiled code.
    """
    engine = model.engine_now()
    if engine.kind == "kernels" or not isinstance(storage_of(model), RolloutStorage | ReplayStorage):
        return ""
    kind = CompiledQ if hasattr(model, "replay_buffer") else CompiledPPO
    previous, sizes, change = engine.compiled, kind.sizes_of(model, env), first_change(model, kind.reproduces)
    if previous is not None and (previous.failure or (previous.sizes == sizes and not change)):
        return ""
    engine.compiled = compiled = kind(engine, previous and previous.compiler)
    if change:
        compiled.failure = f"torch.compile: {change.partition(':')[0]}"
    else:
        compiled.compile(model, sizes)
    return str(compiled.failure)


class Coefficients(NamedTuple):
    """The coefficients of PPO's loss as scalar tensors. With plain numbers torch would recompile after each change."""

    clip_range: Any
    clip_range_vf: Any  # None: values are not clipped
    ent_coef: Any
    vf_coef: Any


class Compiled(ABC):
    """The functions that torch.compile has compiled for one engine and its algorithm.

    Args:
        engine: a torch engine.
        compiler: compiles a function; torch's own by default.
    """

    reproduces: tuple[str, ...]  # methods of the algorithm that the compiled code replaces

    def __init__(self, engine: Any, compiler: Compiler | None = None) -> None:
        self.engine, settings = engine, engine.settings
        graphs = engine.device.type == "cuda" and settings.compile_mode in GRAPH_MODES
        # A CUDA graph overwrites the gradients of its previous call, so gradients of several calls cannot be summed.
        graphs = graphs and settings.gradient_accumulation == 1
        self.compiler = compiler or inductor(settings.compile_mode, graphs)
        self.failure = ""  # why compiling failed; empty without a failure
        self.sizes: tuple[int, ...] = ()  # the numbers of rows for which everything was compiled

    @staticmethod
    @abstractmethod
    def sizes_of(model: Any, env: VecEnv) -> tuple[int, ...]:
        """Numbers of rows to compile for: the minibatch size, then the numbers of envs that act together."""

    @abstractmethod
    def compile(self, model: Any, sizes: tuple[int, ...]) -> None:
        """Compile all functions for these numbers of rows. A failure raises nothing; `self.failure` is the reason."""

    @contextmanager
    def compiling(self, sizes: tuple[int, ...]) -> Iterator[None]:
        """A context for compiling. It leaves policy, optimizer and random state unchanged."""
        begun = time.perf_counter()
        self.sizes = sizes
        try:
            with untouched(self.engine.policy), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns about its own deprecated parts
                yield
        except Exception as error:  # after any failure training continues without compiled code
            self.failure = f"torch.compile failed: {_first_line(error)}"
        self.engine.warmup_s += time.perf_counter() - begun


class CompiledPPO(Compiled):
    """PPO's compiled loss, and compiled logits and values for acting if the policy's view is a `NetworkView`."""

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
        """Compile for each number of rows in `sizes`, by a call with the first step's observations, repeated."""
        if self._outputs is None:
            return
        self.acting_sizes = set(sizes)
        self.engine.policy.set_training_mode(False)
        first = obs_as_tensor(select_rows(rollout.observations, 0), self.engine.device)
        with torch.no_grad():
            for size in sizes:
                self.outputs(repeat_rows(first, size))

    def _compile_loss(self, rollout: RolloutStorage, work: Any) -> None:
        batch = example_rows(rollout, work)
        batch = normalize_advantages(batch) if work.normalize_advantage else batch
        self.engine.policy.set_training_mode(True)
        accumulated = self.engine.settings.gradient_accumulation
        parts = {len(part.returns): part for part, _ in micro_batches(batch, accumulated)}
        self.batch_sizes = set(parts)
        loss = self.loss_with(work)
        for part in parts.values():
            torch.autograd.backward(loss(part)["loss"])

    def serves(self, view: PolicyView) -> bool:
        """Whether the functions were compiled for the policy of `view` and for a view of the same class."""
        return not self.failure and type(view) is type(self.view) and view.policy is self.view.policy

    def attach(self, view: PolicyView) -> None:
        """Let `view` act with the compiled outputs, if they were compiled for its policy and its class."""
        if isinstance(view, NetworkView) and self.serves(view):
            view.acting = self.outputs

    def outputs(self, observations: TensorObservations) -> Outputs:
        """Logits and values, by compiled code if the number of rows is in `acting_sizes`, else by PyTorch."""
        view: Any = self.view
        outputs = self._outputs if num_rows(observations) in self.acting_sizes else view.outputs
        return outputs(observations)  # type: ignore[no-any-return]

    def loss_of(self, model: Any, work: Any) -> Callable[[RolloutBatch], Terms] | None:
        """A function: minibatch → terms of its loss, by compiled code; None if that cannot be used for `model`."""
        if not self.sizes or first_change(model, self.reproduces) or not self.serves(self.engine.new_view()):
            return None
        return self.loss_with(work)

    def loss_with(self, work: Any) -> Callable[[RolloutBatch], Terms]:
        """`self.loss` as a function of the batch alone, with the coefficients of `work`, a `PPOWork`."""
        device, numbers = self.engine.device, (getattr(work, name) for name in Coefficients._fields)
        scalars = (None if number is None else torch.tensor(float(number), device=device) for number in numbers)
        return partial(self.loss, coefficients=Coefficients(*scalars), entropy_gradient=work.ent_coef != 0.0)

    def loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        """PPO's loss and its terms, by compiled code if the number of rows is in `batch_sizes`, else by PyTorch."""
        loss = self._loss if len(batch.returns) in self.batch_sizes else self._plain_loss
        return loss(batch, coefficients, entropy_gradient)

    def _plain_loss(self, batch: RolloutBatch, coefficients: Coefficients, entropy_gradient: bool) -> Terms:
        evaluated = self.view.evaluate(batch, entropy_gradient)
        terms = ppo_terms(batch, evaluated, coefficients.clip_range, coefficients.clip_range_vf)
        return with_loss(terms, batch, evaluated, coefficients)


class CompiledQ(Compiled):
    """DQN's compiled `evaluate` and `loss` of a batch, and compiled Q-values for acting."""

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
                self._values(repeat_rows(batch.observations, sizes[1]))
            policy.set_training_mode(True)
            torch.autograd.backward(self._terms(batch)[1]["td_loss"])

    def values_of(self, observations: TensorObservations) -> Tensor | None:  # (N, A)
        """Q-values of all actions; None if nothing was compiled for this number of rows."""
        if self.failure or num_rows(observations) != self.sizes[1]:
            return None
        return self._values(observations)  # type: ignore[no-any-return]

    def terms_of(self, batch: ReplayBatch) -> tuple[Any, dict[str, Tensor]] | None:
        """The results of DQN's `evaluate` and `loss`; None if nothing was compiled for this number of rows."""
        if self.failure or num_rows(batch.observations) != self.sizes[0]:
            return None
        return self._terms(tensors_of(batch))  # type: ignore[no-any-return]


def num_rows(observations: TensorObservations) -> int:
    return len(next(iter(observations.values())) if isinstance(observations, dict) else observations)


@contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """After the block restore the policy's parameters, statistics, gradients and mode, and torch's random state."""
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


def repeat_rows(observations: TensorObservations, size: int) -> TensorObservations:
    """Repeat the rows until there are `size` rows."""
    return each_array(lambda part: part[torch.arange(size, device=part.device) % len(part)], observations)  # type: ignore[no-any-return]


def example_rows(data: RolloutStorage, work: Any) -> RolloutBatch:
    """A minibatch as large as in training, with arbitrary rows. The random state does not change."""
    full, state = data.full, np.random.get_state()
    data.full = True
    batch = next(data.minibatches(work.batch_size))
    data.full = full
    np.random.set_state(state)
    return batch


def example_batch(data: Replay, batch_size: int) -> ReplayBatch:
    """A batch with the shapes of training and arbitrary rows. No random numbers are drawn."""
    storage, first = data.storage, np.zeros(batch_size, np.int64)
    batch = storage.gather(first, first, data.normalizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        batch = batch._replace(weights=torch.ones((batch_size, 1), device=storage.device))
    return tensors_of(batch)


def tensors_of(batch: ReplayBatch) -> ReplayBatch:
    """The batch without `indices` and `generation`, which prioritized replay keeps in host memory."""
    return batch._replace(indices=None, generation=None)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
