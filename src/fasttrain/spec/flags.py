"""The speed flags, and what a rule that resolves one may look at. Rules: `plan`, `stepping`, `acceleration`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fasttrain.spec.algorithms import AlgorithmSpec
from fasttrain.spec.config import Config

FlagClass = Literal["exact", "rounding", "trade-off"]
NOT_APPLICABLE = "not applicable"


class Flag(NamedTuple):
    """One speed flag. `stock` is its value in a plain SB3 script: the plan prints what differs from it."""

    name: str
    flag_class: FlagClass
    needs: str  # the capability of an algorithm without which it means nothing; empty: it means something for each
    stock: Any
    text: str

    def fits(self, spec: AlgorithmSpec) -> bool:
        """Whether it means anything for that algorithm."""
        return not self.needs or bool(getattr(spec, self.needs))


FLAGS: tuple[Flag, ...] = (
    Flag("engine", "exact", "", "stock", "stock SB3 classes, or fasttrain's with the lean collect and update path"),
    Flag("vec_env", "exact", "", "subproc", "how copies of the env are stepped"),
    Flag("use_subproc_envs", "exact", "", True, "allow worker processes"),
    Flag("force_dummy_vec_env", "exact", "", False, "one process, plain loop, whatever vec_env says"),
    Flag("num_envs", "trade-off", "", 8, "copies of the env stepped together"),
    Flag("num_workers", "exact", "", None, "worker processes"),
    Flag("pipeline", "rounding", "on_policy", 1, "groups of workers; the policy acts for one while the others step"),
    Flag("async_envs", "trade-off", "on_policy", False, "act for whichever worker is ready, waiting for nobody"),
    Flag(
        "overlap",
        "trade-off",
        "on_policy",
        False,
        "update in a thread while the next rollout is collected, one update behind",
    ),
    Flag("updates_per_step", "trade-off", "off_policy", 1, "gradient updates per vector step"),
    Flag("batch_size", "trade-off", "minibatches", 64, "minibatch of one gradient update; null = the algorithm's own"),
    Flag("warmup_steps", "trade-off", "off_policy", 5000, "env steps before the first update"),
    Flag("use_amp", "trade-off", "", "off", "mixed precision in the networks"),
    Flag("amp_dtype", "trade-off", "", "bfloat16", "dtype of mixed precision"),
    Flag("use_compile", "rounding", "", "off", "torch.compile of update and acting"),
    Flag("compile_mode", "rounding", "", "default", "mode of torch.compile"),
    Flag("fused_update", "rounding", "", "off", "compiled CPU kernels for acting and update of an MLP policy"),
    Flag("engine_switch_at", "rounding", "", None, "env step from which kernels work; null = once they are compiled"),
    Flag("prefetch", "trade-off", "off_policy", "off", "replay batches prepared in the background"),
    Flag("pin_memory", "exact", "", "off", "page-locked staging for CUDA copies"),
    Flag("lean_info", "exact", "", False, "only env.info_keys leave the env between episode ends"),
    Flag("local_random_actions", "rounding", "off_policy", False, "random exploration drawn in the trainer"),
    Flag("action_repeat", "trade-off", "", 1, "env steps per decision"),
    Flag(
        "gradient_accumulation", "rounding", "on_policy", 1, "parts in which a minibatch is computed, for less memory"
    ),
    Flag("inference_batch_size", "rounding", "on_policy", None, "envs per forward while acting; null = all at once"),
    Flag("torch_threads", "rounding", "", "default", "threads of one torch operation"),
    Flag("log_every", "exact", "", 10, "gradient updates between [PERF] lines and log rows"),
    Flag("train_log_enabled", "exact", "", True, "record training statistics"),
    Flag("train_log_to_console", "exact", "", True, "print them and the [PERF] line"),
    Flag("train_log_to_file", "exact", "", True, "write them to progress.csv"),
    Flag("reward_debug", "exact", "", False, "report reward terms one by one"),
    Flag("eval_every", "exact", "", 0, "env steps between evaluations, 0 = only at the end"),
    Flag("eval_async", "exact", "", False, "evaluate in a process beside training"),
    Flag(
        "checkpoint_every",
        "exact",
        "",
        0,
        "env steps between checkpoints, 0 = only where a signal or an error stops the run",
    ),
    Flag(
        "checkpoint_every_minutes",
        "exact",
        "",
        0.0,
        "minutes between checkpoints, and one at the end; 0 = none by time",
    ),
    Flag("checkpoint_async", "exact", "", False, "write checkpoints in a thread while training goes on"),
    Flag("nan_guard", "exact", "", False, "refuse non-finite data and updates"),
)
BY_NAME = {flag.name: flag for flag in FLAGS}

# What only fasttrain's own classes can do.
NEEDS_FAST_ENGINE = (
    "pipeline",
    "async_envs",
    "overlap",
    "use_amp",
    "amp_dtype",
    "use_compile",
    "compile_mode",
    "fused_update",
    "engine_switch_at",
    "pin_memory",
    "gradient_accumulation",
    "inference_batch_size",
    "local_random_actions",
    "prefetch",
)


class Machine(NamedTuple):
    """What the plan needs to know of the machine."""

    cores: int  # physical cores this process may use
    windows: bool
    cuda: bool
    bf16_units: str = ""  # their name; empty: a CPU without


class EnvFacts(NamedTuple):
    """What the plan needs to know of the env. `step_s` is None where nothing had to be measured."""

    native: bool
    step_s: float | None
    cpu_share: float = 1.0  # of the step's time that it computes; the rest it waits, for an engine or a socket
    images: bool = False  # the policy will be a convolutional one
    tried: tuple[float, ...] | None = None  # seconds of a step of all envs: in one process, in workers


class Context(NamedTuple):
    """What a rule of the plan may look at."""

    config: Config
    sources: Mapping[str, str]
    env: EnvFacts
    machine: Machine
    effective: dict[str, Any]  # flags resolved so far, in the order of FLAGS


Resolved = tuple[Any, str]
