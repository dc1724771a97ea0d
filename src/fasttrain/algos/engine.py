"""An engine: how networks act, and in compiled kernels how they learn. Verbs `act`, `values`, `update`, and a life.

Here are the words, what all engines share, and the two that act on PyTorch: as made these compute what stock computes,
by the same operations. Algorithms hold the plain update; `update` of the kernels' engines computes the same, from
`PPOWork` or `QWork`. An engine owns no weights. The stock policy and its optimizer are the only truth between two
calls, so that engines can be exchanged wherever nothing is under way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.utils import explained_variance, obs_as_tensor
from torch import Tensor

from fasttrain.algos.causes import why_no_action
from fasttrain.algos.devices import Precision, as_float32
from fasttrain.algos.guard import NOT_FINITE, Guard
from fasttrain.algos.policy_view import LOST, OUTPUT, action_dims, view_of
from fasttrain.algos.q_networks import greedy
from fasttrain.batch import BoolArray, Float32Array, Float64Array, each_array, inside, under
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutStorage, TensorObservations
from fasttrain.errors import ConfigError, EnvError
from fasttrain.perf.clock import PhaseClock
from fasttrain.spec.setting import did_you_mean

KINDS = ("torch", "kernels")
RECURRENT = "a policy that remembers"  # in messages


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How networks compute. As made: on PyTorch, and every number is that of stock SB3."""

    kind: str = "torch"  # or "kernels": compiled ones on the CPU, faster, equal up to rounding and draws
    threads: int = 1  # of the kernels, at most
    fused_adam: bool = False  # torch's fused kernel on the CPU, 99 µs a step of [64, 64], not 275; others bring it too
    amp_dtype: torch.dtype | None = None  # of the networks: bfloat16, or float16 on CUDA
    compile_mode: str | None = None  # a mode of torch.compile; on CUDA all but "default" bring CUDA graphs
    gradient_accumulation: int = 1  # micro-batches per minibatch; on-policy
    pin_memory: bool = False  # page-locked buffers between host and CUDA

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"engine={self.kind!r}: choose {' or '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")

    @classmethod
    def of(cls, given: str | EngineSettings) -> EngineSettings:
        """`"torch"` and `"kernels"` stand for the settings of that kind."""
        return cls(kind=given) if isinstance(given, str) else given

    @property
    def exact(self) -> bool:
        """Whether every number is to be stock's: of two ways that round differently, stock's is taken."""
        rounding = [each for each in fields(self) if each.name not in ("threads", "pin_memory")]
        return all(getattr(self, each.name) == each.default for each in rounding)


class RolloutRow(NamedTuple):
    """What a rollout stores of a vector step, on the networks' device; `n` of N envs."""

    observations: TensorObservations  # (n, ...)
    actions: Tensor  # (n,) or (n, K), as drawn
    values: Tensor  # (n, 1)
    log_probs: Tensor  # (n,)
    action_masks: Tensor | None  # (n, A) bool
    memory: RNNStates | None = None  # of a recurrent policy: its states before the step


class PolicyStep(NamedTuple):
    """One forward. What the envs get is on the host, what is stored lies on the device."""

    actions: NDArray[Any]  # (n, ...), as drawn; not clipped to the action space
    stored: RolloutRow | None = None  # of an actor-critic
    memory: RNNStates | None = None  # of a recurrent policy: its states after the step


class PPOWork(NamedTuple):
    """What one PPO update is, whoever computes it; the names are SB3's."""

    n_epochs: int
    batch_size: int | None  # None: the whole rollout
    clip_range: float
    clip_range_vf: float | None
    ent_coef: float
    vf_coef: float
    normalize_advantage: bool
    max_grad_norm: float
    target_kl: float | None


class QWork(NamedTuple):
    """Some updates of a Q-network, one after the other, by compiled kernels."""

    gradient_steps: int
    batch_size: int
    double_q: bool  # the online network chooses the next action (van Hasselt et al. 2016)
    loss: str  # huber or mse
    gamma: float  # of batches that have no discounts of their own
    max_grad_norm: float


@dataclass(slots=True)
class Statistics:
    """Results of a round of updates, read from the device once, at its end."""

    terms: Mapping[str, NDArray[Any]]  # per minibatch: policy_loss, value_loss, …; of Q-networks loss; see `explained`
    norms: Float64Array  # of gradients, one for each step that was asked for and watched; not finite: not taken
    steps: int  # optimizer steps taken
    epochs: int  # begun
    stopped: bool = False  # before the last minibatch of the last epoch: `target_kl` was exceeded
    blamed: str = ""  # loss or gradient that was not finite first, where the host could see it
    expected_skips: bool = False  # float16: an overflow now and then is normal

    @property
    def skipped(self) -> int:
        """Steps that were not taken because gradient or loss was not finite."""
        return int(np.count_nonzero(~np.isfinite(self.norms)))


def explained(data: RolloutStorage) -> dict[str, NDArray[Any]]:
    """The term `explained_variance`: of the returns by the values with which they were collected; SB3's."""
    values, returns = data.values.reshape(-1)[data.rows], data.returns.reshape(-1)[data.rows]
    return {"explained_variance": np.array([explained_variance(values, returns)])}


class Engine(ABC):
    """What all engines share.

    Those of actor-critics have `values(observations, memory) → (n,)` besides, those of kernels `update(data, work)`,
    which learns from a filled rollout or from replay and returns `Statistics`.

    made      with the model, from settings; nothing is compiled, no size is known
    `begin`   at every rollout: takes the weights of now and draws the rollout's random numbers
    `fits`    asked where a rollout and an update begin: False once what it was made for was replaced
    `state`   for checkpoints; never part of the zip

    Args:
        policy: of SB3, with its optimizer.
        settings: what is wanted.
        before: the engine whose place it takes: clock, guard and counters go on.

    Raises:
        ConfigError: a setting that an engine which is `float32_only` does not have.
    """

    kind: ClassVar[str]
    float32_only: ClassVar[str] = ""  # who computes in float32, uncompiled and in one part only, as messages name it
    clock: PhaseClock
    guard: Guard | None  # None: nothing not finite is looked for
    gradient_updates: int  # optimizer steps so far
    skipped_steps: int  # of these none: see `Statistics.skipped`
    warmup_s: float  # compiling took so long, outside of every phase

    def __init__(self, policy: Any, settings: EngineSettings, before: Engine | None = None) -> None:
        further = settings.amp_dtype is not None or settings.gradient_accumulation > 1 or settings.compile_mode
        if self.float32_only and further:
            raise ConfigError(
                f"{self.float32_only} computes in float32, uncompiled, each minibatch in one part: leave amp_dtype, "
                "compile_mode and gradient_accumulation out"
            )
        self.policy, self.settings, self.device, self.exact = policy, settings, policy.device, settings.exact
        self.pinned = settings.pin_memory and self.device.type == "cuda"
        self.clock = PhaseClock() if before is None else before.clock
        self.guard = Guard() if before is None else before.guard
        self.gradient_updates = 0 if before is None else before.gradient_updates
        self.skipped_steps = 0 if before is None else before.skipped_steps
        self.warmup_s = 0.0 if before is None else before.warmup_s
        dtype = settings.amp_dtype
        self.precision = None if dtype is None else Precision(self.device.type, dtype)  # of the networks; None: float32
        self.scaler = None if self.precision is None else self.precision.scaler  # of gradients in float16
        self.compiled: Any = None  # what torch.compile made of acting and loss, where that was asked for
        self.unsupported_reason: str | None = None  # why it is not the kernels that were asked for

    def fits(self, policy: Any) -> bool:
        """Whether it was made for this policy, as it is now."""
        return policy is self.policy and policy.device == self.device

    def begin(self, rollout: RolloutStorage | None = None) -> None:  # noqa: B027 - Q-networks have nothing to begin
        """Take the current weights and draw numbers for `rollout`, filled step by step; None: in another order."""

    @abstractmethod
    def act(self, observations: Any, action_masks: BoolArray | None, memory: Memory | None = None) -> PolicyStep:
        """Choose actions for observations (n, ...) on the host; masks (n, A), None: all legal.

        Raises:
            EnvError: no action comes out, because something is not finite.
        """

    def counted(self, done: Statistics) -> Statistics:
        """Add a round to the counters and hand it on."""
        self.gradient_updates += done.steps
        self.skipped_steps += done.skipped
        return done

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """For a checkpoint: plain values, and arrays by name."""
        counters = {"gradient_updates": self.gradient_updates, "skipped_steps": self.skipped_steps}
        scaler = None if self.scaler is None else dict(self.scaler.state_dict())
        state: dict[str, Any] = {"fast": counters, "scaler": scaler}
        if self.guard is None:
            return state, {}
        state["guard"], kept = self.guard.state()
        return state, under("guard", kept)

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], model: Any) -> None:
        """Go on from there, once the model's policy and optimizers are as they were.

        Raises:
            ConfigError: what was kept is not of this policy.
        """
        for name in ("gradient_updates", "skipped_steps"):
            setattr(self, name, int(state["fast"][name]))
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(dict(state["scaler"]))
        if self.guard is not None and "guard" in state:
            self.guard.load(state["guard"], inside(arrays, "guard"), model)


# --- on PyTorch


def to_device(
    observations: Any, action_masks: BoolArray | None, device: torch.device, pinned: bool = False
) -> tuple[TensorObservations, Tensor | None]:  # (N, ...) or a dict of them, (N, A)
    """Plain copies, as SB3 makes them; or `pinned`: by way of page-locked memory, which the host need not wait for."""
    if pinned:  # torch keeps the page-locked copy until the device has read it
        given = each_array(np.ascontiguousarray, (observations, action_masks))
        return each_array(lambda part: torch.from_numpy(part).pin_memory().to(device, non_blocking=True), given)  # type: ignore[no-any-return]
    masks = None if action_masks is None else torch.from_numpy(action_masks).to(device)
    return obs_as_tensor(observations, device), masks


class TorchEngine(Engine):
    """Of an actor-critic; where it remembers, `memory` is a `Memory`, and what comes of acting the states after it."""

    kind: ClassVar[str] = "torch"

    def __init__(self, policy: Any, settings: EngineSettings, before: Engine | None = None) -> None:
        super().__init__(policy, settings, before)
        self.view: Any = self.new_view()  # acts

    def new_view(self) -> Any:
        """The shortest way through the policy as it is now."""
        return view_of(self.policy, self.policy.action_space, self.precision)

    def begin(self, rollout: RolloutStorage | None = None) -> None:
        self.view = self.new_view()
        if self.compiled is not None:
            self.compiled.attach(self.view)

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Memory | None = None) -> PolicyStep:
        seen, masks = to_device(observations, action_masks, self.device, self.pinned)
        remembered = () if memory is None else (memory,)
        try:
            with torch.no_grad():
                actions, values, log_probs, *after = self.view.act(seen, masks, *remembered)
        except (RuntimeError, ValueError) as error:  # torch.multinomial's and torch.distributions' own
            # On CUDA the failure is one of the device, which answers no question any more.
            told = self.device.type == "cpu" and any(words in str(error) for words in NOT_FINITE)
            if self.guard is None or not told:
                raise
            raise EnvError(why_no_action(self.policy, seen, OUTPUT) or LOST) from error
        stored = RolloutRow(seen, actions, values, log_probs, masks, None if memory is None else memory.states)
        return PolicyStep(actions.cpu().numpy(), stored, after[0] if after else None)

    def values(self, observations: Any, memory: Memory | None = None) -> Float32Array:
        with torch.no_grad():
            seen, remembered = obs_as_tensor(observations, self.device), () if memory is None else (memory,)
            found: Float32Array = self.view.values(seen, *remembered).cpu().numpy()
        return found.reshape(-1)


class TorchQEngine(Engine):
    """Of a DQN policy."""

    kind: ClassVar[str] = "torch"

    def __init__(self, policy: Any, settings: EngineSettings, before: Engine | None = None) -> None:
        super().__init__(policy, settings, before)
        self._dims, self._shape = action_dims(policy.action_space), policy.action_space.shape or ()

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Memory | None = None) -> PolicyStep:
        seen, legal = to_device(observations, action_masks, self.device, self.pinned)
        values = self.q_values(seen)
        best = greedy(values, legal, self._dims)
        chosen: NDArray[Any] = (best if self.guard is None else marked(best, values)).cpu().numpy()
        if self.guard is not None and chosen.flat[0] < 0:
            raise EnvError(why_no_action(self.policy, observations, "a Q-value") or "a Q-value is not finite")
        return PolicyStep(chosen.reshape(-1, *self._shape))  # one sub-action has a column of its own

    @torch.no_grad()
    def q_values(self, observations: TensorObservations) -> Tensor:  # (N, A)
        """Of all actions, without gradients."""
        compiled = None if self.compiled is None else self.compiled.values_of(observations)
        return network_values(self.policy.q_net, observations, self.precision) if compiled is None else compiled


def network_values(network: Any, observations: TensorObservations, precision: Precision | None) -> Tensor:  # (B, A)
    """A network's Q-values in float32; with a `precision` the network itself computes in that."""
    if precision is None:
        return network(observations)  # type: ignore[no-any-return]
    with precision.autocast():
        return as_float32(network(observations))  # type: ignore[no-any-return]


def marked(chosen: Tensor, values: Tensor) -> Tensor:
    """`chosen`, or -1 everywhere where one of the values (N, A) is not finite, which nothing else would show.

    On the CPU the host looks (2.5 µs); elsewhere nothing waits for the device, the mark travels with the actions.
    """
    if values.device.type == "cpu":
        return chosen if math.isfinite(values.sum().item()) else torch.full_like(chosen, -1)
    return torch.where(torch.isfinite(values.sum()), chosen, -1)
