"""What a checkup says of the cause: a planted one each, and envs whose cause it does not know."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs.causes import played_beside, refused
from fasttrain.envs.checkup import CheckupResult, checkup
from fasttrain.envs.make import EnvSpec
from fasttrain.envs.probe import Play, PlayError
from plain_env import PlainEnv

NEVER = float("inf")
TABLE = {"at": 0}


class Room(PlainEnv):
    """Ten steps in a room; `fault` spoils one thing."""

    observation_space, action_space = spaces.Box(-1000, 1000, (4,), np.float32), spaces.Discrete(3)

    def __init__(self, fault: str = "") -> None:
        self.fault, self.steps, self.episodes = fault, 0, 0
        self.start, self.shown = np.zeros(4, np.float32), np.zeros(4, np.float32)
        self.size = random.random() if fault == "constructor draws" else 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        gymnasium.Env.reset(self, seed=42 if self.fault == "always 42" else seed)
        self.time, self.episodes = 0, self.episodes + 1
        self.place = self.start if self.fault == "not put back" else self.start.copy()
        if self.fault == "seeds the global stream":
            if seed is not None:
                random.seed(seed)
            self.place[2] = random.random()
        self.place[3] = int(self.np_random.integers(5))
        TABLE["at"] = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.place[0] += int(action)
        TABLE["at"] += int(action)
        answer = super().step(action)
        if answer[2] and self.fault == "short end":
            return np.zeros(2, np.float32), *answer[1:]
        return answer

    def paid(self, action: Any) -> float:
        return float(action) + self.place[3]

    def seen(self) -> Any:
        faults: dict[str, Callable[[], float]] = {
            "shared": lambda: TABLE["at"],
            "constructor draws": lambda: self.size,
            "counts steps": lambda: self.steps,
        }
        if self.fault == "renumbered":
            return np.array([1, 2, 3, 4], np.float32) + 10 * self.episodes
        if self.fault == "column":
            return self.place[None].copy()
        self.shown[:] = self.place
        self.shown[1] = faults.get(self.fault, float)()
        return self.shown if self.fault == "own array" else self.shown.copy()


def looked_at(fault: str, **limits: Any) -> CheckupResult:
    return checkup(lambda: Room(fault), **{"max_seconds": 20.0, "max_steps": 100, **limits})


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("own array", "reused_array", "changed by the env after the env had returned it"),
        ("not put back", "state_left_over", "depends on the actions in the episode before"),
        ("always 42", "unseeded_randomness", "seeds np_random with 42 for any seed"),
        ("seeds the global stream", "unseeded_randomness", "reset.* seeds the global `random` or"),
        ("constructor draws", "unseeded_randomness", "its constructor draws from the global `random`"),
        ("counts steps", "unseeded_randomness", "the cause is unknown"),
        ("renumbered", "renumbered", "1.1?.* → .*"),
        ("shared", "copies_not_independent", "two copies of the env on this machine influence each other"),
        ("column", "odd_shape", r"has shape \(1, 4\), declared \(4,\)"),
    ],
)
def test_a_planted_cause_is_the_one_thing_found(fault: str, code: str, text: str) -> None:
    (finding,) = looked_at(fault).findings
    assert (finding.code, finding.severity) == (code, "warning")
    assert finding.remedy
    assert re.search(text, finding.message), finding.message


@pytest.mark.parametrize("fault", ["", "short end"])
def test_nothing_is_found_where_nothing_is_wrong(fault: str) -> None:
    result = looked_at(fault)
    assert result.findings == ()
    assert result.shares == ""


@pytest.mark.parametrize(("reaches", "shares"), [(False, "process"), (True, "machine")])
def test_whether_another_process_reaches_the_game(reaches: bool, shares: str) -> None:
    @contextmanager
    def beside() -> Any:
        if reaches:
            raise PlayError("raised", "the port is taken")
        yield

    result = looked_at("shared", beside=beside)
    assert result.shares == shares
    assert looked_at("shared", copies=False).findings == (), "one env alone needs no copy"
    assert ("in one process" if shares == "process" else "on this machine") in result.findings[0].message


def test_another_process_plays_a_copy(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "import gymnasium\nprint('hello')\nmake = lambda: gymnasium.make('CartPole-v1')"
    )
    for spec in (EnvSpec(id="CartPole-v1"), EnvSpec(entry_point="chatty:make")):
        with played_beside(spec, str(tmp_path)):
            pass
    with pytest.raises(PlayError, match="another process"), played_beside(EnvSpec(id="NoSuch-v0"), str(tmp_path)):
        pass


class Pushed(PlainEnv):
    """A mass that is pushed by at most 1, whatever the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, bound: float) -> None:
        self.action_space = spaces.Box(-bound, bound, (1,), np.float32)

    def seen(self) -> Any:
        self.place = self.place if self.time else self.np_random.random(1).astype(np.float32)
        return self.place.copy()

    def step(self, action: Any) -> Any:
        self.place = self.place + np.clip(action, -1, 1)
        return super().step(action)

    def paid(self, action: Any) -> float:
        return -abs(float(self.place[0]))


@pytest.mark.parametrize(("bound", "codes"), [(1, []), (8, ["unused_range"]), (8000, ["unused_range"])])
def test_a_range_of_actions_that_changes_nothing(bound: float, codes: list[str]) -> None:
    result = checkup(lambda: Pushed(bound), max_seconds=20.0, max_steps=100)
    assert [finding.code for finding in result.findings] == codes
    assert all(re.search(r" 0.125| 0.000\d+ times", finding.message) for finding in result.findings)


class Strict(Pushed):
    """Takes numbers from 1 to 2 and no others."""

    def __init__(self) -> None:
        self.action_space = spaces.Box(1.0, 2.0, (1,), np.float32)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return super().step(action - 1.5)


def test_no_action_is_tried_that_the_space_has_not() -> None:
    assert checkup(Strict, max_seconds=20.0, max_steps=100).findings == ()


class Writing(Room):
    """Writes into the array of actions."""

    action_space: Any = spaces.MultiDiscrete([3, 3])

    def step(self, action: Any) -> Any:
        action[1] = 0
        return super().step(action[0])


def test_a_changed_action() -> None:
    (found,) = checkup(Writing, max_seconds=20.0, max_steps=100).findings
    assert found.code == "changed_action"
    assert re.search(r"first at step \d+ .*\(last action \[\d \d\]\)", found.message), found


class Refusing(Room):
    """Raises at some actions that the mask allows."""

    def __init__(self, refuses: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.refuses = refuses

    def step(self, action: Any) -> Any:
        if self.refuses(self, action):
            raise ValueError("no")
        return super().step(action)

    def action_masks(self) -> Any:
        return np.ones(3, np.bool_)


@pytest.mark.parametrize(
    ("refuses", "code"),
    [(lambda env, action: action == 1, "mask_not_respected"), (lambda env, _: env.time == 2, "raised")],
)
def test_is_it_the_mask_or_the_step(refuses: Callable[[Any, Any], bool], code: str) -> None:
    finding = refused(Play(lambda: Refusing(refuses), lenient=True), "step raised", NEVER)
    assert finding.code == code
    assert finding.message.startswith("step raised")
