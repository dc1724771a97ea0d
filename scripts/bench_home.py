"""Works of benchmark.py about what people bring: vector envs of others, trackers. Whole runs of the command.

`home-vector-64`: PPO on 64 CartPoles end to end, by CartPole's own VectorEnv, by EnvPool's C++ and one env after
another. `home-trackers`: the default job with each tracker beside it; the ratio is what the tracker costs, and start-up
and finish (evaluating, what the tracker sends, the process's end) are told apart. `home-pong-ppo`, `home-pong-dqn`:
Pong from its pictures beside the stock classes, with equal settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# `fasttrain` that notes the seconds which training spends in calls of trackers; threads and processes of theirs apart.
TIMED = """
import os, sys, time
from fasttrain.cli import main
from fasttrain.runs.trackers import Watched

spent, call = [0.0], Watched._call

def timed(self, method, *arguments, **further):
    begun = time.perf_counter()
    try:
        return call(self, method, *arguments, **further)
    finally:
        spent[0] += (time.perf_counter() - begun) * (method in ("write", "write_sequence"))

Watched._call = timed
code = main()
with open(os.environ["SPENT"], "w") as file:
    file.write(str(spent[0]))
sys.exit(code)
"""
CARTPOLE = ("env.id=CartPole-v1", "algo=ppo", "num_envs=64", "total_timesteps=600000", "checkup=off")
JOB = ("total_timesteps=2000000", "eval.episodes=10")
PONG = ("env=atari", "env.id=ALE/Pong-v5", "num_envs=8", "total_timesteps=50000", "checkup=off", "eval.episodes=2")
PONG_PPO = (*PONG, "algo=ppo", "algo.n_steps=128", "batch_size=256", "algo.n_epochs=4", "algo.learning_rate=2.5e-4")
PONG_DQN = (
    *PONG, "algo=dqn", "updates_per_step=2", "batch_size=32", "warmup_steps=1000", "algo.buffer_size=50000",
    "algo.learning_rate=1e-4", "algo.target_update_interval=1000",
)  # fmt: skip
TRACKERS = ("tensorboard", "mlflow", "trackio", "wandb")


def run(*typed: str, needs: str = "", profile: str = "speed") -> dict[str, Any]:
    """One run; what it was asked for is the work, env steps beyond the horizon depend on the rollout."""
    if needs and find_spec(needs) is None:
        return {"skipped": f"{needs} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TIMED, f"+profile={profile}", *typed, "report=false", "live=off"]
        environment = {**os.environ, "WANDB_MODE": "offline", "SDL_VIDEODRIVER": "dummy", "SPENT": f"{folder}/spent"}
        done = subprocess.run(
            [*command, f"hydra.run.dir={folder}/run"], capture_output=True, text=True, env=environment
        )
        ended = time.time()
        if done.returncode:
            raise SystemExit(f"{' '.join(command[3:])} failed\n{done.stderr[-1000:]}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
        spent_s = float((Path(folder) / "spent").read_text(encoding="utf-8"))
        trained = (Path(folder) / "run" / "perf.json").stat().st_mtime  # written when training is over
    horizon = int(next(text for text in typed if text.startswith("total_timesteps=")).partition("=")[2])
    return {
        "rate": summary["steps_per_s"],
        "env_steps": horizon,
        "updates": summary["updates"],
        "samples_per_update": next(row["effective"] for row in summary["plan"] if row["flag"] == "batch_size"),
        "startup_s": summary["startup_s"],
        "finish_s": ended - trained,
        "tracker_share": spent_s / summary["wall_s"],
    }


def tracked(name: str) -> dict[str, Any]:
    return run(*JOB, f"loggers=[csv,{name}]", needs=name)


WORKS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "home-vector-64": {
        "fasttrain": lambda: run(*CARTPOLE, "vec_env=vector"),
        "EnvPool": lambda: run(*CARTPOLE, "env.backend=envpool", needs="envpool"),
        "DummyVecEnv": lambda: run(*CARTPOLE, "vec_env=dummy"),
    },
    **{
        f"home-pong-{name}": {
            "fasttrain": lambda typed=typed: run(*typed, needs="ale_py"),
            "stock": lambda typed=typed: run(*typed, needs="ale_py", profile="baseline"),
        }
        for name, typed in (("ppo", PONG_PPO), ("dqn", PONG_DQN))
    },
    "home-trackers": {
        "fasttrain": lambda: run(*JOB, "loggers=[csv]"),
        **{name: lambda name=name: tracked(name) for name in TRACKERS},
    },
}
LONG = ("home-pong-ppo", "home-pong-dqn")
