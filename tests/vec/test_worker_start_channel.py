"""The line between trainer and worker: whole messages, and no call that can block for ever."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.vec.worker_start import PIECE_BYTES, Channel, DeadlineError, acquire


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    return pair()


def pair() -> tuple[Channel, Channel]:
    ours, theirs = multiprocessing.Pipe()
    go, done = multiprocessing.get_context("spawn").Semaphore(0), multiprocessing.get_context("spawn").Semaphore(0)
    return Channel(ours, go, done), Channel(theirs, go, done)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 9, PIECE_BYTES - 8, PIECE_BYTES - 7, 3 * PIECE_BYTES, 5_000_000])
def test_messages_of_any_size_come_whole(ends: tuple[Channel, Channel], size: int):
    payload = bytes(range(256)) * (size // 256 + 1)
    payload = payload[:size]
    sender = threading.Thread(target=ends[0].send, args=(payload,))
    sender.start()
    assert ends[1].receive(10.0) == payload
    sender.join()


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=3 * PIECE_BYTES), max_size=5))
def test_messages_come_in_order_and_apart(payloads: list[bytes]):
    ours, theirs = pair()
    sender = threading.Thread(target=lambda: [ours.send(payload) for payload in payloads])
    sender.start()
    assert [theirs.receive(10.0) for _ in payloads] == payloads
    sender.join()


def test_nobody_writes(ends: tuple[Channel, Channel]):
    with pytest.raises(DeadlineError):
        ends[0].receive(0.05)


def test_half_a_message_does_not_hang(ends: tuple[Channel, Channel]):
    ends[1].connection.send_bytes((10_000).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(DeadlineError):
        ends[0].receive(0.05)


def test_nobody_reads(ends: tuple[Channel, Channel]):
    with pytest.raises(DeadlineError):
        ends[0].send(b"x" * 5_000_000, 0.2)


def test_the_other_side_is_gone(ends: tuple[Channel, Channel]):
    ends[1].connection.close()
    with pytest.raises((EOFError, OSError)):
        ends[0].receive(5.0)
    with pytest.raises(OSError, match="pipe|reset"):
        ends[0].send(b"x" * 5_000_000, 5.0)


def test_a_reader_that_goes_in_the_middle_of_a_message(ends: tuple[Channel, Channel]):
    def leave() -> None:
        time.sleep(0.1)
        ends[1].connection.close()

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(OSError, match="pipe|reset"):
        ends[0].send(b"x" * 50_000_000, 20.0)
    thread.join()


@pytest.mark.parametrize("spin_s", [0.0, 100e-6])
def test_acquire(ends: tuple[Channel, Channel], spin_s: float):
    semaphore = ends[0].go
    assert not acquire(semaphore, spin_s, 0.01)
    semaphore.release()
    assert acquire(semaphore, spin_s, 0.01)
    assert not acquire(semaphore, spin_s, 0.01), "one token, once"
    threading.Timer(0.05, semaphore.release).start()
    assert acquire(semaphore, spin_s, 10.0)
