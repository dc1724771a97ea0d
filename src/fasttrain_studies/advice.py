"""Changes of a configuration that might make it faster, and the expected gain of each.

The parts that a change affects are measured again, alternately with the same parts without the change. `limits`
computes the gain from these times. The second half of this file prints the texts of `fasttrain doctor`: the machine,
the parts of the run, the limit of the run, and the advice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from rich.console import Console

from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.machine import free_memory
from fasttrain.runs.envs import env_facts
from fasttrain.runs.view import FittingTable, say
from fasttrain.spec import plugins
from fasttrain.spec.checks import BY_NAME, EnvFacts, Machine, batch_size_of, train_frequency
from fasttrain.spec.computing import FUSED_PAYS_UP_TO_WIDTH, widest_layer
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.precedence import key_of
from fasttrain.spec.reading import with_fixed_opponent
from fasttrain.spec.setting import FlagClass
from fasttrain.terminal import command, rate_text, spelt
from fasttrain_studies.limits import WORTH, Flow, Rates, composed_limit, expected_s, gain_of, most_gain

MOST = 7  # largest number of candidates that are measured; each takes some seconds
SLOWER_FROM = 1.2  # if slowest worker's work ÷ mean work is larger, schedule=first_ready may be faster
PARTS = ("env", "policy", "update")


class Situation(NamedTuple):
    """The measurements on which the advice is based."""

    requested: Config
    sources: Mapping[str, str]
    overrides: Sequence[str]  # overrides with which `fasttrain` trains this configuration
    facts: EnvFacts
    machine: Machine
    effective: Config
    rates: Rates
    flow: Flow
    trained_s: float | None = None  # seconds per env step of a short training on this machine
    slowest_over_mean: float | None = None  # slowest worker's work ÷ mean of all workers
    finished_s: float | None = None  # seconds per env step of the finished run in `run=FOLDER`
    engines: tuple[str, list[str]] | None = None  # for games with engines: what limits them, and overrides to try

    @property
    def present_s(self) -> float:
        """Seconds per env step of the short training. Changes are compared with this time."""
        return self.trained_s or 0.0

    @property
    def run_s(self) -> float | None:
        """Seconds per env step of the finished run, else of the short training. Parts are shown as shares of this."""
        return self.trained_s if self.finished_s is None else self.finished_s


class Candidate(NamedTuple):
    """A change that might make the run faster."""

    changes: tuple[tuple[str, Any], ...]  # dotted key, value
    parts: tuple[str, ...]  # the parts of the run that the change affects
    why: str

    @property
    def flag_class(self) -> FlagClass:
        """The class of the change farthest from stock (exact, rounding, trade-off). A value `off` does not count."""
        order: list[FlagClass] = ["exact", "rounding", "trade-off"]
        on = [(key, value) for key, value in self.changes if value != "off"]
        parts = [one.name for one in plugins.parts(plugins.ENGINES)]
        on = [(key, value) for key, value in on if key.partition(".")[0] not in parts] or [("vec_env", "daemons")]
        classes = [BY_NAME[key].class_of(value) if key in BY_NAME else "trade-off" for key, value in on]
        return max(classes, key=order.index)

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={spelt(value)}" for key, value in self.changes]

    @property
    def text(self) -> str:
        return " ".join(self.overrides)


class Advice(NamedTuple):
    """A change with its expected gain, and its measured gain if it was tried."""

    candidate: Candidate
    expected: float  # expected gain; 0.25: a quarter more steps/s
    real: float | None = None  # measured gain, if it was tried
    error: str = ""  # why the trial failed

    def to_dict(self) -> dict[str, Any]:
        change = self.candidate
        return {
            "change": change.text, "class": change.flag_class, "why": change.why,
            "measured_again": list(change.parts), "expected_gain": self.expected, "real_gain": self.real,
            "error": self.error,
        }  # fmt: skip


def candidates(now: Situation) -> list[Candidate]:
    """The changes that may gain `WORTH` or more, because their parts take enough time; the most promising first."""

    def at_most(change: Candidate) -> float:
        return most_gain(sum(getattr(now.rates, part) or 0.0 for part in change.parts if part in PARTS), now.present_s)

    every = [*_engine(now), *_stepping(now), *_sizes(now), *_computing(now), *_learning(now)]
    return sorted((change for change in every if at_most(change) >= WORTH), key=at_most, reverse=True)[:MOST]


def logging_advice(now: Situation) -> list[Advice]:
    """Advice about logging. The gain is computed, not measured: logging a tenth as often costs a tenth."""
    cost, config = now.rates.logging or 0.0, now.effective
    gain = gain_of(now.present_s, now.present_s - 0.9 * cost)
    if gain < WORTH:
        return []
    prints = config.train_log_to_console and config.train_log_enabled
    quiet = (("train_log_to_console", False),) if prints else ()
    change = (("log_every", 10 * config.log_every), *quiet)
    return [Advice(Candidate(change, ("logging",), "logging takes a noticeable part of the time"), gain)]


def _engine(now: Situation) -> Iterator[Candidate]:
    config = now.effective
    if config.engine == "stock" and config.algo.spec.fast:
        changes = {"engine": "fast", "vec_env": "auto", "fused_update": "auto", "torch_threads": "auto"}
        yield Candidate((*changes.items(),), PARTS, "the overhead of the stock classes")


def _stepping(now: Situation) -> Iterator[Candidate]:
    """Other ways to step the same envs."""
    config, facts, machine, rates = now.effective, now.facts, now.machine, now.rates
    fast_on_policy = config.engine == "fast" and config.algo.spec.on_policy
    if config.vec_env == "subproc" or (config.vec_env == "dummy" and machine.cores > 1):
        yield Candidate((("vec_env", "shared"),), ("env",), "one process steps all envs, or each env has one")
    if now.engines is not None and now.engines[1]:
        pairs = (text.split("=") for text in now.engines[1])
        changes = tuple((key, int(value) if value.isdigit() else value) for key, value in pairs)
        yield Candidate(changes, ("env", "policy"), "Little's law")
    if config.vec_env != "shared":
        return
    if (rates.transport or 0.0) > 0.4 * (rates.env or 0.0):
        yield Candidate((("vec_env", "dummy"),), ("env",), "communication with the workers costs more than their work")
    workers = config.workers if isinstance(config.workers, int) else machine.cores
    more = min(config.num_envs, 2 * workers)
    if more > workers and (facts.cpu_share < 0.9 or workers < machine.cores):
        yield Candidate((("workers", more),), ("env",), "the envs mostly wait, or cores are free")
    if now.flow.groups or not fast_on_policy:
        return
    differ = (now.slowest_over_mean or 1.0) > SLOWER_FROM
    if differ or facts.cpu_share < 0.9 or machine.cores > workers:
        why = "all envs wait for the slowest one" if differ else "the policy acts for ready envs while others step"
        yield Candidate((("schedule", "first_ready"),), ("env", "policy"), why)


def _sizes(now: Situation) -> Iterator[Candidate]:
    """More envs per vector step, with the same number of updates per env step."""
    config = now.effective
    off_policy = config.algo.spec.off_policy
    if off_policy and train_frequency(config.algo.train_freq)[1] == "episode":  # SB3 allows only one env
        return
    changes = {
        "num_envs": 2 * config.num_envs,
        **({"updates_per_step": 2 * config.updates_per_step} if off_policy else {}),
    }
    why = "each vector step has an overhead, however many envs it has"
    yield Candidate((*changes.items(),), PARTS if off_policy else ("env", "policy"), why)


def _computing(now: Situation) -> Iterator[Candidate]:
    """Changes that compute the same updates faster."""
    config, machine = now.effective, now.machine
    if config.engine == "stock":
        yield from _threads(now)
        return
    networks = ("policy", "update")
    if config.fused_update == "off" and widest_layer(config) <= FUSED_PAYS_UP_TO_WIDTH:
        kernels = (("fused_update", "on"), ("use_amp", "off"), ("use_compile", "off"))
        yield Candidate(kernels, networks, "compiled kernels for small networks")
    if config.use_amp == "off" and (machine.cuda or machine.bf16_units) and widest_layer(config) >= 128:
        change = (("use_amp", "on"), ("fused_update", "auto"))
        yield Candidate(change, networks, "bfloat16 products are faster")
    if config.use_compile == "off" and machine.cuda and config.fused_update == "off":
        yield Candidate((("use_compile", "on"),), networks, "fewer, larger operations")
    if config.fused_update == "off":
        yield from _threads(now)
    drawing = config.algo.spec.off_policy and config.prefetch == "off"
    if drawing and most_gain(now.rates.replay, now.present_s) >= WORTH:
        yield Candidate((("prefetch", "on"),), ("update",), "batches are drawn while the update runs")


def _threads(now: Situation) -> Iterator[Candidate]:
    machine, config = now.machine, now.effective
    if machine.cores > 1:
        other = machine.cores if config.torch_threads == 1 else 1
        why = "cores are free" if other > 1 else "small operations wait for their threads"
        yield Candidate((("torch_threads", other),), ("policy", "update"), why)


def _learning(now: Situation) -> Iterator[Candidate]:
    """Less work per env step, which may cost quality."""
    config, algo = now.effective, now.effective.algo
    batch_size = batch_size_of(config)
    if batch_size is None:
        return
    if algo.spec.off_policy:
        if config.updates_per_step > 1:
            change = (("updates_per_step", config.updates_per_step // 2),)
            yield Candidate(change, ("update",), "half the updates per env step")
        if batch_size >= 64:
            yield Candidate((("batch_size", batch_size // 2),), ("update",), "smaller batches")
        return
    if getattr(algo, "n_epochs", 1) > 1:
        yield Candidate((("algo.n_epochs", algo.n_epochs // 2),), ("update",), "half the updates")
    if 4 * batch_size <= algo.rollout_size:
        yield Candidate((("batch_size", 4 * batch_size),), ("update",), "fewer and larger minibatches")


# --- the plan and the gain of a change


def changed_plan(now: Situation, candidate: Candidate) -> RunSpec | None:
    """The plan after the change; None if the change is impossible or has no effect."""
    config = with_changes(now.requested, candidate.changes)
    sources = {**now.sources, **dict.fromkeys((key for key, _ in candidate.changes), "command line")}
    try:
        facts = now.facts
        if {"engine", "vec_env"} & set(dict(candidate.changes)):  # with these settings the env must be examined again
            facts = env_facts(with_fixed_opponent(config))
        plan = resolve(config, sources, facts, now.machine)
    except (ConfigError, EnvSpecError):
        return None
    return None if plan.config == now.effective else plan


def with_changes(config: Config, changes: tuple[tuple[str, Any], ...]) -> Config:
    """`config` with other values under dotted keys."""
    for key, value in changes:
        group, _, name = key.rpartition(".")
        below = {group: dataclasses.replace(getattr(config, group), **{name: value})} if group else {name: value}
        config = dataclasses.replace(config, **below)
    return config


def advise(
    now: Situation,
    measure_again: Callable[[RunSpec, Candidate], tuple[Rates, Flow] | None],
    tell: Callable[[str], None],
) -> list[Advice]:
    """The changes that gain at least `WORTH`, best first. `measure_again` returns None if the run cannot be built."""
    found = logging_advice(now)
    for candidate in candidates(now):
        if (plan := changed_plan(now, candidate)) is None:
            continue
        tell(f"measuring next: {candidate.text}")
        if (changed := measure_again(plan, candidate)) is None:
            continue
        gain = gain_of(now.present_s, expected_s(now.present_s, (now.rates, now.flow), changed))
        if gain >= WORTH:
            found.append(Advice(candidate, gain))
    return sorted(found, key=lambda advice: -advice.expected)


NAMES = {
    "env": "stepping the envs",
    "transport": "  of it reaching the workers",
    "policy": "choosing actions",
    "update": "updates",
    "replay": "  of it drawing batches",
    "storing": "storing transitions",
    "logging": "logging",
}


def machine_dict(machine: Machine, config: Config) -> dict[str, Any]:
    return {
        "cores": machine.cores,
        "bf16_units": machine.bf16_units or None,
        "gpu": torch.cuda.get_device_name() if machine.cuda else None,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "free_memory_gb": round(free_memory() / 2**30, 1),
        "device": config.device,
    }


def parts(console: Console, now: Situation) -> None:
    """Print the machine, a table of the parts, the limit, and the run's share of the limit."""
    facts = machine_dict(now.machine, now.effective)
    units = f"bfloat16 by {facts['bf16_units']}" if facts["bf16_units"] else "no bfloat16 units"
    memory = f"{facts['free_memory_gb']:g} of {facts['memory_gb']:g} GB of memory free"
    say(console, f"Machine: {facts['cores']} cores, {units}, {facts['gpu'] or 'no GPU'}, {memory}")
    rates, run_s = now.rates, now.run_s
    names = ["steps/s", "µs per step", "of the run's time"]
    table = FittingTable(["part, measured alone", *names], right=names)
    for part, name in NAMES.items():
        if (seconds := getattr(rates, part)) is not None:
            share = "" if run_s is None else f"{100 * seconds / run_s:.0f} %"
            table.add_row(name, rate_text(1 / seconds) if seconds > 0 else "-", f"{1e6 * seconds:.3g}", share)
    if table.rows:
        console.print(table)
    if all(getattr(rates, part) is not None for part in PARTS):
        limit = composed_limit(rates, now.flow)
        overlap = "the policy acts while envs step" if now.flow.groups else "envs step, then the policy acts"
        say(console, f"Limit of this configuration: {rate_text(limit)} steps/s ({overlap}, then updates)")
        if run_s is not None:
            run = "The run" if now.finished_s is not None else "A short training"
            say(console, f"{run}: {rate_text(1 / run_s)} steps/s, {100 / run_s / limit:.0f} % of the limit")
    if now.engines is not None:
        say(console, f"Games with engines: {now.engines[0]}")


def advices(console: Console, best: Sequence[Advice], now: Situation) -> None:
    """Print the advice, or that there is none."""
    if not best:
        say(console, f"None of the changes considered makes the run faster. The bottleneck is {bottleneck(now)}.")
        return
    say(console, "What would make it faster:")
    for number, advice in enumerate(best, 1):
        change = advice.candidate
        line = f"  {number}. {change.text} ({change.flag_class}; {change.why}): {_gain(advice.expected)} expected"
        if advice.real is not None:
            line += f", {_gain(advice.real)} when tried"
        if advice.error:
            line += f"; the trial failed: {advice.error}"
        say(console, line)
        if change.flag_class == "trade-off":
            say(console, f"     changes the learning; check it with: {comparison(now.overrides, change.overrides)}")


def comparison(base: Sequence[str], changes: Sequence[str]) -> str:
    """The command that compares the learning with and without the changes."""
    changed = f"candidates=[{{name: now, overrides: []}}, {{name: changed, overrides: [{', '.join(changes)}]}}]"
    implied = ["env=gym"] if {"env.id", "env.entry_point"} & {*map(key_of, base)} else []
    typed = [text for text in base if text not in implied]
    return f'{command()} compare {" ".join([*typed, ""])}"{changed}"'


def bottleneck(now: Situation) -> str:
    """The part that takes the most time, with the gain if this part took no time."""
    rates, run_s = now.rates, now.run_s
    part = max(PARTS, key=lambda name: getattr(rates, name) or 0.0)
    most = float("inf") if run_s is None else most_gain(getattr(rates, part), run_s)
    return f"{NAMES[part]}: " + ("all of it" if most == float("inf") else f"at most {_gain(most)} if it took no time")


def _gain(gain: float) -> str:
    return f"{100 * gain:+.0f} %"
