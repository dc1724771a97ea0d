"""An env on a wire that raises once, at a step of all envs together, and never again. Free of torch."""

from __future__ import annotations

from typing import Any

from wired import GO, ORDER, WiredEnv

SPENT = 3


class LateEnv(WiredEnv):
    """Raises in the step that brings the count on the wire to `at`."""

    def __init__(self, wire: str, at: int) -> None:
        super().__init__(wire)
        self._at = at

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        wire = self._wire
        if wire is not None and wire.steps >= self._at and wire.numbers[ORDER] == GO:
            wire.order(SPENT)
            raise ValueError("the board fell")
        return super().step(action)
