"""ExternalVecEnv: base of vectorized envs whose games are played by external engines, in other processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fasttrain.batch import BoolArray, FinishedEpisode, Int64Array
from fasttrain.vec.base import SlotVecEnv


class Figure(NamedTuple):
    """A metric that Prometheus can read while training runs."""

    kind: str  # counter, gauge or histogram
    name: str
    text: str
    value: Any  # a number; with `label`: label value → number; of a histogram: (counts by upper edge, count, sum)
    label: str = ""


class ExternalVecEnv(SlotVecEnv):
    """A vectorized env that reports on its games. Evaluations can use its engines.

    Attributes:
        ended: True if the training's games were ended to make room for the games of an evaluation.
    """

    ended: bool

    @property
    @abstractmethod
    def opponents_turn(self) -> BoolArray:
        """(N,) True where the next decision is the opponent's."""

    @abstractmethod
    def guests(self) -> ExternalVecEnv:
        """Make a vectorized env for the games of one evaluation. The caller closes the env."""

    @abstractmethod
    def step_listed(self, envs: Int64Array, actions: Any) -> list[FinishedEpisode]:
        """Make one decision in these envs (M,) only. Returns the episodes that ended."""

    @abstractmethod
    def env_times(self) -> dict[str, Any]:
        """The fields `games`, `restarts` and `lost_steps` of `perf.report.EnvTimes`."""

    @abstractmethod
    def summary(self, wall_s: float, fresh: bool = False) -> dict[str, Any]:
        """The games' part of perf.json. `fresh`: ask the workers first; only the trainer's own thread may do so."""

    @abstractmethod
    def lines(self, summary: Mapping[str, Any]) -> list[str]:
        """The summary as lines of text."""

    @abstractmethod
    def figures(self, summary: Mapping[str, Any]) -> Iterator[Figure]:
        """The summary as metrics for Prometheus."""

    @abstractmethod
    def limits(self, play: Callable[[], object]) -> tuple[str, list[str]]:
        """The bottleneck of the games while `play` plays them, and overrides that may make the games faster."""
