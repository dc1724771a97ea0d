"""What a worker does when it is asked: its envs are called through the vector env."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from fasttrain.errors import EnvError
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_vec.worker import NO_MAIL
from fasttrain_vec.worker_memory import BUSY_NS, MAIL, NO_ROW, NOTIFY, REPLY, REQUEST, ROW, STEP_NS
from worker_toys import Walker, walkers

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def env() -> Iterator[SharedMemoryVecEnv]:
    env = SharedMemoryVecEnv(walkers(2), num_workers=1)
    env.reset()
    yield env
    env.close()


def test_a_step_writes_the_other_buffer_keeps_the_clock_and_rings_only_if_asked(env: SharedMemoryVecEnv):
    crew, control, before = env.crew, env.crew.control[0], env.crew.buffers[0]
    busy = int(control[BUSY_NS])
    env.step([0, 0])
    assert crew.buffers == [1 - before]
    assert [crew.arrays.observations[buffer][:, 2].tolist() for buffer in (before, 1 - before)] == [[0, 0], [1, 1]]
    assert control[BUSY_NS] - busy == control[STEP_NS] > 0
    assert control[REPLY] == control[REQUEST]
    assert (control[MAIL], control[ROW]) == (NO_MAIL, NO_ROW)
    assert not crew.notify.acquire(False)
    control[NOTIFY] = 1
    env.step([0, 0])
    assert crew.notify.acquire(True, 10.0), "a moment after the reply"


def test_a_seeded_reset_seeds_the_global_streams(env: SharedMemoryVecEnv):
    draws = []
    for seed in (5, 5, 6):
        env.seed(seed)
        env.reset()
        draws.append(env.env_method("process", indices=[0])[0]["draws"])
    assert draws[0] == draws[1] != draws[2]


def test_an_attribute_that_was_set_is_read_back(env: SharedMemoryVecEnv):
    class Deaf(Walker):
        """Its mood stays, whatever is set."""

        def __init__(self, kept: Any) -> None:
            super().__init__(0)
            self.kept = kept

        mood = property(lambda self: self.kept, lambda self, value: None)

    cases = [(1, 1, True), (1, 2, False), (np.arange(3), np.arange(3), True), (np.arange(3), np.zeros(3), False),
             (np.arange(3), np.arange(4), False), (float("nan"), 1.0, False), ([1, [2]], [1, [2]], True)]  # fmt: skip
    deaf = SharedMemoryVecEnv([lambda kept=kept: Deaf(kept) for kept, *_ in cases], num_workers=1)
    for index, (_, value, same) in enumerate(cases):
        with nullcontext() if same else pytest.raises(EnvError, match="mood was set to"):
            deaf.set_attr("mood", value, indices=index)
    deaf.close()
    env.set_attr("level", float("nan"))
