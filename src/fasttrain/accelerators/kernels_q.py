"""KernelQEngine: a Q-network acts and learns in the compiled kernels of `kernels/q.py`, in the same memory.

DQN updates after every vector step, so nothing is copied to and fro as PPO's `KernelEngine` does it: the parameters of
both nets and Adam's moments become views of flat vectors, in which they stand one after the other as they are. Policy
and optimizer are right at every moment, whoever reads or writes them, and look no different when they are saved;
whatever swaps a tensor for another is seen by `fits`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.dqn.policies import DQNPolicy

from fasttrain.accelerators.kernels import adam_of, constants_of, zeros
from fasttrain.accelerators.layout import Chain, Flat, keys_of
from fasttrain.algos.causes import blame, why_no_action
from fasttrain.algos.engine import Engine, EngineSettings, PolicyStep, QWork, Statistics
from fasttrain.algos.q_networks import DuelingQNetwork
from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, QBatches, joined
from fasttrain.buffers.prefetch import Replay
from fasttrain.errors import EnvError
from fasttrain.kernel_cache import KernelCall
from fasttrain.kernels.nets import Layout
from fasttrain.kernels.q import QScratch, QSettings, act_rows, train_updates

# Of `QBatches`. Nothing is converted: copying the storage, or compiling for another type, takes longer than to train.
_STORED: dict[str, Any] = dict.fromkeys(QBatches._fields, np.float32)
_STORED |= {"actions": np.int64, "rows": np.int64, "next_rows": np.int64, "next_masks": np.bool_}
OUTPUT = "the net's output (Q-values)"  # in messages
LOST = f"{OUTPUT} is not finite although its inputs are: its weights are too large; lower algo.learning_rate"
_NO_MASK: BoolArray = np.zeros((0, 0), np.bool_)


class KernelQEngine(Engine):
    """Of a DQN policy that `eligible.py` allows, whose tensors it moves into flat vectors.

    Their values and the optimizer's state stay what they are; the state of an optimizer that has not stepped is made,
    as its first step would make it. One call at a time: the working memory is shared. Other threads may run meanwhile.
    """

    kind: ClassVar[str] = "kernels"

    def __init__(self, policy: Any, settings: EngineSettings, before: Engine | None = None) -> None:
        super().__init__(policy, settings, before)
        self._keys, self._shape = keys_of(policy.q_net.features_extractor), policy.action_space.shape or ()
        chain, target = Chain.of_q_net(policy.q_net), Chain.of_q_net(policy.q_net_target)
        self.layout, layers_size, row_size = chain.layout()
        self.pieces = chain.pieces(self.layout)
        self.dueling = isinstance(policy.q_net, DuelingQNetwork)
        self.actions, self.inputs = int(self.layout.dims.sum()), int(policy.q_net.features_dim)
        self.flat, self.target = Flat(chain.parameters, policy, policy.modules()), Flat(target.parameters)
        size = len(self.flat.values)
        self._scratch = _make_scratch(self.layout, size, layers_size, row_size)
        self._bad = np.full(1, -1)  # place of the first gradient in an update that was not finite

    def fits(self, policy: Any) -> bool:
        """Whether every tensor still is where it was put."""
        return policy is self.policy and self.flat.holds() and self.target.holds()

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Any = None) -> PolicyStep:
        """The best legal actions; where none is legal 0."""
        return PolicyStep(self.q_values(observations, action_masks)[1].reshape(-1, *self._shape), memory=memory)

    def q_values(self, observations: Any, action_masks: BoolArray | None = None) -> tuple[Float32Array, Int64Array]:
        """Q-values (N, A), of illegal actions too, and the best legal actions (N,), of K > 1 sub-actions (N, K).

        Raises:
            EnvError: an observation or the net's output is not finite.
        """
        seen = joined(observations, self._keys)
        count = len(seen)
        masks = _NO_MASK if action_masks is None else np.ascontiguousarray(action_masks, np.bool_)
        wide = (0, 0) if action_masks is None else (count, self.actions)
        _check_shapes(observations=(seen, (count, self.inputs)), action_masks=(masks, wide))
        values = np.empty((count, self.actions), np.float32)
        actions = np.empty((count, len(self.layout.dims)), np.int64)
        total = self._call(act_rows, seen, masks, self.flat.arrays[0], self.layout, self.pieces, self.dueling,
                           self._scratch, values, actions)  # fmt: skip
        if not np.isfinite(total):
            raise EnvError(why_no_action(self.policy, observations, OUTPUT) or LOST)
        return values, actions[:, 0] if actions.shape[1] == 1 else actions

    def update(self, data: Replay, work: QWork) -> Statistics:
        """All updates in one call of the kernels, all their batches in one draw: other random numbers than batch by
        batch. Prioritized batches are drawn with the priorities of this moment; those of the errors follow at the end.

        Raises:
            EnvError: the loss is not finite and nothing is guarded.
        """
        guarded = self.guard is not None
        self.clock.enter("replay_sample")
        block = data.block(work.gradient_steps, work.batch_size)
        self.clock.enter("train")
        losses, errors, norms = self.train(block.batches, work, guarded)
        if not guarded and not np.isfinite(losses).all():
            raise EnvError(
                "the loss is not finite (a reward too large, or a value that is NaN?): lower the learning rate, or "
                "scale the rewards"
            )
        if block.indices is not None:
            self.clock.enter("replay_sample")
            data.rate(block.indices, errors.reshape(-1), block.generation, guarded)
        self.clock.enter("log")
        first, blamed = np.flatnonzero(np.isnan(norms)), ""
        if len(first):
            blamed = blame(bool(np.isfinite(losses[first[0]])), self.flat.name_at(int(self._bad[0]), self.policy))
        watched, taken = (norms if guarded else np.zeros(0)), work.gradient_steps - len(first)
        return self.counted(Statistics({"loss": losses}, watched, taken, work.gradient_steps, blamed=blamed))

    def train(self, batches: QBatches, work: QWork, guarded: bool) -> tuple[Float64Array, Float32Array, Float64Array]:
        """An update for each batch, one after the other, as SB3's `DQN.train`; the target net stays as it is.

        Learning rate, betas and eps are the optimizer's. The GIL is free meanwhile. Guarded, no step is taken where
        loss or gradient is not finite. A row without any legal next action counts as ended.

        Returns:
            mean losses (U,), for the caller to see whether they are finite; absolute temporal difference errors (U, B);
            gradient norms (U,), NaN where no step was taken.

        Raises:
            ValueError: an array's shape does not fit, or it is not contiguous, or of another dtype.
            IndexError: a row or an action is out of range; nothing was done.
        """
        if not batches.discounts.size:
            batches = batches._replace(discounts=np.full(batches.rows.shape, work.gamma, np.float32))
        self._check(batches)
        adam = adam_of(self.policy.optimizer, work.max_grad_norm)
        (online, *moments), target = self.flat.arrays, self.target.arrays[0]
        count = len(batches.rows)
        losses, errors, norms = np.zeros(count), np.zeros(batches.rows.shape, np.float32), np.empty(count)
        first_step = self.flat.steps + 1
        settings = QSettings(work.double_q, work.loss == "huber", self.dueling)
        self._bad[0] = -1
        taken = self._call(train_updates, batches, online, target, *moments, first_step, self.layout,
                           self.pieces, settings, adam, self._scratch, losses, errors, norms, guarded,
                           self._bad)  # fmt: skip
        if taken < 0:
            raise IndexError("a sampled row is not in the storage, or an action is not one of the policy's")
        self.flat.stepped(taken)
        return losses, errors, norms

    def _call(self, kernel: Any, *arguments: Any) -> Any:
        return kernel(*arguments)

    def _check(self, batches: QBatches) -> None:
        """The kernels check no shape."""
        shape, wide = batches.rows.shape, (len(batches.observations), self.inputs)
        for name, array in batches._asdict().items():
            if array.dtype != _STORED[name] or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous {np.dtype(_STORED[name])}, not {array.dtype}")
        _check_shapes(
            observations=(batches.observations, wide),
            next_observations=(batches.next_observations, (len(batches.next_observations), self.inputs)),
            actions=(batches.actions, (wide[0], len(self.layout.dims))),
            rows=(batches.rows, (*shape, 1)[:2]),
            next_rows=(batches.next_rows, shape),
            rewards=(batches.rewards, shape),
            discounts=(batches.discounts, shape),
            dones=(batches.dones, shape),
        )
        if batches.next_masks.size:
            _check_shapes(next_masks=(batches.next_masks, (*shape, self.actions)))
        if batches.weights.size:
            _check_shapes(weights=(batches.weights, shape))


def _check_shapes(**arrays: tuple[NDArray[Any], tuple[int, ...]]) -> None:
    for name, (array, shape) in arrays.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")


def _make_scratch(layout: Layout, size: int, layers_size: int, row_size: int) -> QScratch:
    constants = constants_of(row_size)
    block = len(constants.every)
    return QScratch(
        inputs=zeros(block, layout.inputs),
        activations=zeros(block, row_size),
        deltas=zeros(block, row_size),
        targets=zeros(block),
        chosen=np.zeros((block, len(layout.dims)), np.int64),
        online=zeros(layers_size),
        back=zeros(layers_size),
        target=zeros(layers_size),
        sums=zeros(layers_size),
        gradient=zeros(size),
        constants=constants,
    )


def kernel_calls() -> list[KernelCall]:
    """Calls of the kernels that `KernelQEngine` makes, on a net of no consequence; types do not depend on its sizes."""
    box, pair, calls = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2), list[KernelCall]()

    class Noting(KernelQEngine):
        def _call(self, kernel: Any, *arguments: Any) -> Any:
            calls.append(KernelCall(kernel, arguments))
            return 1

    with torch.random.fork_rng(devices=[]):
        engine = Noting(DQNPolicy(box, pair, lambda _: 1e-3, net_arch=[4, 4]), EngineSettings())
    seen, row, number = np.zeros((1, 3), np.float32), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32)
    engine.q_values(seen)
    batches = QBatches(seen, seen, row, row, row, number, number, number, np.zeros((0, 0, 0), np.bool_), number)
    engine.train(batches, QWork(1, 1, False, "huber", 0.99, 10.0), guarded=False)
    return calls
