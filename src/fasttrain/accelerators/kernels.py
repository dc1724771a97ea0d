"""KernelEngine: an actor-critic acts and learns in the compiled kernels of `kernels/`.

Parameters and Adam's moments are copied into flat vectors before an update and back after it, so that the policy and
the optimizer stay stock ones at every moment somebody can look. A copy is 45,000 floats in 50 µs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from fasttrain.accelerators.layout import Place, keys_of, make_layout
from fasttrain.algos.causes import blame, why_no_action
from fasttrain.algos.engine import Engine, EngineSettings, PolicyStep, PPOWork, RolloutRow, Statistics, explained
from fasttrain.algos.policy_view import LOST, OUTPUT
from fasttrain.batch import BoolArray, Float32Array, Float64Array, Int64Array, joined
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.errors import EnvError
from fasttrain.kernel_cache import KernelCall
from fasttrain.kernels import ppo
from fasttrain.kernels.actor_critic import act_rows, train_epoch
from fasttrain.kernels.nets import Constants, Layout, Lists, Rows, compress, empty_lists
from fasttrain.kernels.recurrent import Remembered, Sequences
from fasttrain.threads import FOLLOW, ThreadChoice, new_team, run

# Rows that go through the nets together. Their activations stay in the cache, and the weights of a wide net, which do
# not, are read once per block: 16.9 → 13.4 µs a sample for [256, 256] with 128 rows; [64, 64] does not care.
BLOCK, WIDE_BLOCK, WIDE = 64, 128, 512  # floats in a row of activations
ROWS_PER_THREAD = 128  # below that many rows a second thread costs more than it brings (about 10 µs to wake)
COLUMNS = {
    "loss": ppo.LOSS,
    "policy_gradient_loss": ppo.POLICY_LOSS,
    "value_loss": ppo.VALUE_LOSS,
    "clip_fraction": ppo.CLIPPED,
}
CPU = torch.device("cpu")


class KernelEngine(Engine):
    """Of an actor-critic policy that `eligible.py` allows. It draws its random numbers a rollout at a time."""

    kind: ClassVar[str] = "kernels"

    def __init__(self, policy: Any, settings: EngineSettings, before: Engine | None = None) -> None:
        super().__init__(policy, settings, before)
        self.max_threads = settings.threads
        self._keys = keys_of(policy.features_extractor)
        self.layout, self._places, self.size, self._row_size = self._laid_out(policy)
        self._single = isinstance(policy.action_space, spaces.Discrete)
        self._continuous = self.layout.log_std >= 0
        self.parameters = torch.zeros(self.size)
        self._flat = self.parameters.numpy()
        self._legal: BoolArray = np.zeros((0, 0), np.bool_)
        self._exp_avg, self._exp_avg_sq = torch.zeros(self.size), torch.zeros(self.size)
        flat = (self.parameters, self._exp_avg, self._exp_avg_sq)  # every parameter has its place in each
        self._views = [(place, tuple(place.of(each) for each in flat)) for place in self._places]
        self._scratch: dict[int, ppo.Scratch] = {}  # by number of parts
        self._constants = constants_of(self._row_size)
        self._choice, self._acting_choice = ThreadChoice(), ThreadChoice(trial=8)
        self._acted, self._learned = empty_lists(0, 0, 0), empty_lists(0, 0, 0)  # of the rows of now, of a rollout's
        self._order: Int64Array = np.arange(0)
        self._drawn: Iterator[Float32Array] = iter(())

    def _laid_out(self, policy: Any) -> tuple[Layout, list[Place], int, int]:
        return make_layout(policy)

    def fits(self, policy: Any) -> bool:
        """A head may have been replaced."""
        mine = {id(place.parameter) for place in self._places}
        return policy is self.policy and mine == {id(parameter) for parameter in policy.parameters()}

    def begin(self, rollout: RolloutStorage | None = None) -> None:
        """Read the parameters, and draw for the steps of `rollout`, if given."""
        self.pack()
        steps, envs = (0, 0) if rollout is None else (rollout.num_steps, rollout.num_envs)
        self._drawn = iter(self._random(steps, envs))

    def _random(self, *shape: int) -> Float32Array:
        """What actions are drawn by: a number in [0, 1) for each sub-action, or normal ones for a continuous action."""
        if self._continuous:
            return torch.randn(*shape, int(self.layout.dims[0])).numpy()
        return torch.rand(*shape, len(self.layout.dims)).numpy()

    def pack(self) -> None:
        """Read the policy's parameters."""
        for place, (value, _, _) in self._views:
            value.copy_(place.parameter.detach())

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Memory | None = None) -> PolicyStep:
        """One number per env and sub-action is drawn from torch's global stream, a rollout's at its start."""
        seen = joined(observations, self._keys)
        count = len(seen)
        masks = self._all_legal(count) if action_masks is None else np.ascontiguousarray(action_masks)
        drawn = next(self._drawn, None)
        if drawn is None or len(drawn) != count:
            drawn = self._random(count)
        actions, points = self._actions(count)
        values, log_probs = np.empty(count, np.float32), np.empty(count, np.float32)
        scratch = self._memory(count)
        kept, after = self._recalled(memory, scratch)
        total = self._call(self._acting_choice, len(scratch.gradients), act_rows, seen, masks, drawn,
                           *self._rows_acted_on(count), self._flat, self.layout, scratch, kept, actions, points,
                           values, log_probs)  # fmt: skip
        if not math.isfinite(total):
            raise EnvError(why_no_action(self.policy, observations, OUTPUT) or LOST)
        chosen: Any = points if self._continuous else actions[:, 0] if self._single else actions
        stored = RolloutRow(
            obs_as_tensor(observations, CPU), torch.from_numpy(chosen), torch.from_numpy(values)[:, None],
            torch.from_numpy(log_probs), None if action_masks is None else torch.from_numpy(masks),
            getattr(memory, "states", None),
        )  # fmt: skip
        return PolicyStep(chosen, stored, after)

    def _actions(self, count: int) -> tuple[Int64Array, Float32Array]:
        """Room for choices and for continuous actions, of which one has columns."""
        choices, points = (0, int(self.layout.dims[0])) if self._continuous else (len(self.layout.dims), 0)
        return np.empty((count, choices), np.int64), np.empty((count, points), np.float32)

    def _recalled(self, memory: Any, scratch: ppo.Scratch) -> tuple[Remembered | None, Any]:
        """A memory as the acting kernel takes it, and what is remembered after the step."""
        return None, memory

    def values(self, observations: Any, memory: Memory | None = None) -> Float32Array:
        """With the parameters last packed.

        torch would do too, but for a rollout's last observations it takes longer than for acting on them: 256 rows of
        248 floats 0.4 ms, and many times that where another process wants the core its second thread waits for. They
        are acted on, for a kernel of their own would be one more to compile.
        """
        seen = joined(observations, self._keys)
        count = len(seen)
        values, log_probs = np.empty(count, np.float32), np.empty(count, np.float32)
        drawn, scratch = np.zeros((count, int(self.layout.dims.sum())), np.float32), self._memory(1)
        act_rows(seen, self._all_legal(count), drawn, *self._rows_acted_on(count), self._flat, self.layout, scratch,
                 self._recalled(memory, scratch)[0], *self._actions(count), values, log_probs, new_team(),
                 0)  # fmt: skip
        return values

    def _call(self, choice: ThreadChoice, threads: int, kernel: Any, *arguments: Any, runs: int = 1) -> Any:
        """The kernel, on `threads` threads where that pays."""
        on_threads = threads > 1 and choice.next()
        begun = time.perf_counter()
        result = run(kernel, threads if on_threads else 1, *arguments)
        if threads > 1:
            choice.took(on_threads, (time.perf_counter() - begun) / runs)
        return result

    def _rows_acted_on(self, count: int) -> tuple[Lists, Int64Array]:
        """Lists with room for `count` rows, and the rows' numbers."""
        if len(self._order) < count:
            self._order, self._acted = np.arange(count), self._new_lists(count)
        return self._acted, self._order[:count]

    def _new_lists(self, count: int) -> Lists:
        return empty_lists(count, self.layout.inputs, int(self.layout.dims.sum()))

    def _all_legal(self, count: int) -> BoolArray:
        if len(self._legal) < count:
            self._legal = np.ones((count, int(self.layout.dims.sum())), np.bool_)
        return self._legal[:count]

    def update(self, data: RolloutStorage, work: PPOWork) -> Statistics:
        """All epochs in compiled code; statistics of the minibatches come from there.

        Raises:
            EnvError: nothing is guarded and parameters would not be finite.
        """
        self.clock.enter("train")
        optimizer, guarded = self.policy.optimizer, self.guard is not None
        step, adam = self._read(optimizer), adam_of(optimizer, work.max_grad_norm)
        rows, loss = self._rows_of_rollout(data), _loss_settings(work)
        total = len(data.rows)
        batch_size = work.batch_size or total
        minibatches = -(-total // batch_size)
        scratch = self._memory(batch_size)
        flat, exp_avg, exp_avg_sq = (t.numpy() for t in (self.parameters, self._exp_avg, self._exp_avg_sq))
        epochs: list[Float64Array] = []
        taken, bad, stopped = 0, np.full(1, -1), False
        for _ in range(work.n_epochs):
            statistics = np.zeros((minibatches, ppo.NUM_STATISTICS))
            order = data.draw_order()
            memory = self._sequences(data, order, batch_size, scratch)
            done = self._call(self._choice, len(scratch.gradients), train_epoch, order, batch_size, flat, exp_avg,
                              exp_avg_sq, step + taken + 1, self.layout, rows, loss, adam, scratch, memory, statistics,
                              guarded, bad, runs=minibatches)  # fmt: skip
            taken += done - (np.count_nonzero(np.isnan(statistics[:done, ppo.GRAD_NORM])) if guarded else 0)
            epochs.append(statistics[: min(done + 1, minibatches)])
            stopped = done < minibatches
            if stopped:
                break
        if (taken or not guarded) and not np.isfinite(flat.sum()):
            raise EnvError(
                "the update gave parameters that are not finite (a reward, advantage or coefficient too large?); the "
                "policy keeps the parameters it had before this update"
            )
        if taken:
            self._write(optimizer, step + taken)
        self.clock.enter("log")
        return self.counted(self._statistics(epochs, taken, stopped, int(bad[0]), data))

    def _sequences(self, data: Any, order: Int64Array, batch_size: int, scratch: ppo.Scratch) -> Sequences | None:
        """What LSTMs read and write in an epoch; None without."""
        return None

    def _statistics(
        self, epochs: list[Float64Array], taken: int, stopped: bool, bad: int, data: RolloutStorage
    ) -> Statistics:
        seen = np.concatenate(epochs)
        norms = seen[:, ppo.GRAD_NORM]
        terms = {name: seen[:, column] for name, column in COLUMNS.items()}
        terms |= {"entropy_loss": -seen[:, ppo.ENTROPY], "approx_kl": epochs[-1][:, ppo.APPROX_KL]}
        blamed, first = "", np.flatnonzero(np.isnan(norms))
        if self.guard is None:
            norms = np.zeros(0)
        elif len(first):
            blamed = blame(bool(np.isfinite(seen[first[0], ppo.LOSS])), self._name_at(bad))
        return Statistics(
            {**terms, **explained(data)}, norms[norms != ppo.NO_STEP], int(taken), len(epochs), stopped, blamed
        )

    def _name_at(self, index: int) -> str:
        """The parameter that stands there in the flat vectors."""
        if index < 0:
            return ""
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        numbered = torch.arange(self.size)
        found = [names[id(place.parameter)] for place in self._places if bool((place.of(numbered) == index).any())]
        return found[0] if found else "padding"

    def _rows_of_rollout(self, storage: RolloutStorage) -> Rows:
        """All T × N transitions in the order they are stored in."""
        stored: Any = storage.observations
        total = storage.num_steps * storage.num_envs
        parts = {key: stored[key].reshape(total, -1) for key in self._keys}
        seen = joined(parts or stored.reshape(total, -1))
        masks = self._all_legal(total) if storage.masks is None else storage.masks.reshape(total, -1)
        if len(self._learned.starts) != total + 1:
            self._learned = self._new_lists(total)
        threads = min(self.max_threads, total // ROWS_PER_THREAD)
        self._call(ThreadChoice(), threads, compress, seen, masks, self._learned)
        actions, *scalars = storage.scalars()
        room = self._actions(0 if self._continuous else total)
        taken = (room[0], actions) if self._continuous else (actions, room[1])
        return Rows(*self._learned, *taken, *scalars)

    def _read(self, optimizer: torch.optim.Optimizer) -> int:
        """Parameters and Adam's state into the flat vectors; the number of steps Adam has taken."""
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

    def _write(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Back into the policy and the optimizer, whose state then looks as if torch had made these steps."""
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

    def _memory(self, count: int) -> ppo.Scratch:
        """Working memory for as many parts as pay for `count` rows."""
        parts = max(1, min(self.max_threads, count // ROWS_PER_THREAD))
        if parts not in self._scratch:
            width, block = int(self.layout.dims.sum()), len(self._constants.every)
            self._scratch[parts] = ppo.Scratch(
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
    """As the kernels take it: numbers alone."""
    (group,) = optimizer.param_groups
    return ppo.AdamSettings(*map(float, (group["lr"], *group["betas"], group["eps"], max_grad_norm)))


def _loss_settings(work: PPOWork) -> ppo.LossSettings:
    """As the kernels take them: numbers alone."""
    return ppo.LossSettings(
        clip_range=work.clip_range,
        clip_range_vf=-1.0 if work.clip_range_vf is None else work.clip_range_vf,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef,
        normalize_advantage=work.normalize_advantage,
        target_kl=-1.0 if work.target_kl is None else work.target_kl,
    )


def constants_of(row_size: int) -> Constants:
    """For blocks of rows of so many activations."""
    block = BLOCK if row_size <= WIDE else WIDE_BLOCK
    return Constants(zeros(row_size), torch.ones(block).numpy(), torch.arange(block, dtype=torch.int32).numpy())


def zeros(*shape: int) -> Float32Array:
    """From torch, which aligns memory with the cache lines."""
    array: Float32Array = torch.zeros(shape).numpy()
    return array


def kernel_calls() -> list[KernelCall]:
    """Calls of the kernels that `KernelEngine` makes, on a net of no consequence; types do not depend on its sizes."""
    return noted_calls(KernelEngine, ActorCriticPolicy, RolloutStorage)


def noted_calls(
    kind: type[KernelEngine], policy_class: Any, storage_class: Any, memory: Any = None, **sizes: Any
) -> list[KernelCall]:
    """What an engine calls that acts once with a `memory` and learns from one step; `sizes` are the storage's."""
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
        storage.full = True  # zeros are as good as any
        engine.update(storage, PPOWork(1, 1, 0.2, None, 0.0, 0.5, True, 0.5, None))
    np.random.set_state(before)
    return [*calls, FOLLOW]
