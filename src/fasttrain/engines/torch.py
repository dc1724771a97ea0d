"""TorchEngine: an actor-critic acts on PyTorch: its head, copies to the device, and what torch.compile made of both.

As made it computes what stock computes, by the same operations. The update itself is in `algos/ppo.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor

from fasttrain.batch import BoolArray, Float32Array, each_array, select_rows
from fasttrain.buffers.rollout import RolloutBatch, RolloutStorage, TensorObservations
from fasttrain.engines.causes import why_no_action
from fasttrain.engines.compiling import CompiledHead, Compiler, TorchBase, repeated
from fasttrain.engines.engine import Acted, Engine, EngineSettings, PPOWork, Stored
from fasttrain.engines.guard import NOT_FINITE
from fasttrain.engines.heads import LOST, OUTPUT, CategoricalHead, head_of
from fasttrain.engines.losses import Coefficients, Terms, normalized
from fasttrain.engines.step import micro_batches
from fasttrain.errors import EnvError


class Transfer:
    """Plain copies, as SB3 makes them; or by way of page-locked memory, so that the host need not wait for them."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device, self.pinned = device, pinned and device.type == "cuda"

    def observations(self, observations: Any) -> TensorObservations:
        """To the device; (N, ...) or a dict of them."""
        return each_array(self._sent, observations) if self.pinned else obs_as_tensor(observations, self.device)

    def masks(self, action_masks: BoolArray) -> Tensor:  # (N, A) bool
        """To the device."""
        return self._sent(action_masks) if self.pinned else torch.from_numpy(action_masks).to(self.device)

    def _sent(self, array: NDArray[Any]) -> Tensor:
        """torch keeps the page-locked copy until the device has read it."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.device, non_blocking=True)

    def actions(self, actions: Tensor) -> NDArray[Any]:  # (N,) or (N, K)
        """To the host."""
        array: NDArray[Any] = actions.cpu().numpy()
        return array


class TorchEngine(TorchBase):
    """Of an actor-critic policy."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        super().__init__(policy, settings, before, compiler)
        self.transfer = Transfer(self.device, settings.pin_memory)
        self.compiled: CompiledHead | None = None
        self.head: Any = self.new_head()  # acts

    def new_head(self) -> Any:
        """The shortest way through the policy as it is now."""
        return head_of(self.policy, self.policy.action_space, self.precision)

    def batches(self, data: Any, batch_size: int | None) -> Iterator[RolloutBatch]:
        """One epoch's minibatches."""
        found: Iterator[RolloutBatch] = data.minibatches(batch_size)
        return found

    def begin(self, rollout: Any = None) -> None:
        head = self.head = self.new_head()
        if self.compiled is not None and self.compiled.serves(head) and isinstance(head, CategoricalHead):
            head.acting = self.compiled.outputs

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Any = None) -> Acted:
        with torch.no_grad():
            seen = self.transfer.observations(observations)
            masks = None if action_masks is None else self.transfer.masks(action_masks)
            actions, values, log_probs = self._drawn(seen, masks)
        return Acted(self.transfer.actions(actions), Stored(seen, actions, values, log_probs, masks), memory)

    def _drawn(self, observations: TensorObservations, masks: Tensor | None, *memory: Any) -> Any:
        """A failure to draw from what is not finite is told with the place."""
        try:
            return self.head.act(observations, masks, *memory)
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

    def compiled_loss(self, work: PPOWork) -> Callable[[RolloutBatch], Terms] | None:
        """What `CompiledHead.loss` gives of a minibatch, where the loss was compiled for the policy as it is now.

        The coefficients lie on the device: compiled code would fix a number.
        """
        compiled = self.compiled
        if compiled is None or not compiled.serves(self.new_head()):
            return None
        numbers = Coefficients.of(work)
        scalars = (None if number is None else torch.tensor(float(number), device=self.device) for number in numbers)
        return partial(compiled.loss, coefficients=Coefficients(*scalars), entropy_gradient=work.ent_coef != 0.0)

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
        loss: Any = self.compiled_loss(work)
        for part in parts.values():
            torch.autograd.backward(loss(part)["loss"])


def example_batch(data: RolloutStorage, work: PPOWork) -> RolloutBatch:
    """A minibatch of the size that training will use; numpy's random state stays as it was."""
    full, state = data.full, np.random.get_state()
    data.full = True  # whatever lies there is good enough
    batch = next(data.minibatches(work.batch_size))
    data.full = full
    np.random.set_state(state)
    return batch
