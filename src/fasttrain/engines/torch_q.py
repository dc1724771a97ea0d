"""TorchQEngine: a Q-network acts on PyTorch; mixed precision and torch.compile around the update of `algos/dqn.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.batch import BoolArray, Float64Array, each_array
from fasttrain.buffers.prefetch import Replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, TensorObservations
from fasttrain.engines.causes import why_no_action
from fasttrain.engines.compiling import Compiler, TorchBase, num_rows, repeated
from fasttrain.engines.devices import Precision, as_float32
from fasttrain.engines.engine import Acted, Engine, EngineSettings, Statistics
from fasttrain.engines.heads import action_dims
from fasttrain.engines.q_networks import greedy
from fasttrain.engines.step import TorchStep
from fasttrain.engines.torch import Transfer
from fasttrain.errors import EnvError


def network_values(network: Any, observations: TensorObservations, precision: Precision | None) -> Tensor:  # (B, A)
    """A network's Q-values in float32; with a `precision` the network itself computes in that."""
    if precision is None:
        return network(observations)  # type: ignore[no-any-return]
    with precision.autocast():
        return as_float32(network(observations))  # type: ignore[no-any-return]


class TorchQEngine(TorchBase):
    """Of a DQN policy. The update itself is `DQN.train`."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before, compiler)
        self.transfer = Transfer(self.device, settings.pin_memory)
        self._dims = action_dims(policy.action_space)
        self._shape = policy.action_space.shape or ()
        self._terms: Any = None  # compiled
        self._values: Any = None  # compiled

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Any = None) -> Acted:
        values = self.q_values(self.transfer.observations(observations))
        legal = None if action_masks is None else self.transfer.masks(action_masks)
        best = greedy(values, legal, self._dims)
        chosen: NDArray[Any] = (best if self.guard is None else marked(best, values)).cpu().numpy()
        if self.guard is not None and chosen.flat[0] < 0:
            raise EnvError(why_no_action(self.policy, observations, "a Q-value") or "a Q-value is not finite")
        return Acted(chosen.reshape(-1, *self._shape), memory=memory)  # one sub-action has a column of its own

    @torch.no_grad()
    def q_values(self, observations: TensorObservations) -> Tensor:  # (N, A)
        """Of all actions, without gradients."""
        if self._values is None or num_rows(observations) != self._sizes[1]:
            return network_values(self.policy.q_net, observations, self.precision)
        return self._values(observations)  # type: ignore[no-any-return]

    def compiled(self, batch: ReplayBatch) -> Callable[[ReplayBatch], Any] | None:
        """What `compile` made of a batch's evaluation and loss; None where nothing was, or for another size."""
        if self._terms is None or num_rows(batch.observations) != self._sizes[0]:
            return None
        return lambda batch: self._terms(tensors_of(batch))

    def compile(
        self, evaluate: Callable[..., Any], loss: Callable[..., Any], data: Replay, batch_size: int, num_envs: int
    ) -> str:
        """Compile the update of such batches up to the gradient, and acting; nothing where that was done before.

        Returns:
            why it failed, if it did just now.
        """
        if not self.must_compile_for((batch_size, num_envs)):
            return ""
        batch, policy, precision = example_batch(data, batch_size), self.policy, self.precision

        def terms(batch: ReplayBatch) -> tuple[Any, dict[str, Tensor]]:
            evaluated = evaluate(batch)
            return each_array(Tensor.detach, evaluated), loss(batch, evaluated)

        def values(observations: TensorObservations) -> Tensor:
            return network_values(policy.q_net, observations, precision)

        with self.compiling((batch_size, num_envs)):
            self._terms, self._values = self.compiler(terms), self.compiler(values)
            self.policy.set_training_mode(False)
            with torch.no_grad():
                self._values(repeated(batch.observations, num_envs))
            self.policy.set_training_mode(True)
            torch.autograd.backward(self._terms(batch)[1]["td_loss"])
        if self.failure:
            self._terms = self._values = None
        return self.failure

    def statistics(self, step: TorchStep, terms: Mapping[str, list[Tensor]]) -> Statistics:
        """What a round of steps came to, read from the device once. A single term is the loss and has no other name."""
        norms = _read(step.norms)
        skipped = int(np.count_nonzero(~np.isfinite(norms)))
        names = ["loss"] if terms.keys() == {"td_loss", "loss"} else [*terms]
        logged = dict(zip(names, map(_read, map(terms.__getitem__, names)), strict=True))
        return self.counted(
            Statistics(
                logged, norms, step.taken - skipped, step.taken, blamed=step.blamed,
                expected_skips=self.scaler is not None,
            )
        )  # fmt: skip


def _read(scalars: list[Tensor]) -> Float64Array:
    numbers: NDArray[Any] = torch.stack(scalars).cpu().numpy() if scalars else np.zeros(0)
    return numbers.astype(np.float64)


def tensors_of(batch: ReplayBatch) -> ReplayBatch:
    """The batch without what is only for the host: where it was drawn, and when."""
    return batch._replace(indices=None, generation=None)


def example_batch(data: Replay, batch_size: int) -> ReplayBatch:
    """A batch of the shapes, types and place that training will see, whatever lies in the storage; nothing is drawn."""
    storage, first = data.storage, np.zeros(batch_size, np.int64)
    batch = storage.gather(first, first, data.normalizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        batch = batch._replace(weights=torch.ones((batch_size, 1), device=storage.device))
    return tensors_of(batch)


def marked(chosen: Tensor, values: Tensor) -> Tensor:
    """`chosen`, or -1 everywhere where one of the values (N, A) is not finite, which nothing else would show.

    On the CPU the host looks (2.5 µs); elsewhere nothing waits for the device, the mark travels with the actions.
    """
    if values.device.type == "cpu":
        return chosen if math.isfinite(values.sum().item()) else torch.full_like(chosen, -1)
    return torch.where(torch.isfinite(values.sum()), chosen, -1)
