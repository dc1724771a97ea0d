"""The code that one transition passes: what runs of src/fasttrain in an iteration of a small training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gymnasium
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain_games.skullking.game import SkullKingGame

SRC = Path(fasttrain.__file__).parent
# Compiled code, rules of a game, and what a run sets in torch: optimizers that step without torch's compiler.
APART = ("native/", "kernels/", "jit.py", "threads.py", "kernel_cache.py", "runs/")


def passed(iteration: Callable[[], Any]) -> dict[str, int]:
    """Files, functions and source lines of fasttrain that `iteration` enters."""
    seen: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        iteration()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    places: dict[str, set[int]] = {}
    functions = 0
    for code in seen:
        file = Path(code.co_filename)
        if not file.is_relative_to(SRC) or str(file.relative_to(SRC)).startswith(APART):
            continue
        functions += not code.co_name.startswith("<")  # comprehensions and lambdas are inlined by newer Pythons
        lines = {line for *_, line in code.co_lines() if line}
        places.setdefault(str(file.relative_to(SRC)), set()).update(range(min(lines), max(lines) + 1))
    return {"files": len(places), "functions": functions, "lines": sum(map(len, places.values()))}


ROLLOUT = {"n_steps": 16, "batch_size": 64, "n_epochs": 1}
PATHS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "ppo": (fasttrain.MaskablePPO, "MlpPolicy", {**ROLLOUT, "engine": "torch"}),
    "kernels": (fasttrain.MaskablePPO, "MlpPolicy", {**ROLLOUT, "engine": "kernels"}),
    "recurrent": (fasttrain.MaskableRecurrentPPO, "MlpLstmPolicy", ROLLOUT),
    "dqn": (fasttrain.DQN, "MlpPolicy", {"learning_starts": 16, "train_freq": 1}),
    "sac": (fasttrain.SAC, "MlpPolicy", {"learning_starts": 16, "batch_size": 16}),
}


def path_of(name: str) -> dict[str, int]:
    """Of the second iteration: the first one makes what is made once."""
    kind, policy, settings = PATHS[name]
    if "n_steps" in settings:
        env: Any = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    else:
        env = DummyVecEnv([lambda: gymnasium.make("Pendulum-v1" if name == "sac" else "CartPole-v1")] * 4)
    model, steps = kind(policy, env, seed=0, device="cpu", **settings), 128 if "n_steps" in settings else 64
    model.learn(steps)
    return passed(lambda: model.learn(steps, reset_num_timesteps=False))
