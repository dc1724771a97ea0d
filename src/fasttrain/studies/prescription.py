"""How the doctor says what it found: the machine, the parts of the run, its limit, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch
from rich.console import Console

from fasttrain.machine import free_memory
from fasttrain.perf.limits import Flow, Rates, composed_limit, most_gain
from fasttrain.runs.view import FittingTable, say
from fasttrain.spec.config import Config
from fasttrain.spec.flags import Machine
from fasttrain.studies.advice import Advice
from fasttrain.terminal import command, rate_text

NAMES = {
    "env": "stepping the envs",
    "transport": "  of it reaching the workers",
    "policy": "choosing actions",
    "update": "updates",
    "replay": "  of it drawing batches",
    "storing": "storing transitions",
    "logging": "logging",
}
LIMIT_PARTS = ("env", "policy", "update")


class Findings(NamedTuple):
    """What there is to say."""

    machine: Machine
    config: Config  # as it is planned
    overrides: Sequence[str]  # that a training of it is started with
    rates: Rates
    flow: Flow
    present_s: float | None  # seconds per env step of the run
    finished: bool = False  # that of a finished run, not of a short training now


def machine_dict(machine: Machine, config: Config) -> dict[str, Any]:
    """What the machine is."""
    return {
        "cores": machine.cores,
        "bf16_units": machine.bf16_units or None,
        "gpu": torch.cuda.get_device_name() if machine.cuda else None,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "free_memory_gb": round(free_memory() / 2**30, 1),
        "device": config.device,
    }


def parts(console: Console, found: Findings) -> None:
    """The machine, a table of the parts, and the limit with the run's share of it."""
    is_ = machine_dict(found.machine, found.config)
    units = f"bfloat16 by {is_['bf16_units']}" if is_["bf16_units"] else "no bfloat16 units"
    say(
        console,
        f"Machine: {is_['cores']} cores, {units}, {is_['gpu'] or 'no GPU'}, "
        f"{is_['free_memory_gb']:g} of {is_['memory_gb']:g} GB of memory free",
    )
    rates, present_s = found.rates, found.present_s
    names = ["steps/s", "µs per step", "of the run's time"]
    table = FittingTable(["part, by itself", *names], right=names)
    for part, name in NAMES.items():
        seconds = getattr(rates, part)
        if seconds is not None:
            share = "" if present_s is None else f"{100 * seconds / present_s:.0f} %"
            table.add_row(name, _rate(seconds), f"{1e6 * seconds:.3g}", share)
    if table.rows:
        console.print(table)
    if all(getattr(rates, part) is not None for part in LIMIT_PARTS):
        limit = composed_limit(rates, found.flow)
        say(console, f"Limit of this configuration: {rate_text(limit)} steps/s ({flow_words(found.flow)})")
        if present_s is not None:
            run = "The run" if found.finished else "A short training"
            say(console, f"{run}: {rate_text(1 / present_s)} steps/s, {100 / present_s / limit:.0f} % of the limit")


def _rate(seconds: float) -> str:
    return rate_text(1 / seconds) if seconds > 0 else "-"


def flow_words(flow: Flow) -> str:
    """How the parts go together."""
    collect = "the policy acts while envs step" if flow.groups else "envs step, then the policy acts"
    return f"{collect}, {'updates run beside it' if flow.overlap else 'then updates'}"


def advices(console: Console, best: Sequence[Advice], found: Findings) -> None:
    """What to change, or that there is nothing to."""
    if not best:
        say(console, f"As fast as this configuration gets; what is left is {what_is_left(found)}.")
        return
    say(console, "What would pay:")
    for number, advice in enumerate(best, 1):
        given = advice.candidate
        line = f"  {number}. {given.text} ({given.flag_class}; {given.why}): {_gain(advice.expected)} expected"
        if advice.real is not None:
            line += f", {_gain(advice.real)} when tried"
        if advice.error:
            line += f"; trying it failed: {advice.error}"
        say(console, line)
        if given.flag_class == "trade-off":
            say(console, f"     changes the learning: check with: {comparison(found.overrides, given.overrides)}")


def comparison(base: Sequence[str], changes: Sequence[str]) -> str:
    """The command that shows whether learning is as good."""
    changed = f"candidates=[{{name: now, overrides: []}}, {{name: changed, overrides: [{', '.join(changes)}]}}]"
    return f'{command()} compare {" ".join([*base, ""])}"{changed}"'


def what_is_left(found: Findings) -> str:
    """The part that takes the most, in words."""
    rates, present_s = found.rates, found.present_s
    part = max(LIMIT_PARTS, key=lambda name: getattr(rates, name) or 0.0)
    most = float("inf") if present_s is None else most_gain(getattr(rates, part), present_s)
    at_most = "all of it" if most == float("inf") else f"at most {_gain(most)} without any"
    return f"{NAMES[part]}: {at_most}"


def _gain(gain: float) -> str:
    return f"{100 * gain:+.0f} %"
