"""Reads the infos of envs, for all of fasttrain.

Stable-Baselines3 reads almost nothing of an info, so an env may put anything into it. `FORMS` has every name that is
read, and the values that are accepted for it; docs/guides/env_options.md has the same table. Other values are left out,
with one warning per name. No function here raises, whatever the env has put into the info.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from fasttrain.terminal import one_line

if TYPE_CHECKING:  # workers import this module, but must not import the configuration
    from fasttrain.spec.config import EnvConfig

WIN_KEYS = ("is_win", "is_success")
SCORE_KEYS = ("score_diff", "vp_diff")  # by how much the learner was ahead at the end
END_KEY = "end_reason"
SCORES = "env.result.scores"  # key in `read`'s result; its value: info key → number, for the setting env.result.scores
WRAPPERS = ("episode", "TimeLimit.truncated", "terminal_observation", "action_mask", "perf")  # added by wrappers
NOT_THE_ENVS = (*WRAPPERS, "reward_terms", SCORES)
MOST_SHOWN = 12
SIMPLE = frozenset((bool, float, str))  # classes of values that `plain` returns as they are
MOST_BITS = 1023  # number of bits of the largest int that fits into a float


def plain(value: Any) -> bool | int | float | str | None:
    """A number, truth value or text as a Python object, also from an array without axes; None for other values."""
    if type(value) in SIMPLE:  # most values, 20 per episode
        return value  # type: ignore[no-any-return]
    try:
        if getattr(value, "shape", None) == ():
            value = value.item()
        if isinstance(value, int):
            return value if value.bit_length() <= MOST_BITS else None
        if isinstance(value, (float, str)):
            return value
        return value.name if isinstance(value, Enum) else None
    except Exception:  # because the value's class may be the env's own
        return None


def number(value: object) -> int | float | None:
    """A finite number; None for other values. Text is not converted."""
    result = plain(value)
    return result if isinstance(result, (int, float)) and math.isfinite(result) else None


def truth(value: object) -> bool | None:
    """True, false, 1 or 0 as bool; None for other values."""
    result = plain(value)
    return bool(result) if isinstance(result, (int, float)) and result in (0, 1) else None


def _text(value: object) -> str | None:
    result = plain(value)
    return None if result is None else str(result)


def _numbers(value: object) -> dict[str, int | float] | None:
    if (by_name := _mapping(value)) is None:
        return None
    numbers = [(name if isinstance(name, str) else _short(name), number(each)) for name, each in by_name.items()]
    return {name: each for name, each in numbers if each is not None}


def _perf(value: object) -> Mapping[str, Any] | None:
    perf = _mapping(value)
    return perf if perf is not None and number(perf.get("enemy_turn_ms", 0)) is not None else None


def _mapping(value: object) -> Mapping[str, Any] | None:
    try:
        return value if isinstance(value, Mapping) else None
    except Exception:  # because the class of the value may raise in isinstance
        return None


class Form(NamedTuple):
    """The accepted values of an entry. `self.read` converts a value, or returns None for a value not accepted."""

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
WIN_FORM = Form(truth, f"{TRUTH.words}; set env.result.win_value to the value that means a win")


@dataclass(slots=True)
class InfoReader:
    """Reads the last info of an episode. `win`, `scores`, `end` and `win_value`: see `env.result`.

    `warn` receives one message for each name whose value is not accepted.
    """

    win: str | None = None
    scores: tuple[str, ...] = ()
    end: str | None = None
    win_value: Any = None
    warn: Callable[[str], object] = bool  # the default ignores the message
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, env: EnvConfig, warn: Callable[[str], object] = bool) -> InfoReader:
        """A reader of the keys that `env.result` names."""
        return cls(env.result.win, env.result.scores, env.result.end, env.result.win_value, warn)

    def read(self, info: Mapping[str, Any], env: int | None = None) -> dict[str, Any]:
        """The info without values that are not accepted. Entries under the user's keys get the standard names.

        The standard names are `is_win`, `end_reason` and the dict `SCORES`. `env` is the env's index, for the warning.
        """
        result = {key: value for key, value in info.items() if key not in FORMS and key != SCORES}
        entries = [(name, name, FORMS[name]) for name in FORMS if name in info and name not in (self.win, self.end)]
        won = WIN_FORM if self.win_value is None else Form(self._is_won, "a number or a text")
        entries += [(WIN_KEYS[0], self.win, won)] if self.win in info and self.win is not None else []
        entries += [(END_KEY, self.end, TEXT)] if self.end in info and self.end is not None else []
        for name, key, form in entries:
            if (value := self._read(form, key, info[key], env)) is not None:
                result[name] = value
        if self.scores:
            scores = {key: self._read(NUMBER, key, info[key], env) for key in self.scores if key in info}
            result[SCORES] = {key: value for key, value in scores.items() if value is not None}
        return result

    def _is_won(self, value: object) -> bool | None:
        result = plain(value)
        return None if result is None and value is not None else bool(result == self.win_value)

    def _read(self, form: Form, key: str, value: Any, env: int | None) -> Any:
        result = form.read(value)
        partly = isinstance(result, dict) and len(result) < len(value)
        if (result is None or partly) and key not in self._warned:
            self._warned.add(key)
            where = "" if env is None else f" of env {env}"
            what = f"{_short(value)} is not {form.words}"
            self.warn(f'info["{one_line(key, 40)}"]{where} is {"partly " if partly else ""}left out: {what}')
        return result

    def missing(self, infos: Sequence[Mapping[str, Any]]) -> list[str]:
        """The settings, such as `env.result.win=won`, whose entry is missing in all `infos`, or is never a number."""
        named = [("env.result.win", self.win), ("env.result.end", self.end)]
        absent = [f"{name}={key}" for name, key in named if key and not any(key in info for info in infos)]
        numbers = [key for key in self.scores if not any(key in info[SCORES] for info in infos)]
        return absent + [f"env.result.scores=[{key}]" for key in numbers]


def _short(value: object) -> str:
    try:
        return one_line(reprlib.repr(value), 60)
    except Exception:
        return f"a {type(value).__name__}"


def win_of(info: Mapping[str, Any]) -> bool | None:
    """Whether the episode was won, from an info that `read` returned; None if the env does not report this."""
    return next((info[key] for key in WIN_KEYS if key in info), None)


def score_diff_of(info: Mapping[str, Any]) -> float | None:
    """The learner's lead in score at the end; None if the env does not report it."""
    return next((info[key] for key in SCORE_KEYS if key in info), None)


def score_of(info: Mapping[str, Any]) -> float | None:
    """The learner's score: the share of beaten opponents, or 1, 0.5 or 0 for a win, a draw or a loss."""
    if "opponents_beaten" in info:
        return float(info["opponents_beaten"])
    won = win_of(info)
    if won is None:
        return None
    return 0.5 if info.get("is_draw") else float(won)


def candidate_entries(info: Mapping[str, Any]) -> list[str]:
    """The entries of an info that could be a result, with their values: `vp (31)`, `winner (red)`."""
    entries = [(key, value) for key in info if key not in NOT_THE_ENVS and (value := plain(info[key])) is not None]
    texts = [(key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in entries[:MOST_SHOWN]]
    return [f"{one_line(key, 40)} ({one_line(text, 20)})" for key, text in texts]


# --- entries that are read at every step, without warnings


def enemy_turn_ms(info: Mapping[str, Any]) -> float:
    """Time of the opponents' turns in this step, in ms, as the env reports it."""
    perf = _mapping(info.get("perf"))
    return 0.0 if perf is None else number(perf.get("enemy_turn_ms")) or 0.0


def record_of(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record of SB3's Monitor with return `r` and length `l` of the episode that ended; None if it is missing."""
    record = _mapping(info.get("episode"))
    if not record:
        return None
    known = isinstance(plain(record.get("r")), (int, float)) and isinstance(plain(record.get("l")), (int, float))
    return record if known else None


def sb3_statistics(info: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a last info that SB3 averages. Values of a wrong type are left out."""
    entries = {"episode": record_of(info), "is_success": number(info.get("is_success"))}
    return {key: value for key, value in entries.items() if value is not None}
