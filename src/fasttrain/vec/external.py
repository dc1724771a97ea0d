"""ExternalVecEnv: what a run asks of a vectorized env whose games are played elsewhere, by engines of other people."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fasttrain.batch import BoolArray, FinishedEpisode, Int64Array
from fasttrain.vec.base import SlotVecEnv


class Figure(NamedTuple):
    """A number that can be watched while training goes on."""

    kind: str  # counter, gauge or histogram
    name: str
    text: str
    value: Any  # of several by `label` a mapping; of a histogram (count up to each edge by edge, count, sum in seconds)
    label: str = ""


class ExternalVecEnv(SlotVecEnv):
    """A vectorized env that tells of its games, and lends games to evaluations.

    Attributes:
        ended: evaluations found no place beside the training's games, which were ended for them.
    """

    ended: bool

    @property
    @abstractmethod
    def opponents_turn(self) -> BoolArray:
        """(N,) whether the next decision is the other side's."""

    @abstractmethod
    def guests(self) -> ExternalVecEnv:
        """An evaluation's games; to be closed."""

    @abstractmethod
    def step_listed(self, envs: Int64Array, actions: Any) -> list[FinishedEpisode]:
        """One decision in these envs (M,) alone; the episodes that ended."""

    @abstractmethod
    def env_times(self) -> dict[str, Any]:
        """Of `perf.report.EnvTimes` what it knows: games, restarts, lost_steps."""

    @abstractmethod
    def summary(self, wall_s: float, fresh: bool = False) -> dict[str, Any]:
        """What perf.json says of the games; `fresh`: asked of the workers, from the trainer's own thread."""

    @abstractmethod
    def lines(self, found: Mapping[str, Any]) -> list[str]:
        """`summary` for a person."""

    @abstractmethod
    def figures(self, found: Mapping[str, Any]) -> Iterator[Figure]:
        """`summary` for Prometheus."""

    @abstractmethod
    def limits(self, play: Callable[[], object]) -> tuple[str, list[str]]:
        """What limits the games while `play` plays them, and the overrides that would show it."""
