"""What the envs of a run say of their time, and what came of games with external engines, in numbers and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from fasttrain.perf.report import EnvTimes
from fasttrain.spec.config import Config
from fasttrain.terminal import rate_text
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_engines.stats import summary
from fasttrain_engines.vec_env import DaemonVecEnv

LOST_SHARE = 0.01  # of the games, from which on the loss is worth a warning
BIASED = (
    "Dropping games, long ones above all, biases what is learned from: see failed_games.jsonl, and give them time "
    "(daemons.timeouts_s.game, daemons.timeouts_s.request)"
)


def env_times(env: VecEnv, config: Config, opponents_ns: int, counted: bool) -> EnvTimes:
    """What they report: opponents' time, and where workers or engines spent theirs.

    Args:
        opponents_ns: what info["perf"] said of it.
        counted: whether the envs count it themselves, as `opponents_ns`.
    """
    itself = env if isinstance(env, SelfPlayVecEnv) else None
    stepping = env.unwrapped if itself is None else itself.inner
    if itself is not None:  # the trainer decides for them; what the envs count lies within
        opponents_ns = itself.opponents_ns
    if isinstance(stepping, DaemonVecEnv):
        told = stepping.times()
        games = tuple((name, ns // stepping.num_envs) for name, ns in told.parts_ns.items())
        together = config.schedule != "first_ready"
        return EnvTimes(
            opponents_ns, in_step=together, restarts=told.restarts, lost_steps=told.lost_decisions, games=games
        )
    shared = stepping if isinstance(stepping, SharedMemoryVecEnv) else None
    if counted and itself is None:
        counts = env.get_attr("opponents_ns")
        opponents_ns = int(counts[0] if config.vec_env == "native" else sum(counts))
    if shared is None:
        return EnvTimes(opponents_ns)
    times = shared.times_ns()
    of_workers = (times["opponents"] or opponents_ns) // shared.num_workers  # side by side
    return EnvTimes(
        opponents_ns=of_workers if itself is None else opponents_ns,
        num_workers=shared.num_workers,
        envs_ns=times["envs"],
        slowest_ns=times["slowest"],
        waiting_ns=times["waiting"],
        in_step=config.schedule != "first_ready",
        restarts=shared.restarts,
        lost_steps=shared.lost_steps,
    )


def engines_of(env: VecEnv) -> DaemonVecEnv | None:
    """The vectorized env whose games external engines play, if `env` is one."""
    games = env.inner if isinstance(env, SelfPlayVecEnv) else env.unwrapped
    return games if isinstance(games, DaemonVecEnv) else None


def engines_dict(env: VecEnv, wall_s: float, fresh: bool = False) -> dict[str, Any]:
    """{"engines": what came of the games since the env was built}; empty where there are none.

    Args:
        fresh: ask the workers, from the trainer's own thread; else what was last heard of them.
    """
    games = engines_of(env)
    if games is None:
        return {}
    found = summary(games.tally(fresh), games.times(), wall_s)
    lost, length = _lost(found)
    often = lost > LOST_SHARE * (lost + found["games"])
    biased = lost and (often or length > (found["mean_decisions"] or 0.0))
    return {"engines": {**found, "warning": BIASED if biased else ""}}


def _lost(found: Mapping[str, Any]) -> tuple[int, float]:
    """How many games were lost, and their mean length."""
    causes = found["lost_games"].values()
    lost = sum(one["games"] for one in causes)
    return lost, sum(one["games"] * one["mean_decisions"] for one in causes) / max(1, lost)


def engine_lines(engines: Mapping[str, Any]) -> list[str]:
    """`engines_dict` for a person."""
    if not engines:
        return []
    found, count = engines["engines"], len(engines["engines"]["daemons"])
    lines = [
        f"engines: {count}, busy {100 * (found['busy_share'] or 0.0):.0f} %, {found['memory_mb']:,.0f} MB; "
        f"{found['games']:,} games ({rate_text(found['games_per_s'] or 0.0)}/s), {found['decisions']:,} decisions "
        f"({rate_text(found['decisions_per_s'] or 0.0)}/s)"
    ]
    took = {"a decision": found["decision_ms"], "a game": found["game_ms"]}
    parts = {what: [f"{rate_text(ms)} ms ({name.upper()})" for name, ms in each.items()]
             for what, each in took.items() if each["p50"] is not None}  # fmt: skip
    told = [f"{what} took {', '.join(each)}" for what, each in parts.items()]
    lines += ["; ".join(told)] if told else []
    lost, length = _lost(found)
    if lost:
        causes = ", ".join(f"{cause} {one['games']:,}" for cause, one in found["lost_games"].items())
        finished = f"; finished ones have {found['mean_decisions']:g}" if found["mean_decisions"] else ""
        lines.append(f"{lost:,} games were lost after {length:.3g} decisions in the mean ({causes}){finished}")
    return [*lines, *([found["warning"]] if found["warning"] else [])]
