"""Trainings that works time: the `fasttrain` command in this process, and stock models."""

from __future__ import annotations

import csv
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.work import Sample

Model = Any
CHOSEN = ("vec_env", "workers", "schedule", "torch_threads", "fused_update", "use_amp", "use_compile", "log_every")


def typed(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Overrides as they are typed: `key=value` each, lists without spaces."""
    return [f"{prefix}{key}={value}".replace(", ", ",") for key, value in settings.items()]


def finished(arguments: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Summary and episodes of `fasttrain ARGUMENTS`, in this process.

    Raises:
        SystemExit: it failed.
    """
    from fasttrain.cli import main

    with tempfile.TemporaryDirectory() as name:
        if main([*arguments, "live=off", "report=false", f"hydra.run.dir={name}/run"]) != 0:
            raise SystemExit(1)
        folder = Path(name) / "run"
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        summary["finish_s"] = time.time() - (folder / "perf.json").stat().st_mtime  # written when training is over
        with (folder / "episodes.csv").open(newline="", encoding="utf-8") as file:
            return summary, list(csv.DictReader(file))


def effective(summary: Mapping[str, Any], *flags: str) -> dict[str, Any]:
    """What really ran, from the plan in a summary."""
    return {row["flag"]: row["effective"] for row in summary["plan"] if row["flag"] in flags}


def command(arguments: Sequence[str], batch_size: int, window: int = 500) -> Sample:
    """A run of the command, by its own summary; `quality` is the mean return of the last `window` episodes."""
    summary, episodes = finished(arguments)
    busy = summary["utilization"]["gpu"]
    return {
        "rate": summary["steps_per_s"],
        "env_steps": summary["env_steps"],
        "updates": summary["updates"],
        "samples_per_update": batch_size,
        "quality": statistics.fmean(float(row["return"]) for row in episodes[-window:]) if episodes else 0.0,
        "startup_s": summary["startup_s"],
        "alone": summary["limits"],
        "chosen": effective(summary, *CHOSEN),
        **({} if busy is None else {"gpu_share": busy}),
    }


def stock_envs(env: Any, num_envs: int, subproc: bool = False, kwargs: Mapping[str, Any] | None = None) -> Any:
    """SB3's vector env with Monitor. `fork`: SB3's own start method imports torch in every worker."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    start = {"start_method": "fork"} if subproc else {}
    kind = SubprocVecEnv if subproc else DummyVecEnv
    return make_vec_env(
        env, n_envs=num_envs, seed=0, vec_env_cls=kind, vec_env_kwargs=start, env_kwargs=dict(kwargs or {})
    )


def stock_learn(model: Model, total: int, begun: float) -> Sample:
    """A stock model's `learn`; `begun`: when its making began."""
    updates = 0

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1

    model.policy.optimizer.register_step_post_hook(count)
    started = time.perf_counter()
    model.learn(total)
    seconds = time.perf_counter() - started
    model.env.close()
    return {
        "rate": model.num_timesteps / seconds,
        "env_steps": model.num_timesteps,
        "updates": updates,
        "samples_per_update": model.batch_size,
        "quality": statistics.fmean(episode["r"] for episode in model.ep_info_buffer or [{"r": 0.0}]),
        "startup_s": started - begun,
    }


def count_updates(model: Model) -> Callable[[], float]:
    """How many gradient updates a model makes from now on: by the optimizer's own step counts, kernels' too."""
    optimizer = model.policy.optimizer

    def now() -> float:
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        return float(max(map(float, steps), default=0.0))

    begun = now()
    return lambda: now() - begun


def threads(count: int | None) -> None:
    """So many of torch's; None: its own choice, which an SB3 user gets."""
    import torch

    torch.set_num_threads(count or torch.get_num_threads())


def built(arguments: Sequence[str]) -> tuple[Any, Model]:
    """The plan and the model as `fasttrain ARGUMENTS` makes them, with everything compiled."""
    from fasttrain.cli.compose import configured
    from fasttrain.perf.clock import PhaseClock
    from fasttrain.runs import engine, envs, models
    from fasttrain.runs.engine import learner_calls, settle_engine, settle_kernels
    from fasttrain.spec.plan import resolve
    from fasttrain_kernels.kernel_cache import compile_all

    config = configured(list(arguments))
    plan = resolve(config, {}, envs.env_facts(config), envs.this_machine())
    engine.set_threads(plan.config.torch_threads)
    compile_all([*envs.game_calls(plan.config), *learner_calls(plan.config)])
    env = envs.build_vec_env(plan.config, plan.config.num_envs, seed=0)
    model = models.build_algorithm(plan.config, env, PhaseClock())
    return settle_engine(settle_kernels(plan, model), model), model
