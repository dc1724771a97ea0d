from __future__ import annotations

import dataclasses
import json

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import FLAGS, NOT_APPLICABLE, EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plan import Row, RunSpec, resolve

MACHINE = Machine(cores=2, windows=False, cuda=False)
NATIVE, PLAIN = EnvFacts(native=True, step_s=None), EnvFacts(native=False, step_s=20e-6)


def plan_of(config: Config, env: EnvFacts = PLAIN, machine: Machine = MACHINE, **sources: str) -> RunSpec:
    return resolve(config, sources, env, machine)


def row_of(plan: RunSpec, flag: str) -> Row:
    return plan.row(flag)


def test_every_flag_has_a_row_and_a_field():
    plan = plan_of(configured())
    assert [row.flag for row in plan.rows] == [flag.name for flag in FLAGS] + [
        "algo.rollout_size",
        "algo.learning_rate",
        "algo.n_epochs",
    ]
    assert {flag.name for flag in FLAGS} <= {field.name for field in dataclasses.fields(Config)}


def test_plan_is_json_ready():
    text = json.dumps(plan_of(configured("+profile=speed"), NATIVE).to_dict())
    assert json.loads(text)["flags"][1] == {
        "flag": "vec_env",
        "requested": "auto",
        "effective": "native",
        "source": "default",
        "class": "exact",
        "reason": "the game has a batched native form",
    }


def test_native_game_brings_its_own_number_of_envs():
    plan = plan_of(configured("+profile=speed"), NATIVE)
    assert plan.config.vec_env == "native"
    assert plan.config.num_envs == 256
    assert plan.config.algo.rollout_size == 16384


@pytest.mark.parametrize("source", ["command line", "environment"])
def test_a_typed_number_of_envs_wins_over_the_games_own(source: str):
    plan = plan_of(configured("+profile=speed", "num_envs=32"), NATIVE, num_envs=source)
    assert plan.config.num_envs == 32


TYPED = "command line"


@pytest.mark.parametrize("algo", ["ppo", "maskable_ppo", "recurrent_ppo"])
def test_sb3s_n_steps_makes_the_rollout(algo: str):
    config = configured("+profile=speed", f"algo={algo}", "algo.n_steps=96", "batch_size=32", "num_envs=10")
    plan = plan_of(config, **{"algo.n_steps": TYPED})
    assert plan.config.algo.rollout_size == 960
    rows = [row_of(plan, "algo.n_steps"), row_of(plan, "algo.rollout_size")]
    assert [(row.effective, row.source) for row in rows] == [(96, TYPED), (960, TYPED)]
    assert rows[1].reason.startswith("10 envs × 96 steps, as algo.n_steps says")
    assert set(rows) <= set(plan.notable())


def test_n_steps_are_of_the_envs_that_there_are_in_the_end():
    config = configured("+profile=speed", "algo.n_steps=16")
    assert plan_of(config, NATIVE, **{"algo.n_steps": TYPED}).config.algo.rollout_size == 16 * 256


@pytest.mark.parametrize(
    ("of_steps", "of_size", "size"),
    [
        (TYPED, "profile mine", 8 * 100),
        ("profile mine", TYPED, 8 * 512),
        ("profile mine", None, 8 * 100),
        (TYPED, TYPED, None),
        ("profile mine", "profile mine", None),
    ],
)
def test_of_n_steps_and_rollout_size_the_typed_one_holds(of_steps: str, of_size: str | None, size: int | None):
    config = configured("algo.n_steps=100", "algo.rollout_size=4096")
    sources = {"algo.n_steps": of_steps, **({"algo.rollout_size": of_size} if of_size else {})}
    if size is None:
        with pytest.raises(
            ConfigError, match="algo.n_steps=100 contradicts algo.rollout_size=4096, which is 512 steps"
        ):
            plan_of(config, **sources)
        return
    plan = plan_of(config, **sources)
    assert plan.config.algo.rollout_size == size
    assert plan.config.algo.n_steps == row_of(plan, "algo.n_steps").effective == (100 if size == 800 else None)


def test_n_steps_and_a_rollout_size_that_say_the_same_are_fine():
    config = configured("algo.n_steps=512", "algo.rollout_size=4096")
    plan = plan_of(config, **{"algo.n_steps": TYPED, "algo.rollout_size": TYPED})
    assert plan.config.algo.rollout_size == 4096


def test_a_batch_larger_than_n_steps_allow_is_refused():
    with pytest.raises(ConfigError, match="batch_size=64 is larger than the rollout of 40 .* or a larger algo.n_steps"):
        plan_of(configured("algo.n_steps=5"), **{"algo.n_steps": TYPED})


def test_rollout_size_is_kept_to_whole_steps():
    plan = plan_of(configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo"))
    assert plan.config.num_envs == 12
    assert plan.config.algo.rollout_size == 12 * 341
    row = row_of(plan, "algo.rollout_size")
    assert row.source == "tier speed"
    assert row.reason == (
        "12 envs × 341 steps; last minibatch of an epoch has 252 of 256 rows; ppo's own in this tier, stock 16,384"
    )


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        (("+profile=speed",), 16384),  # Skull King names its own
        (("+profile=speed", "env.id=CartPole-v1"), 4096),
        (("+profile=balance", "env.id=CartPole-v1"), 16384),
        (("+profile=speed", "env.id=CartPole-v1", "algo.rollout_size=2400"), 2400),
        (("+profile=debug", "env.id=CartPole-v1"), 512),
        (("+profile=speed", "env.id=CartPole-v1", "algo=recurrent_ppo"), 1024),
    ],
)
def test_rollout_size_by_tier(arguments: tuple[str, ...], size: int):
    assert configured(*arguments).algo.rollout_size == size


def test_short_last_minibatch_is_said():
    plan = plan_of(configured("batch_size=1000"))
    assert "last minibatch of an epoch has 384 of 1000 rows" in row_of(plan, "algo.rollout_size").reason


def test_batch_size_null_is_the_algorithms_own():
    row = row_of(plan_of(configured("+profile=speed"), NATIVE), "batch_size")
    assert row.requested is None
    assert row.effective == configured("+profile=speed").own.batch_size


def test_envpool_is_native_whatever_a_profile_says_and_refuses_what_was_typed():
    arguments = ("env.id=CartPole-v1", "env.backend=envpool", "algo=ppo")
    for profile in ("baseline", "speed", "debug"):
        plan = plan_of(configured(f"+profile={profile}", *arguments), NATIVE, vec_env=f"profile {profile}")
        assert plan.config.vec_env == "native"
        assert row_of(plan, "vec_env").reason == "EnvPool steps all envs in its own threads"
    with pytest.raises(ConfigError, match="vec_env=dummy with env.backend=envpool, .*: leave it out"):
        plan_of(configured(*arguments, "vec_env=dummy"), NATIVE, vec_env="command line")
    with pytest.raises(ConfigError, match="vec_env=dummy with env.backend=envpool"):
        plan_of(configured(*arguments, "force_dummy_vec_env=true"), NATIVE, vec_env="command line")


def test_action_repeat_reaches_the_effective_configuration():
    plan = plan_of(configured("action_repeat=3", "env.id=CartPole-v1", "algo=ppo"), action_repeat="command line")
    assert plan.config.action_repeat == 3
    assert row_of(plan, "action_repeat") in plan.notable()


def test_evaluation_beside_training_needs_evaluations_and_a_second_core():
    asked = configured("+profile=speed", "eval_every=1000", "algo=ppo", "env.id=CartPole-v1")
    assert plan_of(asked).config.eval_async
    none = plan_of(configured("+profile=speed", "algo=ppo", "env.id=CartPole-v1"))
    assert row_of(none, "eval_async")[1:3] == (True, False)
    one_core = resolve(asked, {}, EnvFacts(False, 1e-6), Machine(1, False, False))
    assert row_of(one_core, "eval_async").reason == "one core: nothing can run beside the training"


def test_dqn_has_an_engine_of_its_own():
    plan = plan_of(configured("+profile=speed", "algo=dqn", "env.id=CartPole-v1"))
    assert (plan.config.engine, plan.config.fused_update) == ("fast", "on")
    config = configured("+profile=speed", "engine=stock", "algo=dqn", "env.id=CartPole-v1")
    stock = plan_of(config, prefetch="profile speed")
    assert (stock.config.engine, stock.config.fused_update) == ("stock", "off")


def test_a_native_game_names_its_number_of_envs_for_rollouts_only():
    plan = plan_of(configured("+profile=speed", "algo=dqn"), NATIVE)
    assert (plan.config.vec_env, plan.config.num_envs) == ("native", 12)


def test_progress_csv_needs_the_training_log():
    config = configured("train_log_enabled=false", "train_log_to_file=true", "train_log_to_console=true")
    plan = plan_of(config, train_log_enabled="command line")
    row = row_of(plan, "train_log_to_file")
    assert (row.requested, row.effective, row.reason) == (True, False, "train_log_enabled=false")
    assert plan.config.train_log_to_file is False
    assert plan.config.train_log_to_console is True, "[PERF] lines need no training log"
    with pytest.raises(ConfigError, match="train_log_to_file=true contradicts train_log_enabled=false.*enabled=true"):
        plan_of(config, train_log_to_file="command line")
    assert plan_of(configured("train_log_to_file=true")).config.train_log_to_file is True


@pytest.mark.parametrize("lean", ["true", "false"])
def test_a_native_game_is_lean_anyway(lean: str):
    config = configured("vec_env=auto", f"lean_info={lean}")
    row = row_of(plan_of(config, NATIVE), "lean_info")
    assert (row.requested, row.reason) == (row.effective, "a native game sends info only when an episode ends")


def test_flag_of_another_algorithm():
    config = configured("updates_per_step=4", "algo=ppo", "env.id=CartPole-v1")
    assert row_of(plan_of(config), "updates_per_step").effective == NOT_APPLICABLE
    with pytest.raises(ConfigError, match="updates_per_step=4 means nothing for algo=ppo: only for dqn"):
        plan_of(config, updates_per_step="command line")


def test_who_else_has_a_flag_is_who_could_use_it():
    config = configured("gradient_accumulation=2", "algo=dqn", "env.id=CartPole-v1")
    with pytest.raises(ConfigError, match="only for maskable_ppo, ppo; leave it out"):
        plan_of(config, gradient_accumulation="command line")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("engine=stock", "algo=ppo"), "fused_update=on with engine=stock: .*; take engine=fast, or"),
        (("engine=stock", "algo=dqn"), "fused_update=on with engine=stock: .*; take engine=fast, or"),
    ],
)
def test_kernels_asked_for_in_vain_say_what_is_in_the_way(arguments: tuple[str, ...], error: str):
    with pytest.raises(ConfigError, match=error):
        plan_of(configured("fused_update=on", "env.id=CartPole-v1", *arguments))


def test_effective_values_contradict():
    config = configured("+profile=speed", "algo.rollout_size=2048", "num_envs=2048", "batch_size=2048")
    assert plan_of(config, NATIVE, num_envs="command line").config.algo.rollout_size == 2048
    config = configured("+profile=speed", "algo.rollout_size=1024", "num_envs=700", "batch_size=1024")
    with pytest.raises(ConfigError, match="batch_size=1024 is larger than the rollout of 700"):
        plan_of(config, NATIVE, num_envs="command line")
    config = configured("algo.rollout_size=100", "num_envs=101", "batch_size=50")
    with pytest.raises(ConfigError, match="num_envs=101 is more than algo.rollout_size=100"):
        plan_of(config, **{"algo.rollout_size": "command line"})


def test_profile_exact_switches_on_exact_flags_and_nothing_else():
    baseline = plan_of(configured("+profile=baseline"), NATIVE).config
    exact = plan_of(configured("+profile=exact"), NATIVE).config
    changed = {
        flag.name: flag.flag_class for flag in FLAGS if getattr(exact, flag.name) != getattr(baseline, flag.name)
    }
    assert {"engine", "vec_env", "lean_info"} <= set(changed)
    assert set(changed.values()) == {"exact"}


def test_notable_rows_are_those_that_differ_from_stock_and_fast_paths_that_ended_off():
    names = {row.flag for row in plan_of(configured("+profile=speed"), NATIVE).notable()}
    assert {"engine", "vec_env", "num_envs", "lean_info"} <= names
    assert "use_amp" in names, "auto ended off"
    assert "use_amp" not in {row.flag for row in plan_of(configured("+profile=exact"), NATIVE).notable()}
    assert "updates_per_step" not in names


def test_torch_threads():
    small = plan_of(configured("torch_threads=auto"), NATIVE, Machine(16, False, False)).config.torch_threads
    wide = plan_of(configured("torch_threads=auto", "algo.net_arch=[512]", "vec_env=dummy"), PLAIN).config.torch_threads
    assert small == 1
    assert wide == 2
    for units, threads in ((128, 1), (256, 2)):
        typed = ("torch_threads=auto", "algo=maskable_recurrent_ppo", f"algo.lstm_hidden_size={units}")
        assert plan_of(configured(*typed, "vec_env=dummy"), PLAIN).config.torch_threads == threads
    many = plan_of(
        configured("torch_threads=auto", "algo.net_arch=[512]", "vec_env=dummy"), PLAIN, MACHINE._replace(cores=999)
    )
    assert many.config.torch_threads == 256, "what eval reads back must be within the bounds"
    assert plan_of(configured("torch_threads=auto", "vec_env=subproc")).config.torch_threads == 1


def test_in_one_process_infos_are_left_alone_unless_asked():
    config = configured("vec_env=dummy", "lean_info=true", "env.id=CartPole-v1", "algo=ppo")
    row = row_of(plan_of(config), "lean_info")
    assert (row.effective, row.reason) == (False, "in one process infos cost nothing; cutting them would")
    assert row_of(plan_of(config, lean_info="command line"), "lean_info").effective is True
    shared = ("vec_env=shared", "lean_info=true", "env.id=CartPole-v1", "algo=ppo")
    assert row_of(plan_of(configured(*shared)), "lean_info").effective is True
    reading = configured(*shared, "callbacks=[costs:Mean]")
    row = row_of(plan_of(reading), "lean_info")
    assert row.effective is False
    assert row.reason.startswith("callbacks may read any info of any step")
    assert row_of(plan_of(reading, lean_info="command line"), "lean_info").effective is True
    named = configured(*shared, "callbacks=[costs:Mean]", "env.info_keys=[cost]")
    assert row_of(plan_of(named), "lean_info").effective is True


def test_a_games_own_values_come_before_the_algorithms():
    game = plan_of(configured("+profile=speed"), NATIVE)
    other = plan_of(configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo"))
    assert (game.config.batch_size, game.config.algo.n_epochs) == (1024, 4)
    assert (other.config.batch_size, other.config.algo.n_epochs) == (256, 10)
    assert row_of(game, "batch_size").reason == "the game's own in this tier"
    assert row_of(other, "batch_size").reason == "ppo's own in this tier"
    baseline = plan_of(configured("profile=baseline"), NATIVE)
    assert (baseline.config.batch_size, baseline.config.algo.n_epochs) == (64, 10)


def test_kernels_leave_wide_nets_to_torch():
    assert plan_of(configured("+profile=speed", "algo.net_arch=[1024,64]")).config.fused_update == "on"
    plan = plan_of(configured("+profile=speed", "algo.net_arch=[1025,64]"))
    assert plan.config.fused_update == "off"
    assert "layers of 1,025 units" in row_of(plan, "fused_update").reason
    asked = plan_of(configured("+profile=speed", "algo.net_arch=[1025,64]", "fused_update=on"))
    assert asked.config.fused_update == "on"


@pytest.mark.parametrize("profile", ["baseline", "balance", "speed", "exact", "debug"])
def test_nan_guard_is_on_everywhere_and_says_what_the_stock_classes_leave_out(profile: str):
    plan = plan_of(configured(f"+profile={profile}", "env.id=CartPole-v1", "algo=ppo"))
    assert plan.config.nan_guard == "stop"
    reason = row_of(plan, "nan_guard").reason
    assert ("their updates cannot be watched" in reason) == (plan.config.engine == "stock")
    off = plan_of(configured(f"+profile={profile}", "env.id=CartPole-v1", "algo=ppo", "nan_guard=false"))
    assert (row_of(off, "nan_guard").effective, row_of(off, "nan_guard").reason) == ("off", "")


def test_what_is_found_out_later_is_an_event_on_the_record():
    plan = plan_of(configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo"))
    after = plan.after("fused_update", "off", "the policy is a CNN")
    assert (plan.config.fused_update, plan.events) == ("on", ())
    assert (after.config.fused_update, after.row("fused_update").reason) == ("off", "the policy is a CNN")
    event = {"flag": "fused_update", "effective": "off", "reason": "the policy is a CNN"}
    assert after.to_dict()["events"] == [event]
    assert len(after.after("fused_update", "off", "the policy is a CNN").events) == 1, "found again, after a resume"


def test_a_profile_keeps_its_updates_per_transition_where_other_envs_are_typed():
    config = configured("+profile=balance", "algo=dqn", "env.id=CartPole-v1", "num_envs=2")
    row = row_of(plan_of(config, updates_per_step="profile balance", num_envs="command line"), "updates_per_step")
    assert (row.requested, row.effective) == (6, 2)
    assert "its 8 envs" in row.reason
    assert row_of(plan_of(config, updates_per_step="command line"), "updates_per_step").effective == 6


def test_a_rollout_that_nobody_chose_is_stocks_or_no_longer_than_the_training():
    plain = plan_of(configured("+profile=baseline", "algo=ppo", "env.id=CartPole-v1", "num_envs=1"))
    assert plain.config.algo.rollout_size == 2048
    row = row_of(plan_of(configured("+profile=speed", "algo=ppo", "env.id=CartPole-v1", "total_timesteps=1200")),
                 "algo.rollout_size")  # fmt: skip
    assert row.effective == 1200
    assert "cut from 4,096" in row.reason
