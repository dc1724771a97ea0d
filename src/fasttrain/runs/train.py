"""One training run, from the configuration to the files in its folder. Read this first.

checkup → plan → envs → algorithm → learn (with one callback) → model.zip → evaluation → perf.json, summary.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.engine import Fast
from fasttrain.errors import EXIT_DONE, EXIT_STOPPED
from fasttrain.machine import process_age_s
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.report import EnvTimes, PerfWindow
from fasttrain.perf.windows import PerfMeter
from fasttrain.runs import callbacks, engine
from fasttrain.runs.calibration import calibrate, calibrate_at_switch, settle_threads
from fasttrain.runs.check import run_checkup, with_trial
from fasttrain.runs.curriculum import Curriculum
from fasttrain.runs.envs import (
    build_vec_env,
    engines_of,
    env_facts,
    env_spec,
    env_times,
    game_calls,
    survey_of,
    this_machine,
)
from fasttrain.runs.evaluate import check_evaluation
from fasttrain.runs.evaluator import Evaluator
from fasttrain.runs.folders import clear, provenance
from fasttrain.runs.loggers import UsersCallbacks, check_loggers, log_figures, make_logger, metrics_of
from fasttrain.runs.models import build_algorithm, evaluation_env
from fasttrain.runs.parts import Parts
from fasttrain.runs.phases import Phases
from fasttrain.runs.progress import EVALUATING
from fasttrain.runs.state import MODEL, raise_crash, snapshot
from fasttrain.runs.stopping import stopping_for
from fasttrain.runs.summary import check_saved, evaluate_run, report, tell_loggers
from fasttrain.runs.teacher import follow_teacher
from fasttrain.runs.video import check_every, recorded
from fasttrain.runs.view import Voice, activity, make_console, say, show_plan
from fasttrain.runs.warm_start import check_init_from, warm_start, with_absolute_paths
from fasttrain.saving.checkpointing import Checkpoints, Settings
from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.saving.files import clean, lock_folder
from fasttrain.spec.checks import short_run_warning
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.reading import with_fixed_opponent
from fasttrain.vec.base import close_envs
from fasttrain.vec.stock import killing_workers
from fasttrain_vec.process import Scout

Draw = Callable[[Path], str]  # draws report.html in a run's folder; returns why it failed, or an empty text


def main(
    config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], draw: Draw = lambda _: ""
) -> int:
    """Train the run of `config` and write its files into `folder`. Returns the exit code."""
    if config.warmup == "only":
        return engine.warm_up(config, sources)
    with open_run(config, sources, folder, overrides) as run:
        return train_to_end(run, overrides, draw)


@contextmanager
def open_run(
    config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str], switch_at: int | None = None
) -> Iterator[Parts]:
    """Build the run that `config` asks for; show its plan and write plan.json. `folder` is locked inside the block."""
    console = make_console()
    if config.names_models:
        config = with_absolute_paths(config)
        check_init_from(config)
    with lock_folder(folder), survey_of(with_fixed_opponent(config), console) as survey:
        calls = game_calls(config)  # compiled before the checkup, which plays the game
        compile_s = engine.compile_shown(calls, console) if calls else 0.0
        looks = [partial(run_checkup, config, folder, console, survey)] * 2 if config.checkup != "off" else []
        facts, machine = env_facts(with_fixed_opponent(config), survey, *looks), this_machine()
        plan = resolve(config, sources, facts, machine)
        if plan.row("vec_env").requested == "auto" and (tried := with_trial(facts, plan, machine, console)) != facts:
            plan = resolve(config, sources, tried, machine)
        if config.on_existing != "refuse":
            clear(folder, but="checkup.json" if config.checkup != "off" else "")
            if config.checkpoint.copy_to is not None:
                from fasttrain.saving.remote import RemoteFolder

                RemoteFolder(config.checkpoint.copy_to).clear()
        with activity(console, "building the run"):
            scout = survey.first_worker(plan.config, env_spec(plan.config))
            run = build(plan._replace(engine_switch_at=switch_at), folder, console, scout=scout, density=facts.density)
        run.compile_s += compile_s
        run.origin = {"provenance": provenance(overrides)}
        run.write_plan()
        show_plan(console, run.plan)
        if warning := short_run_warning(run.plan.config):
            say(console, f"  {warning}", "bold")
        yield run


def train_to_end(run: Parts, overrides: Sequence[str], draw: Draw) -> int:
    """Train a new or restored run to its end and write its files. Returns the exit code."""
    with run.stop.listening():
        _train(run, overrides, draw)
    run.status.now("stopped" if run.stop.requested else "done")
    if (place := run.config.checkpoint.copy_to) is not None:
        with activity(run.console, f"copying the run to {place}"), run.saving.of(f"the copy at {place}"):
            cast(Any, run.checkpoints.folder).remote.store(run.folder)
            run.checkpoints.failed *= "CopyError" not in run.checkpoints.failed  # what was not copied is there now
    check_saved(run)
    return EXIT_STOPPED if run.stop.requested else EXIT_DONE


def _train(run: Parts, overrides: Sequence[str], draw: Draw) -> None:
    try:
        window = learn(run)
        with activity(run.console, f"saving {MODEL}"), run.saving.of(MODEL):
            run.save(run.folder / MODEL)
        run.status.now(EVALUATING)
        with run.saving.extra("evaluations beside training"), activity(run.console, "waiting for evaluations"):
            run.evaluator.finish(lambda: not run.stop.requested)
        summary = report(run, window, list(overrides))
        if run.config.report and (failed := draw(run.folder)):
            run.saving.cost("report.html", failed)
        with run.saving.extra("loggers"):
            tell_loggers(run, summary)
    except BaseException as error:
        run.status.now("crashed")
        with killing_workers(run.env):
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
            run.say(f"warning: close() of an env failed; the results of the run are complete: {failed}")


def learn(run: Parts) -> PerfWindow:
    """Train until `total_timesteps`, a stopping rule or a signal. Returns how long each phase took."""
    run.startup_s = process_age_s()
    served: Any = nullcontext()
    if (metrics := metrics_of(run.config)) is not None:
        served = metrics.serving(metrics.endpoint_of(run.config), run.progress, run.env, run.model)
    with served, run.live:
        more: Any = {"log_interval": None, "reset_num_timesteps": not run.resumed_at}
        run.model.learn(run.config.total_timesteps - run.model.num_timesteps, callbacks.callbacks_of(run), **more)
        window = run.meter.overall(run.progress.env_steps, run.progress.updates)  # measured before the last checkpoint
        with activity(run.console, "writing the last checkpoint"):
            wanted = run.stop.requested or run.course.continues
            run.checkpoints.finish(run.model.num_timesteps, run.course.at_rest, wanted)
        return window


# --- building the parts of a run


def build(
    plan: RunSpec,
    folder: Path,
    console: Console,
    resumes: bool = False,
    scout: Scout | None = None,
    density: tuple[float, float] = (1.0, 1.0),
) -> Parts:
    """Build the run of a plan.

    Args:
        resumes: the run appends to the files in its folder.
        scout: the process that ran the checkup; it becomes the first worker.
        density: shares of non-zero numbers in observations, and of legal actions.
    """
    config, voice, clock = plan.config, Voice(console), PhaseClock()
    if resumes:
        clean(folder)
    stopping, users = stopping_for(config), UsersCallbacks(config, clock, lambda: evaluation_env(config))
    engine.set_up_torch(config)
    if config.video.every:
        check_every(config)
    check_loggers(config)
    compile_s = engine.compile_shown(game_calls(config), console)  # takes no time if `open_run` has compiled them
    with activity(console, f"starting {config.num_envs:,} envs") as doing:
        env = build_vec_env(config, config.num_envs, config.seed, None, doing.now, scout, folder / "daemons")
    try:
        model = _model(config, env, clock, voice, bool(users.callbacks))
        if config.names_models:
            if not resumes:
                warm_start(config, model, voice)
            follow_teacher(config, model)
        plan = _settled(plan, model, console, resumes, density)
        config = plan.config
        switch, switch_s = engine.switch_for(plan, model, console, voice, resumes, lambda: _decide(run, density))
        pool = callbacks.pool_for(config, model, env)
        phases = Phases(config.env.phases, model) if config.env.phases else None
        curriculum = Curriculum(config, config.num_envs) if config.curriculum.tasks else None
        if curriculum is not None:
            curriculum.begin(env)
        run = Parts(plan, folder, console, voice, clock, stopping, users, env, model, pool, curriculum, phases, switch)
        run.compile_s = compile_s + switch_s
        callbacks.count_empty_masks(model, run.empty_masks)
        _complete(run, config)
        with activity(console, "starting loggers"):
            model.set_logger(make_logger(config, folder, resumes, voice))
        return run
    except BaseException:
        env.close()
        raise


def _model(config: Config, env: VecEnv, clock: PhaseClock, voice: Voice, has_callbacks: bool) -> BaseAlgorithm:
    """Build the algorithm. If the user has callbacks, each step gets new arrays, because a callback may keep them."""
    model = build_algorithm(config, env, clock)
    if config.cluster.engine != "off":
        cast(Any, env.unwrapped).check_algorithm(model)
    if (replay := callbacks.replay_dict(model)) is not None:  # say the full size: buffers take memory as they fill
        voice(f"replay buffer: {replay['capacity']:,} transitions, {replay['memory_bytes']:,} bytes when full")
    if has_callbacks and isinstance(model, Fast):
        model.collector.lends = False
    if engines_of(env) is None:  # external engines: their workers have checked eval.env_kwargs
        check_evaluation(model, config)
    return model


def _settled(
    plan: RunSpec, model: BaseAlgorithm, console: Console, resumes: bool, density: tuple[float, float]
) -> RunSpec:
    """Decide what depends on the built model: kernels or PyTorch, the number of threads, torch.compile or not."""
    plan = engine.settle_kernels(plan, model, resumes)
    if any(plan.row(flag).requested == "auto" for flag in ("fused_update", "torch_threads")):
        with activity(console, "trying kernels, torch and its threads"):
            plan = settle_threads(plan if resumes else calibrate(plan, model, console, density), model)
    with activity(console, "compiling the policy"):
        return engine.settle_engine(plan, model)


def _complete(run: Parts, config: Config) -> None:
    """Add the parts that use other parts of the run: evaluator, [PERF] meter and checkpoints."""
    counted, (every, every_s) = run.env.has_attr("opponents_ns"), config.checkpoint_interval

    def times() -> EnvTimes:
        told = env_times(run.env, config, int(run.course.enemy_turn_ms * 1e6), counted)
        told = told._replace(episodes=run.progress.episodes, ticks=run.progress.ticks)
        ours = getattr(getattr(run.model, "collector", None), "continuous", None)
        return told if ours is None else told._replace(lags=ours.lags())

    run.evaluator = Evaluator(
        config, run.folder, lambda: evaluate_run(run, final=False)["greedy"], run.save, run.say, run.saving,
        note=lambda quality, env_steps: log_figures(run.model.logger, "eval", lambda: quality, env_steps),
        film=lambda file: recorded(config, run.model, run.model.get_vec_normalize_env(), file),
    )  # fmt: skip
    run.meter = PerfMeter(
        run.clock, times, lambda: callbacks.replay_words(run.model) + callbacks.policies_words(run.model)
    )
    saved = CheckpointFolder(run.folder / "checkpoints", config.checkpoint.keep)
    if (place := config.checkpoint.copy_to) is not None:
        from fasttrain.saving.remote import CopiedCheckpoints, RemoteFolder

        saved = CopiedCheckpoints(saved.root, saved.keep, RemoteFolder(place))
    saved.clean()
    settings = Settings(every, config.checkpoint_async, config.checkpoint.grace_s, every_s)
    run.checkpoints = Checkpoints(saved, lambda: snapshot(run), settings, run.clock, run.say)


def _decide(run: Parts, density: tuple[float, float]) -> str:
    """Choose PyTorch or the kernels, which are compiled now. Returns why PyTorch was chosen; empty: the kernels."""
    run.plan, reason = calibrate_at_switch(run.plan, cast(Fast, run.model), run.console, density)
    return reason
