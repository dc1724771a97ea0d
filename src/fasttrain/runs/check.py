"""The checkup of a run's env: a few lines before training; by itself (`fasttrain check`) longer and with the costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttrain.envs.checkup import CheckupResult
from fasttrain.envs.make import EnvSpec
from fasttrain.envs.probe import ProbeResult
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.runs.build import env_spec
from fasttrain.runs.envs import check_spaces
from fasttrain.runs.survey import BrokenEnvError, Survey
from fasttrain.runs.view import make_console, say
from fasttrain.saving.files import write_json
from fasttrain.spec.config import Config
from fasttrain.spec.reading import against_bots
from fasttrain.terminal import command, rate_text

CHECK_SCHEMA = 1
# Of `fasttrain check`; before training the checkup's own, smaller, limits hold.
CHECK_STEPS, CHECK_SECONDS = 5_000, 20.0
MOST_LINES = 6  # before training


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """`fasttrain check env.id=…`: look at an env for longer, show what it costs and what was found.

    Returns 2 for an error, or for anything found under checkup=strict.

    Raises:
        ConfigError: the env is not one that can be played alone.
    """
    if config.env.backend == "envpool":
        raise ConfigError("check plays one Gymnasium env: env.backend=envpool has none; leave it out")
    spec = env_spec(against_bots(config))
    if "algo" not in sources:  # the default, which needs masks, was not asked for
        spec = dataclasses.replace(spec, needs_masks=False, use_masks=True)
    console = make_console()
    with Survey(spec, config.checkup_timeout_s, console) as survey:
        built = survey.build()
        if built.lacks_masks:
            raise EnvSpecError(built.lacks_masks)
        if "algo" in sources:
            check_spaces(config, spec.option, built.action_space, built.observation_space)
        result = _looked(survey, folder, {"max_steps": CHECK_STEPS, "max_seconds": CHECK_SECONDS})
    say(console, f"Checkup of {spec.option}: {result.steps:,} steps by random legal actions, {result.seconds:.1f} s")
    if result.costs is not None:
        console.print(_cost_table(result, result.costs))
    for text in _notes(result, config):
        say(console, text)
    for finding in result.findings:
        say(console, f"{finding.severity} {finding.code}: {finding}")
    if not result.findings:
        say(console, "nothing found")
    say(console, f"written to {folder / 'checkup.json'}")
    return EnvSpecError.exit_code if result.errors or (config.checkup == "strict" and result.findings) else 0


def run_checkup(config: Config, folder: Path, console: Console, survey: Survey) -> ProbeResult | None:
    """The checkup before a training: says what it found, writes checkup.json, returns what the env costs.

    None where nothing was played (checkup=off, EnvPool) or where what was played is no measure (an error was found).

    Raises:
        EnvSpecError: the env cannot be built; or something was found, under checkup=strict.
    """
    if config.checkup == "off" or config.env.backend == "envpool":
        return None
    may_stay = config.vec_env in ("auto", "shared") and not config.deterministic
    result = _looked(survey, folder, {}, may_stay)
    lines = [f"  {finding.severity} {finding.code}: {finding}" for finding in result.findings]
    count = f"{len(lines)} finding{'s' if len(lines) > 1 else ''}" if lines else "nothing found"
    if lines and config.checkup == "strict":
        what = f"checkup=strict: {count} in {survey.spec.option}; mend it, or take checkup=warn"
        raise EnvSpecError("\n".join([what, *lines]))
    say(console, f"Checkup: {count} in {result.steps:,} steps by random legal actions")
    for line in lines[:MOST_LINES]:
        say(console, line)
    if lines:
        more = f"{len(lines) - MOST_LINES} more in" if len(lines) > MOST_LINES else "stored in"
        longer = f"checkup=strict stops here, `{command()} check` looks longer"
        say(console, f"  ({more} {folder / 'checkup.json'}; {longer})")
    for text in _notes(result, config):
        say(console, f"  {text}")
    return None if result.errors else result.costs


def _notes(result: CheckupResult, config: Config) -> list[str]:
    """What is no fault of the env's, and worth a line."""
    notes = [f"not checked: {text}" for text in result.not_checked]
    if result.masks_ignored and config.algo.spec.masks == "no":
        notes.append(f"the env offers action masks and algo={config.algo.name} ignores them: take algo=maskable_ppo")
    return notes


def _looked(survey: Survey, folder: Path, limits: Mapping[str, Any], may_stay: bool = False) -> CheckupResult:
    """The checkup, written down; also one that the env did not survive."""
    try:
        result = survey.checkup(limits, may_stay)
    except BrokenEnvError as error:
        _write({"findings": [{"code": error.code, "severity": "error", "message": str(error)}]}, survey.spec, folder)
        raise
    _write(result.to_dict(), survey.spec, folder)
    return result


def _write(found: Mapping[str, Any], spec: EnvSpec, folder: Path) -> None:
    write_json(folder / "checkup.json", {"schema": CHECK_SCHEMA, "env": spec.option, **found})


def _cost_table(result: CheckupResult, costs: ProbeResult) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _cost_rows(result, costs):
        table.add_row(name, text)
    return table


def _cost_rows(result: CheckupResult, costs: ProbeResult) -> Iterator[tuple[str, str]]:
    yield "build", _duration(costs.build_s)
    yield "reset", _duration(costs.reset_s)
    step_s = costs.step_s + costs.mask_s
    rate = f", {rate_text(1 / step_s)} steps/s one after another" if step_s > 0 else ""
    yield "step", f"{_duration(costs.step_s)} ± {_duration(costs.step_cv * costs.step_s)}{rate}"
    yield "action mask", _duration(costs.mask_s) if costs.has_masks else "none"
    count = len(result.returns)
    episode = "none ended" if costs.episode_steps is None else f"{costs.episode_steps:,.1f} steps, mean of {count:,}"
    yield "episode", episode
    if result.reward_range is not None:
        yield "reward", _range(*result.reward_range)
    if result.returns:
        yield "return", f"{_range(min(result.returns), max(result.returns))}, mean {sum(result.returns) / count:.4g}"
    yield "info", f"{costs.info_bytes:,.0f} bytes a step when sent to another process"
    yield "CPU time", f"{100 * costs.cpu_share:.0f} % of a step's time; where it is low, the env waits for something"


def _range(low: float, high: float) -> str:
    return f"always {low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"
