"""KernelEngine: an actor-critic acts and learns in the compiled kernels of `fasttrain_kernels`.

Before an update parameters and Adam's moments are copied into flat vectors. After the update they are copied back into
the stock policy and its optimizer. A copy of 45,000 floats takes 50 µs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from fasttrain.accelerators.layout import Place, keys_of, make_layout
from fasttrain.algos.causes import blame, why_no_action
from fasttrain.algos.devices import EngineSettings
from fasttrain.algos.engine import Engine, PolicyStep, Statistics
from fasttrain.algos.policy_view import LOST, OUTPUT
from fasttrain.algos.step import PPOWork, explained_variance_term
from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, each_array, flat_rows
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutRow, RolloutStorage
from fasttrain.errors import EnvError
from fasttrain_kernels import ppo
from fasttrain_kernels.actor_critic import Acted, act_rows, train_epoch
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.nets import Constants, Layout, Lists, Rows, compress, empty_lists
from fasttrain_kernels.recurrent import Remembered, Sequences
from fasttrain_kernels.threads import FOLLOW, ThreadChoice, new_team

# Rows that the nets compute at once (a block), so that activations stay in the cache. The weights of a wide net do not
# fit there and are read for each block: [256, 256] takes 13.4 µs per row in blocks of 128, 16.9 in blocks of 64.
BLOCK, WIDE_BLOCK, WIDE = 64, 128, 512  # nets with more than WIDE floats in a row of activations use WIDE_BLOCK
ROWS_PER_THREAD = 128  # with fewer rows a second thread saves no time: waking it takes about 10 µs
COLUMNS = {
    "loss": ppo.LOSS,
    "policy_gradient_loss": ppo.POLICY_LOSS,
    "value_loss": ppo.VALUE_LOSS,
    "clip_fraction": ppo.CLIPPED,
}
CPU = torch.device("cpu")


class KernelEngine(Engine):
    """The engine for an actor-critic policy that `eligible.py` accepts. It draws random numbers once per rollout."""

    kind: ClassVar[str] = "kernels"
    given: Float32Array | None = None  # (T, N, K) random numbers that the next `begin` takes in place of drawing

    def __init__(self, policy: Any, settings: EngineSettings, previous: Engine | None = None) -> None:
        super().__init__(policy, settings, previous)
        self.max_threads = settings.threads
        self._keys = keys_of(policy.features_extractor)
        self.layout, self._places, self.size, self._row_size = self._laid_out(policy)
        self._single = isinstance(policy.action_space, spaces.Discrete)
        self._continuous = self.layout.log_std >= 0
        self.parameters = torch.zeros(self.size)
        self._flat = self.parameters.numpy()
        self._legal: BoolArray = np.zeros((0, 0), np.bool_)
        self._exp_avg, self._exp_avg_sq = torch.zeros(self.size), torch.zeros(self.size)
        flat = (self.parameters, self._exp_avg, self._exp_avg_sq)
        self._views = [(place, tuple(place.of(each) for each in flat)) for place in self._places]
        self._scratch: dict[int, ppo.Scratch] = {}  # number of threads → working memory
        self._constants = constants_of(self._row_size)
        self._choice, self._acting_choice = ThreadChoice(), ThreadChoice(trial=8)
        self._acting_lists, self._rollout_lists = empty_lists(0, 0, 0), empty_lists(0, 0, 0)
        self._order: Int64Array = np.arange(0)
        self._drawn: Iterator[Float32Array] = iter(())

    def _laid_out(self, policy: Any) -> tuple[Layout, list[Place], int, int]:
        return make_layout(policy)

    def fits(self, policy: Any) -> bool:
        """Whether `policy` still has the parameters that it had when this engine was created."""
        own = {id(place.parameter) for place in self._places}
        return policy is self.policy and own == {id(parameter) for parameter in policy.parameters()}

    def begin(self, rollout: RolloutStorage | None = None) -> None:
        """Read the parameters, and draw the random numbers for all steps of `rollout`."""
        self.pack()
        steps, envs = (0, 0) if rollout is None else (rollout.num_steps, rollout.num_envs)
        self.noise, self.given = self._random(steps, envs) if self.given is None else self.given, None
        self._drawn = iter(self.noise)

    def _random(self, *shape: int) -> Float32Array:
        """Random numbers for actions: uniform numbers for sub-actions, or normal numbers for continuous actions."""
        if self._continuous:
            return torch.randn(*shape, int(self.layout.dims[0])).numpy()
        return torch.rand(*shape, len(self.layout.dims)).numpy()

    def pack(self) -> None:
        """Copy the policy's parameters into the flat vector."""
        for place, (value, _, _) in self._views:
            value.copy_(place.parameter.detach())

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        """Like `Engine.act`. Random numbers are from torch's global stream; `begin` draws them for a whole rollout."""
        rows = flat_rows(observations, self._keys)
        count = len(rows)
        masks = self._all_legal(count) if action_masks is None else np.ascontiguousarray(action_masks)
        drawn = next(self._drawn, None)
        if drawn is None or len(drawn) != count:
            drawn = self._random(count)
        scratch, acted = self._scratch_for(count), self._room_for(count, into)
        remembered, after = self._remembered(memory, scratch)
        total = self._call(self._acting_choice, len(scratch.gradients), act_rows, rows, masks, drawn,
                           *self._lists_for(count), self._flat, self.layout, scratch, remembered, acted)  # fmt: skip
        if not math.isfinite(total):
            raise EnvError(why_no_action(self.policy, observations, OUTPUT) or LOST)
        actions, points, values, log_probs = acted
        chosen: Any = points if self._continuous else actions[:, 0] if self._single else actions
        if into is not None:
            stored = into.row if memory is None else into.row._replace(lstm_states=memory.states)
            return PolicyStep(chosen.copy(), stored, after)  # a copy, because an env may keep its actions
        outputs = torch.from_numpy(chosen), torch.from_numpy(values)[:, None], torch.from_numpy(log_probs)
        legal = None if action_masks is None else torch.from_numpy(masks)
        seen = each_array(torch.from_numpy, observations)
        return PolicyStep(chosen, RolloutRow(seen, *outputs, legal, getattr(memory, "states", None)), after)

    def _room_for(self, count: int, into: Any = None) -> Acted:
        """Arrays for the results of acting in `count` envs: those of `into`, or new ones."""
        if into is not None:
            none = np.empty((count, 0), np.int64 if self._continuous else np.float32)
            chosen, points = (none, into.actions) if self._continuous else (into.actions, none)
            return chosen, points, into.values, into.log_probs
        choices, points = (0, int(self.layout.dims[0])) if self._continuous else (len(self.layout.dims), 0)
        actions, values = np.empty((count, choices), np.int64), np.empty((2, count), np.float32)
        return actions, np.empty((count, points), np.float32), values[0], values[1]

    def _remembered(self, memory: Any, scratch: ppo.Scratch) -> tuple[Remembered | None, Any]:
        """LSTM states for the acting kernel, and the tensors for the states after the step; None without LSTMs."""
        return None, None

    def values(self, observations: Any, memory: Memory | None = None) -> Float32Array:
        """Values (n,) with the parameters of the last `pack`.

        The acting kernel computes the values, so that no additional kernel must be compiled. torch would be slower:
        0.4 ms for 256 rows of 248 floats, and much slower if another process uses the second core.
        """
        seen = flat_rows(observations, self._keys)
        count = len(seen)
        drawn, scratch = np.zeros((count, int(self.layout.dims.sum())), np.float32), self._scratch_for(1)
        acted = self._room_for(count)
        act_rows(seen, self._all_legal(count), drawn, *self._lists_for(count), self._flat, self.layout, scratch,
                 self._remembered(memory, scratch)[0], acted, new_team(), 0)  # fmt: skip
        return acted[2]

    def _call(self, choice: ThreadChoice, threads: int, kernel: Any, *arguments: Any, runs: int = 1) -> Any:
        return choice.run(kernel, threads, *arguments, runs=runs)

    def _lists_for(self, count: int) -> tuple[Lists, Int64Array]:
        """Lists for the non-zero inputs and legal actions of `count` rows, and the row indices 0, 1, …"""
        if len(self._order) < count:
            self._order, self._acting_lists = np.arange(count), self._new_lists(count)
        return self._acting_lists, self._order[:count]

    def _new_lists(self, count: int) -> Lists:
        return empty_lists(count, self.layout.inputs, int(self.layout.dims.sum()))

    def _all_legal(self, count: int) -> BoolArray:
        if len(self._legal) < count:
            self._legal = np.ones((count, int(self.layout.dims.sum())), np.bool_)
        return self._legal[:count]

    def update(self, data: RolloutStorage, work: PPOWork) -> Statistics:
        """Compute all epochs of the update in compiled code.

        Raises:
            EnvError: `nan_guard` is off, and the new parameters would not be finite.
        """
        self.clock.enter("train")
        optimizer, guarded = self.policy.optimizer, self.guard is not None
        step, adam = self._pack_optimizer(optimizer), adam_of(optimizer, work.max_grad_norm)
        total = len(data.rows)
        batch_size = work.batch_size or total
        minibatches = -(-total // batch_size)
        scratch = self._scratch_for(batch_size)
        flat = [each.numpy() for each in (self.parameters, self._exp_avg, self._exp_avg_sq)]
        rows, loss = self._rows_of_rollout(data), _loss_settings(work)
        training = ppo.Training(flat[0], flat[1], flat[2], self.layout, rows, loss, adam, scratch)
        epochs: list[Float64Array] = []
        taken, bad, stopped = 0, np.full(1, -1), False
        for _ in range(work.n_epochs):
            statistics = np.zeros((minibatches, ppo.NUM_STATISTICS))
            order = data.draw_order()
            sequences = self._sequences(data, order, batch_size, scratch)
            done = self._call(self._choice, len(scratch.gradients), train_epoch, order, batch_size, step + taken + 1,
                              training, sequences, statistics, guarded, bad, runs=minibatches)  # fmt: skip
            taken += done - (np.count_nonzero(np.isnan(statistics[:done, ppo.GRAD_NORM])) if guarded else 0)
            epochs.append(statistics[: min(done + 1, minibatches)])
            stopped = done < minibatches
            if stopped:
                break
        if (taken or not guarded) and not np.isfinite(flat[0].sum()):
            raise EnvError(
                "the update gave parameters that are not finite (a too large reward, advantage or coefficient?); the "
                "policy keeps the parameters it had before this update"
            )
        if taken:
            self._unpack(optimizer, step + taken)
        self.clock.enter("log")
        return self.count_steps(self._statistics(epochs, taken, stopped, int(bad[0]), data))

    def _sequences(self, data: Any, order: Int64Array, batch_size: int, scratch: ppo.Scratch) -> Sequences | None:
        """Inputs and working memory of the LSTMs in an epoch; None without LSTMs."""
        return None

    def _statistics(
        self, epochs: list[Float64Array], taken: int, stopped: bool, bad: int, data: RolloutStorage
    ) -> Statistics:
        every = np.concatenate(epochs)
        norms = every[:, ppo.GRAD_NORM]
        terms = {name: every[:, column] for name, column in COLUMNS.items()} | explained_variance_term(data)
        terms |= {"entropy_loss": -every[:, ppo.ENTROPY], "approx_kl": epochs[-1][:, ppo.APPROX_KL]}
        blamed, first = "", np.flatnonzero(np.isnan(norms))
        if self.guard is None:
            norms = np.zeros(0)
        elif len(first):
            blamed = blame(bool(np.isfinite(every[first[0], ppo.LOSS])), self._name_at(bad))
        return Statistics(terms, norms[norms != ppo.NO_STEP], int(taken), len(epochs), stopped, blamed)

    def _name_at(self, index: int) -> str:
        """Name of the parameter at `index` of the flat vectors; an empty text for -1."""
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        numbered = torch.arange(self.size)
        at_index = (place for place in self._places if bool((place.of(numbered) == index).any()))
        return next((names[id(place.parameter)] for place in at_index), "padding" if index >= 0 else "")

    def _rows_of_rollout(self, storage: RolloutStorage) -> Rows:
        """All T × N transitions in stored order."""
        stored: Any = storage.observations
        total = storage.num_steps * storage.num_envs
        parts = {key: stored[key].reshape(total, -1) for key in self._keys}
        seen = flat_rows(parts or stored.reshape(total, -1))
        masks = self._all_legal(total) if storage.masks is None else storage.masks.reshape(total, -1)
        if len(self._rollout_lists.starts) != total + 1:
            self._rollout_lists = self._new_lists(total)
        threads = min(self.max_threads, total // ROWS_PER_THREAD)
        self._call(ThreadChoice(), threads, compress, seen, masks, self._rollout_lists)
        actions, *scalars = storage.scalars()
        choices, points, *_ = self._room_for(total)
        taken = (choices, actions) if self._continuous else (actions, points)
        return Rows(self._rollout_lists, *taken, *scalars)

    def _pack_optimizer(self, optimizer: torch.optim.Optimizer) -> int:
        """Copy parameters and Adam's moments into the flat vectors; returns the number of Adam steps so far."""
        self.pack()
        step = 0
        for place, (_, average, square) in self._views:
            state = optimizer.state[place.parameter]
            if state:
                step = int(state["step"])
                average.copy_(state["exp_avg"])
                square.copy_(state["exp_avg_sq"])
            else:
                average.zero_()
                square.zero_()
        return step

    def _unpack(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Copy the flat vectors into the policy and the optimizer. `step`: the number of Adam steps to set there."""
        with torch.no_grad():
            for place, (value, average, square) in self._views:
                parameter = place.parameter
                parameter.copy_(value)
                state = optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"].fill_(step)
                state["exp_avg"].copy_(average)
                state["exp_avg_sq"].copy_(square)

    def _scratch_for(self, count: int) -> ppo.Scratch:
        """Working memory for `count` rows, with one part for each thread that these rows can use."""
        parts = max(1, min(self.max_threads, count // ROWS_PER_THREAD))
        if parts not in self._scratch:
            width, block = int(self.layout.dims.sum()), len(self._constants.every)
            self._scratch[parts] = ppo.Scratch(
                seen=zeros(parts, self.layout.inputs, block),
                activations=zeros(parts, block, self._row_size),
                deltas=zeros(parts, block, self._row_size),
                probs=zeros(parts, 4, width),
                gradients=zeros(parts, self.size),
                transposed=zeros(self.size),
                statistics=np.zeros((parts, ppo.NUM_STATISTICS)),
                values=zeros(parts, 1),
                moments=np.zeros(2),
                **self._constants._asdict(),
            )
        return self._scratch[parts]


def adam_of(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> ppo.AdamSettings:
    """The optimizer's settings, as an argument of the kernels."""
    (group,) = optimizer.param_groups
    return ppo.AdamSettings(*map(float, (group["lr"], *group["betas"], group["eps"], max_grad_norm)))


def _loss_settings(work: PPOWork) -> ppo.LossSettings:
    """The settings of the loss, as an argument of the kernels."""
    settings = work._asdict()
    off = {name: -1.0 for name in ("clip_range_vf", "target_kl") if settings[name] is None}
    return ppo.LossSettings(*((settings | off)[name] for name in ppo.LossSettings._fields))


def constants_of(row_size: int) -> Constants:
    """Constants for blocks of rows with `row_size` activations each."""
    block = BLOCK if row_size <= WIDE else WIDE_BLOCK
    return Constants(zeros(row_size), torch.ones(block).numpy(), torch.arange(block, dtype=torch.int32).numpy())


def zeros(*shape: int) -> Float32Array:
    """An array of zeros, from torch, because torch aligns memory with cache lines."""
    array: Float32Array = torch.zeros(shape).numpy()
    return array


def kernel_calls() -> list[KernelCall]:
    """All calls of kernels by a `KernelEngine`, for a tiny net. Argument types do not depend on the net's size."""
    return noted_calls(KernelEngine, ActorCriticPolicy, RolloutStorage)


def noted_calls(
    kind: type[KernelEngine], policy_class: Any, storage_class: Any, memory: Any = None, **sizes: Any
) -> list[KernelCall]:
    """The kernel calls of an engine that acts once and learns from one step. `sizes`: arguments of the storage."""
    box, calls = spaces.Box(-1.0, 1.0, (3,), np.float32), list[KernelCall]()

    class Noting(kind):  # type: ignore[valid-type, misc]
        def _call(self, choice: ThreadChoice, threads: int, kernel: Any, *arguments: Any, runs: int = 1) -> Any:
            calls.append(KernelCall(kernel, (*arguments, new_team(), 0)))
            return 0

    before = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        cells = {} if memory is None else {"lstm_hidden_size": memory.states.pi[0].shape[2]}
        engine = Noting(
            policy_class(box, spaces.Discrete(2), lambda _: 1e-3, net_arch=[4, 4], **cells), EngineSettings()
        )
        storage = storage_class(1, 1, box, spaces.Discrete(2), device=CPU, gamma=1.0, gae_lambda=1.0, **sizes)
        engine.begin(storage)
        engine.act(np.zeros((1, 3), np.float32), None, memory)
        storage.full = True  # rows of zeros are used as data
        engine.update(storage, PPOWork(1, 1, 0.2, None, 0.0, 0.5, True, 0.5, None))
    np.random.set_state(before)
    return [*calls, FOLLOW]
