"""What a run knows of itself while it goes: counters, the last episodes, and how to say it in one line."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fasttrain.perf.clock import PhaseClock

WIN_KEYS = ("is_win", "is_success")
UPDATE_PHASES = ("replay_sample", "train_fwd", "train_bwd", "train", "optim")


def win_of(info: dict[str, Any]) -> bool | None:
    """Whether an episode was won, None where the env does not say."""
    for key in WIN_KEYS:
        if key in info:
            return bool(info[key])
    return None


@dataclass(slots=True)
class Progress:
    """Written by the callback, read by the live view and the summary."""

    total_timesteps: int
    clock: PhaseClock
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    started: float = field(default_factory=time.perf_counter)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    wins: deque[bool] = field(default_factory=lambda: deque(maxlen=1000))

    def add_episode(self, episode_return: float, info: dict[str, Any]) -> None:
        """Count one finished episode."""
        self.episodes += 1
        self.returns.append(episode_return)
        won = win_of(info)
        if won is not None:
            self.wins.append(won)

    @property
    def steps_per_s(self) -> float:
        elapsed = time.perf_counter() - self.started
        return self.env_steps / elapsed if elapsed > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the mean rate so far; None before anything is known."""
        rate = self.steps_per_s
        return max(0.0, (self.total_timesteps - self.env_steps) / rate) if rate > 0 else None

    @property
    def mean_return(self) -> float | None:
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def win_rate(self) -> float | None:
        return sum(self.wins) / len(self.wins) if self.wins else None

    def shares(self) -> dict[str, float]:
        """Shares of the time so far: env, act, update, rest."""
        totals = self.clock.snapshot()
        wall = sum(totals.values()) or 1
        groups = {
            "env": totals["env_step"] / wall,
            "act": totals["action"] / wall,
            "update": sum(totals[name] for name in UPDATE_PHASES) / wall,
        }
        return {**groups, "rest": 1.0 - sum(groups.values())}

    def line(self) -> str:
        """`1,200,000/3,000,000 steps 40 % · 61,234 steps/s · ETA 0:29 · reward 0.52 · win 31 % · env 20 % …`."""
        percent = min(100.0, 100 * self.env_steps / self.total_timesteps)  # SB3 finishes the rollout it is in
        parts = [
            f"{self.env_steps:,}/{self.total_timesteps:,} steps {percent:.0f} %",
            f"{self.steps_per_s:,.0f} steps/s",
        ]
        if self.eta_s is not None:
            parts.append(f"ETA {clock_text(self.eta_s)}")
        if self.mean_return is not None:
            parts.append(f"reward {self.mean_return:.3g}")
        if self.win_rate is not None:
            parts.append(f"win {100 * self.win_rate:.1f} %")
        parts.append(" ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares().items()))
        return " · ".join(parts)


def clock_text(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
