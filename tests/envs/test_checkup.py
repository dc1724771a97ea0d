"""Planted faults are each named, ordinary envs are passed in silence. No test asserts a time."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from strangers import Cards

from fasttrain.envs import checkup as checkups
from fasttrain.envs.checkup import CheckupResult, checkup
from fasttrain.envs.make import EnvFactory, EnvSpec
from fasttrain.envs.masks import ActionMasks, find_mask_convention
from plain_env import PlainEnv

UNHURRIED_S = 60.0  # of a checkup in these tests: how much is played must not depend on how busy the machine is


class Walk(gymnasium.Env[Any, Any]):
    """An honest random walk with masks at both ends of the line; `fault` spoils one thing."""

    def __init__(self, fault: str = "", illegal: str = "stays") -> None:
        self.fault, self.illegal = fault, illegal
        self.observation_space = spaces.Box(-10, 30, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.generator, self.fixed = np.random.default_rng(), np.random.default_rng(5)
        self.over, self.mask = False, np.ones(3, np.bool_)
        if fault not in ("unmasked", "info mask one step old"):
            self.action_masks = self._action_masks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place, self.wind, self.count = int(self.np_random.integers(1, 6)), self._draw(), 0
        self.over = self.over and self.fault == "done for ever"
        if self.fault != "first mask stale":
            self.mask = self._legal()
        return self._observation(), self._info()

    def step(self, action: Any) -> Any:
        if self.fault in ("mask one step old", "info mask one step old"):
            self.mask = self._legal()
        if not self._legal()[action] and self.illegal == "raises":
            raise ValueError(f"no move {action} at {self.place}")
        lost = not self._legal()[action] and self.illegal == "loses"
        self.place = min(max(self.place + (0 if self.fault == "action ignored" else int(action) - 1), 0), 6)
        self.wind = self._draw()
        self.count += 1
        if self.fault == "first mask stale":
            self.mask = self._legal()
        fixed_end = self.fault in ("action ignored", "reward of the time", "reward always", "no reward", "win always")
        self.over |= self.count >= 20 or lost or (self.place == 6 and not fixed_end)
        over = self.over and self.fault != "never done"
        if self.fault == "four values":
            return self._observation(), self._reward(), over, self._info()
        return self._observation(), self._reward(), int(over) if self.fault == "int end" else over, False, self._info()

    def _action_masks(self) -> Any:
        if self.fault == "empty mask" and self.count == 3:
            return np.zeros(3, np.bool_)
        if self.fault == "mask refreshed by asking":
            shown, self.mask = self.mask, self._legal()
            return shown
        if self.fault in ("mask one step old", "first mask stale"):
            return self.mask
        return np.ones(4) if self.fault == "mask too long" else self._legal()

    def _legal(self) -> Any:
        return np.array([self.place > 0, True, self.place < 6])

    def _draw(self) -> float:
        draws: dict[str, Callable[[], float]] = {
            "random": random.random,
            "np.random": np.random.random,
            "random and np.random": lambda: random.random() + np.random.random(),
            "own generator": self.generator.random,
            "fixed generator": self.fixed.random,
        }
        return draws.get(self.fault, self.np_random.random)()

    def _observation(self) -> Any:
        if self.fault == "constant observation":
            return np.zeros(3, np.float32)
        if self.fault == "wrong shape":
            return np.zeros(4, np.float32) + self.place
        wind = {"nan": np.nan, "out of bounds": 35.0}.get(self.fault if self.count == 4 else "", self.wind)
        return np.array([self.place, wind, min(self.count, 30)], np.float32)

    def _reward(self) -> Any:
        rewards: dict[str, Any] = {
            "reward of the wind": self.wind,
            "reward of the time": 0.1 * (self.count % 3),
            "reward always": 1.0,
            "win always": float(self.count == 20),
            "no reward": 0.0,
            "reward in an array": np.array([1.0, 2.0]),
            "reward none": None,
            "reward inf": float("inf"),
        }
        return rewards.get(self.fault, self.place + self.wind)

    def _info(self) -> Any:
        if self.fault == "info mask one step old":
            return {"action_mask": self.mask}
        infos: dict[str, Any] = {"unpicklable info": {"lock": threading.Lock()}, "info is a list": [1]}
        return infos.get(self.fault, {"count": self.count})


def checked(make: Callable[[], Any], **limits: Any) -> CheckupResult:
    def build() -> Any:
        env = make()
        convention = find_mask_convention(env) if isinstance(env.action_space, spaces.Discrete) else None
        return env if convention is None else ActionMasks(env, convention)

    return checkup(build, **{"max_seconds": UNHURRIED_S, **limits})


def codes(result: CheckupResult) -> list[str]:
    return [finding.code for finding in result.findings]


FAULTS = [
    ("constant observation", "constant_observation", "warning", r"all \d+ observations were the same"),
    ("never done", "never_done", "warning", r"no episode ended in 2,\d+ steps.*env.max_episode_steps"),
    (
        "reward of the wind",
        "reward_ignores_action",
        "warning",
        r"gave exactly the same.*only the length of episodes depends",
    ),
    ("mask one step old", "stale_mask", "warning", "one step earlier"),
    ("empty mask", "empty_mask", "warning", r"allows none of 3 actions \(step 3 of episode"),
    ("wrong shape", "wrong_shape", "error", r"has shape \(4,\), declared \(3,\)"),
    ("own generator", "unseeded_randomness", "warning", "cause is unknown. It is neither reset.* nor the global"),
    ("unpicklable info", "unpicklable_info", "error", r"info\['lock'\] holds a _thread.lock"),
    ("done for ever", "done_for_ever", "error", r"each of \d+ episodes ended at its first step"),
    ("action ignored", "action_ignored", "error", "same bit for bit"),
    ("first mask stale", "stale_mask", "error", "same observation and different action masks"),
    ("mask refreshed by asking", "stale_mask", "error", "calls of action_masks.. without a step between"),
    ("mask too long", "bad_mask", "error", "expected 3 entries, got 4"),
    ("reward of the time", "reward_ignores_action", "warning", "3 different ones.;"),
    ("reward always", "reward_ignores_action", "warning", "returned 20, whatever the actions"),
    ("win always", "reward_ignores_action", "warning", "returned 1, whatever the actions"),
    ("no reward", "constant_reward", "warning", "the reward was 0 at each step"),
    ("reward in an array", "reward_not_scalar", "error", r"of shape \(2,\)"),
    ("reward none", "reward_not_scalar", "error", "is None"),
    ("reward inf", "reward_not_finite", "error", "is inf"),
    ("nan", "observation_not_finite", "error", "is nan at index 1 .step 4"),
    ("out of bounds", "out_of_bounds", "warning", "is 35 at index 1, declared -10 to 30"),
    ("random", "unseeded_randomness", "warning", "draws from the global `random`;"),
    ("np.random", "unseeded_randomness", "warning", "draws from the global `np.random`;"),
    ("random and np.random", "unseeded_randomness", "warning", "the global `random` and `np.random`;"),
    ("fixed generator", "unseeded_randomness", "warning", "a generator that the constructor makes"),
    (
        "four values",
        "step_answer",
        "error",
        "instead of .observation, reward, terminated.*=.fasttrain.*wrappers:OldGym",
    ),
    ("int end", "ends_not_bool", "warning", "terminated is 0 of type int"),
    ("info is a list", "reset_answer", "error", r"reset\(\) must return \(observation, info\), it returned \(array"),
]


@pytest.mark.parametrize(("fault", "code", "severity", "text"), FAULTS, ids=lambda value: str(value)[:30])
def test_a_planted_fault_is_the_one_thing_found(
    fault: str, code: str, severity: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkups, "PATIENCE_STEPS", 2_000)
    result = checked(lambda: Walk(fault))
    assert codes(result) == [code]
    (finding,) = result.findings
    assert finding.severity == severity
    assert finding.remedy
    assert re.search(text, str(finding)), finding


@pytest.mark.parametrize(
    ("fault", "illegal"),
    [("mask one step old", "loses"), ("mask one step old", "raises"), ("info mask one step old", "stays")],
)
def test_a_late_mask_is_named_whatever_an_illegal_action_does(illegal: str, fault: str) -> None:
    assert codes(checked(lambda: Walk(fault, illegal))) == ["stale_mask"]


class Collect(PlainEnv):
    """Take each stone once: every action changes the mask."""

    observation_space, action_space = spaces.Box(0, 1, (5,), np.float32), spaces.Discrete(5)

    def __init__(self, late: bool, illegal: str) -> None:
        self.late, self.illegal = late, illegal

    def seen(self) -> Any:
        if self.time == 0:
            self.there = self.shown = np.ones(5, np.bool_)
        return self.there.astype(np.float32)

    def step(self, action: Any) -> Any:
        if not self.there[action] and self.illegal == "raises":
            raise ValueError(f"stone {action} is gone")
        illegal, before = not self.there[action], self.there
        self.there = before & (np.arange(5) != action)
        self.shown = before if self.late else self.there
        over = not self.there.any() or (illegal and self.illegal == "loses")
        return super().step(action)[0], action / 10 - float(illegal), over, False, {}

    def action_masks(self) -> Any:
        return self.shown


@pytest.mark.parametrize("illegal", ["stays", "loses", "raises"])
@pytest.mark.parametrize("late", [False, True])
def test_a_late_mask_where_every_action_changes_it(late: bool, illegal: str) -> None:
    assert codes(checked(lambda: Collect(late, illegal))) == (["stale_mask"] if late else [])


def test_a_refused_action_of_an_env_whose_masks_have_another_name() -> None:
    class Named(Walk):
        def __init__(self) -> None:
            super().__init__("unmasked", illegal="raises")

        def valid_action_mask(self) -> Any:
            return self._legal()

    (finding,) = checked(Named).findings
    assert finding.code == "raised"
    assert finding.remedy.endswith("use algo=maskable_ppo with env.masks=valid_action_mask")


@pytest.mark.parametrize("special", [0, None])
def test_one_action_of_thousands_that_does_something_else(special: int | None) -> None:
    class Wide(Walk):
        def __init__(self) -> None:
            super().__init__("unmasked")
            self.action_space = spaces.Discrete(10_000)

        def step(self, action: Any) -> Any:
            return super().step(2 if action == special else 1)

    assert codes(checked(Wide)) == ([] if special == 0 else ["action_ignored"])


def test_an_action_refused_although_its_mask_is_fresh() -> None:
    class Picky(Walk):
        def step(self, action: Any) -> Any:
            if action == 2 and self.place == 3:
                raise ValueError("not from here")
            return super().step(action)

    result = checked(Picky)
    assert (codes(result), result.masks_ignored) == (["mask_not_respected"], False)
    assert "not from here" in result.findings[0].message


def test_without_masks_an_illegal_action_that_raises_leads_to_the_masks() -> None:
    result = checkup(lambda: Walk(illegal="raises"), max_seconds=UNHURRIED_S, use_masks=False)
    assert codes(result) == ["raised"]
    assert result.masks_ignored
    assert "no move" in result.findings[0].message
    assert "use algo=maskable_ppo" in result.findings[0].remedy


def test_an_env_that_cannot_reset_is_one_finding() -> None:
    class Broken(Walk):
        def reset(self, **_: Any) -> Any:
            raise RuntimeError("no board")

    result = checkup(Broken)
    assert codes(result) == ["raised"]
    assert "failed at the start of an episode" in result.findings[0].message
    assert result.costs is result.to_dict()["costs"] is None


@pytest.mark.parametrize("illegal", ["stays", "loses", "raises"])
def test_the_honest_env_is_passed(illegal: str) -> None:
    assert codes(checked(lambda: Walk(illegal=illegal))) == []
    assert codes(checked(lambda: Walk("unmasked"))) == []


TAXI = "Taxi-v3" if "Taxi-v3" in gymnasium.registry else "Taxi-v4"  # Gymnasium 1.4 has only the later one
CLIFF = "CliffWalking-v1" if "CliffWalking-v1" in gymnasium.registry else "CliffWalking-v0"  # Gymnasium 1.1
ORDINARY = [
    "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1",
    "FrozenLake8x8-v1", TAXI, "Blackjack-v1", CLIFF,
]  # fmt: skip


@pytest.mark.parametrize(("env_id", "max_steps"), [*((name, 300) for name in ORDINARY), ("FrozenLake-v1", 2_000)])
def test_ordinary_envs_are_passed(env_id: str, max_steps: int) -> None:
    for use_masks in (True, False) if env_id == TAXI else (False,):
        factory = EnvFactory(EnvSpec(id=env_id, use_masks=use_masks))
        result = checkup(factory, max_steps=max_steps, max_seconds=UNHURRIED_S, use_masks=use_masks)
        assert result.findings == ()
        assert result.not_checked == ()
        assert result.costs.has_masks == use_masks


@pytest.mark.parametrize(("opponents", "use_masks"), [("random", True), ({"easy": 1, "hard": 3}, False)])
def test_skull_king_is_passed(opponents: Any, use_masks: bool) -> None:
    spec = EnvSpec(id="fasttrain/SkullKing-v0", kwargs={"opponents": opponents}, use_masks=use_masks)
    result = checkup(EnvFactory(spec), max_seconds=UNHURRIED_S, use_masks=use_masks)
    assert result.findings == ()
    assert result.not_checked == ()


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # SWIG's, when Box2D is imported
@pytest.mark.filterwarnings("ignore:pkg_resources:UserWarning")  # pygame's
def test_lunar_lander_is_passed() -> None:
    pytest.importorskip("Box2D", reason="LunarLander needs Box2D, which has no wheel for this Python")
    for env_id in ("LunarLander-v3", "LunarLanderContinuous-v3"):
        assert checkup(EnvFactory(EnvSpec(id=env_id)), max_seconds=UNHURRIED_S).findings == ()


class Bandit(PlainEnv):
    """One-step episodes without anything to see; action 3 pays most often."""

    action_space, length = spaces.Discrete(4), 1

    def paid(self, action: Any) -> Any:
        return float(self.np_random.random() < 0.1 + 0.2 * action)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 5),
        lambda: gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 3),
        lambda: gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), np.float32(-1), np.float32(1)),
    ],
    ids=["cut short", "frames", "rescaled"],
)
def test_less_ordinary_envs_are_passed(make: Callable[[], Any]) -> None:
    assert checked(make).findings == ()


def test_episodes_of_one_step_may_be_meant_so() -> None:
    (finding,) = checked(Bandit).findings
    assert (finding.severity, finding.code) == ("warning", "one_step_episodes")


def test_a_flag_that_no_reset_clears_is_found_whenever_it_is_set() -> None:
    class Worn(Walk):
        steps_of_all = 0

        def step(self, action: Any) -> Any:
            self.steps_of_all += 1
            observation, reward, over, cut, info = super().step(action)
            return observation, reward, over or self.steps_of_all > 60, cut, info

    codes = {finding.code: finding for finding in checked(Worn).findings}
    assert codes["done_for_ever"].severity == "error"
    assert "unseeded_randomness" not in codes


def test_a_seed_that_decides_nothing() -> None:
    class Deaf(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.np_random = self.fixed
            return super().reset()

    (finding,) = checked(Deaf).findings
    assert finding.code == "unseeded_randomness"
    assert "all copies of the env play the same" in finding.message


def test_running_statistics_are_no_unseeded_randomness() -> None:
    result = checked(lambda: gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")))
    assert result.findings == ()
    assert result.not_checked == ("seeds and other actions: NormalizeObservation carries statistics over episodes",)


def test_a_time_limit_is_an_end() -> None:
    assert codes(checked(lambda: gymnasium.wrappers.TimeLimit(Walk("never done"), 100_000))) == []


def test_an_end_that_takes_long_is_waited_for() -> None:
    class Long(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, _, _, info = super().step(action)
            self.over = False
            return observation, reward, self.count >= 4_500, False, info

    result = checked(Long)
    assert result.findings == ()
    assert result.costs.episode_steps == 4_500


def test_what_there_is_no_time_for_is_said_and_nothing_claimed() -> None:
    result = checked(lambda: Walk("never done"), max_seconds=0.0)
    assert result.findings == ()
    assert result.costs.steps == 1
    assert [text.split(":")[0] for text in result.not_checked] == ["whether episodes end", "seeds and other actions"]


def test_the_global_streams_are_as_they_were_and_every_env_is_closed() -> None:
    closed: list[bool] = []

    class Closing(Walk):
        def close(self) -> None:
            closed.append(True)

    built: list[Closing] = []
    random.seed(1)
    np.random.seed(1)
    python_state, numpy_state = random.getstate(), np.random.get_state()[1]
    checkup(lambda: built.append(Closing("random")) or built[-1], max_seconds=UNHURRIED_S)
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert len(closed) == len(built) >= 2


def test_to_dict_holds_everything() -> None:
    result = checked(lambda: Walk("empty mask"))
    content = result.to_dict()
    assert set(content) == {
        "findings", "costs", "steps", "seconds", "reward_range", "episodes", "return_range", "not_checked",
    }  # fmt: skip
    assert content["findings"][0]["code"] == "empty_mask"
    assert set(content["findings"][0]) == {"severity", "code", "message", "remedy"}
    assert content["costs"]["episode_steps"] > 1
    assert content["episodes"] == len(result.returns) > 0
    assert content["return_range"] == (min(result.returns), max(result.returns))


def test_without_time_for_comparisons_equal_returns_prove_nothing() -> None:
    """Every order of the cards brings 10: only other actions would show that rewards depend on them."""

    class Slow(Cards):
        def step(self, action: Any) -> Any:
            time.sleep(0.002)
            return super().step(action)

    slow = checkup(lambda: ActionMasks(Slow(), "method", None, "valid_action_mask"), max_seconds=1.0)
    assert [finding.code for finding in slow.findings] == []
    assert any("what other actions change" in text for text in slow.not_checked)
