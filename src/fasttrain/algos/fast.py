"""What our algorithms have besides SB3's: an engine, which computes, and a collector, which is the env's side.

Neither is saved, so that a zip holds nothing that stock SB3 does not know.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.collector import Collector
from fasttrain.engines.engine import Engine, EngineSettings
from fasttrain.perf.clock import PhaseClock

UNSAVED = ("engine", "collector")


class Fast(BaseAlgorithm):
    """Stands before the stock class among the bases of ours.

    Args:
        engine: "torch", which gives the numbers of stock, "kernels", or settings in full.
        further: as the stock class.
    """

    engine: Engine
    collector: Collector
    _kinds: ClassVar[dict[str, type[Engine]]]  # engines for its policies, by kind

    def __init__(self, *args: Any, engine: str | EngineSettings = "torch", **further: Any) -> None:
        self.engine = engine  # type: ignore[assignment]  # made in `_setup_model`; `load` may put another name there
        super().__init__(*args, **further)

    def _attach(self) -> None:
        """Make engine and collector, once there is a policy."""
        asked: Any = self.engine
        self.collector = Collector()
        self.engine = self._made(asked.settings if isinstance(asked, Engine) else EngineSettings.of(asked), None)
        self.engine.clock = self.collector.clock

    def use_engine(self, settings: str | EngineSettings) -> None:
        """Compute otherwise from the next rollout or update on; counters, guard and clock go on.

        To be called where no update is under way, but one that `overlap` makes beside collecting.
        """
        self.engine = self._made(EngineSettings.of(settings), self.engine)

    def engine_now(self) -> Engine:
        """The engine; made anew where policy, optimizer or device were replaced since."""
        engine = self.engine
        wanted = engine.settings.kind
        if not engine.fits(self.policy) or (engine.kind != wanted and not self.why_not(wanted)) or self._must_change():
            self.engine = engine = self._made(engine.settings, engine)
        return engine

    def time_with(self, clock: PhaseClock) -> None:
        """Spend training's time in the phases of `clock`."""
        self.collector.clock = self.engine.clock = clock

    @abstractmethod
    def prepare(self, env: VecEnv) -> str:
        """Compile what the settings ask for, for the sizes of now; phase `other`.

        Returns:
            why that failed, if it did just now: training goes on without; else nothing.
        """

    @abstractmethod
    def why_not(self, kind: str) -> str:
        """Why an engine of that kind cannot serve the policy as it is; empty if it can."""

    def _must_change(self) -> bool:
        """Whether something but the policy keeps the present engine from serving."""
        return False

    def _made(self, settings: EngineSettings, before: Engine | None) -> Engine:
        why_not = self.why_not(settings.kind)
        engine = self._kinds["torch" if why_not else settings.kind](self.policy, settings, before)
        engine.why_not = why_not
        return engine

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *UNSAVED]
