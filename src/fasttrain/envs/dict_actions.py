"""DictActions: an action space of named heads (a Dict of Discrete) becomes the MultiDiscrete that SB3 knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.errors import EnvSpecError


class DictActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Heads in the order of the space's keys, which Gymnasium sorts; a Dict inside a Dict is walked through.

    The env gets its own Dict back, each head counted from that head's `start`. `ActionMasks` outside reads
    `action_heads` to lay masks given by name into the same order.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], action_heads: spaces.Dict) -> None:
        super().__init__(env)
        heads = list(_heads(action_heads, ""))
        if not heads:
            raise EnvSpecError(f"env {self.unwrapped}: the action space is a Dict without a head")
        self.action_heads = action_heads
        self.action_space = spaces.MultiDiscrete([int(head.n) for head in heads])

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.env.step(_named(self.action_heads, iter(action)))


def _heads(space: spaces.Dict, where: str) -> Iterator[spaces.Discrete]:
    for key, part in space.spaces.items():
        if isinstance(part, spaces.Dict):
            yield from _heads(part, f"{where}{key}.")
        elif isinstance(part, spaces.Discrete):
            yield part
        else:
            raise EnvSpecError(
                f"the action space is a Dict whose head {where}{key} is {part}: only heads that are Discrete can be "
                "chosen by one policy; make it Discrete (bins for a Box), or turn the actions into one space in a "
                "wrapper (env.wrappers)"
            )


def _named(space: spaces.Dict, values: Iterator[Any]) -> dict[str, Any]:
    return {
        key: _named(part, values) if isinstance(part, spaces.Dict) else np.int64(next(values) + part.start)  # type: ignore[attr-defined]
        for key, part in space.spaces.items()
    }
