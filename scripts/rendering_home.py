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

DAEMONS = {
    "daemons-4-engines": "4 engine processes each; ours play 64 games on them",
    "daemons-1": "1 game",
    "daemons-4": "4 games",
    "daemons-16": "16 games in flight",
    "daemons-64": "64",
    "daemons-64-lognormal": "64, thinking varies (lognormal, variation 0.63)",
    "daemons-computing": "16 on 2 engines that compute",
}


def daemons(load: Load) -> str:
    """Games with an engine, against one blocking process per env."""
    rows = []
    for name, what in DAEMONS.items():
        stored = load(name)
        rates, ratios, late = {"": stored["ours"], **stored["theirs"]}, stored["ratios"], stored.get("p95_ms", {})
        plain = "SubprocVecEnv" if "SubprocVecEnv" in ratios else "the engines alone"
        both = [rounded(rates[each]["median"], 2) for each in ("", plain)]
        same = ratios.get("SubprocVecEnv, our PPO")
        shown = [
            f"{value['median']:.2f}× [{value['min']:.2f}, {value['max']:.2f}]"
            for value in (ratios[plain], same)
            if value
        ]
        p95 = [f"{late[each]['median']:.1f}" for each in ("fasttrain", plain) if each in late]
        rows.append((what, both[0], both[1], shown[0], shown[1] if same else "-", " / ".join(p95)))
    head = (
        "games",
        "decisions/s",
        "theirs",
        "ratio",
        "ratio, both with our PPO",
        "P95 of a decision, ms, ours / theirs",
    )
    text = (
        f"Against one blocking process per env in SubprocVecEnv with stock's MaskablePPO, {cores(load('daemons-64'))}: "
        "the Java reference engine sleeps 5 ms a decision; training and updates included, medians of turns. Of "
        "engines that compute 5 ms, theirs is what they do in a closed loop of recorded answers, with no learning:"
    )
    return f"{prose(text)}\n\n{table(head, rows)}"


BOARDS = (1, 4, 16, 64)


def engines(load: Load, engine: str, text: str) -> str:
    """Games with a real engine, against one blocking process per env and against what the engine can do."""
    rows = []
    for games in BOARDS:
        stored, alone = load(f"{engine}-{games}"), load(f"{engine}-{games}-capacity")
        shown = [
            f"{value['median']:.2f}× [{value['min']:.2f}, {value['max']:.2f}]"
            for value in (stored["ratios"]["SubprocVecEnv"], stored["ratios"]["SubprocVecEnv, our PPO"])
        ]
        late = " / ".join(f"{stored['p95_ms'][each]['median']:.0f}" for each in ("fasttrain", "SubprocVecEnv"))
        both = [rounded(one["median"], 2) for one in (stored["ours"], stored["theirs"]["SubprocVecEnv"])]
        share = f"{100 * alone['ratios']['the engines alone']['median']:.0f} %"
        rows.append((str(games), *both, *shown, share, late))
    head = (
        "at once",
        "decisions/s",
        "theirs",
        "ratio",
        "ratio, both with our PPO",
        "of what the engines can do",
        "P95 of a decision, ms, ours / theirs",
    )
    return f"{prose(text)}\n\n{table(head, rows)}"


def go(load: Load) -> str:
    """GNU Go."""
    text = (
        f"Size 5, level 1; {cores(load('go-16'))}, with training; theirs is one blocking process an env "
        "in SubprocVecEnv with stock's MaskablePPO. What the engines can do: recorded games in a closed "
        "loop, without policy and learning:"
    )
    return engines(load, "go", text)


def daemon_faults(load: Load) -> str:
    """The run in which engines fail in every way there is."""
    parts = load("faults_daemons")["parts"]
    run, frames = parts["trainings"], parts["frames"]
    faults = run["faults"]
    kinds = (
        "the engine crashes, hangs, is stopped or killed for its memory, does not come up, half closes, sends garbage, "
        "too much, too deep, a byte a second, for another game, refuses"
    )
    refused = faults["connection refused"]  # five games ask for four connections, again and again
    count = f"{sum(faults.values()) - refused:,} faults of {len(faults) - 1} kinds"
    text = (
        f"One training of {run['decisions']:,} decisions, {count} ({kinds}) and {refused:,} connections too many: it "
        f"ended by itself, {run['illegal']} illegal transitions were learnt, {run['lost']:,} games were lost, each "
        f"counted, {run['processes_left']} processes and {run['sockets_left']} sockets were left. "
        f"{frames['count']:,} mutated, cut or reordered frames: each was a message or a game lost with a cause; the "
        f"process grew by {frames['grown_mb']:.0f} MB."
    )
    return prose(text)


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
