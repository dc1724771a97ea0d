"""Wall time until a policy has learned an environment whose steps are slow: which way of collecting needs least.

A turn is a seed. `rate` is 3,600 ÷ the seconds of training until the mean return of 100 episodes reaches a value. A
training that does not reach it within its minutes counts with all of them. `quality` is its last such mean.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of
from benchmarks.works import engines, learning_engines

CONTINUOUS, REUSE = {"schedule": "continuous"}, {"algo.reuse": 3}
LANDER = {
    "algo": "ppo", "env.entry_point": "benchmarks.envs:Lander", "env.max_episode_steps": 1000, "num_envs": 16,
    "vec_env": "shared", "algo.rollout_size": 2048, "batch_size": 64, "algo.n_epochs": 10, "algo.gamma": 0.999,
    "algo.gae_lambda": 0.98, "algo.ent_coef": 0.01, "total_timesteps": "1e7",
}  # fmt: skip


def learned(settings: dict[str, Any], reward: float, minutes: float, way: dict[str, Any], seed: int) -> Sample:
    kind = str(settings.get("env"))
    if (kind == "go" and not engines.gnugo()) or (kind == "showdown" and not engines.battles()):
        return {"skipped": "the engine is not installed"}
    end = [f"stop.at_reward={reward}", f"stop.max_minutes={minutes}", f"seed={seed}", "eval.episodes=0"]
    typed = [*trainings.typed({**settings, **way}), *end]
    summary, episodes = trainings.finished(["+profile=speed", "checkpoint_every=0", *typed])
    last = statistics.fmean(float(row["return"]) for row in episodes[-100:])
    seconds = float(episodes[-1]["wall_s"])
    return {
        "rate": 3600 / seconds, "seconds": seconds, "reached": float(last >= reward), "quality": last,
        "env_steps": summary["env_steps"], "updates": summary["updates"],
    }  # fmt: skip


def work(name: str, text: str, settings: dict[str, Any], reward: float, minutes: float) -> Work:
    """`OURS` is `schedule=continuous`."""
    usual = {"schedule": "lockstep"} if settings.get("vec_env") == "shared" else {}
    ways = {OURS: CONTINUOUS, "synchronous": usual, "reuse": {**usual, **REUSE}, "both": {**CONTINUOUS, **REUSE}}
    measurements = {label: partial(learned, settings, reward, minutes, way) for label, way in ways.items()}
    return Work(f"slow-{name}", text, measurements, "trainings per hour", equal=(), seeded=True)


WORKS = works_of(
    work(
        "sleep", "LunarLander that waits 5 ms a step in the mean: to a return of 100, at most 4 minutes.",
        {**LANDER, "env.kwargs": "{sleep_s: 0.005}"}, 100.0, 4,
    ),
    work(
        "busy", "LunarLander that computes 100 µs more a step: to a return of 100, at most 3 minutes.",
        {**LANDER, "env.kwargs": "{work_ns: 100000}"}, 100.0, 3,
    ),
    work(
        "go-5", "GNU Go, level 1, on 5×5, whose random moves end as the policy wins: to a return of 0, 8 minutes.",
        {**learning_engines.GO, "env.kwargs.size": 5, "env.kwargs.errs": 0.4}, 0.0, 8,
    ),
    work(
        "showdown", "Pokémon Showdown, generation 1, against max_damage with shaping: to a return of -0.5, 8 minutes.",
        learning_engines.SHOWDOWN, -0.5, 8,
    ),
)  # fmt: skip
