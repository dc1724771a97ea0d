"""Does `+profile=speed` learn as well as stock? Paired seeds: a turn is a seed, all sides have its env steps.

`quality` is the win rate of the final greedy policy, or its mean reward where the game has no winner; for DQN, whose
greedy policy is another after every update (CartPole: 9 in one moment, 500 in the next), the mean of the last fifth of
the training curve. A task that stock cannot play (stock DQN ignores masks) has one side.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of

STOCK = ("profile=baseline", "vec_env=dummy", "torch_threads=1")
SPEED, BALANCE = ("profile=speed",), ("profile=balance",)


@dataclass(frozen=True)
class Task:
    """What all sides are asked to learn. `measure`: mean_reward or win_rate of the final policy, or tail."""

    overrides: tuple[str, ...]
    measure: str = "mean_reward"
    sides: tuple[tuple[str, tuple[str, ...]], ...] = ((OURS, SPEED), ("stock", STOCK))
    episodes: int = 200


def learned(overrides: tuple[str, ...], measure: str, seed: int) -> Sample:
    """One training with one seed."""
    os.environ["FASTTRAIN_ENGINE_SWITCH_AT"] = "0"  # compile first: what is measured is one engine
    summary, episodes = trainings.finished([*overrides, f"seed={seed}"])
    quality = summary["quality"]
    return {
        "rate": summary["steps_per_s"],
        "env_steps": summary["env_steps"],
        "updates": summary["updates"],
        "wall_s": summary["wall_s"],
        "quality": tail(episodes) if measure == "tail" else quality[measure],
        "curve": tenths(episodes),
    }


def returns(episodes: list[dict[str, str]]) -> list[float]:
    column = "is_win" if episodes and episodes[0].get("is_win") else "return"
    return [float(row[column]) for row in episodes]


def tail(episodes: list[dict[str, str]]) -> float:
    """The mean over the episodes of the last fifth of the env steps."""
    last = float(episodes[-1]["env_steps"])
    late = [row for row in episodes if float(row["env_steps"]) > 0.8 * last]
    return sum(returns(late)) / len(late)


def tenths(episodes: list[dict[str, str]]) -> list[float]:
    """The mean return, or win rate, in each tenth of the episodes."""
    import numpy as np

    return [round(float(part.mean()), 4) for part in np.array_split(np.array(returns(episodes)), 10) if len(part)]


def learning_work(name: str, text: str, sides: Mapping[str, tuple[str, ...]], measure: str, **more: Any) -> Work:
    """`sides`: name → the whole command line but for the seed."""
    measurements = {side: partial(learned, overrides, measure) for side, overrides in sides.items()}
    equal = more.pop("equal", ())  # a rollout of another length ends elsewhere
    return Work(name, text, measurements, equal=equal, seeded=True, is_rate=measure == "win_rate", **more)


# Stock's 64 samples at 1e-4 once per vector step of 8 envs, with a target that moves every 10,000 steps, learn nothing
# in such a horizon: mean reward 9.2 in CartPole after 50,000 steps. So rate, target and buffer are set on both sides.
DQN = ("algo=dqn", "algo.learning_rate=5e-4", "algo.target_update_interval=500", "algo.buffer_size=50000")
DOUBLE = ("fasttrain, double Q and PER", (*SPEED, "algo.double_q=true", "algo.prioritized=true"))
PAIR = Task(()).sides
TASKS = {
    "cartpole": Task(("env.id=CartPole-v1", "algo=ppo", "total_timesteps=100000")),
    # gamma as in sb3-contrib's own test: the best action depends on the present state alone. 70 actions, 55 illegal.
    "invalid-actions": Task(
        (
            "env.entry_point=sb3_contrib.common.envs:InvalidActionEnvDiscrete", "env.kwargs.dim=70",
            "env.kwargs.n_invalid_actions=55", "algo=maskable_ppo", "algo.rollout_size=2048", "algo.gamma=0.1",
            "total_timesteps=20000",
        )
    ),
    "acrobot": Task(("env.id=Acrobot-v1", "algo=ppo", "total_timesteps=200000")),
    # gamma, lambda and entropy of rl-zoo3: with SB3's own a lander learns to hover.
    "lunarlander": Task(
        ("env.id=LunarLander-v3", "algo=ppo", "algo.gamma=0.999", "algo.gae_lambda=0.98", "algo.ent_coef=0.01",
         "total_timesteps=300000")
    ),
    "skullking": Task(("total_timesteps=500000",), "win_rate", episodes=1000),
    # Too short for the large batches of `speed`, of which the plan warns.
    "skullking-short": Task(
        ("total_timesteps=200000",), "win_rate", (*PAIR, ("fasttrain, balance", BALANCE)), episodes=1000
    ),
    "dqn-cartpole": Task(("env.id=CartPole-v1", *DQN, "total_timesteps=100000"), "tail"),
    "dqn-acrobot": Task(("env.id=Acrobot-v1", *DQN, "total_timesteps=100000"), "tail"),
    "dqn-lunarlander": Task(("env.id=LunarLander-v3", *DQN, "total_timesteps=200000"), "tail", (*PAIR, DOUBLE)),
    # Four players: who plays at random wins a quarter of the games.
    "dqn-skullking": Task(
        ("algo=dqn", "env.kwargs.opponents=easy", "algo.learning_rate=5e-4", "algo.target_update_interval=2000",
         "algo.buffer_size=100000", "total_timesteps=200000"),
        "win_rate",
        ((OURS, SPEED),),
        episodes=1000,
    ),
}  # fmt: skip
# What the tiers' own minibatch, epochs, learning rate and number of envs cost in learning, all by the same engine.
TIERS = {
    OURS: ("tier=speed",),
    "stock's settings": ("tier=baseline",),
    "balance": ("tier=balance",),
    "speed, stock's learning rate": ("tier=speed", "algo.learning_rate=3e-4"),
}
FASTER = ("profile=speed", "total_timesteps=1000000", "eval.episodes=2000")
WORKS = works_of(
    *(
        learning_work(
            f"learn-{name}",
            f"Learning, `{' '.join(task.overrides)}`.",
            {side: (*typed, *task.overrides, f"eval.episodes={task.episodes}") for side, typed in task.sides},
            task.measure,
        )
        for name, task in TASKS.items()
    ),
    learning_work(
        "learn-settings",
        "What the faster settings cost in learning, Skull King over 1,000,000 env steps.",
        {side: (*FASTER, *typed) for side, typed in TIERS.items()},
        "win_rate",
    ),
)
