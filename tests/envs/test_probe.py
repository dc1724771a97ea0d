"""Random play is legal, checked and measured. No test asserts a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.envs import probe as probing
from fasttrain.envs.probe import PROBE_SECONDS, PROBE_STEPS, SEED, Play, PlayError, ProbeResult
from plain_env import PlainEnv


def probe(build: Callable[[], Any], max_seconds: float = PROBE_SECONDS, max_steps: int = PROBE_STEPS) -> ProbeResult:
    play = Play(build)
    play.run(max_seconds, max_steps)
    return play.costs()


class Watched(PlainEnv):
    """Allows one action per state, ends after `length` steps, and notes what happens."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(4)

    def __init__(self, length: int = 3, masked: bool = True) -> None:
        self.length, self.illegal, self.seeds = length, 0, list[int | None]()
        if masked:
            self.action_masks = lambda: np.arange(4) == self.time % 4

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, ...]:
        self.illegal += int(action != self.time % 4)
        return super().step(action)


def test_shares_of_zeros_and_of_legal_actions() -> None:
    env = Watched()
    assert probe(lambda: env, max_steps=8).density == (0.0, 0.25)
    pair = {"a": np.array([[0, 3], [0, 0]]), "b": np.ones(4, np.float32), "c": "words"}
    env.step, stepped = lambda action: (pair, *stepped(action)[1:]), env.step
    assert probe(lambda: env, max_steps=8).density[0] == 5 / 8


def test_random_play_does_not_guess_what_the_env_draws() -> None:
    class Code(Watched):
        def reset(self, **given: Any) -> Any:
            gymnasium.Env.reset(self, seed=given["seed"])
            self.code = self.np_random.integers(4, size=50)
            return np.zeros(1, np.float32), {}

    env = Code(60, masked=False)
    play = Play(lambda: env)
    played = [moment.action for moment in play.episode(SEED, 50)][1:]
    assert 0 < (played == env.code).sum() < 40


def test_structure_and_legality() -> None:
    env = Watched()
    result = probe(lambda: env, max_seconds=60, max_steps=20)
    assert result.steps == 20
    assert result.resets >= 20 // 3
    assert result.episode_steps == 3.0
    assert result.has_masks
    assert min(result.step_s, result.reset_s, result.mask_s) > 0
    assert env.illegal == 0
    assert env.seeds[0] is not None
    assert set(env.seeds[1:]) == {None}


def test_limits_still_allow_one_step_and_one_reset() -> None:
    one_step = probe(lambda: Watched(length=1, masked=False), max_seconds=60, max_steps=5)
    assert (one_step.steps, one_step.episode_steps, one_step.has_masks, one_step.mask_s) == (5, 1.0, False, 0.0)
    result = probe(Watched, max_seconds=0.0)
    assert (result.steps, result.resets) == (1, 1)
    assert result.episode_steps is None


@pytest.mark.parametrize("limit", [False, True], ids=["bare", "in a TimeLimit"])
@pytest.mark.parametrize(
    ("method", "answer", "text"),
    [
        ("step", lambda: 1 / 0, r"failed at step 1 of an episode.*ZeroDivisionError.*test_probe\.py"),
        ("step", lambda: (np.zeros(1), 0.0, False, {}), r"step\(\) returned .*instead of \(observation, reward"),
        ("reset", lambda: np.zeros(1), r"reset\(\) must return \(observation, info\), it returned array.*OldGym"),
    ],
)
def test_an_answer_of_another_form_is_named(method: str, answer: Any, text: str, limit: bool) -> None:
    env = Watched()
    setattr(env, method, lambda *_, **__: answer())
    with pytest.raises(PlayError, match=text):
        probe(lambda: gymnasium.wrappers.TimeLimit(env, 9) if limit else env)


def test_info_is_measured_as_it_travels() -> None:
    def cost(info: dict[str, Any]) -> float:
        env = Watched()
        env.step = lambda _action: (np.zeros(1), 0.0, False, False, info)
        return probe(lambda: env, max_steps=5).info_bytes

    assert cost({}) == 0
    assert 1_000 < cost({"board": bytes(1_000)}) < 1_100
    assert cost({"call": lambda: 0}) == 0


def test_an_env_may_draw_from_its_own_action_space() -> None:
    env = Watched(masked=False)
    env.action_space = spaces.Discrete(100, seed=4)
    expected = spaces.Discrete(100, seed=4).sample()
    probe(lambda: env, max_steps=5)
    assert env.action_space.sample() == expected


@pytest.mark.parametrize(
    ("cpu_s", "kept_off_s", "step_s", "share"),
    [
        (1.0, 0.0, 4.0, 0.25),  # it waits
        (1.0, 3.0, 1.0, 1.0),  # another process had its core
        (1.0, 1.0, 3.0, 1 / 3),  # both
    ],
)
def test_time_without_a_core_is_no_time_of_the_step(
    monkeypatch: pytest.MonkeyPatch, cpu_s: float, kept_off_s: float, step_s: float, share: float
):
    now = {"wall": 0.0, "cpu": 0.0, "off": 0.0}
    monkeypatch.setattr(probing.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(probing.time, "process_time", lambda: now["cpu"])
    monkeypatch.setattr(probing.RunDelay, "seconds", lambda _: now["off"])
    env = Watched()

    def step(_: Any) -> Any:
        for name, passed in (("wall", 4.0), ("cpu", cpu_s), ("off", kept_off_s)):
            now[name] += passed
        return np.zeros(1, np.float32), 0.0, False, False, {}

    env.step = step
    costs = probe(lambda: env, max_seconds=1000, max_steps=8)
    assert (costs.step_s, costs.cpu_share) == (pytest.approx(step_s), pytest.approx(share))


def test_where_no_run_delay_is_counted_there_is_none(tmp_path: Path):
    assert probing.RunDelay(str(tmp_path / "none")).seconds() == 0.0
    (tmp_path / "schedstat").write_text("829382 57004 2\n")
    assert probing.RunDelay(str(tmp_path / "schedstat")).seconds() == pytest.approx(57004e-9)
