"""Skirmish: native stepping, what caches and secondary rewards cost, and self-play."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import trainings
from benchmarks.machine import ROOT
from benchmarks.work import OURS, Sample, Work, works_of

NUM_ENVS, STEPS = 256, 1500
PLAIN_STEPS = 400  # of the plain Python env, which takes milliseconds for one
TRAIN = {"batch_size": 1024, "total_timesteps": 1_000_000, "algo.n_epochs": 4, "algo.rollout_size": 16_384}


def native(**kwargs: Any) -> Sample:
    """256 native games on all cores, random legal actions that are drawn outside of what is timed."""
    import numpy as np

    from fasttrain.machine import usable_cores
    from fasttrain.vec.native import NativeVecEnv
    from fasttrain.vec.self_play import RandomOpponent
    from fasttrain_games.skirmish.game import SkirmishGame

    game = SkirmishGame(NUM_ENVS, **kwargs)
    game.max_threads = usable_cores()
    env = NativeVecEnv(game, seed=0)
    env.reset()
    player, every, spent = RandomOpponent(env.action_space), np.arange(NUM_ENVS), 0.0
    for step in range(100 + STEPS):
        actions = player.act(None, env.slots.action_masks, every)
        begun = time.perf_counter()
        env.step_slots(actions)
        spent += time.perf_counter() - begun if step >= 100 else 0.0
    return {"rate": STEPS * NUM_ENVS / spent}


def plain(**kwargs: Any) -> Sample:
    """One env in plain Python, the same rules."""
    import gymnasium
    import numpy as np

    from fasttrain.vec.self_play import RandomOpponent

    sys.path.insert(0, str(ROOT / "tests"))
    import reference.skirmish_python  # noqa: F401 - registers the game

    env: Any = gymnasium.make("SkirmishPython-v0", **kwargs)
    env.reset(seed=0)
    player, one, spent = RandomOpponent(env.action_space), np.arange(1), 0.0
    for step in range(20 + PLAIN_STEPS):
        action = player.act(None, env.unwrapped.action_masks()[None], one)[0]
        begun = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        spent += time.perf_counter() - begun if step >= 20 else 0.0
    return {"rate": PLAIN_STEPS / spent}


def train(opponent: str) -> Sample:
    """A whole `fasttrain` run."""
    more = ["eval_every=100000000"] if opponent == "self" else []  # none on the way
    arguments = ["+profile=speed", "env=skirmish", f"opponent={opponent}", *trainings.typed(TRAIN), *more]
    return trainings.command([*arguments, "eval.episodes=200"], TRAIN["batch_size"])


def step_work(name: str, text: str, measurements: Mapping[str, Any]) -> Work:
    return Work(f"skirmish-{name}", text, measurements, unit="decisions/s", equal=())


PLAIN, UNCACHED = "plain Python env", "without caches"
GREEDY = {"opponent": "greedy"}
UNITS = {**GREEDY, "action_mode": "units"}
PLANNER = {"opponent": "planner"}
WORKS = works_of(
    step_work(
        "step", "Stepping against `greedy`, heads.", {OURS: partial(native, **GREEDY), PLAIN: partial(plain, **GREEDY)}
    ),
    step_work(
        "units-step", "The same, one unit at a time.", {OURS: partial(native, **UNITS), PLAIN: partial(plain, **UNITS)}
    ),
    step_work(
        "planner",
        "Stepping against `planner`, heads.",
        {
            OURS: partial(native, **PLANNER),
            UNCACHED: partial(native, **PLANNER, cache=False),
            PLAIN: partial(plain, **PLANNER),
        },
    ),
    step_work(
        "caches",
        "What caches gain against `greedy`.",
        {OURS: partial(native, **GREEDY), UNCACHED: partial(native, **GREEDY, cache=False)},
    ),
    Work(
        "skirmish-self-play",
        "Training Skirmish against itself instead of against `greedy`.",
        {"against itself": partial(train, "self"), "against greedy": partial(train, "greedy")},
    ),
)
