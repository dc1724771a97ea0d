"""What the profiles choose, against stock's own choices and every explicit one, on quiet cores and on busy ones.

All sides have the same envs, minibatches and updates, and are timed from the first env step to the end of the last
whole rollout and its update within four seconds.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import trainings
from benchmarks.machine import burners
from benchmarks.work import OURS, Sample, Work, works_of

SECONDS, NUM_ENVS = 4.0, 8


@dataclass(frozen=True)
class Task:
    """An env and the net on it; `ppo` and `dqn` are (rollout steps, minibatch, epochs) and (updates a step, batch)."""

    env: str  # an id, or a class of benchmarks.envs
    net: int | None = 64  # two layers of so many units; None: the policy's own
    policy: str = "MlpPolicy"
    ppo: tuple[int, int, int] = (128, 256, 4)
    dqn: tuple[int, int] = (8, 64)
    buffer: int = 50_000
    threads_matter: bool = False  # torch computes, no kernels
    others: tuple[str, ...] = ()  # more explicit choices


COMPUTED = ("fused_update=on use_amp=off", "fused_update=off use_amp=off")
PICTURES = Task("Pictures", None, "CnnPolicy", (32, 64, 4), (1, 32), 5_000, threads_matter=True)
TASKS = {
    "cartpole": Task("CartPole-v1"),
    "mlp-256": Task("CartPole-v1", 256, others=COMPUTED),
    "mlp-1024": Task("CartPole-v1", 1024, dqn=(1, 64), threads_matter=True, others=COMPUTED),
    "computes-100us": Task("Working"),
    "waits-2ms": Task("Waiting"),
    "dict": Task("Parts", policy="MultiInputPolicy", threads_matter=True),
    "pictures": PICTURES,
    "pong": replace(PICTURES, env="Pong-v5"),
}


def ours(task: Task, algo: str, profile: str, overrides: str, busy: bool) -> Sample:
    """Env steps per second of a profile, and what it chose."""
    from fasttrain.machine import usable_cores

    if task.env == "Pong-v5" and find_spec("envpool") is None:
        return {"skipped": "EnvPool is not installed"}
    os.environ["FASTTRAIN_ENGINE_SWITCH_AT"] = "0"
    settings: dict[str, Any] = {
        "algo": algo, "num_envs": NUM_ENVS, "total_timesteps": 10_000_000, "stop.max_minutes": f"{SECONDS / 60:.4f}",
        "eval.episodes": 2, "eval_every": 0,
    }  # fmt: skip
    named = task.env.endswith(("-v1", "-v5"))
    settings |= {"env.id": task.env} if named else {"env.entry_point": f"benchmarks.envs:{task.env}"}
    settings |= {"env.backend": "envpool"} if task.env == "Pong-v5" else {}
    settings |= {"algo.net_arch": [task.net, task.net]} if task.net else {}
    if algo == "ppo":
        settings |= dict(zip(("algo.n_steps", "batch_size", "algo.n_epochs"), task.ppo, strict=True))
    else:
        settings |= dict(zip(("updates_per_step", "batch_size"), task.dqn, strict=True))
        settings |= {"warmup_steps": 500, "algo.buffer_size": task.buffer}
        settings |= {f"algo.exploration_{end}_eps": 0.05 for end in ("initial", "final")}
    with burners(usable_cores()) if busy else nullcontext():
        summary, _ = trainings.finished([f"+profile={profile}", *trainings.typed(settings), *overrides.split()])
    return {"rate": summary["steps_per_s"], "chosen": trainings.effective(summary, *trainings.CHOSEN)}


def stock(task: Task, algo: str, subproc: bool, threads: int | None, busy: bool) -> Sample:
    """Stock SB3 on the same task for as long."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    from benchmarks import envs
    from fasttrain.machine import usable_cores

    trainings.threads(threads)
    if task.env == "Pong-v5":
        if find_spec("envpool") is None:
            return {"skipped": "EnvPool is not installed"}
        from fasttrain_integrations.envpool import EnvPoolVecEnv

        env: Any = EnvPoolVecEnv("Pong-v5", NUM_ENVS)
    else:
        env = trainings.stock_envs(getattr(envs, task.env, task.env), NUM_ENVS, subproc)

    class Clock(BaseCallback):
        """Notes the end of every rollout and its update, and stops the training in time."""

        began = ended = 0.0
        steps = 0

        def _on_rollout_start(self) -> None:
            self.ended, self.steps = time.perf_counter(), self.num_timesteps
            self.began = self.began or self.ended

        def _on_step(self) -> bool:
            return self.ended - self.began < SECONDS

    arguments: dict[str, Any] = {"policy_kwargs": {"net_arch": [task.net, task.net]} if task.net else {}}
    if algo == "ppo":
        arguments |= dict(zip(("n_steps", "batch_size", "n_epochs"), task.ppo, strict=True))
    else:
        arguments |= dict(zip(("gradient_steps", "batch_size"), task.dqn, strict=True))
        arguments |= {"train_freq": 1, "learning_starts": 500, "buffer_size": task.buffer}
        arguments |= {f"exploration_{end}_eps": 0.05 for end in ("initial", "final")}
    model = getattr(stable_baselines3, algo.upper())(task.policy, env, device="cpu", **arguments)
    clock = Clock()
    with burners(usable_cores()) if busy else nullcontext():
        model.learn(10_000_000, callback=clock)
    env.close()
    return {"rate": clock.steps / (clock.ended - clock.began)}


def cell(name: str, task: Task, algo: str, busy: bool) -> Work:
    threads = {", 1 thread": 1, "": None} if task.threads_matter else {"": None}
    vec_envs = {"SubprocVecEnv": True, "DummyVecEnv": False} if name != "pong" else {"EnvPool": False}
    explicit = [*task.others, *(("vec_env=dummy", "vec_env=shared") if name != "pong" else ())]
    explicit += ["torch_threads=1", f"torch_threads={os.cpu_count()}"] if task.threads_matter else []
    return Work(
        f"auto-{algo}-{name}{'-busy' if busy else ''}",
        f"{algo.upper()}, {task.env}{f', [{task.net}, {task.net}]' if task.net else ''}"
        + (", beside a process that burns each core." if busy else "."),
        {
            OURS: partial(ours, task, algo, "speed", "", busy),
            "fasttrain, balance": partial(ours, task, algo, "balance", "", busy),
            **{
                f"stock, {vec_env}{end}": partial(stock, task, algo, subproc, count, busy)
                for vec_env, subproc in vec_envs.items()
                for end, count in threads.items()
            },
            **{choice: partial(ours, task, algo, "speed", choice, busy) for choice in explicit},
        },
        equal=(),
    )


WORKS = works_of(
    *(cell(name, task, algo, busy) for busy in (False, True) for algo in ("ppo", "dqn") for name, task in TASKS.items())
)
