"""What an env tells in its infos: the one door through which all of fasttrain reads them.

Stable-Baselines3 reads next to nothing of an info, so an env may put anything into it. `FORMS` has every name that is
read here and what must stand under it; docs/guides/env_options.md has the same table. What does not fit is left out,
and said once per name where a person sees it. Nothing here raises, whatever the env told.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from fasttrain.terminal import one_line

if TYPE_CHECKING:  # workers read infos too, and need no configuration
    from fasttrain.spec.config import EnvConfig

WIN_KEYS = ("is_win", "is_success")
SCORE_KEYS = ("score_diff", "vp_diff")  # how far ahead of the others the learner ended
END_KEY = "end_reason"
SCORES = "env.result.scores"  # of what was read: the numbers that this setting names, as a dict
WRAPPERS = ("episode", "TimeLimit.truncated", "terminal_observation", "action_mask", "perf")  # what they put into infos
NOT_THE_ENVS = (*WRAPPERS, "reward_terms", SCORES)
MOST_SHOWN = 12
MOST_BITS = 1023  # of a whole number: as far as a float reaches; Python refuses to write very long ones


def plain(value: Any) -> bool | int | float | str | None:
    """A number, truth value or text as Python has it, out of an array without axes too; None for all else."""
    try:
        if getattr(value, "shape", None) == ():
            value = value.item()
        if isinstance(value, int):
            return value if value.bit_length() <= MOST_BITS else None
        if isinstance(value, (float, str)):
            return value
        return value.name if isinstance(value, Enum) else None
    except Exception:  # the env's own class
        return None


def number(value: object) -> int | float | None:
    """A finite number; a text is none, whatever it says."""
    found = plain(value)
    return found if isinstance(found, (int, float)) and math.isfinite(found) else None


def truth(value: object) -> bool | None:
    """True, false, 1 or 0; None for all else, that Python would call true."""
    found = plain(value)
    return bool(found) if isinstance(found, (int, float)) and found in (0, 1) else None


def _text(value: object) -> str | None:
    found = plain(value)
    return None if found is None else str(found)


def _numbers(value: object) -> dict[str, int | float] | None:
    if (by_name := _mapping(value)) is None:
        return None
    found = [(name if isinstance(name, str) else _shown(name), number(each)) for name, each in by_name.items()]
    return {name: each for name, each in found if each is not None}


def _perf(value: object) -> Mapping[str, Any] | None:
    perf = _mapping(value)
    return perf if perf is not None and number(perf.get("enemy_turn_ms", 0)) is not None else None


def _mapping(value: object) -> Mapping[str, Any] | None:
    try:
        return value if isinstance(value, Mapping) else None
    except Exception:  # a class that answers for another
        return None


class Form(NamedTuple):
    """What may stand under a name: `read` gives it as it is used, None where it does not fit."""

    read: Callable[[Any], Any]
    words: str


TRUTH, NUMBER = Form(truth, "true, false, 1 or 0"), Form(number, "a finite number")
TEXT, NUMBERS = Form(_text, "a text or a number"), Form(_numbers, "finite numbers by name")
FORMS = {
    **dict.fromkeys((*WIN_KEYS, "is_draw"), TRUTH),
    **dict.fromkeys((*SCORE_KEYS, "opponents_beaten", "turn", "ticks"), NUMBER),
    END_KEY: TEXT,
    "reward_terms": NUMBERS,
    "perf": Form(_perf, "a dict whose enemy_turn_ms is a number"),
}
WIN_FORM = Form(truth, f"{TRUTH.words}; env.result.win_value=… says which value is a win")


@dataclass(slots=True)
class InfoReader:
    """Reads the last info of an episode. `say` hears of each name once, if what stands there does not fit.

    `win`, `scores`, `end`, `win_value`: those of `env.result`.
    """

    win: str | None = None
    scores: tuple[str, ...] = ()
    end: str | None = None
    win_value: Any = None
    say: Callable[[str], object] = bool  # nobody hears of it
    _said: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, env: EnvConfig, say: Callable[[str], object] = bool) -> InfoReader:
        """A reader of the keys that `env.result` names."""
        return cls(env.result.win, env.result.scores, env.result.end, env.result.win_value, say)

    def read(self, info: Mapping[str, Any], env: int | None = None) -> dict[str, Any]:
        """The info without what does not fit, and with the user's keys under the names that all else knows: `is_win`,
        `end_reason`, and the dict `SCORES`. `env`: its index."""
        told = {key: value for key, value in info.items() if key not in FORMS and key != SCORES}
        wanted = [(name, name, FORMS[name]) for name in FORMS if name in info and name not in (self.win, self.end)]
        won = WIN_FORM if self.win_value is None else Form(self._is_won, "a number or a text")
        wanted += [(WIN_KEYS[0], self.win, won)] if self.win in info and self.win is not None else []
        wanted += [(END_KEY, self.end, TEXT)] if self.end in info and self.end is not None else []
        for name, key, form in wanted:
            if (found := self._read(form, key, info[key], env)) is not None:
                told[name] = found
        if self.scores:
            found = {key: self._read(NUMBER, key, info[key], env) for key in self.scores if key in info}
            told[SCORES] = {key: value for key, value in found.items() if value is not None}
        return told

    def _is_won(self, value: object) -> bool | None:
        found = plain(value)
        return None if found is None and value is not None else bool(found == self.win_value)

    def _read(self, form: Form, key: str, value: Any, env: int | None) -> Any:
        found = form.read(value)
        partly = isinstance(found, dict) and len(found) < len(value)
        if (found is None or partly) and key not in self._said:
            self._said.add(key)
            where = "" if env is None else f" of env {env}"
            what = f"{_shown(value)} is not {form.words}"
            self.say(f'info["{one_line(key, 40)}"]{where} is {"partly " if partly else ""}left out: {what}')
        return found

    def missing(self, told: Sequence[Mapping[str, Any]]) -> list[str]:
        """`env.result.win=won`, …: what is named and in none of the infos that were read, or is no number there."""
        named = [("env.result.win", self.win), ("env.result.end", self.end)]
        lost = [f"{name}={key}" for name, key in named if key and not any(key in info for info in told)]
        numbers = [key for key in self.scores if not any(key in info[SCORES] for info in told)]
        return lost + [f"env.result.scores=[{key}]" for key in numbers]


def _shown(value: object) -> str:
    try:
        return one_line(reprlib.repr(value), 60)
    except Exception:
        return f"a {type(value).__name__}"


def win_of(told: Mapping[str, Any]) -> bool | None:
    """Whether an episode was won, of an info that was read; None where the env does not say."""
    return next((told[key] for key in WIN_KEYS if key in told), None)


def score_diff_of(told: Mapping[str, Any]) -> float | None:
    """By how much the learner was ahead in the end, None where the env does not say."""
    return next((told[key] for key in SCORE_KEYS if key in told), None)


def score_of(info: Mapping[str, Any]) -> float | None:
    """The learner's share of the points, of an info that was read: of opponents beaten, or 1, 0.5, 0 of a game."""
    if "opponents_beaten" in info:
        return float(info["opponents_beaten"])
    won = win_of(info)
    if won is None:
        return None
    return 0.5 if info.get("is_draw") else float(won)


def held_by(info: Mapping[str, Any]) -> list[str]:
    """`vp (31)`, `winner (red)`: what an info holds that could be a quality."""
    found = [(key, value) for key in info if key not in NOT_THE_ENVS and (value := plain(info[key])) is not None]
    texts = [(key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in found[:MOST_SHOWN]]
    return [f"{one_line(key, 40)} ({one_line(text, 20)})" for key, text in texts]


# --- what is read of every step, where nobody is told


def enemy_turn_ms(info: Mapping[str, Any]) -> float:
    """What the env says its opponents took of this step."""
    perf = _mapping(info.get("perf"))
    return 0.0 if perf is None else number(perf.get("enemy_turn_ms")) or 0.0


def record_of(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `r` and length `l` of the episode that ended, as SB3's Monitor writes them; None: it is something else."""
    record = _mapping(info.get("episode"))
    return record if record and all(isinstance(plain(record.get(key)), (int, float)) for key in "rl") else None


def averaged_by_sb3(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of a last info what SB3 keeps for its means, which fail over what is no record and no number."""
    found = {"episode": record_of(info), "is_success": number(info.get("is_success"))}
    return {key: value for key, value in found.items() if value is not None}
