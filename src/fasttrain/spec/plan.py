"""The plan: for each flag the requested and the effective value, the source, and the reason if they differ.

`resolve` is a pure function of the configuration and of facts about env and machine. A flag without effect is "not
applicable" in the plan, but an error if it was typed on the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.spec import checks, computing, stepping
from fasttrain.spec.algorithms import ALGORITHMS, PER_TRANSITION, AlgorithmSpec, algorithms_with, games_own
from fasttrain.spec.checks import BY_NAME, FLAGS, NOT_APPLICABLE, SHIPPED, Context, EnvFacts, Machine, Resolved
from fasttrain.spec.config import MAX_TORCH_THREADS, AlgoConfig, Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.plugins import without_unused
from fasttrain.spec.setting import Setting
from fasttrain.terminal import spelt


class Row(NamedTuple):
    """One line of the plan."""

    flag: str
    requested: Any
    effective: Any
    source: str  # command line, environment, profile NAME, default
    flag_class: str
    reason: str


class Event(NamedTuple):
    """A change of a flag after the model was built, or during training."""

    flag: str
    effective: Any
    reason: str


class RunSpec(NamedTuple):
    """The effective configuration of a run and its plan. A RunSpec is immutable: `after` returns a changed copy."""

    config: Config
    rows: tuple[Row, ...]
    events: tuple[Event, ...] = ()
    engine_switch_at: int | None = None  # env step at which compiled kernels replaced torch; a rerun does the same

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: `{"flags": [{flag, requested, effective, source, class, reason}…], "events": […], "config"…}`."""
        keys = ("flag", "requested", "effective", "source", "class", "reason")
        flags = [dict(zip(keys, map(to_dict, row), strict=True)) for row in self.rows]
        events = [to_dict(event._asdict()) for event in self.events]
        switch = {"engine_switch_at": self.engine_switch_at}
        return {"flags": flags, "events": events, "config": without_unused(to_dict(self.config)), **switch}

    def row(self, flag: str) -> Row:
        return next(row for row in self.rows if row.flag == flag)

    def after(self, flag: str, effective: Any, reason: str) -> RunSpec:
        """The RunSpec after a change of a flag, for this reason."""
        rows = tuple(row._replace(effective=effective, reason=reason) if row.flag == flag else row for row in self.rows)
        event = Event(flag, effective, reason)  # a resumed run may already have this event
        events = self.events if event in self.events else (*self.events, event)
        return self._replace(config=dataclasses.replace(self.config, **{flag: effective}), rows=rows, events=events)

    def notable(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if is_notable(row._asdict(), self.config.algo.spec))


def is_notable(row: Mapping[str, Any], algorithm: AlgorithmSpec | None) -> bool:
    """Whether to print a row: its value differs from stock's, was typed or measured, or went from auto or on to off."""
    name, effective = str(row.get("flag")), row.get("effective")
    baseline = algorithm.tiers["baseline"] if algorithm else {}
    own = {"replay_ratio": computing.BASELINE_RATIO, **{f"algo.{key}": value for key, value in baseline.items()}}
    stock = BY_NAME[name].stock if name in BY_NAME else own.get(name)
    measured = str(row.get("reason")).startswith(computing.MEASURED)
    requested = measured or row.get("source") in ("command line", "environment")
    turned_off = effective == "off" and row.get("requested") in ("auto", "on")
    return effective != NOT_APPLICABLE and (effective not in (stock, None) or requested or turned_off)


def resolve(config: Config, sources: Mapping[str, str], env: EnvFacts, machine: Machine) -> RunSpec:
    """Resolve every flag.

    Args:
        sources: key → source of its value. A key that is missing has its default.

    Raises:
        ConfigError: a typed flag has no effect with the algorithm, or effective values contradict each other.
    """
    rows: list[Row] = []
    effective: dict[str, Any] = {}
    context = Context(config, sources, env, machine, effective)
    for flag in FLAGS:
        requested = getattr(config, flag.name)
        source = sources.get(flag.name, "default")
        value, reason = _resolve(flag, requested, source, context)
        rows.append(Row(flag.name, requested, value, source, flag.class_of(value), reason))
        effective[flag.name] = requested if value == NOT_APPLICABLE else value
    stepping.check_self_play(config, effective, sources)
    stepping.check_masks(config, effective["engine"], sources)
    changes = {name: value for name, value in effective.items() if name != "workers" or value is not None}
    if config.algo.spec.on_policy:
        changes["algo"], rollout_rows = _rollout_rows(config, config.algo, effective, sources)
        rows += rollout_rows
        size = changes["algo"].rollout_size
        if (effective["batch_size"] or 0) > size:  # nobody set it; stock's minibatch is the whole rollout too
            changes["batch_size"] = effective["batch_size"] = size
            row = next(row for row in rows if row.flag == "batch_size")
            rows[rows.index(row)] = row._replace(effective=size, reason=f"the rollout has {size} transitions")
        if (reuse := getattr(config.algo, "reuse", 1)) > 1:
            why = f"an epoch goes over {reuse} rollouts, weighted by importance"
            rows.append(Row("algo.reuse", reuse, reuse, sources.get("algo.reuse", "default"), "trade-off", why))
        if config.algo.spec.recurrent:
            exact = effective["engine"] == "stock" or config.fused_update == "off"
            steps, reason = computing.steps_back(changes["algo"], effective, exact)
            rows.append(Row("steps_back", steps, steps, "rollout_size ÷ num_envs", "trade-off", reason))
            rows += (Row(*row) for row in computing.memory_rows(config.algo, effective["engine"], sources))
    if not config.algo.spec.recurrent:
        checks.check_extras(config, effective["engine"], sources)
    if config.algo.spec.off_policy:
        ratio, reason = computing.replay_ratio(config, effective)
        rows.append(Row("replay_ratio", ratio, ratio, "updates ÷ transitions", "trade-off", reason))
        if (her := config.algo.her) != "off":
            why = f"{config.algo.her_goals} of {config.algo.her_goals + 1} transitions get a goal that was reached"
            rows.append(Row("algo.her", her, her, sources.get("algo.her", "default"), "trade-off", why))
    rows += _own_rows(config, sources)
    return RunSpec(dataclasses.replace(config, **changes), tuple(rows))


def _resolve(flag: Setting, requested: object, source: str, context: Context) -> Resolved:
    spec = context.config.algo.spec
    algo = spec.name
    if not flag.fits(spec):
        fitting = (name for name, it in ALGORITHMS.items() if flag.fits(it) and (it.fast or not flag.ours))
        why = f"only for {', '.join(fitting)}"
        if source == "command line":
            raise ConfigError(f"{flag.name}={spelt(requested)} has no effect with algo={algo}: {why}; remove it")
        return NOT_APPLICABLE, why
    resolver = _RESOLVERS.get(flag.name)
    if flag.name in spec.lacks and context.effective.get("engine") == "fast":
        if requested not in (flag.stock, "auto") and source == "command line":
            raise ConfigError(f"{flag.name}={requested} with algo={algo}: {spec.lacks[flag.name]}; remove it")
        return flag.stock, "" if requested == flag.stock else spec.lacks[flag.name]
    if flag.name in spec.flags and source in SHIPPED:
        own = spec.flags[flag.name]
        return (computing.resolve_updates_per_step(own, context)[0] if own == PER_TRANSITION else own), f"{algo}'s own"
    if flag.ours and requested != flag.stock and context.effective["engine"] == "stock":
        why = "the stock classes do not have it" if spec.fast else f"fasttrain has no class for {algo}"
        if requested != "auto" and source in ("command line", "default"):
            stock, ways = (" with engine=stock", "use engine=fast, or ") if spec.fast else ("", "")
            others = "" if spec.fast else f", only for {', '.join(algorithms_with('fast'))}"
            raise ConfigError(f"{flag.name}={spelt(requested)}{stock}: {why}{others}; {ways}remove it")
        return flag.stock, why
    if resolver is None or (requested == flag.stock and flag.name not in _ALWAYS):
        return requested, ""
    return resolver(requested, context)


def _engine(requested: str, context: Context) -> Resolved:
    if requested == "stock" and context.config.algo.spec.ours_alone:
        why = "there is no stock class"
        error = f"engine=stock: {why} of {context.config.algo.name}; use engine=fast, or remove it"
        return context.instead("engine", "fast", why, error)
    if requested == "fast" and not context.config.algo.spec.fast:
        return "stock", f"fasttrain has no class for {context.config.algo.name}"
    return requested, ""


def _batch_size(requested: int | None, context: Context) -> Resolved:
    reason = f"{own_values_of(context.config, 'batch_size')} own value in this tier"
    return (context.config.own.batch_size, reason) if requested is None else (requested, "")


def _checkpoint_async(requested: bool, context: Context) -> Resolved:
    if not context.effective["checkpoint_every"]:
        return False, "no checkpoints without checkpoint_every=…"
    return requested, ""


def _torch_threads(requested: int | str, context: Context) -> Resolved:
    if requested != "auto":
        return requested, ""
    effective = context.effective
    in_groups = effective["schedule"] in ("first_ready", "continuous")  # the policy acts while envs step
    if effective["vec_env"] == "subproc" or in_groups:
        return 1, "the workers need the cores"
    if context.env.images:
        return min(context.machine.cores, MAX_TORCH_THREADS), "one thread per core, for convolutions"
    algo, width = context.config.algo, computing.widest_layer(context.config)
    # Up to this width 2 threads were not faster on an idle machine, and 20 times slower at a load average of 6.
    if max(width, algo.lstm_hidden_size if algo.spec.recurrent else 0) <= 128:
        return 1, "small networks are not faster with more threads"
    return min(context.machine.cores, MAX_TORCH_THREADS), "one thread per core"


def _copy_final_observations(requested: bool, context: Context) -> Resolved:
    vec_env = context.effective["vec_env"]
    return (requested, "") if vec_env in ("dummy", "subproc") else (NOT_APPLICABLE, f"vec_env={vec_env} always copies")


def _train_log_to_file(requested: bool, context: Context) -> Resolved:
    if context.effective["train_log_enabled"]:
        return requested, ""
    error = (
        "train_log_to_file=true contradicts train_log_enabled=false: nothing is recorded; use train_log_enabled=true, "
        "or remove train_log_to_file"
    )
    return context.instead("train_log_to_file", False, "train_log_enabled=false", error)


def _nan_guard(requested: str, context: Context) -> Resolved:
    stock = context.effective["engine"] == "stock"
    return requested, "stock classes: observations and rewards are checked, updates are not" * stock


def _reward_debug(requested: bool, context: Context) -> Resolved:
    by_env = "what the env puts into info['reward_terms'] at an episode's end"
    return requested, "episodes.csv has each episode's sums" if context.config.env.spec.reward_debug_key else by_env


def _n_steps_row(algo: AlgoConfig, num_envs: int, sources: Mapping[str, str]) -> Row | None:
    """The row of `algo.n_steps`, if it is set. If `algo.rollout_size` is set too, the typed one of the two wins.

    Raises ConfigError if both are typed, or both are in a profile, and they contradict each other.
    """
    source, size_source = sources.get("algo.n_steps", "default"), sources.get("algo.rollout_size", "default")
    row = Row("algo.n_steps", algo.n_steps, algo.n_steps, source, "trade-off", f"steps of each of {num_envs} envs")
    if (size_source == "command line") != (source == "command line"):
        return row if source == "command line" else row._replace(effective=None, reason="algo.rollout_size was typed")
    n_steps = max(1, round(algo.rollout_size / num_envs))
    if size_source != "default" and n_steps != algo.n_steps:
        raise ConfigError(
            f"algo.n_steps={algo.n_steps} contradicts algo.rollout_size={algo.rollout_size}, which is {n_steps} steps "
            f"of each of {num_envs} envs: remove one of them"
        )
    return row


def _rollout_rows(
    config: Config, algo: AlgoConfig, effective: Mapping[str, Any], sources: Mapping[str, str]
) -> tuple[AlgoConfig, list[Row]]:
    """The algorithm with its effective rollout size, a multiple of `num_envs`, and the plan's rows about this size."""
    num_envs, batch_size = effective["num_envs"], effective["batch_size"] or 1  # None: no minibatches
    source = sources.get("algo.rollout_size", f"tier {config.tier}")
    steps_row = None if algo.n_steps is None else _n_steps_row(algo, num_envs, sources)
    requested, chosen = algo.rollout_size, "algo.rollout_size" in sources or steps_row is not None
    algo, before = (algo, 0) if chosen else stepping.usual_rollout(config, algo, effective, batch_size)
    algo = dataclasses.replace(algo, **{"n_steps": None if steps_row is None else steps_row.effective})
    key = "algo.rollout_size"
    if steps_row is not None and algo.n_steps is not None:
        key, source = "algo.n_steps", steps_row.source
    if algo.n_steps is None and num_envs > algo.rollout_size:
        raise ConfigError(
            f"num_envs={num_envs} is more than algo.rollout_size={algo.rollout_size}: a rollout needs at least one "
            f"step per env; use num_envs={algo.rollout_size} or fewer, or a larger algo.rollout_size"
        )
    num_steps = algo.num_steps(num_envs)
    size = num_steps * num_envs
    if batch_size > size and config.batch_size is not None:
        raise ConfigError(
            f"batch_size={batch_size} is larger than the rollout of {size} (num_envs={num_envs} × {num_steps} steps): "
            f"use batch_size={size} or less, or a larger {key}"
        )
    batch_size = min(batch_size, size)
    if size == 1:
        raise ConfigError(f"{key}: a rollout needs at least 2 transitions")
    reason = f"{num_envs} envs × {num_steps} steps{'' if algo.n_steps is None else ', from algo.n_steps'}"
    if before:
        reason += f"; reduced from {before:,}, for total_timesteps={config.total_timesteps:,}"
        uncounted = "; a step that only resets an env does not count, so a second rollout may follow"
        reason += uncounted if effective["vec_env"] == "vector" else ""
    elif size > config.total_timesteps:
        reason += f"; LONGER than total_timesteps={config.total_timesteps:,}: the whole rollout is played"
    if size % batch_size:
        reason += f"; the last minibatch of an epoch has {size % batch_size} of {batch_size} rows"
    stock = algo.spec.tiers["baseline"]["rollout_size"]
    if algo.n_steps is None and "algo.rollout_size" not in sources and requested != stock:
        reason += f"; {own_values_of(config, 'rollout_size')} own value in this tier, stock {stock:,.0f}"
    row = Row("algo.rollout_size", requested, size, source, "trade-off", reason)
    return dataclasses.replace(algo, **{"rollout_size": size}), [*filter(None, [steps_row]), row]


def _fused_update(requested: str, context: Context) -> Resolved:
    """Resolve by the settings alone. `runs.engine` later checks whether the kernels support the model's policy."""
    if requested == "auto" and (why := computing.why_no_fused_kernels(context)):
        return "off", why
    recurrent = context.config.algo.spec.recurrent
    how = "; sequences are not padded" if recurrent else ", on several threads if that is faster"
    return "on", f"compiled kernels{how}"


def own_values_of(config: Config, name: str) -> str:
    """The source of the default in `config.own` for this name: "the game's" or "ppo's"."""
    games = name in games_own(config.env.spec.own, config.algo.name, config.tier)
    return "the game's" if games else f"{config.algo.name}'s"


def _own_rows(config: Config, sources: Mapping[str, str]) -> list[Row]:
    """Rows of hyperparameters whose defaults depend on the profile's tier."""
    rows = []
    for name in ("learning_rate", "n_epochs"):
        if (value := getattr(config.algo, name, None)) is not None:
            key, stock = f"algo.{name}", config.algo.spec.tiers["baseline"][name]
            own = "" if value == stock else f"{own_values_of(config, name)} own value in this tier; stock {stock:g}"
            source, reason = (sources[key], "") if key in sources else (f"tier {config.tier}", own)
            rows.append(Row(key, value, value, source, "trade-off", reason))
    return rows


# Flags that may get another value than stock's, even if stock's was requested.
_ALWAYS = ("engine", "vec_env", "num_envs", "copy_final_observations", "train_log_to_file", "eval_every")
_RESOLVERS: dict[str, Callable[[Any, Context], Resolved]] = {
    "engine": _engine,
    "vec_env": stepping.resolve_vec_env,
    "num_envs": stepping.resolve_num_envs,
    "workers": stepping.resolve_workers,
    "schedule": stepping.resolve_schedule,
    "max_lag": stepping.resolve_max_lag,
    "updates_per_step": computing.resolve_updates_per_step,
    "batch_size": _batch_size,
    "use_amp": computing.resolve_use_amp,
    "use_compile": computing.resolve_use_compile,
    "fused_update": _fused_update,
    "pin_memory": computing.resolve_pin_memory,
    "gradient_accumulation": computing.resolve_gradient_accumulation,
    "lean_info": stepping.resolve_lean_info,
    "copy_final_observations": _copy_final_observations,
    "prefetch": computing.resolve_prefetch,
    "torch_threads": _torch_threads,
    "train_log_to_file": _train_log_to_file,
    "eval_every": stepping.resolve_eval_every,
    "reward_debug": _reward_debug,
    "nan_guard": _nan_guard,
    "eval_async": stepping.resolve_eval_async,
    "checkpoint_async": _checkpoint_async,
}
