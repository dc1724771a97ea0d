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


def second_iteration(model: Any, steps: int) -> dict[str, int]:
    """The first one makes what is made once."""
    model.learn(steps)
    return passed(lambda: model.learn(steps, reset_num_timesteps=False))


def masked_ppo(engine: str) -> dict[str, int]:
    env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    model = fasttrain.MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=16,
        batch_size=64,
        n_epochs=1,
        seed=0,
        device="cpu",
        engine=engine,
    )
    return second_iteration(model, 16 * 8)


def recurrent_ppo() -> dict[str, int]:
    env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    model = fasttrain.MaskableRecurrentPPO(
        "MlpLstmPolicy", env, n_steps=16, batch_size=64, n_epochs=1, seed=0, device="cpu"
    )
    return second_iteration(model, 16 * 8)


def dqn() -> dict[str, int]:
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    model = fasttrain.DQN("MlpPolicy", env, learning_starts=16, train_freq=1, seed=0, device="cpu")
    return second_iteration(model, 64)


def sac() -> dict[str, int]:
    env = DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")] * 4)
    model = fasttrain.SAC("MlpPolicy", env, learning_starts=16, batch_size=16, seed=0, device="cpu")
    return second_iteration(model, 64)


PATHS = {
    "ppo": lambda: masked_ppo("torch"),
    "kernels": lambda: masked_ppo("kernels"),
    "recurrent": recurrent_ppo,
    "dqn": dqn,
    "sac": sac,
}
