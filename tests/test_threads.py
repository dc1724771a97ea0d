from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from fasttrain.atomics import DONE, NEXT, fetch_add, wait_for_all
from fasttrain.jit import njit
from fasttrain.threads import Team, ThreadChoice, alone


@njit
def square(numbers: Any, out: Any, by: Any, team: Any, me: int) -> int:
    """Pieces of one number each; notes who did it."""
    at = fetch_add(team, NEXT, 1)
    while at < len(numbers):
        out[at], by[at] = numbers[at] ** 2, me
        fetch_add(team, DONE, 1)
        at = fetch_add(team, NEXT, 1)
    wait_for_all(team, me, len(numbers))
    return int(me)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_is_done_once_and_before_the_caller_goes_on(threads: int):
    team, numbers = Team(), np.arange(100_000)
    for _ in range(20):
        out, by = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1)
        assert team.run(square, threads, numbers, out, by) == 0
        np.testing.assert_array_equal(out, numbers**2)
        assert by.min() >= 0
        assert by.max() < threads


def test_a_kernel_alone_needs_no_team():
    out, by = np.zeros(3, np.int64), np.zeros(3, np.int64)
    square(np.arange(3), out, by, alone(), 0)
    assert out.tolist() == [0, 1, 4]


def test_threads_are_made_once_and_end_with_the_team():
    def ours() -> list[Any]:
        return [thread for thread in threading.enumerate() if thread.name == "fasttrain-kernels"]

    before, team, empty = ours(), Team(), np.zeros(0, np.int64)
    for _ in range(3):
        team.run(square, 3, empty, empty, empty)
    mine = [thread for thread in ours() if thread not in before]
    assert len(mine) == 2
    del team
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads is just what is tried
def test_a_forked_process_gets_threads_of_its_own():
    team, out, by = Team(), np.zeros(3, np.int64), np.zeros(3, np.int64)
    team.run(square, 2, np.arange(3), out, by)
    child = os.fork()
    if not child:
        out[:] = 0
        team.run(square, 2, np.arange(3), out, by)
        os._exit(0 if out.tolist() == [0, 1, 4] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_faster_way_is_taken_and_the_other_tried_now_and_then():
    choice = ThreadChoice()
    taken = []
    for _ in range(60):
        mode = choice.next()
        taken.append(mode)
        choice.took(mode, 1.0 if mode else 2.0)
    assert taken[:2] == [True, False]
    assert taken.count(False) == 1 + 60 // ThreadChoice.TRY_OTHER_EVERY
    for _ in range(60):  # now another process takes the second core
        mode = choice.next()
        choice.took(mode, 9.0 if mode else 2.0)
    assert choice.next() is False


def test_the_other_way_is_tried_for_some_runs_in_a_row():
    choice = ThreadChoice(trial=3)
    taken = []
    for run in range(3 * ThreadChoice.TRY_OTHER_EVERY):
        mode = choice.next()
        taken.append(mode)
        awake = run > 0 and taken[-2] is mode
        choice.took(mode, (1.0 if awake else 9.0) if mode else 2.0)  # the first run after a rest takes long
    assert taken[:9] == [True] * 3 + [False] * 3 + [True] * 3
    assert taken[-6:] == [True] * 3 + [False] * 3
    assert taken.count(False) == 6


def test_one_disturbed_epoch_decides_nothing():
    choice = ThreadChoice()
    for mode in (True, False):
        choice.took(mode, 1.0 if mode else 1.5)
    choice.took(True, 50.0)
    assert choice.next() is True
    for _ in range(ThreadChoice.REMEMBERED):
        choice.took(True, 5.0)
    assert choice.next() is False
    choice.took(True, 1.0)  # tried again now and then: the core is free
    assert choice.next() is True
