"""Kernels from the first step on where they are on disk; else the torch engine begins and they follow at a boundary."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console

from fasttrain.buffers import n_step, prioritized
from fasttrain.engines import kernels, kernels_q
from fasttrain.kernel_jobs import Compiler, KernelCall, compile_all
from fasttrain.machine import usable_cores
from fasttrain.runs.activity import activity
from fasttrain.runs.progress import Progress
from fasttrain.spec.config import Config

PAYS_S = 30.0  # a run that ends sooner gains nothing: compiling takes 8 to 40 s of a core, and the rest must make up


def learner_calls(config: Config) -> list[KernelCall]:
    """The kernels that this run acts and learns by; none where it has no compiled ones."""
    if config.fused_update != "on":
        return []
    if config.algo.spec.off_policy:
        return kernels_q.kernel_calls()
    in_groups = config.async_envs or config.pipeline not in (1, "auto")
    return kernels.kernel_calls(in_groups)


def replay_calls(config: Config) -> list[KernelCall]:
    """The kernels that a replay buffer draws by, whichever engine learns: they are waited for."""
    if not config.algo.spec.off_policy or config.engine == "stock":
        return []
    by_priority = prioritized.kernel_calls() if config.algo.prioritized else []
    return by_priority + (n_step.kernel_calls() if config.algo.n_steps > 1 else [])


def compile_shown(calls: list[KernelCall], console: Console) -> float:
    """Compile or load them, saying which; the seconds that took.

    On two cores the first, which takes longest, is compiled beside the others: 12 s of a cold start become 9.
    """
    begun = time.perf_counter()
    missing = [call for call in calls if not call.is_kept]
    beside = missing[0] if len(missing) > 1 and usable_cores() > 1 else None
    if calls:
        with activity(console, "compiling kernels") as doing:
            compiler: Compiler | None = None
            with suppress(OSError):  # no memory for a process: all are compiled here
                compiler = None if beside is None else Compiler([beside])
            try:
                compile_all([call for call in calls if call is not beside], doing.now)
                while compiler is not None and not compiler.is_done():
                    doing.now(f"{len(calls)} of {len(calls)}: {missing[0].name}")
                    time.sleep(0.05)
            finally:
                if compiler is not None:
                    compiler.stop()
            compile_all(calls)  # loads what the other process left; compiles it if that failed
    return time.perf_counter() - begun


def settle_engine(
    config: Config, model: Any, console: Console, say: Callable[[str], None], resumes: bool
) -> tuple[EngineSwitch | None, float]:
    """Load the kernels that act and learn, compile them, or let the run begin without.

    A run that goes on without a switch in its plan.json had its kernels from the first step on, or has them from here.

    Returns:
        what will switch, if anything; the seconds it took.
    """
    calls, at = learner_calls(config), config.engine_switch_at
    if at is None and (resumes or all(call.is_kept for call in calls)):
        at = 0
    took = compile_shown(replay_calls(config) + ([] if at is None else calls), console)
    if not calls or at == 0:
        return None, took
    model._fast.fused = False
    return EngineSwitch(calls, at, lambda: setattr(model._fast, "fused", True), say), took


class EngineSwitch:
    """Says at rest, where a rollout (DQN: a vector step) begins, whether kernels act and learn from here on.

    Args:
        calls: the kernels.
        at: the env step from which on they do, compiled already; None: once a process beside training compiled them.
        use: puts them to work.
        say: tells a person.
    """

    def __init__(
        self, calls: list[KernelCall], at: int | None, use: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.at, self.done = at, False
        self.beside_s: float | None = None  # what compiling beside training took
        self.why_not = "training ended before its kernels were compiled"
        self._calls, self._use, self._say = calls, use, say
        self._compiler: Compiler | None = None
        self._began = 0.0
        if at is None:
            say("the kernels of this run are not compiled yet: it begins on the torch engine, they follow")

    def at_rest(self, progress: Progress) -> None:
        """Nothing is under way: the engine may be changed."""
        if self.done or (self.at is not None and progress.env_steps < self.at):
            return
        if self.at is None and not self._compiled(progress):
            return
        compile_all(self._calls)
        self._use()
        self.done = True
        if self.at is None:
            self.at = progress.env_steps
            self._say(
                f"compiled kernels from step {self.at:,} on; compiling took {self.beside_s:.0f} s beside training"
            )

    def _compiled(self, progress: Progress) -> bool:
        if self._compiler is None:
            self._start_if_it_pays(progress)
            return False
        if not self._compiler.is_done():
            return False
        self.beside_s = round(time.perf_counter() - self._began, 3)
        failure = self._compiler.failure
        self.close()
        if not failure and not all(call.is_kept for call in self._calls):
            failure = "no place to keep them"  # compiled once more here, they would stop the training meanwhile
        if failure:
            self._give_up(f"its kernels could not be compiled ({failure})")
        return not failure

    def _start_if_it_pays(self, progress: Progress) -> None:
        """Once the first update is made: how fast it goes is known then, and nobody waited for a core until there."""
        if not progress.updates or progress.eta_s is None:
            return
        if progress.eta_s < PAYS_S:
            self._give_up("it ends sooner than compiled kernels would pay")
            return
        self._began = time.perf_counter()
        try:
            self._compiler = Compiler(self._calls)
        except OSError as error:  # no memory for a process: no reason to end the run
            self._give_up(f"nothing can be compiled beside it ({error})")

    def _give_up(self, why: str) -> None:
        self.done, self.why_not = True, why
        self._say(f"this run stays on the torch engine: {why}")

    def close(self) -> None:
        """Nothing is compiled for a run that has ended."""
        if self._compiler is not None:
            self._compiler.stop()
            self._compiler = None

    def to_dict(self) -> dict[str, Any]:
        """For perf.json and summary.json."""
        return {"at": self.at, "beside_s": self.beside_s, **({} if self.at is not None else {"why_not": self.why_not})}
