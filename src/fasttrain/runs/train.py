"""One training run, from the configuration to the files in its folder. Read this first.

checkup → plan → envs → algorithm → learn (with one callback) → model.zip → evaluation → perf.json, summary.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.fast import Fast
from fasttrain.deploy.video import check_every, recorded
from fasttrain.errors import EXIT_DONE, EXIT_STOPPED, FastTrainError
from fasttrain.machine import process_age_s
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.report import EnvTimes, PerfWindow, perf_dict
from fasttrain.perf.stock import StockPhases, is_stock
from fasttrain.perf.windows import PerfMeter
from fasttrain.runs import callbacks, engine
from fasttrain.runs import view as show
from fasttrain.runs.calibration import calibrated, chosen_at_switch
from fasttrain.runs.check import run_checkup, settle_threads, with_trial
from fasttrain.runs.envs import build_vec_env, env_facts, env_spec, game_calls, survey_of, this_machine
from fasttrain.runs.evaluate import Quality, check_evaluation, summarise
from fasttrain.runs.evaluator import EVALUATION, Evaluator
from fasttrain.runs.folders import clear, gone, provenance
from fasttrain.runs.lending import measured
from fasttrain.runs.loggers import UsersCallbacks, check_loggers, finish, make_logger, note
from fasttrain.runs.logs import EpisodeLog
from fasttrain.runs.metrics import endpoint_of, served
from fasttrain.runs.models import build_algorithm, evaluation_env, save_model
from fasttrain.runs.progress import Progress
from fasttrain.runs.state import MODEL, raise_crash, snapshot
from fasttrain.runs.status import EVALUATING, StatusFile
from fasttrain.runs.stopping import StopFlag, stopping_for
from fasttrain.runs.summary import summary_of
from fasttrain.runs.times import engines_of, env_times
from fasttrain.runs.trackers import Watched
from fasttrain.runs.view import LiveView, activity
from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.saving.files import Saving, clean, into_place, locked, write_json
from fasttrain.saving.rests import Checkpoints, Settings
from fasttrain.spec.checks import too_short
from fasttrain.spec.config import Config
from fasttrain.spec.infos import InfoReader
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.reading import against_bots
from fasttrain.terminal import Output, command, near
from fasttrain.vec.base import EmptyMasks, close_envs
from fasttrain.vec.process import Scout
from fasttrain.vec.stock import workers_ended

Draw = Callable[[Path], str]  # report.html of a run's folder; why there is none


def main(
    config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], draw: Draw = lambda _: ""
) -> int:
    """Train as `config` says and leave everything in `folder`; returns the exit code."""
    if config.warmup == "only":
        return engine.warm_up(config, sources)
    with ready(config, sources, folder, overrides) as run:
        return carry_out(run, overrides, draw)


@contextmanager
def ready(
    config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], switch_at: int | None = None
) -> Iterator[Run]:
    """The run that `config` asks for, its plan shown and written down; inside, `folder` is this process's alone.

    Args:
        switch_at: `engine_switch_at` of a run that is repeated.
    """
    console = show.make_console()
    with locked(folder), survey_of(against_bots(config), console) as survey:
        compile_s = engine.compile_shown(game_calls(config), console)  # before the checkup plays it
        look = partial(run_checkup, config, folder, console, survey)
        facts = env_facts(against_bots(config), survey, look, look)
        plan = resolve(config, sources, facts, this_machine())
        if (tried := with_trial(facts, plan, this_machine(), console)) != facts:
            plan = resolve(config, sources, tried, this_machine())
        if config.on_existing != "refuse":
            clear(folder, but="checkup.json" if config.checkup != "off" else "")
        with activity(console, "building the run"):
            scout = survey.first_worker(plan.config, env_spec(plan.config))
            run = Run(plan._replace(engine_switch_at=switch_at), folder, console, scout=scout, density=facts.density)
        run.compile_s += compile_s
        run.origin = {"provenance": provenance(overrides)}
        run.write_plan()
        show.show_plan(console, run.plan)
        if warning := too_short(run.plan.config):
            show.say(console, f"  {warning}", "bold")
        yield run


def carry_out(run: Run, overrides: Sequence[str], draw: Draw) -> int:
    """Train a run that was built, or restored, until its end, and leave everything in its folder."""
    with run.stop.listening():
        _to_the_end(run, overrides, draw)
    run.status.now("stopped" if run.stop.requested else "done")
    run.check_saved()
    return EXIT_STOPPED if run.stop.requested else EXIT_DONE


def _to_the_end(run: Run, overrides: Sequence[str], draw: Draw) -> None:
    try:
        window = run.learn()
        with activity(run.console, f"saving {MODEL}"), run.saving.of(MODEL):
            run.save(run.folder / MODEL)
        run.status.now(EVALUATING)
        with run.saving.extra("evaluations beside training"), activity(run.console, "waiting for evaluations"):
            run.evaluator.finish(lambda: not run.stop.requested)
        summary = run.report(window, list(overrides))
        if run.config.report and (failed := draw(run.folder)):
            run.saving.cost("report.html", failed)
        with run.saving.extra("loggers"):
            run.tell_loggers(summary)
    except BaseException as error:
        run.status.now("crashed")
        with workers_ended(run.env):
            raise_crash(run, error, overrides)
    finally:
        if run.engine_switch is not None:
            run.engine_switch.close()
        with activity(run.console, "writing the last checkpoint"):
            run.checkpoints.wait()
        run.evaluator.close()
        with run.saving.extra("loggers"):
            run.model.logger.close()
        with activity(run.console, "closing the envs"):
            failed = close_envs(run.env)
        if failed:
            run.say(f"warning: close() of an env failed, which costs nothing else: {failed}")


class Run:
    """The parts of one run, wired.

    Args:
        resumes: the folder has files that the run goes on with.
        scout: the process that looked at the env, for a training that has workers.
        density: as in `EnvFacts`.
    """

    def __init__(
        self,
        plan: RunSpec,
        folder: Path,
        console: Console,
        resumes: bool = False,
        scout: Scout | None = None,
        density: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.density = density
        self.folder, self.console, self.resumes = folder, console, resumes
        self.resumed_at: list[int] = []  # env steps
        self.origin: dict[str, Any] = {}  # of plan.json: where the run, and what went on with it, comes from
        self.said = ""  # the last line
        if resumes:
            clean(folder)
        self.plan, config = plan, plan.config
        self.clock, self.saving, self.stop = PhaseClock(), Saving(self.say), StopFlag()
        self.empty_masks = EmptyMasks(config.env.on_empty_mask == "raise", self.say)
        self.stopping, self.reader = stopping_for(config), InfoReader.of(config.env, self.say)
        self.users = UsersCallbacks(config, self.clock, lambda: evaluation_env(config))
        if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # the call imports a compiler, 3 s
            torch.use_deterministic_algorithms(config.deterministic)
        if config.use_compile == "off":
            engine.leave_compiler_out()
        engine.set_threads(config.torch_threads)
        engine.pick_device(config.device, config.algo.policy)  # what is not there is told before workers start
        check_every(config)
        check_loggers(config)
        self.compile_s = engine.compile_shown(game_calls(config), console)  # waited for; what is loaded takes no time
        with activity(console, f"starting {config.num_envs:,} envs") as doing:
            self.env: VecEnv = build_vec_env(
                config, config.num_envs, config.seed, None, doing.now, scout, folder / "daemons"
            )
        try:
            self._wire(plan)
        except BaseException:
            self.env.close()
            raise

    def _wire(self, plan: RunSpec) -> None:
        """The parts that need the envs."""
        folder, console, self.model = self.folder, self.console, self._build_model()
        if engines_of(self.env) is None:  # which have begun a game of an evaluation
            check_evaluation(self.model, plan.config)
        plan = engine.settle_kernels(plan, self.model, self.resumes)
        with activity(console, "trying kernels, torch and its threads"):
            chosen = plan if self.resumes else calibrated(plan, self.model, console, self.density)
            plan = settle_threads(chosen, self.model)
        with activity(console, "compiling the policy"):
            self.plan = engine.settle_engine(plan, self.model)
        config = self.config
        self.engine_switch, took = engine.switch_for(
            self.plan, self.model, console, self.say, self.resumes, self._decide
        )
        self.compile_s += took
        self.pool = callbacks.pool_for(config, self.model, self.env)
        every = config.self_play.every
        self.snapshots = None if self.pool is None else callbacks.SnapshotCallback(self.pool, every, self.clock)
        self.evaluator = Evaluator(
            config, folder, lambda: measured(self, final=False)["greedy"], self.save, self.say, self.saving,
            lambda quality, env_steps: note(self.model.logger, "eval", lambda: quality, env_steps),
            lambda file: recorded(self.config, self.model, self.model.get_vec_normalize_env(), file),
        )  # fmt: skip
        self._unsupported = ""  # why kernels serve no more, as it was told
        self._counts_opponents = self.env.has_attr("opponents_ns")
        self.progress = Progress(config.total_timesteps, self.clock)
        self.progress.max_s = None if config.stop.max_minutes is None else 60 * config.stop.max_minutes
        self.status = StatusFile(folder, self.progress, lambda: self.said)
        self.meter = PerfMeter(self.clock, self._env_times, lambda: callbacks.replay_words(self.model))
        self.checkpoints = self._build_checkpoints()
        self.episodes = EpisodeLog(folder / "episodes.csv", config.reward_debug, self.saving)
        title = f"{config.algo.name} on {config.env.id or config.env.entry_point}"
        panel = config.live == "on" or (config.live == "auto" and console.is_terminal)
        self.live = LiveView(self.progress, console, title, panel, self.status.tick)
        with activity(console, "starting loggers"):
            self.model.set_logger(make_logger(config, folder, self.resumes, self.say))
        self.callback = callbacks.RunCallback(self)

    @property
    def config(self) -> Config:
        """The effective one, after all that is known by now."""
        return self.plan.config

    def _build_model(self) -> BaseAlgorithm:
        model = build_algorithm(self.config, self.env, self.clock)
        callbacks.count_empty_masks(model, self.empty_masks)
        if (replay := callbacks.replay_dict(model)) is not None:  # np.zeros takes memory page by page, as it is written
            self.say(f"replay buffer: {replay['capacity']:,} transitions, {replay['memory_bytes']:,} bytes when full")
        if self.users.callbacks and isinstance(model, Fast):
            model.collector.lends_observations = False  # they may keep what they are shown
        return model

    def _build_checkpoints(self) -> Checkpoints:
        config = self.config
        folder = CheckpointFolder(self.folder / "checkpoints", config.checkpoint.keep)
        folder.clean()
        every, every_s = config.checkpoint_interval
        settings = Settings(every, config.checkpoint_async, config.checkpoint.grace_s, every_s)
        return Checkpoints(folder, lambda: snapshot(self), settings, self.clock, self.say)

    def watching(self) -> list[BaseCallback]:
        """What stands before all other callbacks."""
        before = [StockPhases(self.clock)] if is_stock(self.model) else []
        return [*before, *([] if self.snapshots is None else [self.snapshots])]

    def learn(self) -> PerfWindow:
        """Train until the horizon or a signal; where the time of that went."""
        callbacks = self.watching()
        self.startup_s = process_age_s()
        looked_at = served(endpoint_of(self.config), self.progress, self.env, self.model)
        with looked_at, self.live:
            callbacks += [*([self.users] if self.users.callbacks else []), self.callback]
            more: Any = {"callback": callbacks, "log_interval": None, "reset_num_timesteps": not self.resumed_at}
            self.model.learn(self.config.total_timesteps - self.model.num_timesteps, **more)
            window = self.meter.overall(self.progress.env_steps, self.progress.updates)  # the last checkpoint apart
            with activity(self.console, "writing the last checkpoint"):
                self.checkpoints.finish(self.model.num_timesteps, self.callback.at_rest, self.stop.requested)
            return window

    def change_engine(self) -> None:
        """Nothing is under way: let the compiled kernels take over if it is time, and write down when they did."""
        reason = getattr(getattr(self.model, "engine", None), "unsupported_reason", None)
        if reason and reason != self._unsupported:  # something was done to the policy or the algorithm on the way
            self._unsupported = reason
            self.say(f"PyTorch computes from here on, not compiled kernels: {reason}")
        switch = self.engine_switch
        if switch is None or switch.done:
            return
        before = self.plan
        with self.clock.phase("other"):
            switch.at_rest(self.progress)
        if switch.done and switch.beside_s is not None and switch.at is not None:  # not where the step was asked for
            self.plan = self.plan._replace(engine_switch_at=switch.at)
        if self.plan is not before:
            with self.saving.of("plan.json"):
                self.write_plan()

    def write_plan(self) -> None:
        """plan.json, whole: also in a folder that was moved or emptied on the way."""
        write_json(self.folder / "plan.json", {**self.plan.to_dict(), **self.origin})

    def _decide(self) -> str:
        self.plan, reason = chosen_at_switch(self.plan, self.model, self.console, self.density)
        return reason

    def save(self, file: Path) -> None:
        """The model, and what belongs to it: whole, or as it was."""
        with into_place(file) as draft:
            save_model(self.model, draft)
            if self.pool is not None:
                torch.save(self.pool.state(), callbacks.pool_file(draft))

    def check_saved(self) -> None:
        """At the end, whether everything is there.

        Raises:
            FastTrainError: something could not be written; names it, and the way on.
        """
        loggers = [each for each in self.model.logger.output_formats if isinstance(each, Watched)]
        for name, why in ((f"logger {each.name}", each.failed) for each in loggers if each.failed):
            self.saving.cost(name, why)
        if lost := Output.lost:
            self.saving.cost("the output", lost)
            Output.lost = ""
        normalized, pooled = bool(self.config.env.normalize), self.pool is not None
        missing = [*self.saving.missing(), *gone(self.folder, normalized, pooled, self.saving.failed)]
        if self.stop.requested and self.checkpoints.failed:
            missing.append(self.checkpoints.failed)
        way_on = ""
        if missing:
            newest, resume = self.checkpoints.folder.newest().folder, f"{command()} resume run={near(self.folder)}"
            way_on = f"; make room, then {resume} goes on from {newest.name}" if newest else ""
        told = {"not saved": missing, "failed, and cost nothing else": self.saving.missing(extras=True)}
        if text := "; ".join(f"{what}: {'; '.join(names)}" for what, names in told.items() if names):
            raise FastTrainError(text + way_on)

    def evaluate(self, measure: bool = True, film: bool = False) -> None:
        """Quality, and a video, now, or soon of what the policy is now."""
        with self.status.doing(EVALUATING) if self.evaluator.background is None else nullcontext():
            self.evaluator.evaluate(self.progress.env_steps, time.perf_counter() - self.progress.started, measure, film)

    def say(self, line: str) -> None:
        """One line, above the live view where there is one."""
        self.said = line
        show.say(self.console, line)

    def tell_loggers(self, summary: Mapping[str, Any]) -> None:
        """Hand the trackers what the run came to, and its files; say where they show it."""
        names = (MODEL, "report.html", "summary.json", "perf.json", "plan.json")
        with activity(self.console, "finishing loggers"):
            found = finish(self.model.logger, summary, [self.folder / name for name in names])
        for line in found:
            self.say(f"logger: {line}")

    def report(self, window: PerfWindow, overrides: list[str]) -> dict[str, Any]:
        """Evaluate the final model; print, write and return perf.json and summary.json."""
        flags = {row.flag: row.effective for row in self.plan.rows}
        show.show_perf(self.console, window, flags)
        if window.envs.restarts:
            lost = window.envs.lost_steps
            what = "engines" if window.envs.games else "envs or workers"
            self.say(f"  {window.envs.restarts} {what} failed and were replaced; {lost:,} env steps were lost")
        if empty := self.empty_masks.count:
            self.say(f"  {empty:,} action masks allowed nothing: any action counted as legal there")
        if left_out := self.episodes.left_out:
            self.say(f"  {left_out:,} episodes are missing in episodes.csv, which could not be written for too long")
        if terms := self.progress.mean_terms():
            parts = ", ".join(f"{name} {value:+.3g}" for name, value in terms.items())
            self.say(f"  reward per episode, last {len(self.progress.returns):,} episodes: {parts}")
        perf = {"total": perf_dict(window), "lines": self.meter.lines, "windows": self.meter.windows.rows()}
        games = engines_of(self.env)
        engines = {} if games is None else {"engines": games.summary(window.wall_ns / 1e9, fresh=True)}
        for line in [] if games is None else games.lines(engines["engines"]):
            self.say(f"  {line}")
        perf |= engines
        if self.engine_switch is not None:
            perf["engine_switch"] = self.engine_switch.to_dict()
        if (replay := callbacks.replay_dict(self.model)) is not None:
            self.say(f"  {callbacks.replay_line(replay)}")
            perf["replay"] = replay
        if line := callbacks.sequences_line(self.model):
            self.say(f"  {line}")
        with self.saving.of("perf.json"):
            write_json(self.folder / "perf.json", perf)
        quality: Quality = {"greedy": summarise([])}
        with self.saving.extra(EVALUATION):
            quality = measured(self, final=True)
        if quality["greedy"]["episodes"]:
            show.show_quality(self.console, quality)
        elif not self.config.eval.episodes:
            self.say("no evaluation: eval.episodes=0")
        summary = {**summary_of(self, window, quality, overrides), **engines}
        with self.saving.of("plan.json"):
            self.write_plan()
        with self.saving.of("summary.json"):
            write_json(self.folder / "summary.json", summary)
        if not self.saving.failed:
            self.say(f"everything is in {near(self.folder)}")
        return summary

    def _env_times(self) -> EnvTimes:
        measured = int(self.callback.enemy_turn_ms * 1e6) if hasattr(self, "callback") else 0
        times = env_times(self.env, self.config, measured, self._counts_opponents)
        return times._replace(episodes=self.progress.episodes, ticks=self.progress.ticks)
