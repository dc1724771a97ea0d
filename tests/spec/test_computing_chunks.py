"""Recurrent policies whose rollouts are cut into chunks: what fits, what is refused in one line, what the plan says."""

from __future__ import annotations

import pytest

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import RunSpec, resolve

# 16 envs × 64 steps
RECURRENT = ("env.id=CartPole-v1", "algo=recurrent_ppo", "num_envs=16", "algo.rollout_size=1024", "batch_size=128")


def plan_of(*arguments: str) -> RunSpec:
    return resolve(configured(*RECURRENT, *arguments), {}, EnvFacts(False, 20e-6), Machine(2, False, False))


@pytest.mark.parametrize(
    ("arguments", "steps", "told"),
    [
        ((), 64, "at most; 2 sequences a minibatch, one more"),
        (("algo.chunk_steps=16",), 16, "at most; 8 sequences a minibatch, one more"),
        (("algo.chunk_steps=16", "algo.burn_in=8"), 16, "at most, after a burn-in of 8; 8 sequences a minibatch"),
        (("algo.chunk_steps=64",), 64, "at most; 2 sequences a minibatch"),
    ],
)
def test_the_plan_says_how_far_back_chunks_learn(arguments: tuple[str, ...], steps: int, told: str):
    row = plan_of("+profile=speed", *arguments).row("steps_back")
    assert (row.effective, row.reason[: len(told)]) == (steps, told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algo.chunk_steps=24",), "algo.chunk_steps=24: must divide the rollout's 64 steps of each env"),
        (("algo.chunk_steps=16", "batch_size=120"),
         "algo.chunk_steps=16 with batch_size=120: a minibatch is whole chunks; take batch_size=112"),
        (("algo.chunk_steps=16", "batch_size=10"), ".*take batch_size=16"),
        (("algo.burn_in=8",),
         "algo.burn_in=8 means nothing without algo.chunk_steps: take both, or leave both out"),
        (("algo.chunk_steps=16", "algo.burn_in=64"),
         "algo.burn_in=64: must lie between 0 and 63, the rollout has 64 steps of each env"),
        (("batch_size=93",), "batch_size=93 with a rollout of 16 × 64 steps: the last minibatch has one row, whose "
                             "advantage cannot be normalised; take another batch_size, or "
                             "algo.normalize_advantage=false"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        plan_of("+profile=speed", *arguments)


@pytest.mark.parametrize("arguments", [("+profile=exact",), ("engine=stock",)])
def test_where_numbers_are_stocks_rollouts_are_cut_as_stock_does_it(arguments: tuple[str, ...]):
    with pytest.raises(ConfigError, match=r"^algo.chunk_steps=16 with engine=\w+ and fused_update=off, where every "):
        plan_of(*arguments, "algo.chunk_steps=16")
    with pytest.raises(ConfigError, match=r"^algo.burn_in=2 means nothing without algo.chunk_steps"):
        plan_of(*arguments, "algo.burn_in=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algo.chunk_steps=24",), "algo.chunk_steps=24: must divide the rollout's 64 steps of each env"),
        (("algo.chunk_steps=0",), "algo.chunk_steps=0: must be at least 1"),
        (("algo.burn_in=-1",), "algo.burn_in=-1: must be at least 0"),
        (("batch_size=93",), "batch_size=93 with a rollout of 16 × 64 steps: the last minibatch has one row, whose "
                             "advantage cannot be normalised; take another batch_size, or "
                             "algo.normalize_advantage=false"),
    ],
)  # fmt: skip
def test_the_command_says_it_in_one_line(fasttrain: RunCommand, arguments: tuple[str, ...], message: str):
    done = fasttrain("+profile=speed", *RECURRENT, "total_timesteps=2048", *arguments)
    assert (done.exit_code, done.err) == (2, f"fasttrain: error: {message}\n")
