"""What people bring: vector envs of others, Atari, trackers. Whole runs of the command.

What a tracker costs is what its calls take of the training; its threads and processes apart.
"""

from __future__ import annotations

import os
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of

CARTPOLE = {"env.id": "CartPole-v1", "algo": "ppo", "num_envs": 64, "total_timesteps": 600_000, "checkup": "off"}
JOB = {"total_timesteps": 2_000_000, "eval.episodes": 10}
PONG = {"env": "atari", "env.id": "ALE/Pong-v5", "num_envs": 8, "total_timesteps": 50_000, "checkup": "off",
        "eval.episodes": 2}  # fmt: skip
POOL = {**PONG, "env": "gym", "env.backend": "envpool", "env.id": "Pong-v5"}
POOLED = {OURS: "speed", "SB3 + EnvPool": "baseline"}
PONG_OF = {
    "ppo": {"algo": "ppo", "algo.n_steps": 128, "batch_size": 256, "algo.n_epochs": 4, "algo.learning_rate": 2.5e-4},
    "dqn": {"algo": "dqn", "updates_per_step": 2, "batch_size": 32, "warmup_steps": 1000, "algo.buffer_size": 50_000,
            "algo.learning_rate": 1e-4, "algo.target_update_interval": 1000},
}  # fmt: skip
TRACKERS = ("tensorboard", "mlflow", "trackio", "wandb")


def run(settings: dict[str, Any], needs: str = "", profile: str = "speed") -> Sample:
    """One run; what it was asked for is the work, env steps beyond the horizon depend on the rollout."""
    if needs and find_spec(needs) is None:
        return {"skipped": f"{needs} is not installed"}
    os.environ |= {"WANDB_MODE": "offline", "SDL_VIDEODRIVER": "dummy"}
    spent = tracker_clock()
    summary, _ = trainings.finished([f"+profile={profile}", *trainings.typed(settings)])
    return {
        "rate": summary["steps_per_s"],
        "env_steps": settings["total_timesteps"],
        "updates": summary["updates"],
        "samples_per_update": trainings.effective(summary, "batch_size")["batch_size"],
        "startup_s": summary["startup_s"],
        "finish_s": summary["finish_s"],
        "tracker_share": spent[0] / summary["wall_s"],
    }


def tracker_clock() -> list[float]:
    """The seconds that training spends in calls of trackers, counted from now on."""
    from fasttrain.runs.loggers import GuardedWriter

    spent, call = [0.0], GuardedWriter._call

    def timed(self: Any, method: str, *arguments: Any, **further: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(self, method, *arguments, **further)
        finally:
            spent[0] += (time.perf_counter() - begun) * (method in ("write", "write_sequence"))

    GuardedWriter._call = timed  # type: ignore[method-assign]
    return spent


WORKS = works_of(
    Work(
        "libraries-vector",
        "64 CartPoles end to end, PPO: by CartPole's own VectorEnv, by EnvPool, one env after another.",
        {
            OURS: partial(run, {**CARTPOLE, "vec_env": "vector"}),
            "EnvPool": partial(run, {**CARTPOLE, "env.backend": "envpool"}, "envpool"),
            "DummyVecEnv": partial(run, {**CARTPOLE, "vec_env": "dummy"}),
        },
    ),
    *(
        Work(
            f"libraries-pong-{name}",
            f"Pong from its pictures, {name.upper()}, 8 envs, beside the stock classes with equal settings.",
            {
                OURS: partial(run, {**PONG, **settings}, "ale_py"),
                "stock": partial(run, {**PONG, **settings}, "ale_py", "baseline"),
            },
        )
        for name, settings in PONG_OF.items()
    ),
    Work(
        "libraries-pong-envpool",
        "The same by EnvPool, PPO, beside SB3's own PPO with equal settings.",
        {name: partial(run, {**POOL, **PONG_OF["ppo"]}, "envpool", profile) for name, profile in POOLED.items()},
    ),
    Work(
        "libraries-trackers",
        "The default job with `loggers=[csv]`, and with each tracker beside it.",
        {
            OURS: partial(run, {**JOB, "loggers": "[csv]"}),
            **{name: partial(run, {**JOB, "loggers": f"[csv,{name}]"}, name) for name in TRACKERS},
        },
    ),
)
