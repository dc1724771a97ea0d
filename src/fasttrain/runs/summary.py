"""The results of a run: its quality, [PERF] and totals, shown at its end and written as perf.json and summary.json.

With `num_envs=1` no second env is opened, because some simulators can run only once (a port, a licence, a window).
Evaluations then play on the training's env. Afterwards the env gets its state back as in a resume, or begins a new
episode. With external engines the training's games pause during the evaluation's games. If the engines take no
more games, the training's games are ended and started again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from fasttrain import __version__
from fasttrain.algos.continuous import settle
from fasttrain.algos.engine import Fast
from fasttrain.algos.joint import Joint
from fasttrain.errors import FastTrainError
from fasttrain.perf.report import PerfWindow, limits_dict, perf_dict
from fasttrain.runs.callbacks import replay_dict, replay_line, sequences_line
from fasttrain.runs.envs import engines_of, with_statistics, wrapped
from fasttrain.runs.evaluate import Quality, evaluate_both, summarise
from fasttrain.runs.evaluator import EVALUATION
from fasttrain.runs.folders import missing_files
from fasttrain.runs.loggers import finish, guarded_writers
from fasttrain.runs.parts import Parts
from fasttrain.runs.state import MODEL, SEED_STRIDE, is_retraced, start_episodes
from fasttrain.runs.view import activity, show_perf, show_quality
from fasttrain.saving.env_state import env_state, load_env_state, own_random_state
from fasttrain.saving.files import SUMMARY_SCHEMA, write_json
from fasttrain.spec.config import Config
from fasttrain.spec.reading import evaluates_in_training_env, evaluates_in_training_games, evaluation_config
from fasttrain.terminal import Output, command, near


def report(run: Parts, window: PerfWindow, overrides: list[str]) -> dict[str, Any]:
    """Evaluate the final model; print, write and return perf.json and summary.json."""
    games = engines_of(run.env)
    engines = {} if games is None else {"engines": games.summary(window.wall_ns / 1e9, fresh=True)}
    _write_perf(run, window, engines)
    quality: Quality = {"greedy": summarise([])}
    with run.saving.extra(EVALUATION):
        quality = evaluate_run(run, final=True)
    if quality["greedy"]["episodes"]:
        show_quality(run.console, quality)
    elif not run.config.eval.episodes:
        run.say("no evaluation, because eval.episodes=0")
    summary = {**summary_of(run, window, quality, overrides), **engines}
    with run.saving.of("plan.json"):
        run.write_plan()
    with run.saving.of("summary.json"):
        write_json(run.folder / "summary.json", summary)
    if not run.saving.failed:
        run.say(f"everything is in {near(run.folder)}")
    return summary


def _write_perf(run: Parts, window: PerfWindow, engines: Mapping[str, Any]) -> None:
    """Show how long each phase took and what was lost; write perf.json."""
    show_perf(run.console, window, {row.flag: row.effective for row in run.plan.rows})
    if window.envs.restarts or window.envs.causes:
        what = "envs or workers" if run.config.cluster.engine == "off" else "envs or actors"
        what, lost = "engines" if window.envs.games else what, window.envs.lost_steps
        causes = ", ".join(f"{cause}: {count}" for cause, count in window.envs.causes)
        how = f"{what} were replaced ({causes})" if causes else f"{what} failed and were replaced"
        count = sum(count for _, count in window.envs.causes) or window.envs.restarts
        run.say(f"  {count} {how}; {lost:,} env steps were lost")
    if empty := run.empty_masks.count:
        run.say(f"  {empty:,} action masks allowed no action; in their states every action counted as legal")
    if left_out := run.episodes.left_out:
        run.say(f"  {left_out:,} episodes are missing in episodes.csv: writing it failed for too long")
    if terms := run.progress.mean_terms():
        parts = ", ".join(f"{name} {value:+.3g}" for name, value in terms.items())
        run.say(f"  reward per episode, last {len(run.progress.returns):,} episodes: {parts}")
    games = engines_of(run.env)
    for line in [] if games is None else games.lines(engines["engines"]):
        run.say(f"  {line}")
    perf = {"total": perf_dict(window), "lines": run.meter.lines, "windows": run.meter.windows.rows(), **engines}
    if run.engine_switch is not None:
        perf["engine_switch"] = run.engine_switch.to_dict()
    if (replay := replay_dict(run.model)) is not None:
        run.say(f"  {replay_line(replay)}")
        perf["replay"] = replay
    if line := sequences_line(run.model):
        run.say(f"  {line}")
    with run.saving.of("perf.json"):
        write_json(run.folder / "perf.json", perf)


def summary_of(run: Parts, window: PerfWindow, quality: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The contents of summary.json."""
    perf, warmup_s = perf_dict(window), run.model.engine.warmup_s if isinstance(run.model, Fast) else 0.0
    stopped_by = "horizon" if run.course.stopped is None else run.course.stopped.by
    stopped_by = "signal" if run.stop.requested else stopped_by  # also by a signal during the final evaluation
    failed = run.saving.failed.get(EVALUATION)
    why = (f"failed: {failed}" if failed else "") if run.config.eval.episodes else "left out: eval.episodes=0"
    return {
        "schema": SUMMARY_SCHEMA,
        "version": __version__,
        "status": "stopped" if run.stop.requested else "done",
        "stopped_by": stopped_by,
        **{key: perf[key] for key in ("env_steps", "wall_s", "steps_per_s", "updates", "update_ratio")},
        **_whole_run(run, perf["wall_s"]),
        "startup_s": round(run.startup_s, 3),
        "first_update_s": run.progress.first_update_s,
        "compile_s": round(run.compile_s + warmup_s, 3),  # part of startup_s: kernels and torch.compile
        **({} if run.engine_switch is None else {"engine_switch": run.engine_switch.to_dict()}),
        "episodes": run.progress.episodes,
        **({"empty_masks": run.empty_masks.count} if run.empty_masks.count else {}),
        "reward_per_hour": run.progress.curve.reward_per_hour(),
        "perf": perf,
        "limits": limits_dict(window),
        "utilization": {"cpu": window.cpu_share, "gpu": window.gpu_share, "memory_bytes": window.memory_bytes},
        **({} if (replay := replay_dict(run.model)) is None else {"replay": replay}),
        "quality": {**quality["greedy"], **({"sampled": quality["sampled"]} if "sampled" in quality else {})},
        **({"evaluation": why} if why else {}),
        **({} if run.pool is None else {"self_play": run.pool.summary()}),
        **({} if run.curriculum is None else {"tasks": run.curriculum.to_dict()}),
        **({"policies": run.model.figures()} if isinstance(run.model, Joint) else {}),
        **({} if run.phases is None else {"phases": run.phases.to_dict()}),
        "evaluations": run.evaluator.log.rows,
        **({"eval_beside_s": round(seconds, 3)} if (seconds := run.evaluator.beside_s) else {}),
        **({"reward_terms": terms} if (terms := run.progress.mean_terms()) else {}),
        "plan": run.plan.to_dict()["flags"],
        "seed": run.config.seed,
        "overrides": overrides,
        "model": "model.zip",
    }


def _whole_run(run: Parts, wall_s: float) -> dict[str, Any]:
    """Totals of a resumed run; `perf` covers only the time since the resume."""
    if not run.resumed_at:
        return {}
    steps, updates = run.progress.env_steps, run.progress.updates
    totals = {"env_steps": steps, "wall_s": wall_s + run.progress.before_s, "updates": updates}
    return {**totals, "update_ratio": updates / max(1, steps), "resumed_at": run.resumed_at}


def tell_loggers(run: Parts, summary: Mapping[str, Any]) -> None:
    """Give the trackers the run's results and files; print where to look at them."""
    names = (MODEL, "report.html", "summary.json", "perf.json", "plan.json")
    with activity(run.console, "finishing loggers"):
        found = finish(run.model.logger, summary, [run.folder / name for name in names])
    for line in found:
        run.say(f"logger: {line}")


def check_saved(run: Parts) -> None:
    """Raises FastTrainError if a file of the run was not written. The message says which, and how to continue."""
    for logger in guarded_writers(run.model.logger):
        if logger.failed:
            run.saving.cost(f"logger {logger.name}", logger.failed)
    if lost := Output.lost:
        run.saving.cost("the output", lost)
        Output.lost = ""
    normalized, pooled = bool(run.config.env.normalize), run.pool is not None
    missing = [*run.saving.missing(), *missing_files(run.folder, normalized, pooled, run.saving.failed)]
    if run.stop.requested and run.checkpoints.failed:
        missing.append(run.checkpoints.failed)
    resume = ""
    if missing and (newest := run.checkpoints.folder.newest()):
        resume = f"; make room, then {command()} resume run={near(run.folder)} continues from {newest.name}"
    lists = {"not saved": missing, "failed, without harm to the rest": run.saving.missing(extras=True)}
    if text := "; ".join(f"{what}: {'; '.join(names)}" for what, names in lists.items() if names):
        raise FastTrainError(text + resume)


# --- the quality of the final policy


@contextmanager
def env_for_evaluation(model: BaseAlgorithm, env: VecEnv, config: Config, returned: bool) -> Iterator[VecEnv]:
    """Lend the training's env or engines to an evaluation, with the present statistics of `env.normalize`.
    `returned`: the training continues afterwards, so its episodes are restored.
    """
    settle(model)
    whole: Any = model.get_env()
    games = None if evaluates_in_training_games(config) and not returned else engines_of(env)
    with own_random_state(config.eval.seed):
        state, views = env_state(whole, is_retraced(config))
        arrays = {name: np.array(array) for name, array in views.items()}
        if games is not None:
            lent = wrapped(games.guests(), evaluation_config(config), model.get_vec_normalize_env())
        else:
            lent = with_statistics(env.venv, config, env) if isinstance(env, VecNormalize) else env
        try:
            yield lent
        finally:
            if games is not None:
                lent.close()
            if returned and (games is None or games.ended):
                other_seed = (config.seed + SEED_STRIDE + model.num_timesteps) % 2**31
                begun = load_env_state(whole, state, arrays, other_seed, is_retraced(config))
                if begun is not None:
                    start_episodes(model, begun)


def evaluate_run(run: Parts, final: bool) -> Quality:
    """Evaluate a run's policy, on new envs or on the training's. `final`: the training is over."""
    config = run.config
    lends = evaluates_in_training_env(config) or engines_of(run.env) is not None
    lent: Any = env_for_evaluation(run.model, run.env, config, not final) if lends else nullcontext()
    if run.curriculum is not None and lends:
        lent = run.curriculum.set_aside(run.env, lent)
    with lent as env:
        return evaluate_both(
            run.model, config, run.console, lambda: run.stop.requested, sampled=final, env=env, reader=run.reader
        )
