"""Works of benchmark.py about Skull King: native stepping, and training from the command to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import bench_ppo

Measurement = Callable[[], dict[str, Any]]
SKULLKING = "fasttrain/SkullKing-v0"
# One set of hyperparameters for ours and stock: the game's own in the speed profile. 12 rollouts: the choice between
# one and two threads is settled in the first ones.
TRAIN = {
    "num_envs": 256,
    "rollout_size": 16_384,
    "batch_size": 1024,
    "n_epochs": 4,
    "learning_rate": 1e-3,
    "rollouts": 12,
}


def native_step() -> dict[str, Any]:
    """256 native games, actions drawn by a compiled helper outside the timed calls."""
    import numpy as np

    from fasttrain.games.skullking.game import SkullKingGame
    from fasttrain.jit import njit
    from fasttrain.vec.native import NativeVecEnv

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

    num_envs, rng = 256, np.random.default_rng(0)
    env = NativeVecEnv(SkullKingGame(num_envs))
    env.seed(0)
    env.reset()
    actions = np.zeros(num_envs, np.int64)

    def run(steps: int) -> float:
        spent = 0.0
        for _ in range(steps):
            draw(env.slots.action_masks, rng.random(num_envs), actions)
            begun = time.perf_counter()
            env.step_slots(actions)
            spent += time.perf_counter() - begun
        return spent

    run(200)
    steps = 8000
    seconds = run(steps)
    return {"rate": steps * num_envs / seconds, **_no_training()}


def single_step(vectorised: bool) -> dict[str, Any]:
    """The single-env class, 8 of them, in a plain loop or in DummyVecEnv."""
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.vec_env import DummyVecEnv

    import fasttrain.envs  # noqa: F401 - registers the game

    rng = np.random.default_rng(0)
    num_envs, steps = 8, 2000
    envs: list[Any] = []
    if vectorised:
        venv: Any = DummyVecEnv([lambda: gym.make(SKULLKING) for _ in range(num_envs)])
        venv.seed(0)
        venv.reset()
    else:
        envs = [gym.make(SKULLKING) for _ in range(num_envs)]
        for seed, env in enumerate(envs):
            env.reset(seed=seed)
    spent = 0.0
    for step in range(steps + 100):
        masks = venv.env_method("action_masks") if vectorised else [e.unwrapped.action_masks() for e in envs]
        actions = [int(rng.choice(np.flatnonzero(mask))) for mask in masks]
        begun = time.perf_counter()
        if vectorised:
            venv.step(np.array(actions))
        else:
            for env, action in zip(envs, actions, strict=True):
                *_, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        if step >= 100:
            spent += time.perf_counter() - begun
    return {"rate": steps * num_envs / spent, **_no_training()}


def _no_training() -> dict[str, Any]:
    return {"env_steps": "rate", "updates": 0, "samples_per_update": 0}


def skullking_ours() -> dict[str, Any]:
    """A whole `fasttrain` run."""
    arguments = [
        "+profile=speed",
        f"num_envs={TRAIN['num_envs']}",
        f"batch_size={TRAIN['batch_size']}",
        f"algo.rollout_size={TRAIN['rollout_size']}",
        f"algo.n_epochs={TRAIN['n_epochs']}",
        f"algo.learning_rate={TRAIN['learning_rate']}",
        f"total_timesteps={TRAIN['rollout_size'] * TRAIN['rollouts']}",
        "eval.episodes=100",
    ]
    return bench_ppo.command_run(arguments, TRAIN["batch_size"])


def stock_run() -> dict[str, Any]:
    """What an SB3 user writes: MaskablePPO on the single-env class."""
    begun = time.perf_counter()
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv

    import fasttrain.envs  # noqa: F401 - registers the game

    env = make_vec_env("fasttrain.envs:" + SKULLKING, n_envs=TRAIN["num_envs"], seed=0, vec_env_cls=DummyVecEnv)
    n_steps = TRAIN["rollout_size"] // TRAIN["num_envs"]
    model = MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=n_steps,
        batch_size=TRAIN["batch_size"],
        n_epochs=TRAIN["n_epochs"],
        learning_rate=TRAIN["learning_rate"],
        seed=0,
        device="cpu",
    )
    return bench_ppo.stock_learn(model, TRAIN["rollout_size"] * TRAIN["rollouts"], begun)


WORKS: dict[str, dict[str, Measurement]] = {
    "skullking-step": {
        "fasttrain": native_step,
        "single env, plain loop": lambda: single_step(False),
        "single env, DummyVecEnv": lambda: single_step(True),
    },
    "skullking-train": {
        "fasttrain": skullking_ours,
        "sb3-contrib, DummyVecEnv": stock_run,
    },
}
