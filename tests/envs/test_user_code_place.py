from __future__ import annotations

import mmap

from fasttrain.envs.user_code import BUILDING, CLOSING, LOOKING, MASKING, Place


def test_another_look_at_the_same_memory_says_where_the_play_is():
    memory = mmap.mmap(-1, 4096)
    here, there = Place(memory), Place(memory)
    assert not there.started
    assert str(there) == "the start of its process"
    said = []
    for move in (
        lambda: here.enter(BUILDING), lambda: here.enter(LOOKING), lambda: here.reset(5), lambda: here.step(37),
        lambda: here.enter(MASKING), lambda: here.reset(None), lambda: here.step(2), lambda: here.reset(7),
        lambda: here.enter(CLOSING),
    ):  # fmt: skip
        beats = there.beats
        move()
        assert there.beats > beats
        said.append(str(there))
    assert there.started
    assert said == [
        "its constructor", "its first reset", "reset of seed 5", "step 37 of seed 5",
        "action_masks() after step 37 of seed 5", "reset of episode 2 after seed 5", "step 2 of episode 2 after seed 5",
        "reset of seed 7", "close()",
    ]  # fmt: skip
