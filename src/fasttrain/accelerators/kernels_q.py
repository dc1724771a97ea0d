"""KernelQEngine: a Q-network acts and learns in the compiled kernels of `fasttrain_kernels/q.py`, in its own memory.

DQN updates after every vector step, so copies as in PPO's `KernelEngine` would take too long. Instead the parameters of
both nets and Adam's moments become views of flat vectors. Policy and optimizer can be read, written and saved at any
time. `fits` returns False if a tensor was replaced.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.dqn.policies import DQNPolicy

from fasttrain.accelerators.kernels import adam_of, constants_of, zeros
from fasttrain.accelerators.layout import Chain, Flat, keys_of
from fasttrain.algos.causes import blame, why_no_action
from fasttrain.algos.devices import EngineSettings
from fasttrain.algos.dqn import QWork
from fasttrain.algos.engine import Engine, PolicyStep, Statistics
from fasttrain.algos.q_networks import DuelingQNetwork
from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, QBatches, flat_rows
from fasttrain.buffers.prefetch import Replay
from fasttrain.errors import EnvError
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.q import QScratch, QSettings, QTraining, act_rows, train_updates
from fasttrain_kernels.threads import FOLLOW, ThreadChoice, new_team

OUTPUT = "the net's output (Q-values)"  # name of the output in messages
LOST = f"{OUTPUT} is not finite although its inputs are: its weights are too large; lower algo.learning_rate"
ROWS_PER_THREAD = 64  # rows of a minibatch for each thread; with fewer rows a second thread saves little time
_NO_MASK: BoolArray = np.zeros((0, 0), np.bool_)


class KernelQEngine(Engine):
    """The engine for a DQN policy that `eligible.py` accepts. It moves the policy's tensors into flat vectors (`Flat`).

    Only one method may run at a time, because all calls use the same working memory.
    """

    kind: ClassVar[str] = "kernels"

    def __init__(self, policy: Any, settings: EngineSettings, previous: Engine | None = None) -> None:
        super().__init__(policy, settings, previous)
        self._keys, self._shape = keys_of(policy.q_net.features_extractor), policy.action_space.shape or ()
        chain, target = Chain.of_q_net(policy.q_net), Chain.of_q_net(policy.q_net_target)
        self.layout, layers_size, row_size = chain.layout()
        self.pieces = chain.pieces(self.layout)
        self.dueling = isinstance(policy.q_net, DuelingQNetwork)
        self.actions, self.inputs = int(self.layout.dims.sum()), int(policy.q_net.features_dim)
        self.flat, self.target = Flat(chain.parameters, policy, policy.modules()), Flat(target.parameters)
        self._layers_size, self._constants = layers_size, constants_of(row_size)
        self._scratch: dict[int, QScratch] = {}  # number of parts → working memory
        self._choice = ThreadChoice()
        self._bad = np.full(1, -1)  # flat index of the first gradient that is not finite; -1: none

    def _scratch_for(self, rows: int) -> QScratch:
        """Working memory for minibatches of `rows` rows, with one part for each thread that these rows can use."""
        parts = max(1, min(self.settings.threads, rows // ROWS_PER_THREAD))
        if parts not in self._scratch:
            block, row_size = len(self._constants.every), len(self._constants.zeros)
            self._scratch[parts] = QScratch(
                inputs=zeros(parts, block, self.layout.inputs),
                activations=zeros(parts, block, row_size),
                deltas=zeros(parts, block, row_size),
                targets=zeros(parts, block),
                chosen=np.zeros((parts, block, len(self.layout.dims)), np.int64),
                losses=np.zeros(parts),
                sums=zeros(parts, self._layers_size),
                online=zeros(self._layers_size),
                back=zeros(self._layers_size),
                target=zeros(self._layers_size),
                gradient=zeros(len(self.flat.values)),
                constants=self._constants,
            )
        return self._scratch[parts]

    def fits(self, policy: Any) -> bool:
        """Whether every tensor of `policy` is still the view that this engine created."""
        return policy is self.policy and self.flat.holds() and self.target.holds()

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        """The best legal actions; 0 where no action is legal."""
        return PolicyStep(self.q_values(observations, action_masks)[1].reshape(-1, *self._shape))

    def q_values(self, observations: Any, action_masks: BoolArray | None = None) -> tuple[Float32Array, Int64Array]:
        """Q-values (N, A), also of illegal actions, and the best legal actions (N,), or (N, K) for K > 1 sub-actions.

        Raises:
            EnvError: an observation or the net's output is not finite.
        """
        seen = flat_rows(observations, self._keys)
        count = len(seen)
        masks = _NO_MASK if action_masks is None else np.ascontiguousarray(action_masks, np.bool_)
        values = np.empty((count, self.actions), np.float32)
        actions = np.empty((count, len(self.layout.dims)), np.int64)
        total = self._call(act_rows, seen, masks, self.flat.arrays[0], self.layout, self.pieces, self.dueling,
                           self._scratch_for(1), values, actions)  # fmt: skip
        if not np.isfinite(total):
            raise EnvError(why_no_action(self.policy, observations, OUTPUT) or LOST)
        return values, actions[:, 0] if actions.shape[1] == 1 else actions

    def update(self, data: Replay, work: QWork) -> Statistics:
        """Take all updates in one call of the kernels. All batches are drawn at once. So the random numbers differ from
        SB3's, and all prioritized batches use the priorities from before the first update.

        Raises:
            EnvError: the loss is not finite, and `nan_guard` is off.
        """
        guarded = self.guard is not None
        self.clock.enter("replay_sample")
        block = data.block(work.gradient_steps, work.batch_size)
        self.clock.enter("train")
        losses, errors, norms = self.train(block.batches, work, guarded)
        if not guarded and not np.isfinite(losses).all():
            raise EnvError(
                "the loss is not finite (is a reward too large, or a value NaN?): lower the learning rate, or "
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
        return self.count_steps(Statistics({"loss": losses}, watched, taken, work.gradient_steps, blamed=blamed))

    def train(self, batches: QBatches, work: QWork, guarded: bool) -> tuple[Float64Array, Float32Array, Float64Array]:
        """An update for each batch, one after another, like SB3's `DQN.train`. The target net does not change.

        If `guarded`, a step whose loss or gradient is not finite is skipped. For a row without a legal next action the
        next value is 0. The kernels do not check shapes and dtypes; batches of `draw_block` have the right ones.

        Returns:
            mean losses (U,); absolute temporal difference errors (U, B); gradient norms (U,), NaN after a skipped step.

        Raises:
            IndexError: a row or an action is out of range; nothing was changed.
        """
        if not batches.discounts.size:
            batches = batches._replace(discounts=np.full(batches.rows.shape, work.gamma, np.float32))
        adam = adam_of(self.policy.optimizer, work.max_grad_norm)
        (online, *moments), target = self.flat.arrays, self.target.arrays[0]
        count = len(batches.rows)
        losses, errors, norms = np.zeros(count), np.zeros(batches.rows.shape, np.float32), np.empty(count)
        first_step = self.flat.steps + 1
        settings = QSettings(work.double_q, work.loss == "huber", self.dueling)
        self._bad[0] = -1
        scratch = self._scratch_for(batches.rows.shape[1])
        training = QTraining(batches, self.layout, self.pieces, settings, adam, scratch)
        taken = self._train(len(scratch.sums), training, online, target, *moments, first_step, losses, errors, norms,
                            guarded, self._bad, runs=count)  # fmt: skip
        if taken < 0:
            raise IndexError("a sampled row is not in the storage, or an action is not one of the policy's")
        self.flat.stepped(taken)
        return losses, errors, norms

    def _call(self, kernel: Any, *arguments: Any) -> Any:
        return kernel(*arguments)

    def _train(self, threads: int, *arguments: Any, runs: int) -> int:
        return self._choice.run(train_updates, threads, *arguments, runs=runs)


def kernel_calls() -> list[KernelCall]:
    """All calls of kernels by a `KernelQEngine`, for a tiny net. Argument types do not depend on the net's size."""
    box, pair, calls = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2), list[KernelCall]()

    class Noting(KernelQEngine):
        def _call(self, kernel: Any, *arguments: Any) -> Any:
            calls.append(KernelCall(kernel, arguments))
            return 1

        def _train(self, threads: int, *arguments: Any, runs: int) -> int:
            calls.append(KernelCall(train_updates, (*arguments, new_team(), 0)))
            return 1

    with torch.random.fork_rng(devices=[]):
        engine = Noting(DQNPolicy(box, pair, lambda _: 1e-3, net_arch=[4, 4]), EngineSettings())
    seen, row, number = np.zeros((1, 3), np.float32), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32)
    engine.q_values(seen)
    batches = QBatches(seen, seen, row, row, row, number, number, number, np.zeros((0, 0, 0), np.bool_), number)
    engine.train(batches, QWork(1, 1, False, "huber", 0.99, 10.0), guarded=False)
    return [*calls, FOLLOW]
