"""What a worker does with an env before the trainer has a plan: build it, look at it, measure it, and keep it.

Errands are values that travel by pickle and are called there with the memory that trainer and worker share (the place)
and the list of what is kept between them: at most one `core_env`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import gymnasium

from fasttrain.envs.checkup import CheckupResult, Lent, checkup
from fasttrain.envs.make import Env, EnvSpec, core_env, make_env, wrapped_core
from fasttrain.envs.place import BUILDING, LOOKING, Place
from fasttrain.envs.probe import PROBE_SECONDS, PROBE_STEPS, Play, ProbeResult
from fasttrain.envs.replay import Recorder, not_fresh
from fasttrain.envs.user_code import kept_random_state
from fasttrain.errors import EnvSpecError

Kept = list[Env]


class Built(NamedTuple):
    """What can be said without playing."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    build_s: float
    lacks_masks: str  # what is missing, if the algorithm needs masks and there are none


class Measured(NamedTuple):
    """What a short play cost, and why the env is not like a fresh one after it."""

    costs: ProbeResult
    not_fresh: str


@dataclass(frozen=True)
class Build:
    """Build the env and keep it."""

    spec: EnvSpec
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, memory: Any, kept: Kept) -> Built:
        place, spec = Place(memory), self.spec
        with _printing_at_once():
            place.enter(BUILDING)
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
        return Built(env.observation_space, env.action_space, build_s, lacks_masks)


@dataclass(frozen=True)
class Look:
    """The checkup, on the env that was kept and on fresh ones."""

    spec: EnvSpec
    build_s: float
    stays: bool  # the kept one may become one of the training's
    limits: dict[str, Any] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, memory: Any, kept: Kept) -> CheckupResult:
        place = Place(memory)
        with _printing_at_once():
            place.enter(LOOKING)
            lent = Lent(wrapped_core(kept[0], self.spec), self.build_s, self.stays)
            fresh = partial(make_env, self.spec, self.folder)
            return checkup(fresh, use_masks=self.spec.use_masks, lent=lent, place=place, **self.limits)


@dataclass(frozen=True)
class Measure:
    """The probe, on the env that was kept."""

    spec: EnvSpec
    build_s: float

    def __call__(self, memory: Any, kept: Kept) -> Measured:
        place, recorder = Place(memory), Recorder()
        with _printing_at_once(), kept_random_state():
            place.enter(LOOKING)
            env = wrapped_core(kept[0], self.spec)
            play = Play(lambda: env, place=place, build_s=self.build_s)
            play.run(PROBE_SECONDS, PROBE_STEPS, recorder)
            again = Play(lambda: env, place=place, build_s=self.build_s)
            return Measured(play.costs(), not_fresh(again, recorder.frames))


@contextlib.contextmanager
def _printing_at_once() -> Iterator[None]:
    """Lines that the env prints are not to wait in a buffer of a process that may be killed."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    before = [stream.line_buffering for stream in streams]
    for stream in streams:
        stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        for stream, was in zip(streams, before, strict=True):
            stream.reconfigure(line_buffering=was)
