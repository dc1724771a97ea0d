from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from conftest import RunCommand, configured
from fasttrain.runs import check as module
from fasttrain.runs.check import step_times, with_trial
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve
from resume_cases import episodes_of

CLOSE = EnvFacts(native=False, step_s=60e-6)  # 8 envs: 0.5 ms one after another, about as much in two workers
SLOW = CLOSE._replace(step_s=0.235)
TWO = Machine(2, False, False)
ACROBOT = ("+profile=speed", "env.id=Acrobot-v1", "algo=ppo", "num_envs=8", "total_timesteps=1e6")


def after_trial(monkeypatch: pytest.MonkeyPatch, facts: EnvFacts, *arguments: str, takes: Any = (5e-4, 2e-4)) -> Any:
    monkeypatch.setattr(module, "step_times", lambda *configs: takes)
    config = configured(*ACROBOT, *arguments)
    return with_trial(facts, resolve(config, {}, facts, TWO), TWO, Console(quiet=True)).tried


def test_only_a_close_call_is_tried(monkeypatch: pytest.MonkeyPatch):
    assert after_trial(monkeypatch, CLOSE) == (5e-4, 2e-4)
    for changed in ({"step_s": 5e-6}, {"step_s": 5e-3, "cpu_share": 0.0}):
        assert after_trial(monkeypatch, CLOSE._replace(**changed)) is None, changed
    assert after_trial(monkeypatch, CLOSE._replace(step_s=None)) is None
    for typed in ("deterministic=true", "env.on_env_error=restart", "num_envs=1", "total_timesteps=10000"):
        assert after_trial(monkeypatch, CLOSE, typed) is None, typed


@pytest.mark.parametrize(
    ("facts", "takes", "expected"),
    [
        (CLOSE, (5e-4, 4e-4), "shared"),
        (CLOSE, (4e-4, 5e-4), "dummy"),
        (CLOSE, (4.1e-4, 4e-4), "dummy"),
        (SLOW, (0.9, 1.0), "dummy"),
    ],
)
def test_what_was_tried_decides(facts: EnvFacts, takes: tuple[float, float], expected: str):
    plan = resolve(configured(*ACROBOT), {}, facts._replace(tried=takes), TWO)
    row = plan.row("vec_env")
    assert (row.requested, row.effective) == ("auto", expected)
    if facts is CLOSE:
        assert row.reason.startswith(f"tried: a step of 8 envs takes {1e6 * takes[0]:.0f} µs in one process")
    assert plan.config.workers == (2 if expected == "shared" else "auto")


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ([(0.938, 0.914), (0.94, 0.5)], (0.938, 0.5)),  # the first one was disturbed
        ([(0.938, 0.914), (0.93, 0.93)], (0.93, 0.914)),
        ([(1.9, 0.95)], (1.9, 0.95)),
    ],
)
def test_slow_envs_are_tried_again_where_it_is_close(
    monkeypatch: pytest.MonkeyPatch, tries: list[tuple[float, float]], expected: tuple[float, float]
):
    monkeypatch.setattr(module, "step_times", lambda *_: tries.pop(0))
    plan = resolve(configured(*ACROBOT), {}, SLOW, TWO)
    facts = with_trial(SLOW, plan, TWO, Console(quiet=True))
    assert (facts.tried, tries) == (expected, [])
    assert resolve(configured(*ACROBOT), {}, facts, TWO).row("vec_env").effective == "shared", "a tie is theirs"


def test_a_trial_that_fails_leaves_the_estimates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "step_times", Mock(side_effect=OSError("the port is taken")))
    config = configured(*ACROBOT)
    assert with_trial(CLOSE, resolve(config, {}, CLOSE, TWO), TWO, Console(quiet=True)) == CLOSE


def test_real_envs_with_masks_are_played_and_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TURN_S", 0.01)
    masked = ("env.entry_point=worker_toys:Walker", "env.kwargs.number=0", "algo=maskable_ppo", "num_envs=2")
    alone, shared = (configured(*masked, "engine=fast", f"vec_env={kind}") for kind in ("dummy", "shared"))
    assert all(0 < seconds < 10 for seconds in step_times(alone, shared))
    alone = configured("env.id=CartPole-v1", "algo=ppo", "engine=fast", "num_envs=2", "vec_env=dummy")
    assert all(0 < seconds < 10 for seconds in step_times(alone, dataclasses.replace(alone, vec_env="vector")))
    built = Mock()
    monkeypatch.setattr(module, "build_vec_env", Mock(side_effect=[built, OSError("the port is taken")]))
    with pytest.raises(OSError, match="port"):
        step_times(configured(*ACROBOT), configured(*ACROBOT))
    assert built.close.called


def test_a_training_is_the_one_it_would_have_been(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    small = ("env.id=CartPole-v1", "algo=ppo", "engine=fast", "num_envs=2", "total_timesteps=256",
             "algo.rollout_size=128", "batch_size=64", "eval.episodes=2", "fused_update=off")  # fmt: skip
    monkeypatch.setattr(module, "step_costs", lambda *_: (1.0, 1.0, 2))
    monkeypatch.setattr(module, "TURN_S", 0.0)
    first = fasttrain(*small, "vec_env=auto").ok()
    (reason,) = (row["reason"] for row in first.json("plan.json")["flags"] if row["flag"] == "vec_env")
    assert reason.startswith("tried: ")
    monkeypatch.setattr("fasttrain.runs.train.with_trial", Mock(side_effect=AssertionError("only auto is tried")))
    assert episodes_of(fasttrain(*small, "vec_env=dummy").ok().folder) == episodes_of(first.folder)


@pytest.mark.parametrize(("takes", "expected"), [((5e-4, 1e-4), "vector"), ((1e-4, 5e-4), "dummy")])
def test_a_faster_vector_form_is_taken(monkeypatch: pytest.MonkeyPatch, takes: tuple[float, float], expected: str):
    monkeypatch.setattr(module, "step_times", lambda *configs: takes)
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "num_envs=8", "total_timesteps=1e6")
    plan = resolve(config, {}, CLOSE, TWO)
    facts = with_trial(CLOSE, plan, TWO, Console(quiet=True))
    assert facts.vector == takes
    assert facts.tried == (None if expected == "vector" else takes)  # else the usual trial is made too
    row = resolve(config, {}, facts, TWO).row("vec_env")
    assert row.effective == expected
    if expected == "vector":
        assert row.reason == "tried: a step of 8 envs takes 100 µs with the env's own vector form, else 500 µs"
