from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.errors import ConfigError
from fasttrain.saving.model_state import end_last_rows, load_replay_state, replay_state

BOX, PAIR = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
PARTS = spaces.Dict({"board": BOX, "turn": spaces.Discrete(5)})


def filled(kind: Any, rows: int, space: Any = BOX, **more: Any) -> Any:
    buffer = kind(20, space, PAIR, "cpu", 2, **more)
    rng = np.random.default_rng(rows)
    for _ in range(rows):
        seen = [rng.normal(size=(2, 3)).astype(np.float32) for _ in range(2)]
        if space is PARTS:
            seen = [{"board": part, "turn": rng.integers(0, 5, 2)} for part in seen]  # type: ignore[misc]
        done = rng.random(2) < 0.2
        buffer.add(*seen, rng.integers(0, 2, 2), rng.normal(size=2), done, [{}, {}])
    return buffer


@pytest.mark.parametrize("rows", [0, 4, 13])
@pytest.mark.parametrize(
    ("kind", "more"),
    [(ReplayStorage, {}), (ReplayStorage, {"mask_width": 2, "n_steps": 3}),
     (ReplayStorage, {"optimize_memory_usage": True, "handle_timeout_termination": False}),
     (ReplayStorage, {"space": PARTS}), (PrioritizedReplayBuffer, {}), (ReplayBuffer, {})],
)  # fmt: skip
def test_the_copy_draws_the_same(kind: Any, more: dict[str, Any], rows: int):
    buffer, other = filled(kind, rows, **more), filled(kind, 0, **more)
    if isinstance(buffer, PrioritizedReplayBuffer) and rows:
        buffer.update_priorities(np.arange(4), np.array([0.5, 3.0, 0.1, 7.0]))
        buffer.anneal(0.5)
    state, arrays = replay_state(buffer)
    assert all(len(array) == state["rows"] * (2 if name == "priorities" else 1) for name, array in arrays.items())
    load_replay_state(other, state, {name: array.copy() for name, array in arrays.items()})
    assert (other.pos, other.full, other.size()) == (buffer.pos, buffer.full, buffer.size())
    for _ in range(2 if rows else 0):
        drawn = []
        for each in (buffer, other):
            np.random.seed(1)
            drawn.append(each.sample(8))
        for mine, his in zip(*drawn, strict=True):
            assert str(mine) == str(his)
    if isinstance(buffer, PrioritizedReplayBuffer):
        assert (buffer.tree.nodes == other.tree.nodes).all()
        assert (buffer.beta, buffer.generation) == (other.beta, other.generation)
        for each in (buffer, other):
            each.add(np.ones((2, 3)), np.ones((2, 3)), np.ones(2), np.ones(2), np.zeros(2, np.bool_), [{}, {}])
        assert (buffer.tree.nodes == other.tree.nodes).all(), "a new row has the highest priority so far"


def test_another_size_another_type_and_no_priorities_are_refused():
    state, arrays = replay_state(filled(ReplayStorage, 10))
    with pytest.raises(ConfigError, match="10 rows"):
        load_replay_state(ReplayStorage(8, BOX, PAIR, "cpu", 2), state, arrays)
    state, arrays = replay_state(filled(ReplayStorage, 4))
    with pytest.raises(ConfigError, match="no array rewards"):
        load_replay_state(filled(ReplayStorage, 0), state, {k: v for k, v in arrays.items() if k != "rewards"})
    with pytest.raises(ConfigError, match=r"float64 \(4, 2\), this run needs float32"):
        load_replay_state(filled(ReplayStorage, 0), state, {**arrays, "rewards": arrays["rewards"].astype(np.float64)})
    state, arrays = replay_state(filled(PrioritizedReplayBuffer, 4))
    with pytest.raises(ConfigError, match="priorities"):
        load_replay_state(filled(PrioritizedReplayBuffer, 0), state, {**arrays, "priorities": np.full(8, np.nan)})


def test_episodes_that_break_off_end_in_the_last_row():
    buffer = filled(ReplayStorage, 5)
    buffer.dones[4], buffer.timeouts[4] = (0.0, 1.0), 0.0
    end_last_rows(buffer, [0, 1])
    assert buffer.dones[4].tolist() == [1.0, 1.0]
    assert buffer.timeouts[4].tolist() == [1.0, 0.0], "one that ended by the rules did"
    end_last_rows(filled(ReplayStorage, 0), [0])
