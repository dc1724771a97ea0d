from __future__ import annotations

from fasttrain.threads import ThreadChoice


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
