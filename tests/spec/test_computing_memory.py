"""How far back recurrent policies learn, as the plan says it, and minibatches that they cannot learn from."""

from __future__ import annotations

import pytest

from conftest import RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import RunSpec, resolve

# 16 envs × 64 steps
RECURRENT = ("env.id=CartPole-v1", "algo=recurrent_ppo", "num_envs=16", "algo.rollout_size=1024")
ONE_ROW = (
    "batch_size=93 with a rollout of 16 × 64 steps: the last minibatch has one row, whose advantage cannot be "
    "normalised; take another batch_size, or algo.normalize_advantage=false"
)


def plan_of(*arguments: str) -> RunSpec:
    return resolve(configured(*RECURRENT, *arguments), {}, EnvFacts(False, 20e-6), Machine(2, False, False))


def test_the_plan_says_how_far_back_it_learns():
    row = plan_of("+profile=speed", "batch_size=128").row("steps_back")
    assert row.effective == 64
    assert row.reason.startswith("at most; 2 sequences a minibatch, one more for each episode's end in it, ")


def test_a_last_minibatch_of_one_row_is_refused(fasttrain: RunCommand):
    with pytest.raises(ConfigError, match=f"^{ONE_ROW}$"):
        plan_of("+profile=speed", "batch_size=93")
    done = fasttrain("+profile=speed", *RECURRENT, "total_timesteps=2048", "batch_size=93")
    assert (done.exit_code, done.err) == (2, f"fasttrain: error: {ONE_ROW}\n")
