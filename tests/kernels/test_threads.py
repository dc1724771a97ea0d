from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from fasttrain_kernels import threads as of_threads
from fasttrain_kernels.jit import njit
from fasttrain_kernels.threads import Team, ThreadChoice, begin_work, claim, end_work, fetch_add, run


@njit
def square(numbers: Any, out: Any, by: Any, team: Any, me: int) -> int:
    """Pieces of one number each; notes who did it."""
    begin_work(team, me, len(numbers))
    piece = claim(team, me)
    while piece >= 0:
        out[piece], by[piece] = numbers[piece] ** 2, me
        piece = claim(team, me)
    end_work(team, me)
    return int(me)


@njit
def take_turns(out: Any, by: Any, team: Any, me: int) -> int:
    """Each row of `out` is opened once the one before is done."""
    begin_work(team, me, 0)
    number = 0
    while of_threads.is_open(team) if me > 0 else number < len(out):
        if me == 0:
            team[of_threads.NOTE] = number
            of_threads.open_pieces(team, out.shape[1])
        piece = claim(team, me)
        while piece >= 0:
            out[team[of_threads.NOTE], piece] += team[of_threads.NOTE] * piece
            fetch_add(by, me, 1)
            fetch_add(team, of_threads.DONE, 1)
            piece = claim(team, me)
        if me == 0:
            of_threads.wait_for(team, of_threads.DONE, out.shape[1])
        number += 1
    end_work(team, me)
    return int(me)


def squared(team: Any, numbers: Any, threads: int) -> Any:
    """Who did each piece."""
    out, by = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1)
    team.run(square, threads, numbers, out, by)
    assert (out == numbers**2).all()
    return by


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_is_done_once_and_before_the_caller_goes_on(threads: int):
    team = Team()
    for _ in range(20):
        by = squared(team, np.arange(50_000), threads)
        assert by.min() >= 0
        assert by.max() < threads


def test_each_call_is_entered_with_its_own_arguments():
    """Thousands of short calls, one after the other: a thread that comes late finds the next one or none."""
    team = Team()
    for size in range(4_000):
        squared(team, np.arange(size % 7) + size, 2 + size % 2)


@pytest.mark.parametrize("threads", [2, 3])
def test_others_take_part_in_what_is_opened_later(threads: int):
    team, by, rounds = Team(), np.zeros(threads, np.int64), 0
    while not by.all():  # a thread that has no core just then takes no part, and nobody waits for it
        out = np.zeros((2_000, 8), np.int64)
        assert team.run(take_turns, threads, out, by) == 0
        assert (out == np.arange(2_000)[:, None] * np.arange(8)).all()
        rounds += 1
        assert by.sum() == rounds * out.size
    for _ in range(2_000):  # what is opened first is opened while others look
        out, before = np.zeros((1, 8), np.int64), int(by.sum())
        team.run(take_turns, threads, out, by)
        assert by.sum() == before + 8


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fasttrain-kernels"]


def test_threads_are_made_once_and_one_set_serves_all():
    before, empty, teams = ours(), np.zeros(0, np.int64), of_threads.Teams()
    for _ in range(3):
        teams.run(square, 3, empty, empty, empty)
    assert len([thread for thread in ours() if thread not in before]) == 2


def test_two_callers_at_once_have_a_team_each():
    def call() -> None:
        for _ in range(300):
            out, by = np.zeros(100, np.int64), np.full(100, -1)
            run(square, 2, np.arange(100), out, by)
            found.append((out == np.arange(100) ** 2).all())

    found: list[bool] = []
    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 900


def test_a_thread_without_work_goes_to_sleep_and_wakes_again():
    team = Team()
    for _ in range(3):
        squared(team, np.arange(1_000_000), 2)
        (follower,) = team._followers
        deadline = time.monotonic() + 60
        while not follower._asleep:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads is just what is tried
def test_a_forked_process_gets_threads_of_its_own():
    def until_others_took_part() -> None:
        by = np.zeros(2, np.int64)
        while not by.all():
            run(take_turns, 2, np.zeros((2_000, 8), np.int64), by)

    until_others_took_part()
    child = os.fork()
    if not child:
        until_others_took_part()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("alone_s", "rarely"), [(1.2, 1), (2.0, 4)])
def test_the_faster_way_is_taken_and_the_other_tried_now_and_then(alone_s: float, rarely: int):
    choice = ThreadChoice()
    taken = []
    for _ in range(410):
        mode = choice.next()
        taken.append(mode)
        choice.took(mode, 1.0 if mode else alone_s)
    assert taken[:4] == [True, True, False, False]
    assert taken.count(False) == 2 + 410 // (rarely * ThreadChoice.TRY_OTHER_EVERY)
    for _ in range(10):  # now another process takes the second core
        mode = choice.next()
        choice.took(mode, 9.0 if mode else 2.0)
    assert choice.next() is False


def test_the_other_way_is_tried_for_some_runs_in_a_row():
    choice = ThreadChoice(trial=3)
    taken = []
    for turn in range(12 * ThreadChoice.TRY_OTHER_EVERY):
        mode = choice.next()
        taken.append(mode)
        awake = turn > 0 and taken[-2] is mode
        choice.took(mode, (1.0 if awake else 9.0) if mode else 2.0)  # the first run after a rest takes long
    assert taken[:9] == [True] * 3 + [False] * 3 + [True] * 3
    assert taken[-6:] == [True] * 3 + [False] * 3
    assert taken.count(False) == 6


def test_one_disturbed_epoch_decides_nothing():
    choice = ThreadChoice()
    for seconds in (9.0, 1.0, 1.5, 1.5):  # the first run on threads is slow, and decides nothing either
        choice.took(choice.next(), seconds)
    choice.took(True, 50.0)
    assert choice.next() is True
    for _ in range(ThreadChoice.REMEMBERED):
        choice.took(True, 5.0)
    assert choice.next() is False
    choice.took(True, 1.0)  # tried again now and then: the core is free
    assert choice.next() is True
