"""Works of benchmark.py about vector environments: ours, SB3's and Gymnasium's, on envs of known cost.

Stock classes get the start method `fork` here: their default, forkserver, imports torch in every one of up to 256
workers, minutes of start-up that say nothing about stepping. All rates are env steps per second, start-up left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

COST_S = 100e-6


class Working(gym.Env[Any, Any]):
    """Computes for `cost_s` of CPU time a step (not wall time: a worker that is kept from its core must not profit)."""

    def __init__(self, cost_s: float = COST_S) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (64,), np.float32)
        self.action_space = gym.spaces.Discrete(16)
        self.cost_ns = int(cost_s * 1e9)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(64, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        until = time.thread_time_ns() + self.cost_ns
        while time.thread_time_ns() < until:
            pass
        self.steps += 1
        observation = np.full(64, self.steps / 200, np.float32)
        return observation, 1.0, self.steps >= 200, False, {"step": self.steps, "phase": "play"}

    def action_masks(self) -> Any:
        masks = np.ones(16, np.bool_)
        masks[self.steps % 16] = False
        return masks


class Waiting(Working):
    """Waits for an engine instead of computing: 2 ms a step in the mean, log-normal with the coefficient given."""

    def __init__(self, variation: float) -> None:
        super().__init__(0.0)
        self.sigma = np.log1p(variation**2) ** 0.5

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(2e-3 * float(self.np_random.lognormal(-(self.sigma**2) / 2, self.sigma)))
        return super().step(action)


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def make(kind: str, env_fn: Callable[[], Any], num_envs: int) -> Any:
    """One of the vector envs, ready to step."""
    if kind == "fasttrain":
        from fasttrain import SharedMemoryVecEnv

        return SharedMemoryVecEnv([env_fn] * num_envs)
    if kind == "AsyncVectorEnv":
        return gym.vector.AsyncVectorEnv([env_fn] * num_envs, shared_memory=True, context="fork")
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    if kind == "DummyVecEnv":
        return DummyVecEnv([env_fn] * num_envs)
    return SubprocVecEnv([env_fn] * num_envs, start_method="fork")


def rate_of(env: Any, num_envs: int, steps: int, masked: bool) -> float:
    """Steps per second with random, where masked legal, actions. Masks are asked for as sb3-contrib does."""
    rng = np.random.default_rng(0)
    slots = hasattr(env, "step_slots") and masked  # our algorithms read the slots; a drop-in is stepped as stock is
    env.reset()
    begun = 0.0
    warm_up = max(5, steps // 10)
    for step in range(steps + warm_up):
        if step == warm_up:
            begun = time.perf_counter()
        if masked:
            masks = env.read_masks() if slots else np.stack(env.env_method("action_masks"))
            actions = np.argmax(rng.random(masks.shape) * masks, axis=1)
        else:
            actions = rng.integers(0, 2, num_envs)
        env.step_slots(actions) if slots else env.step(actions)
    rate = steps * num_envs / (time.perf_counter() - begun)
    env.close()
    return rate


def _result(rate: float, **more: float) -> dict[str, Any]:
    return {"rate": rate, "env_steps": "rate", "updates": 0, "samples_per_update": 0, **more}


def wargame() -> gym.Env[Any, Any]:
    """Skirmish by its plain Python rules: a slow env as users have them, most of it the opponent's turn."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from reference.skirmish_python.env import SkirmishPythonEnv

    return SkirmishPythonEnv(action_mode="units", opponent="greedy")


def collect(kind: str, env_fn: Callable[[], Any] = Working, num_envs: int = 64) -> dict[str, Any]:
    """Envs that compute, with masks; 64 of 100 µs unless said otherwise."""
    from fasttrain.machine import usable_cores

    rate = rate_of(make(kind, env_fn, num_envs), num_envs, 150 if kind != "SubprocVecEnv" else 50, masked=True)
    env, steps = env_fn(), 300
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    begun = time.perf_counter()
    for _ in range(steps):
        masks = np.asarray(env.action_masks())
        if any(env.step(int(np.argmax(rng.random(masks.shape) * masks)))[2:4]):
            env.reset()
    env_s = (time.perf_counter() - begun) / steps
    return _result(rate, share_of_ideal=rate * env_s / usable_cores())


def stepping(kind: str, num_envs: int) -> dict[str, Any]:
    """CartPole, nothing but step()."""
    steps = max(20, 40_000 // num_envs // (1 if kind in ("fasttrain", "DummyVecEnv") else 4))
    return _result(rate_of(make(kind, cartpole, num_envs), num_envs, steps, masked=False))


def auto(num_envs: int) -> dict[str, Any]:
    """CartPole in what `vec_env=auto` takes for it, stepped as our algorithms do."""

    from fasttrain.cli.compose import configured
    from fasttrain.runs.envs import build_vec_env, env_facts, this_machine
    from fasttrain.spec.plan import resolve

    arguments = ["+profile=speed", "env=gym", "env.id=CartPole-v1", "algo=ppo", f"num_envs={num_envs}"]
    config = configured(arguments)
    plan = resolve(config, {}, env_facts(config), this_machine())
    env = build_vec_env(plan.config, num_envs, seed=0)
    rate = rate_of(env, num_envs, 40_000 // num_envs, masked=False)
    return {**_result(rate), "chosen": plan.config.vec_env}


def monitored(num_envs: int) -> dict[str, Any]:
    """CartPole in DummyVecEnv with Monitor, as make_vec_env builds it."""
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("CartPole-v1", n_envs=num_envs, seed=0)
    return _result(rate_of(env, num_envs, 40_000 // num_envs, masked=False))


def grouped(variation: float, first_ready: bool) -> dict[str, Any]:
    """Rollouts of MaskablePPO [256, 256] with 64 envs that wait, two in each of 32 workers; no updates."""
    import torch

    from fasttrain import MaskablePPO, SharedMemoryVecEnv
    from fasttrain.perf.clock import PhaseClock

    torch.set_num_threads(1)
    num_envs, num_steps, rollouts = 64, 64, 3
    env = SharedMemoryVecEnv([lambda: Waiting(variation)] * num_envs, num_workers=32)
    kwargs = {"net_arch": [256, 256]}
    model = MaskablePPO("MlpPolicy", env, n_steps=num_steps, n_epochs=1, batch_size=4096, seed=0, policy_kwargs=kwargs)
    clock = PhaseClock()
    model.time_with(clock)
    model.collector.schedule = "first_ready" if first_ready else "lockstep"
    model.learn(num_envs * num_steps)
    clock.reset()
    model.learn(num_envs * num_steps * rollouts)
    spent = clock.snapshot()
    env.close()
    seconds = sum(spent[phase] for phase in ("action", "env_step", "buffer", "log")) / 1e9
    return {**_result(num_envs * num_steps * rollouts / seconds), "env_steps": num_envs * num_steps * rollouts}


WORKS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "vecenv-collect": {
        kind: lambda kind=kind: collect(kind) for kind in ("fasttrain", "DummyVecEnv", "SubprocVecEnv")
    },
    "vecenv-wargame": {
        kind: lambda kind=kind: collect(kind, wargame, 16) for kind in ("fasttrain", "DummyVecEnv", "SubprocVecEnv")
    },
    **{
        f"vecenv-step-{n}": {
            kind: lambda kind=kind, n=n: stepping(kind, n)
            for kind in ("fasttrain", "AsyncVectorEnv", "SubprocVecEnv")
        }
        for n in (8, 64, 256)
    },
    **{
        f"vecenv-auto-{n}": {"fasttrain": lambda n=n: auto(n), "DummyVecEnv": lambda n=n: monitored(n)}
        for n in (8, 64)
    },
    "groups-first-ready": {
        "fasttrain": lambda: grouped(0.63, True),
        "fasttrain, in step": lambda: grouped(0.63, False),
    },
}  # fmt: skip
