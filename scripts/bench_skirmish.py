"""Works of benchmark.py about Skirmish: native stepping, what caches and secondary rewards cost, and self-play."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_ppo

Measurement = Callable[[], dict[str, Any]]
NUM_ENVS, STEPS = 256, 1500
PLAIN_STEPS = 400  # of the plain Python env, which takes milliseconds for one
UNIT = "decisions per second"
SECONDARY = {"reward_damage": 0.01, "reward_progress": 0.01}
# Of both sides of `skirmish-self-play`.
TRAIN = {"batch_size": 1024, "total_timesteps": 1_000_000, "algo.n_epochs": 4, "algo.rollout_size": 16_384}


def native(**kwargs: Any) -> dict[str, Any]:
    """256 native games on all cores, random legal actions that are drawn outside of what is timed."""
    import numpy as np

    from fasttrain.games.skirmish.game import SkirmishGame
    from fasttrain.machine import usable_cores
    from fasttrain.vec.native import NativeVecEnv
    from fasttrain.vec.self_play import RandomOpponent

    game = SkirmishGame(NUM_ENVS, **kwargs)
    game.max_threads = usable_cores()
    env = NativeVecEnv(game, seed=0)
    env.reset()
    player, every, spent = RandomOpponent(env.action_space), np.arange(NUM_ENVS), 0.0
    for step in range(100 + STEPS):
        actions = player.act(None, env.slots.action_masks, every)
        begun = time.perf_counter()
        env.step_slots(actions)
        if step >= 100:
            spent += time.perf_counter() - begun
    return {"rate": STEPS * NUM_ENVS / spent, "unit": UNIT, **_no_training()}


def plain(**kwargs: Any) -> dict[str, Any]:
    """One env in plain Python, the same rules."""
    import gymnasium
    import numpy as np

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import reference.skirmish_python  # noqa: F401 - registers the game
    from fasttrain.vec.self_play import RandomOpponent

    env = gymnasium.make("SkirmishPython-v0", **kwargs)
    env.reset(seed=0)
    player, one, spent = RandomOpponent(env.action_space), np.arange(1), 0.0
    for step in range(20 + PLAIN_STEPS):
        action = player.act(None, env.unwrapped.action_masks()[None], one)[0]  # type: ignore[attr-defined]
        begun = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        if step >= 20:
            spent += time.perf_counter() - begun
    return {"rate": PLAIN_STEPS / spent, "unit": UNIT, **_no_training()}


def train(opponent: str) -> dict[str, Any]:
    """A whole `fasttrain` run."""
    settings = [f"{key}={value}" for key, value in TRAIN.items()]
    more = ["eval_every=100000000"] if opponent == "self" else []  # none on the way
    arguments = ["+profile=speed", "env=skirmish", f"opponent={opponent}", *settings, "eval.episodes=200", *more]
    return bench_ppo.command_run(arguments, TRAIN["batch_size"])


def _no_training() -> dict[str, Any]:
    return {"env_steps": "rate", "updates": 0, "samples_per_update": 0}


WORKS: dict[str, dict[str, Measurement]] = {
    "skirmish-step": {
        "fasttrain": lambda: native(opponent="greedy"),
        "plain Python env": lambda: plain(opponent="greedy"),
    },
    "skirmish-units-step": {
        "fasttrain": lambda: native(opponent="greedy", action_mode="units"),
        "plain Python env": lambda: plain(opponent="greedy", action_mode="units"),
    },
    "skirmish-planner": {
        "fasttrain": lambda: native(opponent="planner"),
        "without caches": lambda: native(opponent="planner", cache=False),
        "plain Python env": lambda: plain(opponent="planner"),
    },
    "skirmish-caches": {
        "fasttrain": lambda: native(opponent="greedy"),
        "without caches": lambda: native(opponent="greedy", cache=False),
    },
    "skirmish-rewards": {
        "critical terms": lambda: native(opponent="greedy"),
        "secondary every 4th decision": lambda: native(opponent="greedy", **SECONDARY, secondary_every=4),
        "secondary at every decision": lambda: native(opponent="greedy", **SECONDARY, secondary_every=1),
    },
    "skirmish-self-play": {
        "against itself": lambda: train("self"),
        "against greedy": lambda: train("greedy"),
    },
}
