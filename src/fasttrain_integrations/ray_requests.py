"""cluster=ray: requests to actors. The answers are taken in the order in which they come; see `ray_continuous.py`."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

MOST = 2  # requests to an actor that are not answered yet
MESSAGE_S = 0.1  # an answer has at least this much work, unless the limit of its steps is shorter
FIRST_S = 120.0  # before its first answer an actor may have to compile kernels
SLOW = 10.0  # an actor may take this many times the longest time per step so far, in addition to env.step_timeout_s


ENDED, NO_ANSWER, FULL = "actor ended", "actor did not answer", "object store full"  # causes of a loss


class Lost(NamedTuple):
    """Why an actor is lost."""

    cause: str
    detail: str


class Answer(NamedTuple):
    """What an actor sent, or that it was lost."""

    number: int  # of the actor
    tag: Any  # what `Requests.add` got
    sent: Any  # None: the actor was lost
    first: Any = None  # the first observations of the envs in the actor that replaces a lost one


class Request(NamedTuple):
    number: int
    steps: int
    tag: Any
    began: float


class Requests:
    """The requests that are not answered yet. An actor has two of them, so that it need not wait for the next one.

    Args:
        env: the `ActorVecEnv`. A lost actor is replaced with its method `renewed`.
        most: largest number of vector steps in a request.
    """

    def __init__(self, env: Any, most: int) -> None:
        self.env, self.most, self.longest_s = env, most, 0.0
        self.open: dict[Any, Request] = {}  # Ray's reference of the answer → request, the oldest first
        self.step_s = [math.inf] * len(env.actors)  # seconds per vector step in the newest answer of each actor
        self.answered = [0.0] * len(env.actors)  # time of the newest answer

    def of(self, number: int) -> list[int]:
        """Numbers of vector steps in the requests to this actor."""
        return [request.steps for request in self.open.values() if request.number == number]

    def length(self, number: int) -> int:
        """Number of vector steps for the next request to this actor, so that it works for `MESSAGE_S`."""
        return max(1, min(self.most, math.ceil(MESSAGE_S / max(self.step_s[number], 1e-9))))

    def add(self, number: int, steps: int, reply: Any, tag: Any) -> None:
        """Add a request for `steps` vector steps. `reply`: Ray's reference. `tag`: is in the `Answer`."""
        self.open[reply] = Request(number, steps, tag, time.monotonic())

    def answer(self, wait_s: float) -> Answer | None:
        """Wait for the next answer. None: there is none after `wait_s`.

        Raises:
            EnvError: an env raised it, or a lost actor cannot be replaced.
        """
        if not self.open:
            return None
        step_s = self.env.config.env.step_timeout_s
        oldest = {request.number: reply for reply, request in reversed(self.open.items())}  # of each actor
        ready, _ = self.env.ray.wait([*oldest.values()], timeout=wait_s)
        for reply in ready or oldest.values():
            request = self.open[reply]
            is_first = self.step_s[request.number] == math.inf
            most_s = step_s + (FIRST_S if is_first else SLOW * self.longest_s * request.steps)
            waited_s = time.monotonic() - max(request.began, self.answered[request.number])
            if ready or waited_s > most_s:
                return self._answer(request, reply, waited_s)
        return None

    def _answer(self, request: Request, reply: Any, waited_s: float) -> Answer:
        number = request.number
        sent, lost = self.env.result(number, reply, 0.1)
        if lost is None:
            del self.open[reply]
            self.answered[number], self.step_s[number] = time.monotonic(), sent.seconds / request.steps
            self.longest_s = max(self.longest_s, self.step_s[number])
            return Answer(number, request.tag, sent)
        if lost.cause == NO_ANSWER:
            lost = lost._replace(detail=f"{waited_s:.0f} s waited, see env.step_timeout_s")
        steps = sum(self.of(number))
        self.open = {other: each for other, each in self.open.items() if each.number != number}
        self.step_s[number] = math.inf
        return Answer(number, request.tag, None, self.env.renewed(number, lost, steps))
