"""`fasttrain help PROFILE`: what a profile changes against stock SB3, for each algorithm. docs/ has the same tables."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from fasttrain.cli.compose import conf_dir, configured
from fasttrain.spec.algorithms import ALGORITHMS, own_values
from fasttrain.spec.config import Config
from fasttrain.spec.setting import declared, settings_of
from fasttrain.terminal import value_text

STOCK = "baseline"  # the profile with the classes and values of stock SB3
NOTHING = "–"
ALGOS = ("ppo", "maskable_ppo", "recurrent_ppo", "dqn", "sac")  # the columns of the tables


class Value(NamedTuple):
    """The value of a setting as the user types it, and its class (exact, rounding or trade-off)."""

    text: str
    flag_class: str


def profiles() -> list[str]:
    """The names of the shipped profiles."""
    return sorted(file.stem for file in (conf_dir() / "profile").glob("*.yaml"))


def table(profile: str) -> str:
    """The settings that `profile` changes, as a table in Markdown whose columns are aligned for terminals.

    An entry is `64 → 256`, the value alone if it does not change, and – if the algorithm has no such setting.
    """
    stock, chosen = ([_values(name, algo) for algo in ALGOS] for name in (STOCK, profile))
    rows: list[tuple[str, ...]] = [("setting", "class", *ALGOS)]
    for key in stock[0]:
        values = [(old[key], new[key]) for old, new in zip(stock, chosen, strict=True)]
        changed = [new for old, new in values if old.text != new.text]
        if changed:
            cells = [old.text if old.text == new.text else f"{old.text} → {new.text}" for old, new in values]
            rows.append((key, changed[0].flag_class, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


@cache
def _values(profile: str, algo: str) -> dict[str, Value]:
    """Setting → its value with this profile and algorithm. Keys below `algo.` come last."""
    spec = ALGORITHMS[algo]
    env = "Pendulum-v1" if spec.actions == ("Box",) else "CartPole-v1"
    config = configured([f"+profile={profile}", f"algo={algo}", f"env.id={env}"])
    found = {}
    for key, one in settings_of(Config):
        it = declared(one)
        if key.startswith("algo.") or it.hidden:
            continue
        value: Any = config if key != "batch_size" else own_values({}, spec, config.tier)
        for name in key.split("."):
            value = getattr(value, name)
        means = it.fits(spec) and key not in spec.lacks
        found[key] = Value(value_text(value) if means else NOTHING, it.class_of(value) if it.flag_class else "")
    own = {
        f"algo.{name}": getattr(config.algo, name, NOTHING) for name in ("learning_rate", "n_epochs", "rollout_size")
    }
    return found | {key: Value(value_text(value), "trade-off") for key, value in own.items()}
