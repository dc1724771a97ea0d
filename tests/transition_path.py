"""The code that lies on a way: what runs of src/fasttrain and src/fasttrain_vec in an iteration of a small training,
and in a command. Compiled code (fasttrain_kernels) and the pages of runs (fasttrain_report) are left out."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gymnasium
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
import fasttrain_vec
from fasttrain_games.skullking.game import SkullKingGame

PACKAGES = (Path(fasttrain.__file__).parent, Path(fasttrain_vec.__file__).parent)
# Rules of a game, and what a run sets in torch: optimizers that step without torch's compiler.
APART = ("native/", "runs/")


def trace(iteration: Callable[[], Any], seen: set[CodeType]) -> None:
    """Add all code that `iteration` enters to `seen`."""

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


def files_of(seen: set[CodeType], apart: tuple[str, ...]) -> dict[Path, list[CodeType]]:
    """The code of fasttrain by file, without the files and folders `apart`."""
    files: dict[Path, list[CodeType]] = {}
    for code in seen:
        file = Path(code.co_filename)
        for package in PACKAGES:
            if file.is_relative_to(package) and not str(file.relative_to(package)).startswith(apart):
                files.setdefault(file, []).append(code)
    return files


def functions_in(files: dict[Path, list[CodeType]]) -> int:
    """The number of functions, without comprehensions and lambdas, which newer Pythons inline."""
    return sum(not code.co_name.startswith("<") for codes in files.values() for code in codes)


def passed(iteration: Callable[[], Any]) -> dict[str, int]:
    """Files, functions and source lines of fasttrain that `iteration` enters."""
    trace(iteration, seen := set[CodeType]())
    files, count = files_of(seen, APART), 0
    for codes in files.values():
        places = [[line for *_, line in code.co_lines() if line] for code in codes]
        count += len({line for each in places for line in range(min(each), max(each) + 1)})
    return {"files": len(files), "functions": functions_in(files), "lines": count}


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


COMMAND = ("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "total_timesteps=256", "algo.rollout_size=128",
           "eval.episodes=2")  # fmt: skip
LOOK = ("envs/", "runs/survey.py", "runs/spaces.py")  # the look at the env, which the plan needs
ALGORITHMS = ("algos/", "accelerators/", "buffers/")


def path_of_a_command() -> dict[str, dict[str, int]]:
    """From argv to the plan, and to the end of a training. Only a fresh process enters what is cached later."""
    from fasttrain.cli import compose, main  # noqa: F401 - imported now, because only what is called counts
    from fasttrain.runs import train

    def resolved(*arguments: Any) -> Any:
        plan = resolve(*arguments)
        before.update(() if before else seen)
        return plan

    seen, before, resolve = set[CodeType](), set[CodeType](), train.resolve
    train.resolve = resolved
    trace(lambda: main(COMMAND), seen)
    plan, training = files_of(before, LOOK), files_of(seen, ALGORITHMS)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in training)
    return {
        "plan": {"files": len(plan), "functions": functions_in(plan)},
        "training": {"files": len(training), "lines": lines},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.stdout.write(json.dumps(path_of_a_command()))
