"""What a game (`GameSpec.own`) and the algorithm name as their own values: they hold where nobody chose others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, TIERS, AlgorithmSpec
from fasttrain.spec.setting import convert, did_you_mean, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnValues:
    """What the game (`GameSpec.own`), else the algorithm names as its own values in `tier`.

    None where the algorithm has no minibatches, epochs or rollouts.
    """

    total_timesteps: int = setting(100_000, "of a training", least=1)
    eval_episodes: int = setting(100, "of an evaluation", least=2)
    batch_size: int | None = setting(None, "minibatch of one gradient update", least=2)
    learning_rate: float | None = setting(None, "of the optimizer", least=0)
    n_epochs: int | None = setting(None, "passes over a rollout", least=1)
    rollout_size: int | None = setting(None, "transitions of a rollout, of all envs", least=2)
    num_envs: int | None = setting(None, "copies of a native game", least=1)


OWN_NAMES = tuple(one.name for one in fields(OwnValues))


def own_values(games: Mapping[str, Any], spec: AlgorithmSpec, tier: str) -> OwnValues:
    """The game's own values in a tier, else the algorithm's.

    Raises:
        ConfigError: the game's are no such values.
    """
    of_algorithm = {name: value for name, value in spec.tiers[tier].items() if name in OWN_NAMES}
    found: OwnValues = convert({**of_algorithm, **games_own(games, spec.name, tier)}, OwnValues, "GameSpec.own")
    return found


def games_own(games: Mapping[str, Any], algo: str, tier: str) -> dict[str, Any]:
    """Of a game's own values those of an algorithm in a tier; what is said of both or one of them goes before the rest.

    Raises:
        ConfigError: a word in it is no value, no tier and no algorithm.
    """
    found = {}
    for words, value in sorted(_branches(games), key=lambda branch: len(branch[0])):
        names, places = [word for word in words if word in OWN_NAMES], {*words} - {*OWN_NAMES}
        if len(names) != 1 or not places <= {*TIERS, *ALGORITHMS}:
            wrong = next(iter(places - {*TIERS, *ALGORITHMS}), words[-1])
            raise ConfigError(
                f"GameSpec.own has no {'.'.join(words)!r}{did_you_mean(wrong, (*OWN_NAMES, *TIERS, *ALGORITHMS))}; "
                f"there are {', '.join(OWN_NAMES)}, each for a tier or an algorithm alone too"
            )
        if places <= {algo, tier}:
            found[names[0]] = value
    return found


def _branches(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words that lead to each value, and the value."""
    for word, value in values.items():
        if isinstance(value, Mapping):
            yield from _branches(value, (*above, str(word)))
        elif value is not None:
            yield (*above, str(word)), value
