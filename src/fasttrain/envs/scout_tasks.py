"""Tasks for a `vec.process.Scout` before a training is planned: build one env, run its checkup, or measure its speed.

A task is pickled and sent to the scout's process. The process calls the task with the memory that process and trainer
share, and with a list that is empty or contains one `core_env`. The process keeps this list between tasks.
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
from fasttrain.envs.checkup import CheckupResult, LentEnv, checkup
from fasttrain.envs.make import Env, EnvSpec, core_env, import_env, wrapped_core
from fasttrain.envs.masks import layers
from fasttrain.envs.probe import PROBE_SECONDS, PROBE_STEPS, Play, ProbeResult
from fasttrain.envs.retrace import close_env
from fasttrain.envs.second_play import Recorder, not_fresh
from fasttrain.envs.user_code import BUILDING, LOOKING, Place, attribute_of, preserve_random_state
from fasttrain.envs.wrappers import OldGym, has_running_statistics
from fasttrain.errors import EnvSpecError

Envs = list[Env]


class BuildResult(NamedTuple):
    """The facts about an env that are known before its first step."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    build_s: float
    mask_error: str  # empty, or why an algorithm that needs masks cannot use the env
    old_gym: bool  # the env has the old gym interface, which is adapted
    normalizer: str = ""  # name of a user's wrapper that normalizes by running statistics of its own


class MeasureResult(NamedTuple):
    """The costs of a short play, and why the env then differs from a new one (empty if it does not)."""

    costs: ProbeResult
    not_fresh: str


@dataclass(frozen=True)
class Build:
    """Build the env and keep it in the process."""

    spec: EnvSpec
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, memory: mmap.mmap | None, envs: Envs) -> BuildResult:
        place, spec = Place(memory), self.spec
        place.enter(BUILDING)
        import_env(spec, self.folder)  # not timed: an import happens once per process and may take longer than building
        began = time.perf_counter()
        envs.append(core_env(spec, self.folder))
        build_s = time.perf_counter() - began
        place.enter(LOOKING)
        env = wrapped_core(envs[0], dataclasses.replace(spec, needs_masks=False))
        mask_error = ""
        if spec.needs_masks and attribute_of(env, "action_masks") is None:
            try:
                wrapped_core(envs.pop(), spec)
            except EnvSpecError as error:
                mask_error = str(error)
        normalizer = next((type(layer).__name__ for layer in layers(env) if has_running_statistics(layer)), "")
        old_gym = isinstance(env.unwrapped, OldGym)
        return BuildResult(env.observation_space, env.action_space, build_s, mask_error, old_gym, normalizer)


@dataclass(frozen=True)
class Check:
    """Run the checkup, on the env of the process and on new envs."""

    spec: EnvSpec
    build_s: float
    stays: bool  # the training may use the env of this process, instead of building a new one
    limits: dict[str, Any] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    copies: bool = True  # whether the training uses several envs

    def __call__(self, memory: mmap.mmap, envs: Envs) -> CheckupResult:
        place = Place(memory)
        place.enter(LOOKING)
        env = wrapped_core(envs[0], self.spec)
        lent = LentEnv(env, self.build_s, self.stays, None if self.copies else lambda: (close_env(env), envs.pop()))

        def new_env() -> Env:  # wrapped twice like `envs[0]`, for equal numbers of resets: wrapping may reset the env
            core = core_env(self.spec, self.folder)
            wrapped_core(core, dataclasses.replace(self.spec, needs_masks=False))
            return wrapped_core(core, self.spec)

        try:
            return checkup(
                new_env, use_masks=self.spec.use_masks, lent=lent, place=place, copies=self.copies,
                beside=partial(played_beside, self.spec, self.folder), **self.limits,
            )  # fmt: skip
        except EnvSpecError as error:
            if not self.copies:
                raise
            raise EnvSpecError(f"{error}; a first env was still open; use num_envs=1 if only one can exist") from error


@dataclass(frozen=True)
class Measure:
    """Measure the speed of the env of the process."""

    spec: EnvSpec
    build_s: float
    folder: str = field(default_factory=os.getcwd)

    def __call__(self, memory: mmap.mmap, envs: Envs) -> MeasureResult:
        place, recorder = Place(memory), Recorder()
        with preserve_random_state():
            place.enter(LOOKING)
            if not envs:
                envs.append(core_env(self.spec, self.folder))
            env = wrapped_core(envs[0], self.spec)
            play = Play(lambda: env, place=place, build_s=self.build_s)
            play.run(PROBE_SECONDS, PROBE_STEPS, recorder)
            again = Play(lambda: env, place=place, build_s=self.build_s)
            return MeasureResult(play.costs(), not_fresh(again, recorder.frames))
