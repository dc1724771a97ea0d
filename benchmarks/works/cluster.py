"""T14: what a second actor of a cluster brings, and RLlib on the same work. All actors are on this machine."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import peers, trainings
from benchmarks.work import OURS, Sample, Work, works_of

PPO: dict[str, Any] = {
    "num_envs": 8, "num_steps": 128, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "gamma": 0.99,
    "gae_lambda": 0.95, "clip_range": 0.2, "vf_coef": 0.5, "max_grad_norm": 0.5, "rollouts": 10,
}  # fmt: skip
MODES = {"sync": "dummy", "async": "shared"}  # how an RLlib runner and one of our actors step their envs


def ours(kwargs: dict[str, Any], vec_env: str, more: dict[str, Any]) -> Sample:
    if more and not find_spec("ray"):
        return {"skipped": "Ray is not installed"}
    rollout = PPO["num_envs"] * PPO["num_steps"]
    settings = {
        "algo": "ppo", "env.entry_point": "benchmarks.envs:Lander", "num_envs": PPO["num_envs"], "vec_env": vec_env,
        "batch_size": PPO["batch_size"], "algo.rollout_size": rollout, "algo.n_epochs": PPO["n_epochs"],
        "algo.learning_rate": PPO["learning_rate"], "fused_update": "on", "checkup": "off", "checkpoint_every": 0,
        "total_timesteps": rollout * PPO["rollouts"], "eval.episodes": 0, **more,
    }  # fmt: skip
    own = trainings.typed(kwargs, "env.kwargs.")
    return trainings.command(["+profile=speed", *trainings.typed(settings), *own], PPO["batch_size"])


def work(name: str, text: str, kwargs: dict[str, Any], vec_env: str) -> Work:
    def actors(count: int, schedule: str = "auto") -> dict[str, Any]:
        return {"cluster": "ray", "cluster.actors": count, "schedule": schedule}

    mode = next(key for key, own in MODES.items() if own == vec_env)
    asked = {**PPO, "env_kwargs": kwargs, "actors": 2, "mode": mode}
    measurements = {
        OURS: partial(ours, kwargs, vec_env, actors(2)),
        "one actor": partial(ours, kwargs, vec_env, actors(1)),
        "one process": partial(ours, kwargs, vec_env, {}),
        "two actors, continuous": partial(ours, kwargs, vec_env, actors(2, "continuous")),
        "RLlib": partial(peers.run, "RLlib", asked),
    }
    return Work(f"cluster-{name}", text, measurements, equal=(), peers=frozenset({"RLlib"}), target="T14")


WORKS = works_of(
    work(
        "sleep", "PPO with two actors: LunarLander, 8 envs, a step waits 5 ms in the mean.",
        {"sleep_s": 0.005}, "dummy",
    ),
    work("busy", "PPO with two actors: LunarLander, 8 envs, a step computes 1 ms.", {"work_ns": 1_000_000}, "dummy"),
    work(
        "workers", "The same with a step that waits 5 ms, and a process for each env of an actor.",
        {"sleep_s": 0.005}, "shared",
    ),
)  # fmt: skip
