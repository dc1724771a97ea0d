from __future__ import annotations

import os
import signal
import threading

import pytest

from fasttrain.runs.stopping import ONE_S, StopFlag

OF_SLURM = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, *OF_SLURM])
def test_a_signal_asks_to_stop_and_the_handler_goes_back(number: signal.Signals):
    before = signal.getsignal(number)
    stop = StopFlag()
    with stop.listening():
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal there")
def test_a_terminal_that_closes_stops_the_run_unless_under_nohup(monkeypatch: pytest.MonkeyPatch):
    silenced: list[bool] = []
    monkeypatch.setattr("fasttrain.runs.stopping.silence_terminals", lambda: silenced.append(True))
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, stops in ((signal.SIG_IGN, False), (signal.SIG_DFL, True)):
            signal.signal(signal.SIGHUP, handler)
            stop = StopFlag()
            with stop.listening():
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.requested == bool(silenced) == stops
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_same_signal_twice_at_once_is_one_and_later_it_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    now = [10.0]
    monkeypatch.setattr("fasttrain.runs.stopping.time.monotonic", lambda: now[0])
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    before = signal.getsignal(signal.SIGTERM)
    stop = StopFlag()
    with stop.listening():
        for now[0], expected in ((10.0, 0), (10.0 + ONE_S, 0), (10.1 + ONE_S, 1)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.requested, len(raised)) == (True, expected)
    assert signal.getsignal(signal.SIGTERM) is before


def test_off_the_main_thread_nothing_is_changed():
    before = signal.getsignal(signal.SIGINT)
    seen: list[bool] = []

    def run() -> None:
        with StopFlag().listening():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]
