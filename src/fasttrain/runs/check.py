"""Trials before a training: the checkup of the env, and a measurement of one process against several workers.

Before a training the checkup prints a few lines. `fasttrain check` plays longer and also shows what a step costs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.envs.checkup import CheckupResult
from fasttrain.envs.masks import random_legal_action
from fasttrain.envs.probe import ProbeResult
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.runs.batches import check_native_options, checkup_of_game, has_vector_form, made_batch
from fasttrain.runs.envs import build_vec_env, env_spec
from fasttrain.runs.spaces import check_observations, check_spaces
from fasttrain.runs.survey import BrokenEnvError, Survey
from fasttrain.runs.view import activity, make_console, say
from fasttrain.saving.env_state import own_random_state
from fasttrain.saving.files import write_json
from fasttrain.spec.backends import backend_of
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.reading import is_self_play, uses_masks, with_fixed_opponent
from fasttrain.spec.stepping import SHARED_MUST_GAIN, SLOW_S, is_faster, needs_single_envs, step_costs
from fasttrain.terminal import command, duration_text, rate_text
from fasttrain.vec.base import SlotVecEnv, slots_of

CHECK_SCHEMA = 1
LONG = {"max_steps": 5_000, "max_seconds": 20.0}  # limits of `fasttrain check`; a training uses the checkup's defaults
MOST_LINES = 6  # most lines of findings that a training prints


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """`fasttrain check env.id=…`. Returns exit code 2 if an error was found, with checkup=strict for any finding."""
    backend = backend_of(config.env)
    if backend is not None and not backend.lends:
        one = "check plays one Gymnasium env, or one game with an engine"
        raise ConfigError(f"{one}: env.backend={backend.name} builds a batch of envs; remove env.backend")
    console, look = make_console(), _check_env if backend is None else _check_game
    option, result = look(with_fixed_opponent(config), "algo" in sources, folder, console)
    say(console, f"Checkup of {option}: {result.steps:,} steps by random legal actions, {result.seconds:.1f} s")
    if result.costs is not None:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, text in _cost_rows(result, result.costs):
            table.add_row(name, text)
        console.print(table)
    for text in _notes(result, config):
        say(console, text)
    for finding in result.findings:
        say(console, f"{finding.severity} {finding.code}: {finding}")
    if not result.findings:
        say(console, "nothing found" + (" in what could be checked" if result.not_checked else ""))
    say(console, f"written to {folder / 'checkup.json'}")
    return EnvSpecError.exit_code if result.errors or (config.checkup == "strict" and result.findings) else 0


def _check_env(config: Config, for_algo: bool, folder: Path, console: Console) -> tuple[str, CheckupResult]:
    """The longer checkup of a Gymnasium env. `for_algo`: also check that the env suits the algorithm."""
    spec = env_spec(config)
    if not for_algo:  # the user named no algorithm, so masks are not required
        spec = dataclasses.replace(spec, needs_masks=False, use_masks=True)
    with Survey(spec, config.env.step_timeout_s, console) as survey:
        built = survey.build()
        if built.mask_error:
            raise EnvSpecError(built.mask_error)
        if for_algo:
            check_spaces(config, spec.option, built.action_space, built.observation_space)
        else:
            check_observations(config, spec.option, built.observation_space)
        look = partial(survey.checkup, LONG, False, config.num_envs > 1)
        return spec.option, _stored_checkup(look, spec.option, folder)


def _check_game(config: Config, for_algo: bool, folder: Path, console: Console) -> tuple[str, CheckupResult]:
    """The longer checkup of a game with an external engine."""
    check_native_options(config)
    option = config.env.option
    with closing(made_batch(config, 1)) as games, activity(console, f"checkup of {option}"):
        if for_algo:
            check_spaces(config, option, games.action_space, games.observation_space)
        look = partial(checkup_of_game, games, uses_masks(config) or not for_algo, **LONG)
        return option, _stored_checkup(look, option, folder)


# With these faults neither fasttrain nor stock SB3 can train. Other errors harm learning, or occur only in random play.
FATAL = ("reward_not_scalar", "wrong_shape", "reset_answer", "step_answer", "info_not_dict", "needs_package")


def run_checkup(
    config: Config, folder: Path, console: Console, survey: Survey, games: SlotVecEnv | None = None
) -> ProbeResult | None:
    """The checkup before a training: prints its findings and writes checkup.json.

    Returns the times of the env; None if the env was not played (a VectorEnv) or an error was found. Raises
    EnvSpecError for faults with which no training can run, and with checkup=strict for any finding. `games`: one game
    with an external engine, which is played in place of the survey's env.
    """
    option, may_stay = survey.spec.option, config.vec_env in ("auto", "shared") and not config.deterministic
    look: Callable[[], CheckupResult] = partial(survey.checkup, {}, may_stay, config.num_envs > 1)
    if games is not None:
        look = partial(checkup_of_game, games, uses_masks(config))
    with nullcontext() if games is None else activity(console, f"checkup of {option}"):
        result = _stored_checkup(look, option, folder)
    lines = [f"  {finding.severity} {finding.code}: {finding}" for finding in result.findings]
    nothing = "nothing found in what could be checked," if result.not_checked else "nothing found"
    count = f"{len(lines)} finding{'s' if len(lines) > 1 else ''}" if lines else nothing
    begun = result.costs is not None  # False: the first reset or step failed
    fatal = [
        line
        for line, finding in zip(lines, result.findings, strict=True)
        if finding.code in FATAL or (not begun and finding.severity == "error")
    ]
    if fatal:
        raise EnvSpecError("\n".join([f"{option}: the checkup found errors that stop every training", *fatal]))
    if lines and config.checkup == "strict":
        what = f"checkup=strict: {count} in {option}; mend it, or use checkup=warn"
        raise EnvSpecError("\n".join([what, *lines]))
    more = f"{len(lines) - MOST_LINES} more in" if len(lines) > MOST_LINES else "stored in"
    longer = f"checkup=strict stops here, `{command()} check` looks longer"
    where = [f"  ({more} {folder / 'checkup.json'}; {longer})"] if lines else []
    say(console, f"Checkup: {count} in {result.steps:,} steps by random legal actions")
    for line in [*lines[:MOST_LINES], *where, *(f"  {text}" for text in _notes(result, config))]:
        say(console, line)
    return None if result.errors else result.costs


def _notes(result: CheckupResult, config: Config) -> list[str]:
    """Lines about what was not checked, and about masks that the algorithm ignores."""
    notes = [f"not checked: {text}" for text in result.not_checked]
    if result.masks_ignored and config.algo.spec.masks == "no":
        notes.append(f"the env offers action masks and algo={config.algo.name} ignores them: use algo=maskable_ppo")
    return notes


def _stored_checkup(look: Callable[[], CheckupResult], option: str, folder: Path) -> CheckupResult:
    """Run the checkup and write checkup.json, also if the env ended its process."""

    def write(found: Mapping[str, Any]) -> None:
        write_json(folder / "checkup.json", {"schema": CHECK_SCHEMA, "env": option, **found})

    try:
        result = look()
    except BrokenEnvError as error:
        write({"findings": [{"code": error.code, "severity": "error", "message": str(error)}]})
        raise
    write(result.to_dict())
    return result


def _cost_rows(result: CheckupResult, costs: ProbeResult) -> Iterator[tuple[str, str]]:
    yield "build", duration_text(costs.build_s)
    yield "reset", duration_text(costs.reset_s)
    step_s = costs.step_s + costs.mask_s
    rate = f", {rate_text(1 / step_s)} steps/s one after another" if step_s > 0 else ""
    yield "step", f"{duration_text(costs.step_s)} ± {duration_text(costs.step_cv * costs.step_s)}{rate}"
    yield "action mask", duration_text(costs.mask_s) if costs.has_masks else "none"
    count = len(result.returns)
    episode = "none ended" if costs.episode_steps is None else f"{costs.episode_steps:,.1f} steps, mean of {count:,}"
    yield "episode", episode
    if result.reward_range is not None:
        yield "reward", _range(*result.reward_range)
    if result.returns:
        yield "return", f"{_range(min(result.returns), max(result.returns))}, mean {sum(result.returns) / count:.4g}"
    yield "info", f"{costs.info_bytes:,.0f} bytes a step when sent to another process"
    yield "CPU time", f"{100 * costs.cpu_share:.0f} % of a step's time; if it is low, the env waits for something"


def _range(low: float, high: float) -> str:
    return f"always {low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


CLOSE = 2.0  # a trial is run only if the estimates for one process and for workers differ by less than this factor
TURNS, TURN_S = 3, 0.1
PAYS_FROM_S = 20.0  # if all steps take less time, there is no trial, because a trial takes two or three seconds


def with_trial(facts: EnvFacts, plan: RunSpec, machine: Machine, console: Console) -> EnvFacts:
    """For `vec_env=auto`: `facts` with the measured time of a step in one process and in workers, if the estimates are
    close. The trial has its own envs and restores the random state. With `deterministic=true` there is no trial.
    """
    config = plan.config
    needs_workers = config.env.on_env_error == "restart"
    if facts.step_s is None or config.deterministic or is_self_play(config) or config.num_envs == 1 or needs_workers:
        return facts  # on_env_error=restart: only workers can restart an env
    facts = facts._replace(vector_form=has_vector_form(config))
    if facts.vector_form and not needs_single_envs(config):
        own = dataclasses.replace(config, vec_env="vector", workers=0, schedule="lockstep")
        with suppress(Exception), activity(console, "trying the env's own vector form"), own_random_state(config.seed):
            other_s, own_s = step_times(dataclasses.replace(config, schedule="lockstep"), own)
            facts = facts._replace(vector=(other_s, own_s))
        if is_faster(facts.vector):
            return facts
    loop_s, shared_s, workers = step_costs(config.num_envs, facts, machine)
    pays = config.total_timesteps / config.num_envs * loop_s >= PAYS_FROM_S
    if workers < 2 or not pays or not 1 / CLOSE < loop_s / shared_s < CLOSE:
        return facts
    alone = dataclasses.replace(config, vec_env="dummy", schedule="lockstep")
    shared = dataclasses.replace(config, vec_env="shared", workers=workers, schedule="lockstep")
    try:
        with activity(console, "trying one process and workers"), own_random_state(config.seed):
            loop_s, shared_s = step_times(alone, shared)
        if (facts.step_s or 0.0) >= SLOW_S and 1 / SHARED_MUST_GAIN < loop_s / shared_s < SHARED_MUST_GAIN:
            with activity(console, "trying again, because the result is close"), own_random_state(config.seed):
                again = step_times(alone, shared)
            loop_s, shared_s = min(loop_s, again[0]), min(shared_s, again[1])  # other programs only add time
        return facts._replace(tried=(loop_s, shared_s))
    except Exception:  # for example an env that cannot be open twice; if it is faulty, the run reports the error
        return facts


def step_times(*configs: Config) -> tuple[float, ...]:
    """For each configuration the median seconds of a vector step with the reading of masks, measured alternately."""
    with ExitStack() as stack:
        built = (closing(build_vec_env(config, config.num_envs, config.seed)) for config in configs)
        envs = [stack.enter_context(env) for env in built]
        players = [_Player(env) for env in envs]
        for _ in range(TURNS):
            for player in players:
                player.play(TURN_S)
        return tuple(statistics.median(player.steps_s) for player in players)


class _Player:
    """Plays a vector env by random legal actions."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.source = env, slots_of(env)
        self.steps_s: list[float] = []
        self._rng = np.random.default_rng(0)
        self.env.action_space.seed(0)
        env.reset()
        self._masks = self.source.read_masks()

    def play(self, seconds: float) -> None:
        space, until = self.env.action_space, time.perf_counter() + seconds
        while True:
            masks = [None] * self.env.num_envs if self._masks is None else self._masks
            actions = np.stack([random_legal_action(space, mask, self._rng) for mask in masks])
            began = time.perf_counter()
            self.source.step_slots(actions)
            self._masks = self.source.read_masks()
            self.steps_s.append(time.perf_counter() - began)
            if time.perf_counter() > until:
                return
