"""Skull King: native stepping, and training from the command to the end."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of

ENV = "fasttrain/SkullKing-v0"
# One set of hyperparameters for ours and stock: the game's own in the speed profile. 12 rollouts: the choice between
# one and two threads is settled in the first ones.
TRAIN = {"num_envs": 256, "rollout_size": 16_384, "batch_size": 1024, "n_epochs": 4, "learning_rate": 1e-3}
ROLLOUTS = 12


def native(num_envs: int = 256, steps: int = 8000) -> Sample:
    """Native games; random legal actions are drawn by a compiled helper outside the timed calls."""
    import numpy as np

    from fasttrain.vec.native import NativeVecEnv
    from fasttrain_games.skullking.game import SkullKingGame
    from fasttrain_kernels.jit import njit

    @njit
    def draw(masks: Any, noise: Any, actions: Any) -> None:
        for i in range(len(masks)):
            left = int(noise[i] * masks[i].sum())
            for action in range(masks.shape[1]):
                if masks[i, action]:
                    if left == 0:
                        actions[i] = action
                        break
                    left -= 1

    rng, env, actions = np.random.default_rng(0), NativeVecEnv(SkullKingGame(num_envs)), np.zeros(num_envs, np.int64)
    env.seed(0)
    env.reset()
    spent = 0.0
    for step in range(200 + steps):
        draw(env.slots.action_masks, rng.random(num_envs), actions)
        begun = time.perf_counter()
        env.step_slots(actions)
        spent += time.perf_counter() - begun if step >= 200 else 0.0
    return {"rate": steps * num_envs / spent}


def single(vectorised: bool, num_envs: int = 8, steps: int = 2000) -> Sample:
    """The single-env class, in a plain loop or in DummyVecEnv."""
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.vec_env import DummyVecEnv

    import fasttrain_games.envs  # noqa: F401 - registers the game

    rng, spent = np.random.default_rng(0), 0.0
    envs: list[Any] = [] if vectorised else [gym.make(ENV) for _ in range(num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    if vectorised:
        venv = DummyVecEnv([lambda: gym.make(ENV) for _ in range(num_envs)])
        venv.seed(0)
        venv.reset()
    for step in range(100 + steps):
        masks = venv.env_method("action_masks") if vectorised else [env.unwrapped.action_masks() for env in envs]
        actions = np.array([int(rng.choice(np.flatnonzero(mask))) for mask in masks])
        begun = time.perf_counter()
        if vectorised:
            venv.step(actions)
        for env, action in zip(envs, actions.tolist(), strict=False):
            *_, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        spent += time.perf_counter() - begun if step >= 100 else 0.0
    return {"rate": steps * num_envs / spent}


def command(algo: str, rollouts: int, *more: str) -> Sample:
    """A whole run of the command on native games."""
    settings = {
        "algo": algo,
        "num_envs": TRAIN["num_envs"],
        "batch_size": TRAIN["batch_size"],
        "total_timesteps": TRAIN["rollout_size"] * rollouts,
        **{f"algo.{key}": TRAIN[key] for key in ("rollout_size", "n_epochs", "learning_rate")},
    }
    return trainings.command(["+profile=speed", *trainings.typed(settings), *more], int(TRAIN["batch_size"]))


def stock() -> Sample:
    """What an SB3 user writes: MaskablePPO on the single-env class."""
    begun = time.perf_counter()
    from sb3_contrib import MaskablePPO

    import fasttrain_games.envs  # noqa: F401 - registers the game

    same = {key: TRAIN[key] for key in ("batch_size", "n_epochs", "learning_rate")}
    n_steps = int(TRAIN["rollout_size"] // TRAIN["num_envs"])
    env = trainings.stock_envs("fasttrain_games.envs:" + ENV, int(TRAIN["num_envs"]))
    model = MaskablePPO("MlpPolicy", env, n_steps=n_steps, seed=0, device="cpu", **same)  # type: ignore[arg-type]
    return trainings.stock_learn(model, int(TRAIN["rollout_size"]) * ROLLOUTS, begun)


WORKS = works_of(
    Work(
        "skullking-step",
        "Native Skull King, random legal actions, observations and masks written, against the single-env class.",
        {
            OURS: native,
            "single env, plain loop": lambda: single(False),
            "single env, DummyVecEnv": lambda: single(True),
        },
        equal=(),
        target="T6",
    ),
    Work(
        "skullking-train",
        "`fasttrain +profile=speed` against sb3-contrib at the same hyperparameters, envs, steps and updates. "
        "SubprocVecEnv would need 256 processes of 350 MB; with 64 it was several times slower than DummyVecEnv.",
        {
            OURS: lambda: command("maskable_ppo", ROLLOUTS, "eval.episodes=100"),
            "sb3-contrib, DummyVecEnv": stock,
        },
        target="T1",
    ),
)
