"""A close call between one process and workers is tried, and changes nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from conftest import RunCommand, configured
from fasttrain.runs import check as module
from fasttrain.runs.check import tried, with_trial
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve

CLOSE = EnvFacts(native=False, step_s=60e-6)  # 8 envs: 0.5 ms one after another, about as much in two workers
TWO = Machine(2, False, False)
ACROBOT = ("+profile=speed", "env.id=Acrobot-v1", "algo=ppo", "num_envs=8", "total_timesteps=1e6")


def after_trial(monkeypatch: pytest.MonkeyPatch, facts: EnvFacts, *arguments: str, takes: Any = (5e-4, 2e-4)) -> Any:
    monkeypatch.setattr(module, "tried", lambda *configs: takes)
    config = configured(*ACROBOT, *arguments)
    return with_trial(facts, resolve(config, {}, facts, TWO), TWO, Console(quiet=True)).tried


def test_a_close_call_is_tried(monkeypatch: pytest.MonkeyPatch):
    assert after_trial(monkeypatch, CLOSE) == (5e-4, 2e-4)


@pytest.mark.parametrize(
    ("facts", "arguments"),
    [
        (CLOSE._replace(step_s=5e-6), ()),
        (CLOSE._replace(step_s=5e-3, cpu_share=0.0), ()),
        (CLOSE._replace(step_s=None), ("vec_env=dummy",)),
        (CLOSE, ("vec_env=dummy",)),
        (CLOSE, ("deterministic=true",)),
        (CLOSE, ("env.on_env_error=restart",)),
        (CLOSE, ("num_envs=1",)),
        (CLOSE, ("total_timesteps=10000",)),
    ],
)
def test_a_clear_one_is_not(monkeypatch: pytest.MonkeyPatch, facts: EnvFacts, arguments: tuple[str, ...]):
    assert after_trial(monkeypatch, facts, *arguments) is None


@pytest.mark.parametrize(
    ("takes", "expected"), [((5e-4, 4e-4), "shared"), ((4e-4, 5e-4), "dummy"), ((4.1e-4, 4e-4), "dummy")]
)
def test_what_was_tried_decides(takes: tuple[float, float], expected: str):
    plan = resolve(configured(*ACROBOT), {}, CLOSE._replace(tried=takes), TWO)
    row = plan.row("vec_env")
    assert (row.requested, row.effective) == ("auto", expected)
    assert row.reason.startswith(f"tried: a step of 8 envs takes {1e6 * takes[0]:.0f} µs in one process")
    assert plan.config.workers == (2 if expected == "shared" else "auto")


SLOW = CLOSE._replace(step_s=0.235)


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
    monkeypatch.setattr(module, "tried", lambda *_: tries.pop(0))
    plan = resolve(configured(*ACROBOT), {}, SLOW, TWO)
    facts = with_trial(SLOW, plan, TWO, Console(quiet=True))
    assert (facts.tried, tries) == (expected, [])
    assert resolve(configured(*ACROBOT), {}, facts, TWO).row("vec_env").effective == "shared", "a tie is theirs"


def test_workers_that_are_slower_are_not_taken_for_slow_envs_either():
    row = resolve(configured(*ACROBOT), {}, SLOW._replace(tried=(0.9, 1.0)), TWO).row("vec_env")
    assert row.effective == "dummy"


def test_a_trial_that_fails_leaves_the_estimates(monkeypatch: pytest.MonkeyPatch):
    def fails(*configs: Any) -> tuple[float, ...]:
        raise OSError("the port is taken")

    monkeypatch.setattr(module, "tried", fails)
    config = configured(*ACROBOT)
    assert with_trial(CLOSE, resolve(config, {}, CLOSE, TWO), TWO, Console(quiet=True)) == CLOSE


def test_real_envs_with_masks_are_played_and_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TURN_S", 0.0)
    masked = (
        "env.entry_point=worker_toys:Walker",
        "env.kwargs.number=0",
        "algo=maskable_ppo",
        "engine=fast",
        "num_envs=2",
    )
    alone = configured(*masked, "vec_env=dummy")
    shared = configured(*masked, "vec_env=shared", "num_workers=2")
    assert all(0 < seconds < 10 for seconds in tried(alone, shared))


def test_what_was_built_is_closed_where_the_other_cannot_be(monkeypatch: pytest.MonkeyPatch):
    built: list[Any] = []

    class Env:
        closed = False

        def close(self) -> None:
            self.closed = True

    def build(*_: Any) -> Any:
        if built:
            raise OSError("the port is taken")
        built.append(Env())
        return built[0]

    monkeypatch.setattr(module, "build_vec_env", build)
    with pytest.raises(OSError, match="port"):
        tried(configured(*ACROBOT), configured(*ACROBOT))
    assert built[0].closed


def test_random_streams_stay(monkeypatch: pytest.MonkeyPatch):
    def draws(*configs: Any) -> tuple[float, ...]:
        return random.random(), np.random.random() + torch.rand(()).item()

    before = (random.getstate(), torch.get_rng_state())
    monkeypatch.setattr(module, "tried", draws)
    config = configured(*ACROBOT)
    assert with_trial(CLOSE, resolve(config, {}, CLOSE, TWO), TWO, Console(quiet=True)).tried
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_training_is_the_one_it_would_have_been(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    """`vec_env=dummy` typed against the same after a trial: the same episodes."""
    small = ("env.id=CartPole-v1", "algo=ppo", "engine=fast", "num_envs=2", "total_timesteps=256",
             "algo.rollout_size=128", "batch_size=64", "eval.episodes=2", "fused_update=off")  # fmt: skip
    monkeypatch.setattr(module, "step_costs", lambda *_: (1.0, 1.0, 2))
    monkeypatch.setattr(module, "TURN_S", 0.0)
    first = fasttrain(*small, "vec_env=auto")
    assert first.exit_code == 0, first.err
    (reason,) = (row["reason"] for row in first.json("plan.json")["flags"] if row["flag"] == "vec_env")
    assert reason.startswith("tried: ")
    columns = [line.split(",")[:4] for line in (first.folder / "episodes.csv").read_text().splitlines()]
    second = fasttrain(*small, "vec_env=dummy")
    assert [line.split(",")[:4] for line in (second.folder / "episodes.csv").read_text().splitlines()] == columns


@pytest.mark.parametrize(("takes", "expected"), [((5e-4, 1e-4), "vector"), ((1e-4, 5e-4), "dummy")])
def test_a_vector_form_is_tried_and_taken_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, takes: tuple[float, float], expected: str
):
    monkeypatch.setattr(module, "tried", lambda *configs: takes)
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "num_envs=8", "total_timesteps=1e6")
    plan = resolve(config, {}, CLOSE, TWO)
    facts = with_trial(CLOSE, plan, TWO, Console(quiet=True))
    assert facts.vector == takes
    assert facts.tried == (None if expected == "vector" else takes)  # else the usual trial is made too
    row = resolve(config, {}, facts, TWO).row("vec_env")
    assert row.effective == expected
    if expected == "vector":
        assert row.reason == "tried: a step of 8 envs takes 100 µs by the env's own vector form, else 500 µs"
