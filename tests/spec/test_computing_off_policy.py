"""Rules about replay: who may draw random actions at once, when batches are drawn ahead, the replay ratio."""

from __future__ import annotations

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import Row, RunSpec, resolve

CPU, CUDA = Machine(2, False, False), Machine(8, False, True)
DQN = ("algo=dqn", "env.id=CartPole-v1")


def plan_of(*arguments: str, machine: Machine = CPU, images: bool = False, typed: tuple[str, ...] = ()) -> RunSpec:
    facts, sources = EnvFacts(False, None, images=images), dict.fromkeys(typed, "command line")
    return resolve(configured(*DQN, *arguments), sources, facts, machine)


def row_of(plan: RunSpec, flag: str) -> Row:
    return plan.row(flag)


def test_batches_ahead_need_our_engine():
    plan = plan_of("+profile=speed", "engine=stock")
    assert plan.config.prefetch == "off"
    assert row_of(plan, "prefetch").reason == "the stock classes cannot do that"
    with pytest.raises(ConfigError, match="prefetch=on with engine=stock.*take engine=fast"):
        plan_of("engine=stock", "prefetch=on", typed=("prefetch",))


@pytest.mark.parametrize(
    ("arguments", "machine", "images", "expected"),
    [
        ((), CPU, False, ("off", "batches are drawn in no time")),
        ((), CPU, True, ("off", "batches are drawn in no time")),
        (("device=cpu",), CUDA, True, ("on", "images, and a core is free")),
        (("device=cuda",), CUDA, False, ("on", "batches are copied to CUDA meanwhile")),
        (("deterministic=true",), CUDA, True, ("off", "deterministic=true leaves nothing to draw ahead")),
        (("engine=stock",), CUDA, True, ("off", "the stock classes cannot do that")),
    ],
)
def test_prefetch_auto(arguments: tuple[str, ...], machine: Machine, images: bool, expected: tuple[str, str]):
    row = row_of(plan_of("engine=fast", "prefetch=auto", *arguments, machine=machine, images=images), "prefetch")
    assert (row.effective, row.reason) == expected


def test_prefetch_by_name():
    assert plan_of("engine=fast", "prefetch=on").config.prefetch == "on"
    with pytest.raises(ConfigError, match="prefetch=on with engine=stock: .*take engine=fast"):
        plan_of("engine=stock", "prefetch=on")
    with pytest.raises(ConfigError, match=r"prefetch=on: env.normalize: batches are normalised.*take prefetch=off"):
        plan_of("engine=fast", "prefetch=on", "env.normalize=[obs]")


@pytest.mark.parametrize(
    ("arguments", "ratio", "warned"),
    [
        (("+profile=speed",), 10 / 12, False),
        (("+profile=baseline",), 1 / 8, False),
        (("num_envs=64", "updates_per_step=4"), 4 / 64, True),
    ],
)
def test_the_replay_ratio_is_printed_and_a_low_one_warned_of(arguments: tuple[str, ...], ratio: float, warned: bool):
    plan = plan_of("engine=fast", *arguments)
    row = row_of(plan, "replay_ratio")
    assert row.effective == pytest.approx(ratio, abs=1e-4)
    assert ("FEWER than the baseline" in row.reason) == warned
    assert ("take updates_per_step=8 or more" in row.reason) == warned
    assert (row in plan.notable()) == (ratio != 1 / 8)


@pytest.mark.parametrize(
    ("arguments", "updates", "ratio", "reason"),
    [
        (("num_envs=2", "algo.train_freq=16", "updates_per_step=8"), 8, 0.25, "8 updates per 16 vector steps of 2"),
        (("num_envs=2", "algo.train_freq=16", "updates_per_step=-1"), 32, 1.0, "32 updates per 16 vector steps of 2"),
        (("num_envs=1", "algo.train_freq=[1,episode]", "updates_per_step=-1"), -1, 1.0, "after every episode one per"),
        (("num_envs=1", "algo.train_freq=[2,episode]", "updates_per_step=9"), 9, None, "9 updates after every 2"),
        (("num_envs=2", "algo.train_freq=16"), 1, 1 / 32, "take updates_per_step=4 or more"),
    ],
)  # fmt: skip
def test_rounds_of_several_steps(arguments: tuple[str, ...], updates: int, ratio: float | None, reason: str):
    plan = plan_of("engine=fast", *arguments)
    row = row_of(plan, "replay_ratio")
    assert plan.config.updates_per_step == updates
    assert row.effective == (ratio if ratio is None else pytest.approx(ratio, abs=1e-4))
    assert reason in row.reason


def test_one_update_a_transition_is_the_own_value_of_algorithms_for_numbers():
    assert plan_of("algo=sac", "num_envs=3", "algo.train_freq=4").config.updates_per_step == 12
    assert plan_of("algo=sac", "num_envs=3", "algo.train_freq=4", "updates_per_step=5").config.updates_per_step == 12
    config = plan_of("algo=sac", "num_envs=3", "updates_per_step=5", typed=("updates_per_step",)).config
    assert config.updates_per_step == 5


@pytest.mark.parametrize("argument", ["double_q=true", "dueling=true", "prioritized=true", "loss=mse"])
def test_what_stock_dqn_has_not_is_refused_there(argument: str):
    plan_of("engine=fast", f"algo.{argument}")
    with pytest.raises(ConfigError, match=f"algo.{argument} with engine=stock.*take engine=fast"):
        plan_of("engine=stock", f"algo.{argument}")


@pytest.mark.parametrize("key", ["per_alpha", "per_beta"])
def test_settings_of_prioritized_replay_need_it(key: str):
    plan_of("engine=fast", "algo.prioritized=true", f"algo.{key}=0.5", typed=(f"algo.{key}",))
    with pytest.raises(ConfigError, match=f"algo.{key} means nothing with algo.prioritized=false"):
        plan_of("engine=fast", f"algo.{key}=0.5", typed=(f"algo.{key}",))


@pytest.mark.parametrize("argument", ["n_steps=0", "n_steps=200", "per_alpha=-1", "per_beta=2"])
def test_ranges(argument: str):
    with pytest.raises(ConfigError, match=f"algo.{argument}"):
        plan_of(f"algo.{argument}")
