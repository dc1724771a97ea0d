from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np

from fasttrain.envs.retrace import attribute_digests


class Level(gymnasium.Env[Any, Any]):
    best = 0.0

    def __init__(self) -> None:
        self.rng, self.plan = np.random.default_rng(1), SimpleNamespace(level=1, seen=[{"a": np.zeros(2)}])
        self.same = (1, "x", None)


def test_what_an_env_keeps_differs_by_name():
    def changed(change: Any) -> list[str]:
        one, other = Level(), Level()
        change(other)
        before, after = attribute_digests(one), attribute_digests(gymnasium.wrappers.RecordEpisodeStatistics(other))
        assert before.keys() == after.keys() == {"rng", "plan", "same", "best"}
        return [name for name in before if before[name] != after[name]]

    assert changed(lambda _: None) == []
    assert changed(lambda env: env.rng.random()) == ["rng"]
    assert changed(lambda env: env.plan.seen[0]["a"].fill(3)) == ["plan"]
    assert changed(lambda env: setattr(env, "best", 2.0)) == ["best"]
