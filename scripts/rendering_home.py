"""Stored results about what people bring (settings of the zoo, envs, trackers) as the pages show them. Used by
reproduce.py."""

from __future__ import annotations

from collections.abc import Mapping

import zoo
from rendering import Json, Load, cores, prose, rounded, table

TRACKERS = {
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases, offline",
    "mlflow": "MLflow",
    "trackio": "trackio",
}


def tuned(load: Load) -> str:
    """What conf/tuned reaches."""
    stored = load("zoo-tuned")
    found = stored["cells"]
    rows = []
    for name, task in zoo.TUNED.items():
        figures = zoo.figures(task, zoo.of(found, name))
        published = f"{_reward(task.reward)} ({task.algo})" if task.algo else "-"
        reached = "-" if figures["reached_s"] is None or not task.algo else f"{rounded(figures['reached_s'], 2)} s"
        rows.append((f"`{name}`", rounded(figures["env_steps"], 2), _rewards(figures), published,
                     rounded(figures["steps_per_s"], 2), f"{rounded(figures['wall_s'], 2)} s", reached))  # fmt: skip
    head = ("`+tuned=`", "env steps", "mean reward, greedy", "the zoo's best", "steps/s", "time", "time to that reward")
    text = (
        f"Under `+profile=speed` on {cores(stored)}, three seeds each: the middle mean of 500 "
        "greedy episodes and the others' range; the time to the zoo's reward is when the mean of 100 training episodes "
        "was there, in every seed:"
    )
    return f"{prose(text)}\n\n{table(head, rows)}"


def entries(load: Load) -> str:
    """What imported entries reach."""
    found = load("zoo-entries")["cells"]
    rows = []
    for name, task in zoo.ENTRIES.items():
        figures = zoo.figures(task, zoo.of(found, name))
        reached = f"{figures['reached']} of {figures['seeds']}"
        steps = rounded(figures["env_steps"], 2)
        rows.append((task.env, f"`{task.algo}`", steps, _rewards(figures), _reward(task.reward), reached))
    head = ("entry", "algorithm", "env steps", "mean reward, greedy", "published", "reached, seeds")
    text = "Imported and run by the faster command; reached: the 95 % interval is not below what the zoo published:"
    return f"{prose(text)}\n\n{table(head, rows)}"


def _rewards(figures: Json) -> str:
    low, middle, high = (_reward(value) for value in figures["rewards"])
    return middle if low == high else f"{middle} [{low}, {high}]"


def _reward(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"


def vector(load: Load) -> str:
    """CartPole end to end."""
    found = load("home-vector-64")
    against = ", ".join(f"{_ratio(ratio)} that of {name}" for name, ratio in found["ratios"].items())
    ours = rounded(found["ours"]["median"])
    return prose(f"64 CartPoles end to end on {cores(found)}, PPO under `speed`: {ours} steps/s, {against}.")


def pong(load: Load) -> str:
    """Pong beside stock."""
    parts = []
    for algo, label in (("ppo", "PPO"), ("dqn", "DQN")):
        found = load(f"home-pong-{algo}")
        ours, theirs = (rounded(rate["median"]) for rate in (found["ours"], found["theirs"]["stock"]))
        parts.append(f"{label} {ours} steps/s where stock has {theirs} ({_ratio(found['ratio'])})")
    return prose(f"50,000 steps of Pong with 8 envs and equal settings on {cores(found)}: {', '.join(parts)}.")


def trackers(load: Load) -> str:
    """What a tracker costs."""
    found = load("home-trackers")
    rows = []
    for name, label in TRACKERS.items():
        if name in found["tracker_share"]:
            share = found["tracker_share"][name]["median"]
            start, finish = (
                found[key][name]["median"] - found[key]["fasttrain"]["median"] for key in ("startup_s", "finish_s")
            )
            rows.append((label, f"{100 * share:.1f} %", f"{start:+.1f} s", f"{finish:+.1f} s"))
    text = (
        f"The default job under `speed` on {cores(found)}, a tracker beside `loggers=[csv]`: what its calls take of "
        "the training, and what it adds before and after:"
    )
    return f"{prose(text)}\n\n{table(('tracker', 'share of the training time', 'start', 'finish'), rows)}"


def _ratio(ratio: Mapping[str, float]) -> str:
    spread = "" if ratio["min"] == ratio["max"] else f" [{ratio['min']:.2f}, {ratio['max']:.2f}]"
    return f"{ratio['median']:.2f}×{spread}"
