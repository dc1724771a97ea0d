"""TorchEngine: an actor-critic acts and learns on PyTorch.

As made it computes what stock computes, by the same operations. Settings add mixed precision, torch.compile, CUDA
graphs, page-locked transfers, micro-batches and acting in parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.batch import BoolArray, Float32Array
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
from fasttrain.engines.causes import why_no_action
from fasttrain.engines.compiling import (
    Coefficients,
    CompiledHead,
    Compiler,
    GraphedUpdate,
    LossOf,
    Terms,
    graphed_by_size,
    loss_terms,
    micro_batches,
    micro_sizes,
    normalized,
    parameter_addresses,
    rows_of,
)
from fasttrain.engines.engine import Acted, Engine, EngineSettings, PPOWork, Statistics, Stored, explained
from fasttrain.engines.guard import NOT_FINITE
from fasttrain.engines.heads import LOST, OUTPUT, ActingHead, CategoricalHead, ChunkedHead, head_of
from fasttrain.engines.torch_base import TorchBase, TorchStep, repeated
from fasttrain.errors import EnvError


class TorchEngine(TorchBase):
    """Of an actor-critic policy."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before, compiler)
        self.compiled: CompiledHead | None = None
        self.head: ActingHead = head_of(policy, policy.action_space, self.precision)
        self._outputs: Any = None
        self._acting_addresses: tuple[int, ...] = ()  # of the parameters that graphs of acting read
        self._scalars: list[Tensor] = []

    def begin(self, rollout: Any = None) -> None:
        head = head_of(self.policy, self.policy.action_space, self.precision)
        if self.compiled is not None and self.compiled.serves(head) and isinstance(head, CategoricalHead):
            moved = self.graphs and self._acting_addresses != parameter_addresses(self.policy)
            head.acting = self.compiled.outputs if moved else self._outputs
        size = self.settings.inference_batch_size
        whole = size is None or getattr(self.policy, "use_sde", False)  # a part would share one gSDE noise
        self.head = head if whole else ChunkedHead(head, int(size or 0))

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Any = None) -> Acted:
        with torch.no_grad():
            seen = self.transfer.observations(observations)
            masks = None if action_masks is None else self.transfer.masks(action_masks)
            actions, values, log_probs = self._drawn(seen, masks)
        return Acted(self.transfer.actions(actions), Stored(seen, actions, values, log_probs, masks), memory)

    def _drawn(self, observations: TensorObservations, masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """A failure to draw from what is not finite is told with the place."""
        try:
            return self.head.act(observations, masks)
        except (RuntimeError, ValueError) as error:  # torch.multinomial's and torch.distributions' own
            # On CUDA the failure is one of the device, which answers no question any more.
            told = self.device.type == "cpu" and any(words in str(error) for words in NOT_FINITE)
            if self.guard is None or not told:
                raise
            raise EnvError(why_no_action(self.policy, observations, OUTPUT) or LOST) from error

    def values(self, observations: Any, memory: Any = None) -> Float32Array:
        with torch.no_grad():
            found: Float32Array = self.head.values(obs_as_tensor(observations, self.device)).cpu().numpy()
        return found.reshape(-1)

    def update(self, data: RolloutStorage, work: PPOWork) -> Statistics:
        self.clock.enter("other")
        step = PPOStep(self, work)
        graph = self._graph_of(step, data, work)
        with self.stepping(graph):
            epochs, stopped = self._epochs(step, graph, data, work)
        self.clock.enter("log")
        return self.counted(step.read(epochs, stopped, data))

    def _epochs(
        self, step: PPOStep, graph: GraphedUpdate | None, data: RolloutStorage, work: PPOWork
    ) -> tuple[int, bool]:
        """All epochs, or fewer where `target_kl` is exceeded: how many were begun, and whether that stopped them."""
        for epoch in range(work.n_epochs):
            step.first_of_epoch = len(step.terms)
            self.clock.enter("buffer")
            for batch in data.minibatches(work.batch_size):
                if graph is not None and graph.fits(batch):
                    self.clock.enter("train")
                    *terms, norm = graph(batch).unbind()
                    step.terms.append(tuple(terms))
                    step.watch(norm)
                elif step.gradients(batch):
                    self.clock.enter("optim")
                    step.watch(step.apply())
                else:
                    return epoch + 1, True
                self.clock.enter("buffer")
        return work.n_epochs, False

    def loss_of(self, entropy_gradient: bool) -> LossOf:
        """The loss of a (micro-)batch, compiled where that was asked for and came about."""
        head = head_of(self.policy, self.policy.action_space, self.precision)
        compiled = self.compiled
        if compiled is not None and compiled.serves(head):
            return lambda batch, coefficients: compiled.loss(batch, coefficients, entropy_gradient)
        return lambda batch, coefficients: loss_terms(head, batch, coefficients, entropy_gradient)

    def coefficients(self, work: PPOWork) -> Coefficients:
        """Plain numbers for the eager way; scalars on the device, at a fixed place, for compiled code and graphs."""
        numbers = Coefficients(work.clip_range, work.clip_range_vf, work.ent_coef, work.vf_coef)
        if self.compiled is None and not self.graphs:
            return numbers
        if not self._scalars:
            self._scalars = [torch.zeros((), device=self.device) for _ in numbers]
        for scalar, number in zip(self._scalars, numbers, strict=True):
            if number is not None:
                scalar.fill_(number)
        given = (None if number is None else scalar for scalar, number in zip(self._scalars, numbers, strict=True))
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
            self.compiled, self._outputs = None, None
        self._graph_of(PPOStep(self, work), data, work)
        return self.failure

    def _compile_acting(self, compiled: CompiledHead, data: RolloutStorage, sizes: list[int]) -> None:
        """On observations of the storage's first step, whatever they are, repeated to the number of rows wanted."""
        if not isinstance(compiled.head, CategoricalHead):
            return
        limit = self.settings.inference_batch_size
        if limit is not None:
            sizes = sorted({part for size in sizes for part in (min(size, limit), size % limit) if part})
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
        batch = normalized(_example_batch(data, work), work.normalize_advantage)
        self.policy.set_training_mode(True)
        compiled.batch_sizes = set(micro_sizes(len(batch.returns), self.settings.gradient_accumulation))
        coefficients = self.coefficients(work)
        for size in compiled.batch_sizes:
            part = RolloutBatch(*(rows_of(part, slice(0, size)) for part in batch))
            torch.autograd.backward(compiled.loss(part, coefficients, work.ent_coef != 0.0).loss)

    def _graph_of(self, step: PPOStep, data: RolloutStorage, work: PPOWork) -> GraphedUpdate | None:
        stops = "no CUDA graph of the update: algo.target_kl stops in the middle of one"
        why_not = "" if work.target_kl is None else stops
        return self.captured_update(step, why_not, lambda: _example_batch(data, work))


class PPOStep(TorchStep):
    """Gradient and optimizer step of one minibatch, in one go or in micro-batches."""

    def __init__(self, engine: TorchEngine, work: PPOWork) -> None:
        fixed = (work.clip_range_vf is None, work.ent_coef != 0.0, work.normalize_advantage)
        super().__init__(engine, work.max_grad_norm, *fixed)
        self.work, self.parts = work, engine.settings.gradient_accumulation
        self.loss_of, self.coefficients = engine.loss_of(work.ent_coef != 0.0), engine.coefficients(work)
        self.terms: list[tuple[Tensor, ...]] = []  # `Terms` of every minibatch, kept on the device
        self.first_of_epoch = 0

    def gradients(self, batch: RolloutBatch) -> bool:
        """Fill the gradients and note the terms. False: `target_kl` is exceeded, no step shall be taken."""
        batch = normalized(batch, self.work.normalize_advantage)
        if self.parts > 1:
            found = self._accumulated(batch)
            self.loss = found[0]
            self.terms.append(found.unbind())
            return not self._diverged()
        self.clock.enter("train_fwd")
        terms = self.loss_of(batch, self.coefficients)
        self.loss = terms.loss
        self.terms.append((terms.loss.detach(), *terms[1:]))
        if self._diverged():
            return False
        self.clock.enter("train_bwd")
        self._forget_gradients()
        self.backward(terms.loss)
        return True

    def read(self, epochs: int, stopped: bool, data: RolloutStorage) -> Statistics:
        """All is read from the device here, once. The KL divergence is of the last epoch, as SB3 logs it."""
        stacked = torch.stack([term for terms in self.terms for term in terms]).cpu().numpy()
        columns: NDArray[Any] = stacked.reshape(len(self.terms), -1).T
        terms = dict(zip(Terms._fields, columns, strict=True))
        terms["approx_kl"] = terms["approx_kl"][self.first_of_epoch :]
        norms = torch.stack(self.norms).cpu().numpy().astype(np.float64) if self.norms else np.zeros(0)
        skipped = int(np.count_nonzero(~np.isfinite(norms)))
        scaled, steps = self.engine.scaler is not None, self.taken - skipped
        return Statistics({**terms, **explained(data)}, norms, steps, epochs, stopped, self.blamed, scaled)

    def _whole(self, batch: RolloutBatch) -> Tensor:  # (7,) terms, and the gradient's norm
        found = self._accumulated(normalized(batch, self.work.normalize_advantage))
        self.loss = found[0]
        return torch.cat([found, self.apply().detach().reshape(1)])

    def _accumulated(self, batch: RolloutBatch) -> Tensor:  # (6,) terms
        """The gradient of the whole batch as the sum over its parts."""
        self._forget_gradients()
        found = []
        for part, weight in micro_batches(batch, self.parts):
            self.clock.enter("train_fwd")
            terms = self.loss_of(part, self.coefficients)
            found.append(terms.weighted(weight))
            self.clock.enter("train_bwd")
            self.backward(terms.loss * weight)
        return torch.stack(found).sum(0)

    def _diverged(self) -> bool:
        """Reading the divergence waits for the device, which is why only `target_kl` does it."""
        target = self.work.target_kl
        return target is not None and bool(self.terms[-1][-1].cpu().numpy() > 1.5 * target)

    def _forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _example_batch(data: RolloutStorage, work: PPOWork) -> RolloutBatch:
    """A minibatch of the size that training will use; numpy's random state stays as it was."""
    full, state = data.full, np.random.get_state()
    data.full = True  # whatever lies there is good enough
    batch = next(data.minibatches(work.batch_size))
    data.full = full
    np.random.set_state(state)
    return batch
