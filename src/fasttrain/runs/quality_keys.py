"""What an env's last info says of an episode: won or lost, scores, how it ended; under the env's own names too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.spec.config import EnvConfig
from fasttrain.terminal import one_line

WIN_KEYS = ("is_win", "is_success")
SCORE_KEYS = ("score_diff", "vp_diff")  # how far ahead of the others the learner ended
END_KEY = "end_reason"
SCORES = "scores"  # of `read`: those that `env.score_keys` names, as a dict
NOT_THE_ENVS = ("episode", "TimeLimit.truncated", "terminal_observation", "action_mask", "reward_terms", "perf", SCORES)
MOST_SHOWN = 12


def win_of(info: Mapping[str, Any]) -> bool | None:
    """Whether an episode was won, None where the env does not say."""
    for key in WIN_KEYS:
        if key in info:
            return bool(info[key])
    return None


def score_diff_of(info: Mapping[str, Any]) -> float | None:
    """By how much the learner was ahead in the end, None where the env does not say."""
    for key in SCORE_KEYS:
        if key in info:
            return float(info[key])
    return None


@dataclass(frozen=True, slots=True)
class QualityKeys:
    """`env.win_key`, `env.score_keys`, `env.end_key`."""

    win: str | None = None
    scores: tuple[str, ...] = ()
    end: str | None = None

    @classmethod
    def of(cls, env: EnvConfig) -> QualityKeys:
        return cls(env.win_key, env.score_keys, env.end_key)

    def read(self, info: dict[str, Any]) -> dict[str, Any]:
        """An episode's last info with the user's keys under the names that all else knows: `is_win`, `end_reason`,
        and a dict `scores`. What is not there, or is no number, is left out: `missing` tells."""
        if not (self.win or self.scores or self.end):
            return info
        told = dict(info)
        if self.win in info:
            told[WIN_KEYS[0]] = bool(info[self.win])
        if self.end in info:
            told[END_KEY] = str(info[self.end])
        told[SCORES] = {key: number for key in self.scores if (number := _number(info.get(key))) is not None}
        return told

    def missing(self, infos: Sequence[Mapping[str, Any]]) -> list[str]:
        """`env.win_key=won`, …: what is named and in none of the last infos, as a number where it must be one."""
        named = [("env.win_key", self.win), ("env.end_key", self.end)]
        lost = [f"{name}={key}" for name, key in named if key and not any(key in info for info in infos)]
        numbers = [key for key in self.scores if not any(_number(info.get(key)) is not None for info in infos)]
        return lost + [f"env.score_keys=[{key}]" for key in numbers]


def held_by(info: Mapping[str, Any]) -> list[str]:
    """`vp (31)`, `winner (red)`: what an info holds that could be a quality."""
    plain = [(key, value) for key, value in info.items() if key not in NOT_THE_ENVS and _is_plain(value)]
    texts = [(key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in plain[:MOST_SHOWN]]
    return [f"{one_line(key, 40)} ({one_line(text, 20)})" for key, text in texts]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or getattr(value, "shape", None) == ()


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
