"""What a run knows of itself while it goes: counters, the last episodes, and how to say it in one line."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fasttrain.perf.clock import UPDATE_PHASES, PhaseClock
from fasttrain.runs.curve import LearningCurve
from fasttrain.runs.env_text import one_line
from fasttrain.runs.quality_keys import SCORES, score_diff_of, win_of
from fasttrain.terminal import rate_text

RECENT_S, MARK_EVERY_S = 60.0, 1.0


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
    draws: deque[bool] = field(default_factory=lambda: deque(maxlen=1000))
    score_diffs: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    reward_terms: dict[str, deque[float]] = field(default_factory=dict)  # sums of the last episodes, by term
    scores: dict[str, deque[float]] = field(default_factory=dict)  # of the last episodes, by `env.score_keys`
    first_update_s: float | None = None  # from the creation of the process to the end of its first update
    before_s: float = 0.0  # of the training that a resumed run goes on with
    max_s: float | None = None  # the training ends after so many seconds, if not before
    curve: LearningCurve = field(init=False)
    _marks: deque[tuple[float, int]] = field(default_factory=deque)  # when, and env steps by then

    def __post_init__(self) -> None:
        self.curve = LearningCurve(self.total_timesteps)

    def add_episode(self, episode_return: float, info: dict[str, Any]) -> None:
        """Count one finished episode."""
        self.episodes += 1
        self.returns.append(episode_return)
        self.curve.add(self.env_steps, time.perf_counter() - self.started, episode_return)
        won = win_of(info)
        if won is not None:
            self.wins.append(won)
        if "is_draw" in info:
            self.draws.append(bool(info["is_draw"]))
        score_diff = score_diff_of(info)
        if score_diff is not None:
            self.score_diffs.append(score_diff)
        for kept, named in ((self.reward_terms, "reward_terms"), (self.scores, SCORES)):
            for name, value in info.get(named, {}).items():
                kept.setdefault(str(name), deque(maxlen=1000)).append(float(value))

    def mark(self) -> None:
        """Called where a rollout begins: between two marks lie whole turns of collecting and updating."""
        now = time.perf_counter()
        if not self._marks or now - self._marks[-1][0] >= MARK_EVERY_S:
            self._marks.append((now, self.env_steps))
            while len(self._marks) > 2 and now - self._marks[1][0] > RECENT_S:
                self._marks.popleft()

    @property
    def steps_per_s(self) -> float:
        elapsed = time.perf_counter() - self.started
        return self.env_steps / elapsed if elapsed > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the rate of the last minute or so; None before anything is known."""
        rate = self._recent_rate() or self.steps_per_s
        if rate <= 0:
            return None
        left = (self.total_timesteps - self.env_steps) / rate
        if self.max_s is not None:
            left = min(left, self.max_s - (time.perf_counter() - self.started))
        return max(0.0, left)

    def _recent_rate(self) -> float:
        if len(self._marks) < 2:
            return 0.0
        (began, first), (ended, last) = self._marks[0], self._marks[-1]
        return (last - first) / (ended - began)

    @property
    def mean_return(self) -> float | None:
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def win_rate(self) -> float | None:
        return sum(self.wins) / len(self.wins) if self.wins else None

    def trend(self) -> str:
        """` +1.2/h`: what the mean return gains per hour now; empty where that is not known."""
        slope = self.curve.slope_per_hour()
        return "" if slope is None else f" {slope:+,.0f}/h" if abs(slope) >= 1000 else f" {slope:+.2g}/h"

    def mean_terms(self) -> dict[str, float]:
        """Means per episode of the reward's terms, of envs that tell them (`reward_debug`)."""
        return {one_line(name): sum(values) / len(values) for name, values in self.reward_terms.items()}

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
        """`1,200,000/3,000,000 steps 40 % · 61,234 steps/s · ETA 0:29 · reward 0.52 +1.2/h · win 31 % · env 20 % …`."""
        percent = min(100.0, 100 * self.env_steps / self.total_timesteps)  # SB3 finishes the rollout it is in
        parts = [
            f"{self.env_steps:,}/{self.total_timesteps:,} steps {percent:.0f} %",
            f"{rate_text(self.steps_per_s)} steps/s",
        ]
        if self.eta_s is not None:
            parts.append(f"ETA {clock_text(self.eta_s)}")
        if self.mean_return is not None:
            parts.append(f"reward {self.mean_return:.3g}{self.trend()}")
        if self.win_rate is not None:
            draws = f", draw {100 * sum(self.draws) / len(self.draws):.1f} %" if any(self.draws) else ""
            parts.append(f"win {100 * self.win_rate:.1f} %{draws}")
        if self.score_diffs:
            parts.append(f"score {sum(self.score_diffs) / len(self.score_diffs):+.3g}")
        parts += [f"{one_line(name)} {sum(values) / len(values):.3g}" for name, values in self.scores.items()]
        parts.append(" ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares().items()))
        return " · ".join(parts)


def clock_text(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
