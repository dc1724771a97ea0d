"""Builds, checks and times a run's env in a process of its own, so that an env that crashes does not end the trainer.
If the training has worker processes, that process becomes the first worker and keeps its env.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console

from fasttrain.envs.checkup import CheckupResult
from fasttrain.envs.make import Env, EnvSpec
from fasttrain.envs.probe import ProbeResult
from fasttrain.envs.retrace import close_env
from fasttrain.envs.scout_tasks import Build, BuildResult, Check, Measure, MeasureResult
from fasttrain.envs.user_code import Place, make_importable, process_settings, restore_settings
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.machine import outgrows
from fasttrain.runs.view import Activity, activity, say
from fasttrain.spec.config import Config
from fasttrain_vec.process import Scout, ScoutLostError, WorkerLostError

START_S = 120.0  # time limit for starting the process, on a machine that may be busy
# Fields of EnvSpec that do not change the env itself: a worker can keep the env although they differ.
AROUND_ENV = ("needs_masks", "use_masks", "masks", "info_keys", "lean_info", "action_repeat", "two_sided", "stagger")
SLOW_BUILD_S = 1.0  # seconds; an env that takes longer to build may be kept although it was played


class BrokenEnvError(EnvSpecError):
    """The env hangs, ends its process or needs too much memory. `code`: the finding's code in checkup.json."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


class Survey:
    """One env, in a process of its own; with `here` in this process, where compiled games load faster."""

    def __init__(self, spec: EnvSpec, timeout_s: float, console: Console, here: bool = False) -> None:
        self.spec, self.console = spec, console
        self._here, self._envs_here = here, list[Env]()
        self._timeout_s = timeout_s
        self._scout: Scout | None = None
        self._built: BuildResult | None = None
        self._played = False
        self._not_fresh = ""  # why the played env, seeded again, differs from a new env; empty if it does not
        self.shares = ""  # where copies of the env influence each other: in one "process" or "machine"; else empty

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, unless a training uses it as a worker."""
        while self._envs_here:
            close_env(self._envs_here.pop())
        if self._scout is not None:
            self._scout.close()

    # --- questions about the env

    def build(self) -> BuildResult:
        """Build the env and return its spaces. Raises EnvSpecError if that fails, BrokenEnvError if it hangs, ends the
        process or fills memory.
        """
        if self._built is None:
            self._built = self._warn(self._ask(Build(self.spec), f"building {self.spec.option}"))
        return self._built

    def build_here(self) -> BuildResult:
        """Build the env in this process, where it will not be played."""
        envs, before = list[Env](), process_settings()
        built = Build(self.spec)(None, envs)
        restore_settings(before)
        for env in envs:
            close_env(env)
        return self._warn(built)

    def _warn(self, built: BuildResult) -> BuildResult:
        if built.old_gym:
            say(self.console, f"{self.spec.option} has the old gym interface, which is adapted")
        if built.normalizer:
            what = "each env has its own running statistics, which are neither saved nor used in evaluation"
            say(self.console, f"warning: {built.normalizer} in env.wrappers: {what}; use env.normalize=[obs] instead")
        return built

    def checkup(self, limits: Mapping[str, Any], stays: bool, copies: bool = True) -> CheckupResult:
        """Play the env and look for faults. `stays`: a training may keep this env. `copies`: try two envs at once."""
        built = self.build()
        look = Check(self.spec, built.build_s, stays and built.build_s >= SLOW_BUILD_S, dict(limits), copies=copies)
        result: CheckupResult = self._ask(look, f"checkup of {self.spec.option}")
        self._played, self._not_fresh, self.shares = True, result.not_fresh, result.shares
        return result

    def costs(self) -> ProbeResult:
        """Play the env for a moment and return the times of its steps and resets."""
        measured: MeasureResult = self._ask(Measure(self.spec, self.build().build_s), f"timing {self.spec.option}")
        self._played, self._not_fresh = True, measured.not_fresh
        return measured.costs

    def _ask(self, task: Callable[[Any, list[Any]], Any], title: str) -> Any:
        option = self.spec.option
        if self._here:
            with activity(self.console, title):
                return task(None, self._envs_here)
        make_importable(os.getcwd())  # the answer may contain objects of the user's classes
        if self._scout is None:
            self._scout = Scout()
        place = Place(self._scout.memory)
        with activity(self.console, title) as doing:
            watch = _Watch(option, place, self._scout.pid, self._timeout_s, doing)
            try:
                return self._scout.run(task, watch)
            except ScoutLostError as lost:
                raise _death(option, place, lost.exit_code) from None
            except WorkerLostError as error:
                if error.failure is not None and not error.failure.is_spec_error:  # fasttrain's error, not the env's
                    raise EnvError(f"{option}: {error}") from error.cause
                raise EnvSpecError(str(error)) from error.cause

    # --- the process becomes a worker of the training

    def first_worker(self, config: Config, spec: EnvSpec) -> Scout | None:
        """Give the process to a training with this effective configuration, as its first worker. None without workers.

        The worker keeps the env only if results stay the same: the env was never played, or it is slow to build and
        repeated an episode exactly after it was seeded again.
        """
        if self._scout is None or self._built is None or config.cluster.engine != "off":
            return None
        why = self._why_anew(config, spec)
        if why and config.vec_env != "native" and self._built.build_s >= SLOW_BUILD_S:
            took = f"building the env takes {self._built.build_s:.1f} s"
            say(self.console, f"  {took}, and it is built again for training: {why}")
        if config.vec_env != "shared":
            self.close()
            return None
        self._scout.keeps = not why
        return self._scout

    def _why_anew(self, config: Config, spec: EnvSpec) -> str:
        if config.vec_env != "shared":
            return f"vec_env={config.vec_env} plays it in another process than the checkup"
        if spec != dataclasses.replace(self.spec, **{name: getattr(spec, name) for name in AROUND_ENV}):
            return "the training's env has other arguments"
        if not self._played:
            return ""
        if config.deterministic:
            return "deterministic=true takes no env that was played"
        return self._not_fresh if self._built is not None and self._built.build_s >= SLOW_BUILD_S else "it is fast"


class _Watch:
    """Watches the process while it plays: shows the activity, and raises BrokenEnvError if it hangs or fills memory."""

    def __init__(self, option: str, place: Place, pid: int, timeout_s: float, doing: Activity) -> None:
        self._option, self._place, self._pid, self._doing = option, place, pid, doing
        self._timeout_s = timeout_s
        self._beats, self._since = -1, time.monotonic()

    def __call__(self) -> None:
        place, now = self._place, time.monotonic()
        if place.beats != self._beats:
            self._beats, self._since = place.beats, now
        self._doing.now(str(place))
        limit_s = self._timeout_s if place.started else START_S
        if now - self._since > limit_s:
            raise BrokenEnvError(
                "hangs",
                f"{self._option} hangs in {place}: nothing came back for {limit_s:g} s; mend it there, or "
                "raise env.step_timeout_s",
            )
        if held := outgrows(self._pid):
            raise BrokenEnvError(
                "too_much_memory",
                f"{self._option} needs {held / 1e9:.2g} GB or more in {place}, and there is hardly any left; mend it "
                "there, or give it a larger machine or container",
            )


def _death(option: str, place: Place, exit_code: int | None) -> Exception:
    """The error for a process that ended at `place`."""
    if not place.started:
        how = "no exit code" if exit_code is None else f"exit code {exit_code}"
        return EnvError(f"the process that was to build {option} ended while starting ({how}); see above")
    if exit_code is None or exit_code >= 0:
        what = f"ends the process with code {exit_code}" if exit_code is not None else "ends the process"
        return BrokenEnvError("ends_process", f"{option} {what} in {place}; let it raise an exception instead")
    if exit_code == -9:
        return BrokenEnvError(
            "killed",
            f"{option} was killed by signal 9 in {place}: by the system, if memory ran out, or by another program",
        )
    name = f"signal {-exit_code}"
    with suppress(ValueError):
        name += f" ({(signal.strsignal(-exit_code) or '').lower()})"
    return BrokenEnvError("dies", f"{option} dies by {name} in {place}: look at the compiled code that it calls there")
