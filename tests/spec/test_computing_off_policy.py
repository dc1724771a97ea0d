"""Rules about replay: who may draw random actions at once, when batches are drawn ahead, the replay ratio."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import RunSpec, resolve

CPU, CUDA = Machine(2, False, False), Machine(8, False, True)


def plan_of(*arguments: str, machine: Machine = CPU, images: bool = False, typed: tuple[str, ...] = ()) -> RunSpec:
    facts, sources = EnvFacts(False, None, images=images), dict.fromkeys(typed, "command line")
    return resolve(configured("algo=dqn", "env.id=CartPole-v1", *arguments), sources, facts, machine)


@pytest.mark.parametrize(
    ("arguments", "machine", "images", "expected"),
    [
        ((), CPU, False, ("off", "drawing batches takes almost no time")),
        ((), CPU, True, ("off", "drawing batches takes almost no time")),
        (("device=cpu",), CUDA, True, ("on", "drawing images takes long, and a core is free")),
        (("device=cuda",), CUDA, False, ("on", "batches are drawn and copied to CUDA in the background")),
        (("deterministic=true",), CUDA, True, ("off", "with deterministic=true no batch can be drawn ahead")),
        (("engine=stock",), CUDA, True, ("off", "the stock classes do not have it")),
    ],
)
def test_prefetch_auto(arguments: tuple[str, ...], machine: Machine, images: bool, expected: tuple[str, str]):
    row = plan_of("engine=fast", "prefetch=auto", *arguments, machine=machine, images=images).row("prefetch")
    assert (row.effective, row.reason) == expected


@pytest.mark.parametrize(
    ("taken", "refused", "message"),
    [
        ("prefetch=on", "prefetch=on engine=stock", "prefetch=on with engine=stock: .*use engine=fast"),
        ("", "prefetch=on env.normalize=[obs]", "prefetch=on: env.normalize: batches are norm.*use prefetch=off"),
        ("algo.double_q=true", "algo.double_q=true engine=stock", "double_q=true with engine=stock.*use engine=fast"),
        ("algo.dueling=true", "algo.dueling=true engine=stock", "dueling=true with engine=stock.*use engine=fast"),
        ("algo.prioritized=true", "algo.prioritized=true engine=stock", "prioritized=true with engine=stock.*use en"),
        ("algo.loss=mse", "algo.loss=mse engine=stock", "algo.loss=mse with engine=stock.*use engine=fast"),
        ("algo.prioritized=true algo.per_alpha=0.5", "algo.per_alpha=0.5", "per_alpha has no effect with algo.prior"),
        (
            "algo.prioritized=true algo.per_beta=0.5",
            "algo.per_beta=0.5",
            "per_beta has no effect with algo.prioritized",
        ),
        ("algo.n_steps=1", "algo.n_steps=0", "algo.n_steps=0"),
        ("algo.n_steps=100", "algo.n_steps=200", "algo.n_steps=200"),
        ("", "algo.per_alpha=-1", "algo.per_alpha=-1"),
        ("", "algo.per_beta=2", "algo.per_beta=2"),
    ],
)
def test_what_goes_with_what(taken: str, refused: str, message: str):
    for asked in (taken, refused):
        typed = tuple(text.partition("=")[0] for text in asked.split() if "per_" in text)
        with pytest.raises(ConfigError, match=message) if asked == refused else nullcontext():
            plan_of("engine=fast", *asked.split(), typed=typed)


@pytest.mark.parametrize(
    ("arguments", "ratio", "warned"),
    [(("+profile=speed",), 10 / 12, False), (("+profile=baseline",), 1 / 8, False),
     (("num_envs=64", "updates_per_step=4"), 4 / 64, True)],
)  # fmt: skip
def test_the_replay_ratio_is_printed_and_a_low_one_warned_of(arguments: tuple[str, ...], ratio: float, warned: bool):
    plan = plan_of("engine=fast", *arguments)
    row = plan.row("replay_ratio")
    assert row.effective == pytest.approx(ratio, abs=1e-4)
    assert ("FEWER than the baseline" in row.reason) == warned
    assert ("use updates_per_step=8 or more" in row.reason) == warned
    assert (row in plan.notable()) == (ratio != 1 / 8)


@pytest.mark.parametrize(
    ("arguments", "updates", "ratio", "reason"),
    [
        (("num_envs=2", "algo.train_freq=16", "updates_per_step=8"), 8, 0.25, "8 updates per 16 vector steps of 2"),
        (("num_envs=2", "algo.train_freq=16", "updates_per_step=-1"), 32, 1.0, "32 updates per 16 vector steps of 2"),
        (
            ("num_envs=1", "algo.train_freq=[1,episode]", "updates_per_step=-1"),
            -1,
            1.0,
            "after every episode, one update per",
        ),
        (("num_envs=1", "algo.train_freq=[2,episode]", "updates_per_step=9"), 9, None, "9 updates after every 2"),
        (("num_envs=2", "algo.train_freq=16"), 1, 1 / 32, "use updates_per_step=4 or more"),
    ],
)
def test_rounds_of_several_steps(arguments: tuple[str, ...], updates: int, ratio: float | None, reason: str):
    plan = plan_of("engine=fast", *arguments)
    row = plan.row("replay_ratio")
    assert plan.config.updates_per_step == updates
    assert row.effective == (ratio if ratio is None else pytest.approx(ratio, abs=1e-4))
    assert reason in row.reason


# --- recurrent policies


def recurrent_plan(*arguments: str) -> RunSpec:
    """Of 16 envs × 64 steps."""
    recurrent = ("+profile=speed", "env.id=CartPole-v1", "algo=recurrent_ppo", "num_envs=16", "algo.rollout_size=1024")
    return resolve(configured(*recurrent, *arguments), {}, EnvFacts(False, 20e-6), Machine(2, False, False))


def test_the_plan_says_how_far_back_it_learns():
    row = recurrent_plan("batch_size=128").row("steps_back")
    assert row.effective == 64
    assert row.reason.startswith("steps at most; 2 sequences per minibatch and one more for each episode's end, ")


def test_a_last_minibatch_of_one_row_is_refused():
    told = (
        "batch_size=93 with a rollout of 16 × 64 steps: the last minibatch has one row, whose advantage cannot be "
        "normalized; use another batch_size, or algo.normalize_advantage=false"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        recurrent_plan("batch_size=93")
