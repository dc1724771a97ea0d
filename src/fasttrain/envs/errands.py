"""What a worker process does with an env before the trainer has a plan: build it, look at it, time it.

An errand travels to the process by pickle. There it is called with the memory that trainer and worker share (the place)
and with the list of what the process keeps between errands: at most one `core_env`.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import gymnasium

from fasttrain.envs.causes import played_beside
from fasttrain.envs.checkup import CheckupResult, Lent, checkup
from fasttrain.envs.make import Env, EnvSpec, core_env, import_env, wrapped_core
from fasttrain.envs.masks import layers
from fasttrain.envs.probe import PROBE_SECONDS, PROBE_STEPS, Play, ProbeResult
from fasttrain.envs.retrace import closed
from fasttrain.envs.second_play import Recorder, not_fresh
from fasttrain.envs.user_code import BUILDING, LOOKING, Place, kept_random_state
from fasttrain.envs.wrappers import OldGym, keeps_means
from fasttrain.errors import EnvSpecError

Kept = list[Env]


class Built(NamedTuple):
    """What can be said without playing."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    build_s: float
    lacks_masks: str  # what is missing, if the algorithm needs masks and there are none
    old_gym: bool  # it has the old gym interface, which is adapted
    keeps_means: str = ""  # the wrapper of the user's that normalises by running statistics of its own


class Measured(NamedTuple):
    """What a short play cost, and why the env is not like a fresh one after it."""

    costs: ProbeResult
    not_fresh: str


@dataclass(frozen=True)
class Build:
    """Build the env and keep it."""

    spec: EnvSpec
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, memory: mmap.mmap | None, kept: Kept) -> Built:
        place, spec = Place(memory), self.spec
        place.enter(BUILDING)
        import_env(spec, self.folder)  # which may take longer than to build, and happens once
        began = time.perf_counter()
        kept.append(core_env(spec, self.folder))
        build_s = time.perf_counter() - began
        place.enter(LOOKING)
        env = wrapped_core(kept[0], dataclasses.replace(spec, needs_masks=False))
        lacks_masks = ""
        if spec.needs_masks and not env.has_wrapper_attr("action_masks"):
            try:
                wrapped_core(kept.pop(), spec)
            except EnvSpecError as error:
                lacks_masks = str(error)
        old, means = isinstance(env.unwrapped, OldGym), next(filter(keeps_means, layers(env)), None)
        name = "" if means is None else type(means).__name__
        return Built(env.observation_space, env.action_space, build_s, lacks_masks, old, name)


@dataclass(frozen=True)
class Look:
    """The checkup, on the env that was kept and on fresh ones."""

    spec: EnvSpec
    build_s: float
    stays: bool  # the kept one may become one of the training's
    limits: dict[str, Any] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    copies: bool = True  # the training plays several

    def __call__(self, memory: mmap.mmap, kept: Kept) -> CheckupResult:
        place = Place(memory)
        place.enter(LOOKING)
        env = wrapped_core(kept[0], self.spec)
        lent = Lent(env, self.build_s, self.stays, None if self.copies else lambda: (closed(env), kept.pop()))

        def fresh() -> Env:  # wrapped twice as the lent one is, for a search for masks resets it, and envs may count
            core = core_env(self.spec, self.folder)
            wrapped_core(core, dataclasses.replace(self.spec, needs_masks=False))
            return wrapped_core(core, self.spec)

        try:
            return checkup(
                fresh, use_masks=self.spec.use_masks, lent=lent, place=place, copies=self.copies,
                beside=partial(played_beside, self.spec, self.folder), **self.limits,
            )  # fmt: skip
        except EnvSpecError as error:  # the first was built before
            if not self.copies:
                raise
            raise EnvSpecError(f"{error}; a second env beside the first: use num_envs=1 if one alone can be") from error


@dataclass(frozen=True)
class Measure:
    """The probe, on the env that was kept."""

    spec: EnvSpec
    build_s: float
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, memory: mmap.mmap, kept: Kept) -> Measured:
        place, recorder = Place(memory), Recorder()
        with kept_random_state():
            place.enter(LOOKING)
            if not kept:
                kept.append(core_env(self.spec, self.folder))
            env = wrapped_core(kept[0], self.spec)
            play = Play(lambda: env, place=place, build_s=self.build_s)
            play.run(PROBE_SECONDS, PROBE_STEPS, recorder)
            again = Play(lambda: env, place=place, build_s=self.build_s)
            return Measured(play.costs(), not_fresh(again, recorder.frames))
