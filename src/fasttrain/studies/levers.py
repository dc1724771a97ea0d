"""What a profile changes, one lever at a time: flags that mean something only together are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.spec.flags import BY_NAME, NOT_APPLICABLE
from fasttrain.spec.typed import did_you_mean

# Name → settings that are changed together. Every other setting is a lever by itself.
TOGETHER = {
    "learning_rate": ("algo.learning_rate",),
    "n_epochs": ("algo.n_epochs",),
    "rollout_size": ("algo.rollout_size",),
    "use_amp": ("use_amp", "amp_dtype"),
    "use_compile": ("use_compile", "compile_mode"),
    "logging": ("log_every", "train_log_enabled", "train_log_to_console", "train_log_to_file"),
}


@dataclass(frozen=True)
class Lever:
    """A change from the baseline's settings to the profile's."""

    name: str
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def flag_class(self) -> str:
        """exact, rounding or trade-off; hyperparameters are trade-offs."""
        return (
            BY_NAME[self.name].class_of(self.after[self.name])
            if self.name in BY_NAME
            else "exact"
            if self.name == "logging"
            else "trade-off"
        )

    def text(self) -> str:
        """`stock → fast`; of several settings those that differ."""
        pairs = [(self.before[key], self.after[key]) for key in self.before if self.before[key] != self.after[key]]
        return ", ".join(f"{_word(old)} → {_word(new)}" for old, new in pairs)


def _word(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def find_levers(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Lever]:
    """The levers between two sets of settings (`profiles.settings`), in the order of the settings."""
    owner = {key: name for name, keys in TOGETHER.items() for key in keys}
    names = dict.fromkeys(owner.get(key, key) for key in before if before[key] != after[key])
    keys = {name: TOGETHER.get(name, (name,)) for name in names}
    return [Lever(name, {k: before[k] for k in keys[name]}, {k: after[k] for k in keys[name]}) for name in names]


def effective_levers(levers: Sequence[Lever], baseline: Mapping[str, Any], profile: Mapping[str, Any]) -> list[Lever]:
    """Those that make a difference on this machine, by the plans of both ends (plan.json's contents).

    A flag whose effective value is the same at both ends, or that means nothing for the algorithm, is none.
    """
    ends = [{row["flag"]: row["effective"] for row in plan["flags"]} for plan in (baseline, profile)]

    def differs(lever: Lever) -> bool:
        flags = [key for key in lever.before if key in BY_NAME]
        if not flags:
            return True
        values = [(ends[0].get(flag), ends[1].get(flag)) for flag in flags]
        return any(old != new and new != NOT_APPLICABLE for old, new in values)

    return [lever for lever in levers if differs(lever)]


def chosen_levers(levers: Sequence[Lever], names: Sequence[str]) -> list[Lever]:
    """Those called for by `ablate.flags`; all, if none is.

    Raises:
        ConfigError: one of the names is no lever here.
    """
    known = [lever.name for lever in levers]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"ablate.flags: {name} makes no difference here{hint}; what does: {', '.join(known)}")
    return [lever for lever in levers if not names or lever.name in names]


def values_with(
    before: Mapping[str, Any], after: Mapping[str, Any], levers: Sequence[Lever], applied: Sequence[str]
) -> dict[str, Any]:
    """The profile's settings, but of `levers` only those named in `applied`."""
    values = dict(after)
    for lever in levers:
        values.update(lever.after if lever.name in applied else lever.before)
    return values
