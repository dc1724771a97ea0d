"""What a run counts besides its model, as plain values, and back: progress, rules that stop it, what is due when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from fasttrain.algos.random_state import plain
from fasttrain.runs.callbacks import Interval, RunCallback
from fasttrain.runs.curve import LearningCurve, Moments
from fasttrain.runs.opponents import SnapshotCallback
from fasttrain.runs.progress import Progress
from fasttrain.runs.stopping import Block, Plateau, Stopping

RECENT = ("returns", "wins", "draws", "score_diffs")
BY_NAME = ("reward_terms", "scores")  # a deque of each


def progress_state(progress: Progress) -> dict[str, Any]:
    """Counters, the last thousand episodes and the learning curve."""
    return {
        "env_steps": progress.env_steps,
        "updates": progress.updates,
        "episodes": progress.episodes,
        "wall_s": time.perf_counter() - progress.started,
        **{name: plain(list(getattr(progress, name))) for name in RECENT},
        **{
            named: {name: plain(list(values)) for name, values in getattr(progress, named).items()} for named in BY_NAME
        },
        "curve": curve_state(progress.curve),
    }


def load_progress(progress: Progress, state: Mapping[str, Any]) -> None:
    """Count on from there."""
    for name in ("env_steps", "updates", "episodes"):
        setattr(progress, name, int(state[name]))
    progress.before_s = float(state["wall_s"])
    progress.started = time.perf_counter() - progress.before_s
    for name in RECENT:
        getattr(progress, name).extend(state[name])
    for named in BY_NAME:
        for name, values in state.get(named, {}).items():
            getattr(progress, named)[name] = deque(values, maxlen=1000)
    load_curve(progress.curve, state["curve"])


def curve_state(curve: LearningCurve) -> dict[str, Any]:
    """Its stretches."""
    rows = [[each.index, each.episodes, each.returns, each.wall_s] for each in curve._stretches]
    return {"total": curve._total, "stretches": plain(rows)}


def load_curve(curve: LearningCurve, state: Mapping[str, Any]) -> None:
    """In stretches of this horizon: of a longer one several of the old make one."""
    total = int(state["total"])
    for index, episodes, returns, wall_s in state["stretches"]:
        curve.add_stretch(int(index) * total // curve._total, int(episodes), float(returns), float(wall_s))


def stopping_state(stopping: Stopping) -> dict[str, Any]:
    """The last episodes, and the blocks of the rule about plateaus."""
    plateau = stopping._plateau
    return {"recent": plain(list(stopping._recent)), "plateau": None if plateau is None else _plateau_state(plateau)}


def load_stopping(stopping: Stopping, state: Mapping[str, Any]) -> None:
    """Rules that this run has anew begin with what the stored one counted for them, if it did."""
    stopping._recent.extend(state["recent"])
    if stopping._plateau is not None and state["plateau"] is not None:
        _load_plateau(stopping._plateau, state["plateau"])


def _plateau_state(plateau: Plateau) -> dict[str, Any]:
    blocks = [[block.begin, block.end, *_moments(block.returns)] for block in plateau._blocks]
    found = None
    if plateau.found is not None:
        found = [next(i for i, block in enumerate(plateau._blocks) if block is each) for each in plateau.found]
    return {"begin": plateau._begin, "open": _moments(plateau._open), "blocks": blocks, "found": found}


def _load_plateau(plateau: Plateau, state: Mapping[str, Any]) -> None:
    plateau._begin = int(state["begin"])
    plateau._open = Moments(*state["open"])
    plateau._blocks = [Block(int(begin), int(end), Moments(*rest)) for begin, end, *rest in state["blocks"]]
    if state["found"] is not None:
        before, now = state["found"]
        plateau.found = plateau._blocks[before], plateau._blocks[now]


def _moments(moments: Moments) -> list[float]:
    return [moments.count, float(moments.mean), float(moments.squares)]


def callback_state(callback: RunCallback, snapshots: SnapshotCallback | None) -> dict[str, Any]:
    """When what is due next."""
    return {
        "intervals": {name: [each.every, each._next] for name, each in _intervals(callback).items()},
        "logged_updates": callback._logged_updates,
        "enemy_turn_ms": float(callback.enemy_turn_ms),
        "next_snapshot": None if snapshots is None else snapshots._next,
    }


def load_callback(
    callback: RunCallback, snapshots: SnapshotCallback | None, state: Mapping[str, Any], progress: Progress
) -> None:
    """Intervals that were changed begin anew from here."""
    for name, interval in _intervals(callback).items():
        every, following = state["intervals"][name]
        if every == interval.every:
            interval._next = int(following)
        else:
            interval.due(progress.updates if name == "log" else progress.env_steps)
    callback._logged_updates = int(state["logged_updates"])
    callback.enemy_turn_ms = float(state["enemy_turn_ms"])
    if snapshots is not None and state["next_snapshot"] is not None:
        snapshots._next = int(state["next_snapshot"])


def _intervals(callback: RunCallback) -> dict[str, Interval]:
    return {"log": callback._log, "evaluate": callback._evaluate, "checkpoint": callback._checkpoint}
