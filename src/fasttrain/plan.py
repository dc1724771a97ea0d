"""The plan: what was requested, what really runs, where the request came from, and why the two differ.

Pure: configuration + facts about env and machine in, effective configuration + rows out. No flag does nothing
silently: one that means nothing here is "not applicable" (an error if typed on the command line), one whose engine
this version lacks is refused when switched on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fasttrain.config import MAX_TORCH_THREADS, Config, PPOConfig, to_dict
from fasttrain.errors import ConfigError

FlagClass = Literal["exact", "rounding", "trade-off"]
ON_POLICY = ("ppo", "maskable_ppo")
OFF_POLICY = ("dqn",)
ANY = ON_POLICY + OFF_POLICY
NOT_APPLICABLE = "not applicable"

# SubprocVecEnv pays one pickle round trip per env and step (about 60 µs on current machines); below this step time a
# plain loop in one process is faster whatever the number of cores.
SUBPROC_PAYS_ABOVE_S = 200e-6


class Flag(NamedTuple):
    """One speed flag. `stock` is its value in a plain SB3 script: the plan prints what differs from it."""

    name: str
    flag_class: FlagClass
    algos: tuple[str, ...]
    stock: Any
    text: str


FLAGS: tuple[Flag, ...] = (
    Flag("engine", "exact", ANY, "stock", "stock SB3 classes, or fasttrain's with the lean collect and update path"),
    Flag("vec_env", "exact", ANY, "subproc", "how copies of the env are stepped"),
    Flag("use_subproc_envs", "exact", ANY, True, "allow worker processes"),
    Flag("force_dummy_vec_env", "exact", ANY, False, "one process, plain loop, whatever vec_env says"),
    Flag("num_envs", "trade-off", ANY, 8, "copies of the env stepped together"),
    Flag("num_workers", "exact", ANY, None, "worker processes"),
    Flag("updates_per_step", "trade-off", OFF_POLICY, 1, "gradient updates per vector step"),
    Flag("batch_size", "trade-off", ANY, 64, "minibatch of one gradient update; null = the algorithm's own"),
    Flag("warmup_steps", "trade-off", OFF_POLICY, 5000, "env steps before the first update"),
    Flag("use_amp", "trade-off", ANY, "off", "mixed precision in the networks"),
    Flag("amp_dtype", "trade-off", ANY, "bfloat16", "dtype of mixed precision"),
    Flag("use_compile", "rounding", ANY, "off", "torch.compile of update and acting"),
    Flag("compile_mode", "rounding", ANY, "default", "mode of torch.compile"),
    Flag("fused_update", "rounding", ANY, "off", "compiled CPU kernels for acting and update of an MLP policy"),
    Flag("prefetch", "exact", OFF_POLICY, "off", "replay batches prepared in the background"),
    Flag("pin_memory", "exact", ANY, "off", "page-locked staging for CUDA copies"),
    Flag("lean_info", "exact", ANY, False, "only env.info_keys leave the env between episode ends"),
    Flag("local_random_actions", "exact", OFF_POLICY, False, "random exploration drawn in the trainer"),
    Flag("action_repeat", "trade-off", ANY, 1, "env steps per decision"),
    Flag("gradient_accumulation", "rounding", ON_POLICY, 1, "minibatches per optimizer step"),
    Flag("torch_threads", "rounding", ANY, "default", "threads of one torch operation"),
    Flag("log_every", "exact", ANY, 10, "gradient updates between [PERF] lines and log rows"),
    Flag("train_log_enabled", "exact", ANY, True, "record training statistics"),
    Flag("train_log_to_console", "exact", ANY, True, "print them and the [PERF] line"),
    Flag("train_log_to_file", "exact", ANY, True, "write them to progress.csv"),
    Flag("reward_debug", "exact", ANY, False, "report reward terms one by one"),
    Flag("eval_every", "exact", ANY, 0, "env steps between evaluations, 0 = only at the end"),
    Flag("eval_async", "exact", ANY, False, "evaluate in the background"),
    Flag("checkpoint_every", "exact", ANY, 0, "env steps between checkpoints, 0 = only the final model"),
    Flag("checkpoint_async", "exact", ANY, False, "write checkpoints in the background"),
    Flag("nan_guard", "exact", ANY, False, "refuse non-finite data and updates"),
)
BY_NAME = {flag.name: flag for flag in FLAGS}

# What this version cannot do yet. A switch on `auto` resolves to its off value; switched on, it is refused.
NO_ENGINE_YET: dict[str, Any] = {
    "use_amp": "off",
    "amp_dtype": "bfloat16",
    "use_compile": "off",
    "compile_mode": "default",
    "prefetch": "off",
    "pin_memory": "off",
    "local_random_actions": False,
    "action_repeat": 1,
    "gradient_accumulation": 1,
    "reward_debug": False,
    "eval_async": False,
    "checkpoint_async": False,
    "nan_guard": False,
}


class Machine(NamedTuple):
    """What the plan needs to know of the machine."""

    cores: int  # physical cores this process may use
    windows: bool
    cuda: bool


class EnvFacts(NamedTuple):
    """What the plan needs to know of the env. `step_s` is None where nothing had to be measured."""

    native: bool
    step_s: float | None


class Row(NamedTuple):
    """One line of the plan."""

    flag: str
    requested: Any
    effective: Any
    source: str  # command line, environment, profile NAME, default
    flag_class: str
    reason: str


class Plan(NamedTuple):
    """The effective configuration and how it came about."""

    config: Config
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: `{"flags": [{flag, requested, effective, source, class, reason}…], "config": {…}}`."""
        keys = ("flag", "requested", "effective", "source", "class", "reason")
        flags = [dict(zip(keys, map(to_dict, row), strict=True)) for row in self.rows]
        return {"flags": flags, "config": to_dict(self.config)}

    def replacing(self, flag: str, effective: Any, reason: str) -> Plan:
        """The plan after something was found out that only the built model could tell."""
        rows = tuple(row._replace(effective=effective, reason=reason) if row.flag == flag else row for row in self.rows)
        return Plan(dataclasses.replace(self.config, **{flag: effective}), rows)

    def _stock(self, row: Row) -> Any:
        if row.flag in BY_NAME:
            return BY_NAME[row.flag].stock
        return self.config.algo.by_tier["baseline"].get(row.flag.removeprefix("algo."))

    def notable(self) -> tuple[Row, ...]:
        """Rows worth printing: what differs from stock or from the request, and what the user typed."""
        return tuple(
            row
            for row in self.rows
            if row.effective != NOT_APPLICABLE
            and (row.effective not in (self._stock(row), None) or row.source in ("command line", "environment"))
        )


def make_plan(config: Config, sources: Mapping[str, str], env: EnvFacts, machine: Machine) -> Plan:
    """Resolve every flag.

    Args:
        sources: key → where its value came from; keys left out came from the default configuration.

    Raises:
        ConfigError: a flag that this version lacks is switched on, a flag typed on the command line means nothing for
            the algorithm, or the resolved values contradict each other.
    """
    rows: list[Row] = []
    effective: dict[str, Any] = {}
    context = _Context(config, sources, env, machine, effective)
    for flag in FLAGS:
        requested = getattr(config, flag.name)
        source = sources.get(flag.name, "default")
        value, reason = _resolve(flag, requested, source, context)
        rows.append(Row(flag.name, requested, value, source, flag.flag_class, reason))
        effective[flag.name] = requested if value == NOT_APPLICABLE else value
    changes = {name: value for name, value in effective.items() if name != "num_workers" or value is not None}
    if isinstance(config.algo, PPOConfig):
        algo, row = _rollout_row(config.algo, effective, sources)
        changes["algo"] = algo
        rows.append(row)
    rows += _own_rows(config, sources)
    return Plan(dataclasses.replace(config, **changes), tuple(rows))


class _Context(NamedTuple):
    config: Config
    sources: Mapping[str, str]
    env: EnvFacts
    machine: Machine
    effective: dict[str, Any]  # flags resolved so far, in the order of FLAGS


Resolved = tuple[Any, str]


def _resolve(flag: Flag, requested: Any, source: str, context: _Context) -> Resolved:
    algo = context.config.algo.name
    if algo not in flag.algos:
        if source == "command line":
            raise ConfigError(f"{flag.name}={requested} means nothing for algo={algo}: {_why_not(flag)}; leave it out")
        return NOT_APPLICABLE, _why_not(flag)
    if flag.name in NO_ENGINE_YET:
        return _no_engine(flag, requested)
    resolver = _RESOLVERS.get(flag.name)
    return resolver(requested, context) if resolver else (requested, "")


def _why_not(flag: Flag) -> str:
    return f"only for {', '.join(flag.algos)}"


def _no_engine(flag: Flag, requested: Any) -> Resolved:
    off = NO_ENGINE_YET[flag.name]
    if requested == off:
        return off, ""
    if requested == "auto":
        return off, "not in this version"
    raise ConfigError(
        f"{flag.name}={requested}: this version cannot do that yet ({flag.text}); take {flag.name}={_spell(off)}"
    )


def _spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _engine(requested: str, context: _Context) -> Resolved:
    if requested == "fast" and context.config.algo.name in OFF_POLICY:
        return "stock", "no DQN engine in this version"
    return requested, ""


def _vec_env(requested: str, context: _Context) -> Resolved:
    config, env, machine = context.config, context.env, context.machine
    if requested == "shared":
        raise ConfigError(
            "vec_env=shared: this version has no shared-memory workers yet; take vec_env=auto, native, dummy or subproc"
        )
    if config.force_dummy_vec_env:
        return "dummy", "force_dummy_vec_env=true"
    if requested == "subproc" and not config.use_subproc_envs:
        if context.sources.get("vec_env") == context.sources.get("use_subproc_envs") == "command line":
            raise ConfigError("vec_env=subproc contradicts use_subproc_envs=false: leave one of them out")
        return "dummy", "use_subproc_envs=false"
    if requested == "subproc" and machine.windows and context.sources.get("vec_env") != "command line":
        return "dummy", "Windows: worker processes cost more than they bring"
    if requested != "auto":
        return requested, ""
    if env.native:
        return "native", "the game has a batched native form"
    return _auto_python_env(context)


def _auto_python_env(context: _Context) -> Resolved:
    step_s, machine = context.env.step_s, context.machine
    if not context.config.use_subproc_envs:
        return "dummy", "use_subproc_envs=false"
    if step_s is None or machine.windows or machine.cores < 2:
        return "dummy", "Windows" if machine.windows else "one core"
    measured = f"env.step takes {step_s * 1e6:.0f} µs"
    if step_s * (1 - 1 / machine.cores) > SUBPROC_PAYS_ABOVE_S:
        return "subproc", f"{measured}, {machine.cores} cores"
    return "dummy", f"{measured}: less than a message to a worker process costs"


def _num_envs(requested: int, context: _Context) -> Resolved:
    own = context.config.own.native_num_envs
    explicit = context.sources.get("num_envs") in ("command line", "environment")
    if context.effective["vec_env"] == "native" and own is not None and not explicit:
        return own, "the game's own number in this tier" if own != requested else ""
    return requested, ""


def _num_workers(requested: int | str, context: _Context) -> Resolved:
    vec_env, num_envs = context.effective["vec_env"], context.effective["num_envs"]
    if vec_env != "subproc":
        if context.sources.get("num_workers") == "command line":
            raise ConfigError(
                f"num_workers={requested} means nothing with vec_env={vec_env}: it steps all envs in one process; "
                "leave it out"
            )
        return NOT_APPLICABLE, f"vec_env={vec_env} steps in one process"
    if isinstance(requested, int) and requested != num_envs:
        raise ConfigError(
            f"num_workers={requested} with num_envs={num_envs}: SubprocVecEnv runs one worker per env; "
            "take num_workers=auto"
        )
    return num_envs, "SubprocVecEnv: one worker per env"


def _batch_size(requested: int | None, context: _Context) -> Resolved:
    if requested is not None:
        return requested, ""
    own = context.config.own.batch_size
    return own, f"{context.config.algo.name}'s own in this tier"


def _torch_threads(requested: int | str, context: _Context) -> Resolved:
    if requested != "auto":
        return requested, ""
    if context.effective["vec_env"] == "subproc":
        return 1, "the workers need the cores"
    widths = context.config.algo.net_arch
    flat = [w for part in (widths.values() if isinstance(widths, dict) else [widths or (64,)]) for w in part]
    if max(flat, default=64) <= 128:  # 2 threads gained nothing idle and ran 20× slower on a machine at load 6
        return 1, "small networks gain nothing from more"
    return min(context.machine.cores, MAX_TORCH_THREADS), "one per core"


def _lean_info(requested: bool, context: _Context) -> Resolved:
    native = context.effective["vec_env"] == "native"
    return requested, "a native game sends info only when an episode ends" if native else ""


def _train_log_to_file(requested: bool, context: _Context) -> Resolved:
    if not requested or context.effective["train_log_enabled"]:
        return requested, ""
    if context.sources.get("train_log_to_file") == "command line":
        raise ConfigError(
            "train_log_to_file=true contradicts train_log_enabled=false: nothing is recorded that could be written; "
            "take train_log_enabled=true, or leave train_log_to_file out"
        )
    return False, "train_log_enabled=false"


def _rollout_row(algo: PPOConfig, effective: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[PPOConfig, Row]:
    """Keep the rollout's size when num_envs changes, to the nearest whole number of steps per env."""
    num_envs, batch_size = effective["num_envs"], effective["batch_size"]
    source = sources.get("algo.rollout_size", "default")
    if num_envs > algo.rollout_size:
        raise ConfigError(
            f"num_envs={num_envs} is more than algo.rollout_size={algo.rollout_size}: a rollout needs at least one "
            f"step per env; take num_envs={algo.rollout_size} or fewer, or a larger algo.rollout_size"
        )
    num_steps = max(1, round(algo.rollout_size / num_envs))
    size = num_steps * num_envs
    if batch_size > size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than the rollout of {size} (num_envs={num_envs} × {num_steps} steps): "
            f"take batch_size={size} or less, or a larger algo.rollout_size"
        )
    if num_envs * num_steps == 1 or (num_steps == 1 and num_envs == 1):
        raise ConfigError("algo.rollout_size: one transition is no rollout; take 2 or more")
    reason = f"{num_envs} envs × {num_steps} steps"
    if size % batch_size:
        reason += f"; last minibatch of an epoch has {size % batch_size} of {batch_size} rows"
    row = Row("algo.rollout_size", algo.rollout_size, size, source, "trade-off", reason)
    return dataclasses.replace(algo, rollout_size=size), row


def _fused_update(requested: str, context: _Context) -> Resolved:
    """Kernels exist for fasttrain's own algorithms; whether the policy suits them is known once it is built."""
    if requested == "off":
        return "off", ""
    if context.effective["engine"] == "stock" or context.config.algo.name not in ON_POLICY:
        if requested == "on":
            raise ConfigError(
                "fused_update=on: only fasttrain's own algorithms have fused kernels; take engine=fast with "
                "algo=ppo or maskable_ppo, or fused_update=off"
            )
        return "off", "stock classes have no fused kernels"
    return "on", "compiled kernels for acting and update"


def _own_rows(config: Config, sources: Mapping[str, str]) -> list[Row]:
    """Hyperparameters that the profile's tier sets: they belong to what a profile changes."""
    rows = []
    for name in ("learning_rate", "n_epochs"):
        value = getattr(config.algo, name, None)
        if value is not None:
            key, stock = f"algo.{name}", config.algo.by_tier["baseline"][name]
            typed = key in sources
            source = sources.get(key, f"tier {config.own.tier}")
            reason = "" if typed or value == stock else f"{config.algo.name}'s own in this tier; stock {stock:g}"
            rows.append(Row(key, value, value, source, "trade-off", reason))
    return rows


_RESOLVERS: dict[str, Callable[[Any, _Context], Resolved]] = {
    "engine": _engine,
    "vec_env": _vec_env,
    "num_envs": _num_envs,
    "num_workers": _num_workers,
    "batch_size": _batch_size,
    "fused_update": _fused_update,
    "lean_info": _lean_info,
    "torch_threads": _torch_threads,
    "train_log_to_file": _train_log_to_file,
}
