"""summary.json: what a run came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fasttrain import __version__
from fasttrain.algos.fast import Fast
from fasttrain.perf.report import PerfWindow, limits_dict, perf_dict
from fasttrain.runs.callbacks import replay_dict
from fasttrain.runs.lending import why_no_quality
from fasttrain.runs.stopping import StoppedBy
from fasttrain.saving.files import SUMMARY_SCHEMA


def summary_of(run: Any, window: PerfWindow, quality: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Of a `train.Run` that is over."""
    perf, warmup_s = perf_dict(window), run.model.engine.warmup_s if isinstance(run.model, Fast) else 0.0
    return {
        "schema": SUMMARY_SCHEMA,
        "version": __version__,
        "status": "stopped" if run.stop.requested else "done",
        "stopped_by": _stopped_by(run),
        **{key: perf[key] for key in ("env_steps", "wall_s", "steps_per_s", "updates", "update_ratio")},
        **_whole_run(run, perf["wall_s"]),
        "startup_s": round(run.startup_s, 3),
        "first_update_s": run.progress.first_update_s,
        "compile_s": round(run.compile_s + warmup_s, 3),  # of the startup: kernels, torch.compile
        **({} if run.engine_switch is None else {"engine_switch": run.engine_switch.to_dict()}),
        "episodes": run.progress.episodes,
        **({"empty_masks": run.empty_masks.count} if run.empty_masks.count else {}),
        "reward_per_hour": run.progress.curve.reward_per_hour(),
        "perf": perf,
        "limits": limits_dict(window),
        "utilization": {"cpu": window.cpu_share, "gpu": window.gpu_share, "memory_bytes": window.memory_bytes},
        **({} if (replay := replay_dict(run.model)) is None else {"replay": replay}),
        "quality": {**quality["greedy"], **({"sampled": quality["sampled"]} if "sampled" in quality else {})},
        **why_no_quality(run),
        **({} if run.pool is None else {"self_play": run.pool.summary()}),
        "evaluations": run.evaluator.log.rows,
        **({"eval_beside_s": round(seconds, 3)} if (seconds := run.evaluator.beside_s) else {}),
        **({"reward_terms": terms} if (terms := run.progress.mean_terms()) else {}),
        "plan": run.plan.to_dict()["flags"],
        "seed": run.config.seed,
        "overrides": overrides,
        "model": "model.zip",
    }


def _whole_run(run: Any, wall_s: float) -> dict[str, Any]:
    """Of a resumed run: `perf`, and what is derived from it, measured the last part alone."""
    if not run.resumed_at:
        return {}
    steps, updates = run.progress.env_steps, run.progress.updates
    totals = {"env_steps": steps, "wall_s": wall_s + run.progress.before_s, "updates": updates}
    return {**totals, "update_ratio": updates / max(1, steps), "resumed_at": run.resumed_at}


def _stopped_by(run: Any) -> StoppedBy:
    if run.stop.requested:  # perhaps only while the final model was evaluated
        return "signal"
    stopped: StoppedBy = "horizon" if run.callback.stopped is None else run.callback.stopped.by
    return stopped
