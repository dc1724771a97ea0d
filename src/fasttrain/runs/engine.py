"""Which engine computes the networks of a run, PyTorch or compiled kernels, and the switch during a run.

Kernels that are in the cache compute from the first step on. Otherwise PyTorch begins, a second process
compiles the kernels, and these take over between two rollouts. `fasttrain train warmup=only` fills the cache,
for example when a container image is built, or before many jobs start.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from torch.backends import mkldnn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from fasttrain.algos.devices import EngineSettings, convolutions
from fasttrain.algos.engine import Fast, find_kernels
from fasttrain.algos.guard import Guard, optimizers_of
from fasttrain.algos.policy_view import StockView
from fasttrain.buffers import n_step, prioritized
from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.machine import auto_device, usable_cores
from fasttrain.runs.envs import env_facts, game_calls, this_machine
from fasttrain.runs.progress import Progress
from fasttrain.runs.view import activity, make_console, say
from fasttrain.spec.computing import mode_of
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.precedence import COMPILES_FIRST
from fasttrain.spec.reading import with_fixed_opponent
from fasttrain_kernels.kernel_cache import Compiler, KernelCall, compile_all, folders

R = TypeVar("R")
ADAM = "Adam by torch's fused kernel"
IMAGES = "convolutions with channels last in memory"


def engine_settings(plan: RunSpec) -> EngineSettings:
    config, asked = plan.config, plan.row("torch_threads").requested
    kernels_on, cores = config.fused_update == "on", usable_cores()
    may_round = plan.row("fused_update").requested != "off" and not kernels_on  # PyTorch may, where it computes
    return EngineSettings(
        kind="kernels" if kernels_on else "torch",
        threads=(min(asked, cores) if isinstance(asked, int) else cores) if kernels_on else 1,
        fused_adam=may_round,
        channels_last=may_round and mkldnn.is_available(),  # type: ignore[no-untyped-call]
        amp_dtype=None if config.use_amp == "off" else getattr(torch, mode_of("use_amp", config.use_amp)),
        compile_mode=None if config.use_compile == "off" else mode_of("use_compile", config.use_compile),
        gradient_accumulation=config.gradient_accumulation,  # DQN does not use this value
        pin_memory=config.pin_memory == "on",
    )


def settle_kernels(plan: RunSpec, model: BaseAlgorithm, resumes: bool = False) -> RunSpec:
    """The plan, with `fused_update=off` if kernels do not support the policy. ConfigError for a new run with `on`."""
    if isinstance(model, Fast) and plan.config.engine == "stock":
        raise ConfigError(f"algo.entry_point={plan.config.algo.entry_point}: fasttrain's classes need engine=fast")
    if plan.config.fused_update != "on" or not isinstance(model, Fast):
        return plan
    reason = model.unsupported_reason()
    if reason and plan.row("fused_update").requested == "on" and not resumes:
        raise ConfigError(f"fused_update=on: no compiled kernels for this policy ({reason}); use fused_update=auto")
    return plan.after("fused_update", "off", reason) if reason else plan


def settle_engine(plan: RunSpec, model: BaseAlgorithm) -> RunSpec:
    """Give the model its engine, and run torch.compile if the plan says so. Returns the plan with the results."""
    if not isinstance(model, Fast):
        return plan
    row, settings = plan.row("fused_update"), engine_settings(plan)
    fused = settings.fused_adam and any(type(each) in (Adam, AdamW) for each in optimizers_of(model.policy))
    used = {ADAM: fused, IMAGES: settings.channels_last and convolutions(model.policy)}
    ways = [way for way in used if used[way] and model.device.type == "cpu"]
    reason = "; ".join([*(part for part in row.reason.split("; ") if part not in used), *ways])  # not twice if resumed
    if reason != row.reason:
        plan = plan.after("fused_update", row.effective, reason)
    model.use_engine(settings)
    model.engine.guard = None if (way := plan.config.nan_guard) == "off" else Guard(way)
    if plan.config.use_compile == "off" or model.env is None:
        return plan
    if failure := model.prepare(model.env):
        return plan.after("use_compile", "off", failure)
    engine = model.engine
    reasons = [plan.row("use_compile").reason, f"compiled in {engine.warmup_s:.1f} s before training"]
    if isinstance(getattr(engine, "view", None), StockView):
        reasons.append("actions are computed without torch.compile: this policy computes them by its own methods")
    return plan.after("use_compile", plan.config.use_compile, "; ".join(filter(None, reasons)))


PAYS_S = 30.0  # a run that ends sooner stays on torch, because compiling takes 8 to 40 s of one core


def learner_calls(config: Config) -> list[KernelCall]:
    """The kernels with which this run acts and learns; empty if the run uses no kernels."""
    eligible, _ = find_kernels() if config.fused_update == "on" else (None, "")
    return [] if eligible is None else eligible.REPRODUCED[config.algo.spec.kernels].calls()


def replay_calls(config: Config) -> list[KernelCall]:
    """The kernels that draw from a replay buffer. PyTorch needs them too, so training waits until they are compiled."""
    if not config.algo.spec.off_policy or config.engine == "stock":
        return []
    by_priority = prioritized.kernel_calls() if getattr(config.algo, "prioritized", False) else []
    return by_priority + (n_step.kernel_calls() if config.algo.n_steps > 1 else [])


def compile_shown(calls: list[KernelCall], console: Console) -> float:
    """Compile or load kernels, with a progress line. Returns the seconds. The first of `calls` is the slowest kernel.
    A second process compiles that kernel in parallel: on two cores 12 s become 9 s.
    """
    begun = time.perf_counter()
    missing = [call for call in calls if not call.is_kept]
    beside = missing[0] if len(missing) > 1 and usable_cores() > 1 else None
    if calls:
        with activity(console, "compiling kernels") as doing:
            compiler: Compiler | None = None
            with suppress(OSError):  # no memory for a process: all kernels are compiled here
                compiler = None if beside is None else Compiler([beside])
            try:
                compile_all([call for call in calls if call is not beside], doing.now)
                while compiler is not None and not compiler.is_done():
                    doing.now(f"{len(calls)} of {len(calls)}: {missing[0].name}")
                    time.sleep(0.05)
            finally:
                if compiler is not None:
                    compiler.stop()
            compile_all(calls)  # loads what the second process compiled, or compiles it if that process failed
    return time.perf_counter() - begun


def switch_step(plan: RunSpec) -> int | None:
    """The env step from which kernels compute; None: as soon as they are compiled."""
    if plan.config.deterministic or (plan.engine_switch_at is None and COMPILES_FIRST.items() <= os.environ.items()):
        return 0
    return plan.engine_switch_at


def switch_for(
    plan: RunSpec,
    model: BaseAlgorithm,
    console: Console,
    say: Callable[[str], None],
    resumes: bool,
    decide: Callable[[], str],
) -> tuple[EngineSwitch | None, float]:
    """Load or compile the kernels that act and learn, or let the run begin with torch.

    Returns the switch to kernels (None if they compute from the start), and the seconds of compiling. A resumed run
    without a switch in its plan.json waits for its kernels. `decide` is called after the kernels were compiled beside
    training; it returns why torch is kept, or "".
    """
    config, calls, at = plan.config, learner_calls(plan.config), switch_step(plan)
    if at is None and (resumes or all(call.is_kept for call in calls)):
        at = 0
    took = compile_shown(replay_calls(config) + ([] if at is None else calls), console)
    if not calls or at == 0 or not isinstance(model, Fast):
        return None, took
    settings = model.engine.settings
    model.use_engine(EngineSettings())

    def use() -> str:
        if reason := model.unsupported_reason() or (decide() if at is None else ""):
            return reason
        model.use_engine(settings)
        return ""

    return EngineSwitch(calls, at, use, say), took


class EngineSwitch:
    """Switches a run from torch to kernels at the start of a rollout (DQN: of a vector step).

    Args:
        at: the env step of the switch; None: the step at which a second process has compiled them.
        use: switches to kernels, or returns why torch is kept.
    """

    def __init__(
        self, calls: list[KernelCall], at: int | None, use: Callable[[], str | None], say: Callable[[str], None]
    ) -> None:
        self.at, self.done = at, False
        self.beside_s: float | None = None  # seconds that a second process took to compile the kernels
        self.reason = "training ended before its kernels were compiled"
        self._calls, self._use, self._say = calls, use, say
        self._compiler: Compiler | None = None
        self._began = 0.0
        if at is None:
            say("the kernels of this run are not compiled yet: it begins with PyTorch and switches later; "
                "results differ from a run on kernels from the start (deterministic=true waits for them)")  # fmt: skip

    def at_rest(self, progress: Progress) -> None:
        """Switch to the kernels if they are due. Called between two rollouts, where the engine may be changed."""
        if self.done or (not self._compiled(progress) if self.at is None else progress.env_steps < self.at):
            return
        compile_all(self._calls)
        if reason := self._use():
            self._give_up(reason)
            return
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
            failure = "no place to keep them"  # this process does not compile them: training would wait
        if failure:
            self._give_up(f"its kernels could not be compiled ({failure})")
        return not failure

    def _start_if_it_pays(self, progress: Progress) -> None:
        """Start compiling after the first update, when the remaining time of the run can be estimated."""
        if not progress.updates or progress.eta_s is None:
            return
        if progress.eta_s < PAYS_S:
            self._give_up("it ends before compiling would pay")
            return
        self._began = time.perf_counter()
        try:
            self._compiler = Compiler(self._calls)
        except OSError as error:  # there is no memory for another process
            self._give_up(f"nothing can be compiled beside it ({error})")

    def _give_up(self, why: str) -> None:
        self.done, self.reason = True, why
        self._say(f"this run goes on with PyTorch: {why}")

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.stop()
            self._compiler = None

    def to_dict(self) -> dict[str, Any]:
        return {"at": self.at, "beside_s": self.beside_s, **({} if self.at is not None else {"why_not": self.reason})}


def warm_up(config: Config, sources: Mapping[str, str]) -> int:
    """Compile the kernels that a training with this configuration would use; returns the exit code."""
    console = make_console()
    of_game = game_calls(config)
    missing = [call for call in of_game if not call.is_kept]  # compiled first, because `env_facts` plays the game
    took = compile_shown(of_game, console)
    plan = resolve(config, sources, env_facts(with_fixed_opponent(config)), this_machine())
    of_learner = learner_calls(plan.config) + replay_calls(plan.config)
    missing += [call for call in of_learner if not call.is_kept]
    took += compile_shown(of_learner, console)
    count = len(of_game) + len(of_learner)
    others = ", the others were there" if len(missing) < count else ""
    compiled = f"{len(missing)} of {count} kernels compiled in {took:.0f} s{others}"
    what = compiled if missing else f"all {count} kernels were there"
    say(console, f"{what}; they are kept in {folders()[0]}" if count else "this run has no compiled kernels")
    return EXIT_DONE


# --- what a run sets in torch: device, threads, and the compiler, which is imported only if it is used


def set_up_torch(config: Config) -> None:
    """Set torch up before anything starts. Raises ConfigError for a device that this machine lacks."""
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # the call imports a compiler (3 s)
        torch.use_deterministic_algorithms(config.deterministic)
    if config.use_compile == "off":
        leave_compiler_out()
    set_threads(config.torch_threads)
    pick_device(config.device, config.algo.policy)


def pick_device(requested: str, policy: str) -> str:
    """The requested device under torch's name. Raises ConfigError if this machine has no such device."""
    if requested == "auto":
        return auto_device(policy.startswith("Cnn"), torch.cuda.is_available())
    if requested == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: this machine (or this torch build) has no MPS; use device=cpu")
    kind, _, number = requested.partition(":")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={requested}: this machine (or this torch build) has no CUDA; use device=cpu")
        there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if number and requested not in there:
            raise ConfigError(f"device={requested}: this machine has {', '.join(there)}")
    return requested


def set_threads(threads: int | str) -> None:
    """Set torch's intra-op threads; `default` does not change them."""
    if isinstance(threads, int):
        torch.set_num_threads(threads)


WRAPPED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
DISABLED = "__dynamo_disable"  # attribute of a method: the uncompiled function that torch calls instead of the method
STEPPING = (Adam, AdamW, RMSprop, SGD)


def leave_compiler_out() -> None:
    """Keep optimizers from importing `torch._dynamo`, which has 800 modules and takes 1.2 s at each start.

    The methods in `WRAPPED` import `torch._dynamo` only to exclude themselves from compilation, so they are marked as
    excluded here. `_without_compiler` replaces `step`. A later torch may import the module elsewhere, which costs time.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in WRAPPED:
        method = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, DISABLED):
            setattr(method, DISABLED, method)
    for optimizer in STEPPING:
        step: Any = optimizer.step
        if step.__code__.co_name == "_use_grad":
            optimizer.step = _without_compiler(step.__wrapped__)  # type: ignore[method-assign]


def _without_compiler(step: Callable[..., R]) -> Callable[..., R]:
    """`step` with gradients off (on for a differentiable optimizer), without importing torch's compiler."""

    @functools.wraps(step)
    def plain(self: Optimizer, *args: object, **kwargs: object) -> R:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain
