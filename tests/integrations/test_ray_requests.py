"""Requests to actors: the oldest answer of an actor first, the length of messages, actors that are lost or hang."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain_integrations.ray_requests import ENDED, NO_ANSWER, Lost, Requests


class Cluster:
    """Stands for Ray and for an `ActorVecEnv` of two actors. `answers`: reference → what an actor sent, or `Lost`."""

    def __init__(self) -> None:
        self.ray, self.actors, self.answers = self, [0, 1], dict[str, Any]()
        self.config = SimpleNamespace(env=SimpleNamespace(step_timeout_s=30.0))
        self.lost: list[tuple[int, Lost, int]] = []

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return [each for each in references if each in self.answers][:1], []

    def result(self, number: int, reference: str, limit_s: float) -> tuple[Any, Lost | None]:
        answer = self.answers.get(reference, Lost(NO_ANSWER, "0 s waited"))
        if isinstance(answer, Exception):
            raise answer
        return (None, answer) if isinstance(answer, Lost) else (answer, None)

    def renewed(self, number: int, lost: Lost, steps: int) -> str:
        self.lost.append((number, lost, steps))
        return "first observations"


def sent(seconds: float) -> Any:
    return SimpleNamespace(seconds=seconds)


def test_the_oldest_answer_of_an_actor_comes_first_and_messages_have_100_ms_of_work():
    env = Cluster()
    requests = Requests(env, most=32)
    assert [requests.length(0), requests.answer(0.0)] == [1, None]
    requests.add(0, 4, "a", tag=7)
    requests.add(0, 2, "b", tag=8)
    assert requests.of(0) == [4, 2]
    env.answers["b"] = sent(0.2)
    assert requests.answer(0.0) is None, "the answer before it is missing"
    env.answers["a"] = sent(0.02)
    first: Any = requests.answer(0.0)
    assert (first.number, first.tag, first.sent.seconds) == (0, 7, 0.02)
    assert requests.length(0) == 20  # of 5 ms
    second: Any = requests.answer(0.0)
    assert (second.tag, requests.of(0), requests.length(0)) == (8, [], 1)
    env.answers["c"] = sent(1e-5)
    requests.add(0, 1, "c", tag=9)
    requests.answer(0.0)
    assert requests.length(0) == 32


def test_an_actor_that_ends_or_hangs_is_replaced_with_all_its_requests(monkeypatch: pytest.MonkeyPatch):
    env = Cluster()
    requests = Requests(env, most=32)
    for reference in "ab":
        requests.add(1, 3, reference, tag=0)
    requests.add(0, 5, "c", tag=0)
    env.answers["a"] = env.answers["b"] = Lost(ENDED, "ActorDiedError")
    lost: Any = requests.answer(0.0)
    assert (lost.number, lost.sent, lost.first) == (1, None, "first observations")
    assert env.lost == [(1, Lost("actor ended", "ActorDiedError"), 6)]
    assert [requests.of(0), requests.of(1), requests.answer(0.0)] == [[5], [], None]
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 200.0)  # more than 30 s, and 120 s before the first answer
    lost = requests.answer(0.0)
    assert env.lost[1:] == [(0, Lost("actor did not answer", "200 s waited, see env.step_timeout_s"), 5)]


def test_an_error_of_an_env_is_raised():
    env = Cluster()
    requests = Requests(env, most=32)
    requests.add(1, 3, "a", tag=0)
    env.answers["a"] = ValueError("the board fell off the table")
    with pytest.raises(ValueError, match="the board fell off the table"):
        requests.answer(0.0)
