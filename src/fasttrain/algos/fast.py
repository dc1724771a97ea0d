"""What our algorithms have besides SB3's: an engine, which computes, and a collector, which is the env's side.

The collector knows the env as slots: what is read off them, checked and copied, and the clock over all of it. Neither
is saved, so that a zip holds nothing that stock SB3 does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.engine import Engine, EngineSettings
from fasttrain.batch import BoolArray, FinishedEpisode, Float32Array, each_array
from fasttrain.buffers.prefetch import Direct
from fasttrain.buffers.recurrent import Memory
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.spec.infos import sb3_statistics
from fasttrain.vec.base import EmptyMasks, SlotSource, copy_observations, slots_of

ACCELERATORS = "fasttrain.accelerators"  # imported when it is asked for: the plain path needs nothing of it
UNSAVED = ("engine", "collector", "dims", "loss")  # a `loss` that was set on the instance is code


class Fast(BaseAlgorithm):
    """Stands before the stock class among the bases of ours.

    Args:
        engine: "torch", which gives the numbers of stock, "kernels", or settings in full.
        further: as the stock class.
    """

    engine: Engine
    collector: Collector
    _plain: ClassVar[type[Engine]]  # acts on PyTorch
    _updates_often: ClassVar[bool] = False  # then `unsupported_reason` is asked again only after a change

    def __init__(self, *args: Any, engine: str | EngineSettings = "torch", **further: Any) -> None:
        self.engine = engine  # type: ignore[assignment]  # made in `_setup_model`; `load` may put another name there
        super().__init__(*args, **further)

    def _attach(self) -> None:
        """Make engine and collector, once there is a policy."""
        asked: Any = self.engine
        self.collector = Collector()
        self.engine = self._made(asked.settings if isinstance(asked, Engine) else EngineSettings.of(asked), None)
        self.engine.clock = self.collector.clock

    def use_engine(self, settings: str | EngineSettings) -> None:
        """Compute otherwise from the next rollout or update on; counters, guard and clock go on."""
        self.engine = self._made(EngineSettings.of(settings), self.engine)

    def engine_now(self) -> Engine:
        """The engine; a new one if policy, optimizer or device were replaced, or if kernels serve the model only now or
        no longer. Asked where rollouts and updates begin."""
        engine = self.engine
        served = engine.settings.kind == "kernels" and not self.unsupported_reason()
        if engine.kind != ("kernels" if served else "torch") or not engine.fits(self.policy):
            self.engine = engine = self._made(engine.settings, engine)
        return engine

    def time_with(self, clock: PhaseClock) -> None:
        """Measure the phases of training with `clock`."""
        self.collector.clock = self.engine.clock = clock

    def prepare(self, env: VecEnv) -> str:
        """Compile what the settings ask for, for the sizes of now; phase `other`.

        Returns:
            why that failed, if it did just now: training goes on without; else nothing.
        """
        if self.engine.settings.compile_mode is None:
            return ""
        with self.collector.clock.phase("other"):
            return str(import_module(f"{ACCELERATORS}.compiled").prepare(self, env))

    def unsupported_reason(self) -> str | None:
        """Why compiled kernels cannot reproduce this algorithm as it is now; None if they can."""
        watch = self.collector.watch
        if watch is not None and watch.holds(self):
            return watch.reason  # type: ignore[no-any-return]
        eligible, reason = find_kernels()
        if eligible is None or not self._updates_often:
            return reason if eligible is None else eligible.unsupported_reason(self)
        self.collector.watch = watch = eligible.Watch(self)  # an update of DQN's takes less than the question
        return watch.reason  # type: ignore[no-any-return]

    def _made(self, settings: EngineSettings, before: Engine | None) -> Engine:
        self.collector.watch = None  # something was replaced
        reason = self.unsupported_reason() if settings.kind == "kernels" else None
        plain = settings.kind == "torch" or reason is not None
        kind = self._plain if plain else import_module(f"{ACCELERATORS}.eligible").kernels_of(self)
        engine: Engine = kind(self.policy, settings, before)
        engine.unsupported_reason = reason
        return engine

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *UNSAVED]


class AnyDiscrete(OffPolicyAlgorithm):
    """Lets MultiDiscrete actions pass where SB3's DQN, which stands before it among the bases, asks for Discrete."""

    def __init__(self, *args: Any, **further: Any) -> None:
        further["supported_action_spaces"] = (spaces.Discrete, spaces.MultiDiscrete)
        super().__init__(*args, **further)


@cache
def find_kernels() -> tuple[Any, str]:
    """The module that knows what kernels reproduce; or None, and why there are none."""
    try:
        return import_module(f"{ACCELERATORS}.eligible"), ""
    except (ImportError, AttributeError) as error:  # their code stands on private parts of numba
        return None, f"compiled kernels cannot be imported with this version of numba ({error})"


class EnvStep(NamedTuple):
    """The outcome of a vector step of N envs, which the next step does not overwrite."""

    observations: Any  # (N, ...), or one array per key
    rewards: Float32Array  # (N,)
    dones: BoolArray  # (N,)
    infos: list[dict[str, Any]]


class Collector:
    """Never saved. The clock may be a run's, so that one clock covers training and everything around it."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.lends_observations = False  # callbacks see `new_obs` in the storage, for one rollout, not a copy to keep
        self.schedule = "lockstep"  # or first_ready
        self.sampler = Direct()  # of replay batches
        self.empty_masks = EmptyMasks()
        self.watch: Any = None  # an `eligible.Watch`, of a DQN that kernels were asked for
        self.source: SlotSource | None = None  # the env seen as slots
        self._env: VecEnv | None = None

    def source_of(self, env: VecEnv) -> SlotSource:
        """The slots of `env`, kept from rollout to rollout."""
        if self.source is None or self._env is not env:
            self._env, self.source = env, slots_of(env)
        return self.source

    def step(self, source: SlotSource, actions: NDArray[Any], place: Any = None) -> EnvStep:
        """Step all envs. `place`: where the observations are to lie, so that storing them costs no copy."""
        self.clock.enter("env_step")
        source.step_slots(actions)
        self.clock.enter("buffer")
        slots = source.slots
        observations: Any = slots.observations
        if source.reuses_arrays and place is None:
            observations = copy_observations(observations)
        elif source.reuses_arrays:
            each_array(np.copyto, place, observations)
            observations = place
        rewards = np.array(slots.rewards, np.float32)
        return EnvStep(observations, rewards, slots.terminations | slots.truncations, source.infos())


def read_masks(
    collector: Collector, source: SlotSource, dims: Sequence[int], step: int, place: BoolArray | None = None
) -> BoolArray:
    """A checked copy of the masks (N, A), in `place` if given: the step that follows overwrites the slots.

    Args:
        dims: sizes of the sub-actions; A is their sum.

    Raises:
        EnvSpecError: there are none any more.
        EnvError: they have the wrong width, or one is empty and that is to be an error.
    """
    masks = source.read_masks()
    if masks is None:
        raise EnvSpecError(f"the env had action masks when training began and has none at step {step}")
    if masks.shape[1] != sum(dims):
        raise EnvError(
            f"action_masks() returned {masks.shape[1]} entries per env at step {step}, but the action space "
            f"needs {sum(dims)}: one per choice, the choices of all sub-actions one after the other"
        )
    collector.empty_masks.check(masks, dims, step)
    if place is None:
        return np.array(masks)
    np.copyto(place, masks)
    return place


def clip_actions(model: OnPolicyAlgorithm, actions: NDArray[Any]) -> NDArray[Any]:
    """What the envs get: Box actions within bounds, all others as drawn."""
    space = model.action_space
    if not isinstance(space, spaces.Box):
        return actions
    if model.policy.squash_output and getattr(model, "unsquashes", True):
        actions = model.policy.unscale_action(actions)
        return actions
    clipped: NDArray[Any] = np.clip(actions, space.low, space.high)
    return clipped


def bootstrap_truncated(
    engine: Any,
    gamma: float,
    finished: list[FinishedEpisode],
    rewards: Float32Array,
    values: Any,
    storage: Any,
    step: int,
    after: Any = None,
) -> None:
    """Add gamma × value of the last observation to the last reward of every episode that was cut.

    As SB3 does it, env by env, where every number is to be SB3's: one product of several rows rounds differently, by up
    to one unit in the last place. In one forward where kernels were asked for.

    An episode that a fault cut (`lost`) says nothing about its last action: that is left out of `storage`, and what led
    to it ends as cut there, with the value of the observation it was taken on.

    Args:
        rewards: (N,) of this step, changed in place.
        values: (N,) or (N, 1) of the observations before it.
        after: a recurrent policy's states after the step, of N envs.
    """
    if lost := [episode.env_index for episode in finished if episode.lost]:
        storage.leave_out(step, lost)
        rewards[lost] = [gamma * float(value) for value in values.reshape(-1)[lost]]
    cut = [
        episode
        for episode in finished
        if episode.truncated and not episode.lost and episode.final_observation is not None
    ]
    if not cut:
        return
    for together in [cut] if engine.settings.kind == "kernels" else [[episode] for episode in cut]:
        stacked = each_array(lambda *rows: np.stack(rows), *(episode.final_observation for episode in together))
        rows = [episode.env_index for episode in together]
        found = engine.values(stacked, None if after is None else Memory.within(after, rows))
        rewards[rows] += np.float32(gamma) * found


def note_episodes(model: BaseAlgorithm, infos: list[dict[str, Any]], dones: BoolArray) -> None:
    """SB3's running statistics of the episodes that ended in this step."""
    ended = np.flatnonzero(dones)
    if len(ended):
        model._update_info_buffer([sb3_statistics(infos[index]) for index in ended], dones[ended])
