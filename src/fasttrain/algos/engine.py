"""How an algorithm computes and collects: `Engine`, `Collector`, and `Fast`, the base class that has both.

An engine acts with the networks. Engines of compiled kernels also learn; on PyTorch the algorithm itself learns. An
engine owns no weights: between two calls only the stock policy and its optimizer hold them, so that engines can be
exchanged between two calls. With default settings an engine computes what stock SB3 computes, by the same operations.
The collector steps the envs: it reads, checks and copies their results (`Slots`), and holds the clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from fasttrain.algos.causes import why_no_action
from fasttrain.algos.devices import EngineSettings as EngineSettings
from fasttrain.algos.devices import Precision, use_channels_last
from fasttrain.algos.guard import NOT_FINITE, Guard
from fasttrain.algos.policy_view import LOST, OUTPUT, view_of
from fasttrain.batch import (
    BoolArray,
    FinishedEpisode,
    Float32Array,
    Float64Array,
    each_array,
    with_prefix,
    without_prefix,
    written,
)
from fasttrain.buffers.prefetch import Direct
from fasttrain.buffers.recurrent import Memory
from fasttrain.buffers.rollout import RolloutRow, RolloutStorage, TensorObservations
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.spec.infos import sb3_statistics
from fasttrain.vec.base import EmptyMasks, SlotSource, copy_observations, slots_of

ACCELERATORS = "fasttrain.accelerators"  # imported only if a run uses kernels
RECURRENT = "a policy that remembers"  # how messages name a recurrent policy


class PolicyStep(NamedTuple):
    """The result of one forward pass: what the envs get, on the host, and what the rollout stores, on the device."""

    actions: NDArray[Any]  # (n, ...), not clipped to the action space
    stored: RolloutRow | None = None  # None unless the policy is an actor-critic
    lstm_states: RNNStates | None = None  # LSTM states after the step; None: not recurrent


@dataclass(slots=True)
class Statistics:
    """Results of a round of updates, read from the device once, at the round's end."""

    terms: Mapping[str, NDArray[Any]]  # name → one value per minibatch: policy_loss, value_loss, …; DQN: loss
    norms: Float64Array  # gradient norm of each guarded step; not finite if the step was skipped
    steps: int  # optimizer steps taken
    epochs: int  # epochs begun
    stopped: bool = False  # True if `target_kl` ended the update before its last minibatch
    blamed: str = ""  # the first loss or gradient that was not finite; empty: none, or not checked (GPU)
    expected_skips: bool = False  # True in float16: skipping a step now and then is normal there

    @property
    def skipped(self) -> int:
        """Steps that were skipped because gradient or loss was not finite."""
        return int(np.count_nonzero(~np.isfinite(self.norms)))


class Engine(ABC):
    """The base class of engines. An engine is made together with the model, before anything is compiled.

    Engines of actor-critics also have `values(observations, memory) → (n,)`. Engines of kernels also have
    `update(data, work)`, which learns from a filled rollout or from replay and returns `Statistics`.

    Args:
        policy: an SB3 policy with its optimizer.
        settings: how the networks compute.
        previous: the engine that this one replaces; its clock, guard and counters are kept.

    Raises:
        ConfigError: the engine is `float32_only`, and `settings` use AMP, torch.compile or gradient accumulation.
    """

    kind: ClassVar[str]  # one of `devices.KINDS`
    float32_only: ClassVar[str] = ""  # the engine's name in messages, if it supports neither AMP nor torch.compile
    clock: PhaseClock
    guard: Guard | None  # None: nothing is checked for NaN and infinity
    gradient_updates = 0  # optimizer steps so far
    skipped_steps = 0  # see `Statistics.skipped`
    warmup_s = 0.0  # seconds of torch.compile

    def __init__(self, policy: Any, settings: EngineSettings, previous: Engine | None = None) -> None:
        further = settings.amp_dtype is not None or settings.gradient_accumulation > 1 or settings.compile_mode
        if self.float32_only and further:
            raise ConfigError(
                f"{self.float32_only} computes in float32, without torch.compile and micro-batches: remove amp_dtype, "
                "compile_mode and gradient_accumulation"
            )
        self.policy, self.settings, self.device, self.exact = policy, settings, policy.device, settings.exact
        use_channels_last(policy, settings.channels_last and self.device.type == "cpu")
        self.pinned = settings.pin_memory and self.device.type == "cuda"
        self.clock, self.guard = PhaseClock(), Guard()
        if previous is not None:
            self.clock, self.guard, self.warmup_s = previous.clock, previous.guard, previous.warmup_s
            self.gradient_updates, self.skipped_steps = previous.gradient_updates, previous.skipped_steps
        self.precision = Precision(self.device.type, dtype) if (dtype := settings.amp_dtype) else None  # None: float32
        self.scaler = None if self.precision is None else self.precision.scaler  # scales gradients in float16
        self.compiled: Any = None  # a `Compiled`, if torch.compile is used
        self.unsupported_reason: str | None = None  # why torch computes although kernels were requested

    def fits(self, policy: Any) -> bool:
        """Whether the engine was made for this policy as it is now. Called before each rollout and each update."""
        return policy is self.policy and policy.device == self.device

    def begin(self, rollout: RolloutStorage | None = None) -> None:  # noqa: B027 - Q-networks
        """Read the weights, and draw the random numbers for a whole rollout."""

    @abstractmethod
    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        """Choose actions for observations (n, ...) on the host with masks (n, A); None: all actions are legal.

        `into`: `StepViews` that hold these observations and masks, so that kernels can write the rest there.

        Raises:
            EnvError: no action can be drawn because a number is not finite.
        """

    def count_steps(self, statistics: Statistics) -> Statistics:
        """Add the statistics of a round of updates to the counters. Returns `statistics`."""
        self.gradient_updates += statistics.steps
        self.skipped_steps += statistics.skipped
        return statistics

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What a checkpoint stores of the engine: plain values, and arrays by name."""
        counters = {"gradient_updates": self.gradient_updates, "skipped_steps": self.skipped_steps}
        scaler = None if self.scaler is None else dict(self.scaler.state_dict())
        state: dict[str, Any] = {"fast": counters, "scaler": scaler}
        if self.guard is None:
            return state, {}
        state["guard"], copies = self.guard.state()
        return state, with_prefix("guard", copies)

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], model: Any) -> None:
        """Continue from a `state`, after the model's policy and optimizers were loaded.

        Raises:
            ConfigError: the state is of another policy.
        """
        for name in ("gradient_updates", "skipped_steps"):
            setattr(self, name, int(state["fast"][name]))
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(dict(state["scaler"]))
        if self.guard is not None and "guard" in state:
            self.guard.load(state["guard"], without_prefix(arrays, "guard"), model)


def to_device(
    observations: Any, action_masks: BoolArray | None, device: torch.device, pinned: bool = False
) -> tuple[TensorObservations, Tensor | None]:  # (N, ...) or a dict of them, (N, A)
    """Copies on the device. `pinned`: through page-locked memory, so that the host does not wait for them."""
    if pinned:  # torch keeps the page-locked copy until the device has read it
        arrays = each_array(np.ascontiguousarray, (observations, action_masks))
        return each_array(lambda part: torch.from_numpy(part).pin_memory().to(device, non_blocking=True), arrays)  # type: ignore[no-any-return]
    masks = None if action_masks is None else torch.from_numpy(action_masks).to(device)
    return obs_as_tensor(observations, device), masks


class TorchEngine(Engine):
    """An actor-critic on PyTorch. For a recurrent policy, `act` gets a `Memory` and returns the next LSTM states."""

    kind: ClassVar[str] = "torch"

    def __init__(self, policy: Any, settings: EngineSettings, previous: Engine | None = None) -> None:
        super().__init__(policy, settings, previous)
        self.view: Any = self.new_view()  # computes the actions

    def new_view(self) -> Any:
        """The fastest `PolicyView` for the present policy, with the same numbers as the policy's own methods."""
        return view_of(self.policy, self.policy.action_space, self.precision)

    def begin(self, rollout: RolloutStorage | None = None) -> None:
        self.view = self.new_view()
        if self.compiled is not None:
            self.compiled.attach(self.view)

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        seen, masks = into.seen if into else to_device(observations, action_masks, self.device, self.pinned)
        try:
            with torch.no_grad():
                actions, values, log_probs, *after = self.view.act(seen, masks, *([] if memory is None else [memory]))
        except (RuntimeError, ValueError) as error:  # from torch.multinomial or torch.distributions
            # After an error a CUDA device computes nothing any more, so the cause cannot be found there.
            explicable = self.device.type == "cpu" and any(words in str(error) for words in NOT_FINITE)
            if self.guard is None or not explicable:
                raise
            raise EnvError(why_no_action(self.policy, seen, OUTPUT) or LOST) from error
        stored = RolloutRow(seen, actions, values, log_probs, masks, None if memory is None else memory.states)
        return PolicyStep(actions.cpu().numpy(), stored, *after)

    def values(self, observations: Any, memory: Memory | None = None) -> Float32Array:
        with torch.no_grad():
            seen = obs_as_tensor(observations, self.device)
            values: Tensor = self.view.values(seen, *([] if memory is None else [memory]))
        return values.cpu().numpy().reshape(-1)


# --- stepping the envs: the collector


class EnvStep(NamedTuple):
    """The result of a vector step of N envs. The next step does not overwrite it."""

    observations: Any  # (N, ...), or one array per key
    rewards: Float32Array  # (N,)
    dones: BoolArray  # (N,)
    infos: list[dict[str, Any]]


class Collector:
    """Steps the envs and reads their results. A collector is not saved. A run may replace its clock."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.lends = False  # True: callbacks get views of the storage, valid until the next rollout, and change nothing
        self.schedule = "lockstep"  # "lockstep", "first_ready" or "continuous"
        self.continuous: Any = None  # a `Continuous`; only with schedule=continuous
        self.sampler = Direct()  # draws batches from the replay buffer
        self.empty_masks = EmptyMasks()
        self.watch: Any = None  # an `eligible.Watch`; DQN and SAC have one, and PPO if `lends`
        self.source: SlotSource | None = None  # steps the env and has its results
        self._env: VecEnv | None = None

    def source_of(self, env: VecEnv) -> SlotSource:
        """The object that steps `env` and has its results, made once and kept for all rollouts."""
        if self.source is None or self._env is not env:
            self._env, self.source = env, slots_of(env)
        return self.source

    def step(self, source: SlotSource, actions: NDArray[Any], place: Any = None) -> EnvStep:
        """Step all envs. `place`: arrays to write the observations into; None: new arrays."""
        self.clock.enter("env_step")
        source.step_slots(actions)
        self.clock.enter("buffer")
        slots = source.slots
        observations: Any = slots.observations
        if place is not None:
            observations = each_array(written, place, observations)
        elif source.reuses_arrays:
            observations = copy_observations(observations)
        rewards = np.array(slots.rewards, np.float32)
        return EnvStep(observations, rewards, slots.terminations | slots.truncations, source.infos())

    def read_masks(
        self, source: SlotSource, dims: Sequence[int], step: int, place: BoolArray | None = None
    ) -> BoolArray:
        """A checked copy of the masks (N, A), in `place` if given. A is the sum of `dims`, the sub-actions' sizes.

        Raises:
            EnvSpecError: the env had masks before and has none now.
            EnvError: masks have the wrong width, or a mask has no legal action and env.on_empty_mask is raise.
        """
        masks = source.read_masks()
        if masks is None:
            raise EnvSpecError(f"the env had action masks when training began and has none at step {step}")
        if masks.shape[1] != sum(dims):
            raise EnvError(
                f"action_masks() returned {masks.shape[1]} entries per env at step {step}, but the action space "
                f"needs {sum(dims)}: one per choice, the choices of all sub-actions one after the other"
            )
        self.empty_masks.check(masks, dims, step)
        if place is None:
            return np.array(masks)
        np.copyto(place, masks)
        return place


def note_episodes(model: BaseAlgorithm, infos: list[dict[str, Any]], dones: BoolArray) -> None:
    """Update SB3's running statistics with the episodes that ended in this step."""
    ended = dones.nonzero()[0]
    if len(ended):
        model._update_info_buffer([sb3_statistics(infos[index]) for index in ended], dones[ended])


def bootstrap_truncated(
    model: Any, finished: list[FinishedEpisode], rewards: Float32Array, values: Any, step: int, lstm_states: Any = None
) -> None:
    """Add gamma × value of the last observation to the last reward of every truncated episode.

    Values are computed env by env as in SB3, because a product of several rows rounds differently. Kernels compute all
    values at once. If a fault ended an episode (`lost`), its last step says nothing about the action and is left out of
    the rollout. The transition before this step then counts as truncated, with the value of its next observation.

    Args:
        rewards: (N,) rewards of this step, changed in place.
        values: (N,) or (N, 1) values of the observations before the step.
        lstm_states: LSTM states after the step; None: not recurrent.
    """
    if lost := [episode.env_index for episode in finished if episode.lost]:
        model.rollout_buffer.storage.leave_out(step, lost)
        rewards[lost] = [model.gamma * float(value) for value in values.reshape(-1)[lost]]
    cut = [each for each in finished if each.truncated and not each.lost and each.final_observation is not None]
    for episodes in [cut] if cut and model.engine.settings.kind == "kernels" else [[episode] for episode in cut]:
        last = each_array(lambda *rows: np.stack(rows), *(episode.final_observation for episode in episodes))
        rows = [episode.env_index for episode in episodes]
        last_values = model.engine.values(last, None if lstm_states is None else Memory.within(lstm_states, rows))
        rewards[rows] += np.float32(model.gamma) * last_values


class Fast(BaseAlgorithm):
    """Adds an engine and a collector to an SB3 algorithm. A subclass lists `Fast` before the stock class.

    Engine and collector are not saved, so that stock SB3 can load the zip.

    Args:
        engine: "torch" (stock's numbers), "kernels", or `EngineSettings`.
        further: arguments of the stock class.
    """

    engine: Engine
    collector: Collector
    _torch_engine: ClassVar[type[Engine]]
    bootstrap_truncated = bootstrap_truncated  # also a method, so that subclasses can override it

    def __init__(self, *args: Any, engine: str | EngineSettings = "torch", **further: Any) -> None:
        self.engine = engine  # type: ignore[assignment]  # replaced in `_setup_model`; `load` may set another name
        super().__init__(*args, **further)

    def _attach(self) -> None:
        """Make engine and collector, once there is a policy."""
        asked: Any = self.engine
        self.collector = Collector()
        self.engine = self._new_engine(asked.settings if isinstance(asked, Engine) else EngineSettings.of(asked), None)
        self.engine.clock = self.collector.clock

    def use_engine(self, settings: str | EngineSettings) -> None:
        """Use another engine from the next rollout or update on. Counters, guard and clock are kept."""
        self.engine = self._new_engine(EngineSettings.of(settings), self.engine)

    def engine_now(self) -> Engine:
        """The engine for the next rollout or update; a new one if policy, optimizer or device were replaced."""
        engine = self.engine
        supported = engine.settings.kind == "kernels" and not self.unsupported_reason()
        if engine.kind != ("kernels" if supported else "torch") or not engine.fits(self.policy):
            self.engine = engine = self._new_engine(engine.settings, engine)
        return engine

    def time_with(self, clock: PhaseClock) -> None:
        """Measure the phases of training with `clock`."""
        self.collector.clock = self.engine.clock = clock

    def prepare(self, env: VecEnv) -> str:
        """Run torch.compile if it is set; its time counts as phase `other`. Returns why it failed, or ""."""
        if self.engine.settings.compile_mode is None:
            return ""
        with self.collector.clock.phase("other"):
            return str(import_module(f"{ACCELERATORS}.compiled").prepare(self, env))

    def unsupported_reason(self) -> str | None:
        """Why compiled kernels cannot compute the present model; None if they can."""
        if (watch := self.collector.watch) is not None and watch.holds(self):
            return watch.reason  # type: ignore[no-any-return]
        eligible, reason = find_kernels()
        if eligible is None or not (hasattr(self, "replay_buffer") or self.collector.lends):
            return reason if eligible is None else eligible.unsupported_reason(self)
        self.collector.watch = watch = eligible.Watch(self)  # computing the reason takes longer than an update of DQN
        return watch.reason  # type: ignore[no-any-return]

    def _new_engine(self, settings: EngineSettings, previous: Engine | None) -> Engine:
        self.collector.watch = None  # a part of the model was replaced
        reason = self.unsupported_reason() if settings.kind == "kernels" else None
        on_torch = settings.kind == "torch" or reason is not None
        kind = self._torch_engine if on_torch else import_module(f"{ACCELERATORS}.eligible").kernels_of(self)
        engine: Engine = kind(self.policy, settings, previous)
        engine.unsupported_reason = reason
        return engine

    def _excluded_save_params(self) -> list[str]:
        code = ["loss"] if callable(vars(self).get("loss")) else []  # `loss` was set on the instance
        return [*super()._excluded_save_params(), "engine", "collector", "dims", "reuse", *code]


@cache
def find_kernels() -> tuple[Any, str]:
    """The module `accelerators.eligible` and "", or None and the reason why it cannot be imported."""
    try:
        return import_module(f"{ACCELERATORS}.eligible"), ""
    except (ImportError, AttributeError) as error:  # `eligible` imports modules that use private parts of numba
        return None, f"compiled kernels cannot be imported with this version of numba ({error})"
