from __future__ import annotations

import dataclasses
import json

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import FLAGS, EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec, resolve

MACHINE = Machine(cores=2, windows=False, cuda=False)
NATIVE, PLAIN = EnvFacts(native=True, step_s=None), EnvFacts(native=False, step_s=20e-6)
SPEED, CART, TYPED = "+profile=speed", ("env.id=CartPole-v1", "algo=ppo"), "command line"


def plan_of(*arguments: str, env: EnvFacts = PLAIN, machine: Machine = MACHINE, **sources: str) -> RunSpec:
    return resolve(configured(*arguments), sources, env, machine)


def test_every_flag_has_a_row_and_a_field_and_the_plan_is_json_ready():
    plan = plan_of(env=NATIVE)
    own = ["algo.rollout_size", "algo.learning_rate", "algo.n_epochs"]
    assert [row.flag for row in plan.rows] == [flag.name for flag in FLAGS] + own
    assert {flag.name for flag in FLAGS} <= {field.name for field in dataclasses.fields(Config)}
    assert json.loads(json.dumps(plan_of(SPEED, env=NATIVE).to_dict()))["flags"][1] == {
        "flag": "vec_env", "requested": "auto", "effective": "native", "source": "default", "class": "exact",
        "reason": "the game has a native batch",
    }  # fmt: skip


@pytest.mark.parametrize("algo", ["maskable_ppo", "recurrent_ppo"])
def test_sb3s_n_steps_makes_the_rollout_of_the_envs_that_there_are_in_the_end(algo: str):
    typed = {"algo.n_steps": TYPED}
    plan = plan_of(SPEED, f"algo={algo}", "algo.n_steps=96", "batch_size=32", "num_envs=10", **typed)
    assert plan.config.algo.rollout_size == 960
    rows = [plan.row("algo.n_steps"), plan.row("algo.rollout_size")]
    assert [(row.effective, row.source) for row in rows] == [(96, TYPED), (960, TYPED)]
    assert rows[1].reason.startswith("10 envs × 96 steps, from algo.n_steps")
    assert set(rows) <= set(plan.notable())
    assert plan_of(SPEED, "algo.n_steps=16", env=NATIVE, **typed).config.algo.rollout_size == 16 * 256


@pytest.mark.parametrize(
    ("of_steps", "of_size", "size"),
    [(TYPED, "profile mine", 8 * 100), ("profile mine", TYPED, 8 * 512), ("profile mine", None, 8 * 100),
     (TYPED, TYPED, None), ("profile mine", "profile mine", None)],
)  # fmt: skip
def test_of_n_steps_and_rollout_size_the_typed_one_holds(of_steps: str, of_size: str | None, size: int | None):
    arguments = ("algo.n_steps=100", "algo.rollout_size=4096")
    sources = {"algo.n_steps": of_steps, **({"algo.rollout_size": of_size} if of_size else {})}
    if size is None:
        with pytest.raises(ConfigError, match="steps=100 contradicts algo.rollout_size=4096, which is 512 steps"):
            plan_of(*arguments, **sources)
        return
    plan = plan_of(*arguments, **sources)
    assert plan.config.algo.rollout_size == size
    assert plan.config.algo.n_steps == plan.row("algo.n_steps").effective == (100 if size == 800 else None)


def test_n_steps_and_a_rollout_size_that_say_the_same_are_fine():
    sources = {"algo.n_steps": TYPED, "algo.rollout_size": TYPED}
    assert plan_of("algo.n_steps=512", "algo.rollout_size=4096", **sources).config.algo.rollout_size == 4096


@pytest.mark.parametrize(
    ("arguments", "typed", "message"),
    [
        (["algo.n_steps=5", "batch_size=64"], "algo.n_steps", "larger than the rollout of 40 .* a larger algo.n_steps"),
        ([*CART, "env.backend=envpool", "vec_env=dummy"], "vec_env", "with env.backend=envpool, .*: remove it"),
        ([*CART, "env.backend=envpool", "force_dummy_vec_env=true"], "vec_env", "dummy with env.backend=envpool"),
        (["train_log_enabled=false", "train_log_to_file=true"], "train_log_to_file",
         "train_log_to_file=true contradicts train_log_enabled=false.*enabled=true"),
        ([*CART, "updates_per_step=4"], "updates_per_step", "=4 has no effect with algo=ppo: only for dqn"),
        (["env.id=CartPole-v1", "gradient_accumulation=2", "algo=dqn"], "gradient_accumulation",
         "only for maskable_ppo, ppo; remove it"),
        ([*CART, "fused_update=on", "engine=stock"], "seed", "on with engine=stock: .*; use engine=fast, or"),
        ([SPEED, "algo.rollout_size=1024", "num_envs=700", "batch_size=1024"], "num_envs",
         "batch_size=1024 is larger than the rollout of 700"),
        (["algo.rollout_size=100", "num_envs=101", "batch_size=50"], "algo.rollout_size",
         "num_envs=101 is more than algo.rollout_size=100"),
    ],
)  # fmt: skip
def test_what_contradicts_in_the_end_is_refused(arguments: list[str], typed: str, message: str):
    env = NATIVE if SPEED in arguments or "env.backend=envpool" in arguments else PLAIN
    with pytest.raises(ConfigError, match=message):
        plan_of(*arguments, env=env, **{typed: TYPED})


def test_rollout_size_is_kept_to_whole_steps_and_a_short_last_minibatch_is_said():
    plan = plan_of(SPEED, *CART)
    assert (plan.config.num_envs, plan.config.algo.rollout_size) == (12, 12 * 341)
    row = plan.row("algo.rollout_size")
    assert (row.source, row.reason) == ("tier speed", "12 envs × 341 steps; the last minibatch of an epoch has 252 of "
                                        "256 rows; ppo's own value in this tier, stock 16,384")  # fmt: skip
    assert (
        "the last minibatch of an epoch has 384 of 1000 rows"
        in plan_of("batch_size=1000").row("algo.rollout_size").reason
    )
    typed = plan_of(SPEED, "algo.rollout_size=2048", "num_envs=2048", "batch_size=2048", env=NATIVE, num_envs=TYPED)
    assert typed.config.algo.rollout_size == 2048


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        (("total_timesteps=100", "num_envs=12"), (264, 256)), (("total_timesteps=64", "num_envs=5"), (260, 256)),
        (("total_timesteps=9000", "num_envs=2", "algo.n_steps=64"), (128, 128)),
    ],
)  # fmt: skip
def test_a_minibatch_that_nobody_chose_fits_into_the_rollout(more: tuple[str, ...], sizes: tuple[int, int]):
    plan = plan_of(SPEED, *CART, *more, **{"algo.n_steps": TYPED})
    assert (plan.config.algo.rollout_size, plan.config.batch_size) == sizes
    assert plan.row("batch_size").effective == sizes[1]
    assert "the last minibatch" not in plan.row("algo.rollout_size").reason or sizes[1] == 256


def test_a_rollout_that_nobody_chose_is_stocks_or_no_longer_than_the_training():
    assert plan_of("+profile=baseline", *CART, "num_envs=1").config.algo.rollout_size == 2048
    row = plan_of(SPEED, *CART, "total_timesteps=1200").row("algo.rollout_size")
    assert row.effective == 1200
    assert "reduced from 4,096" in row.reason
    assert "a second rollout may follow" not in row.reason
    vector = plan_of(SPEED, *CART, "total_timesteps=1200", "vec_env=vector").row("algo.rollout_size")
    assert "a step that only resets an env does not count, so a second rollout may follow" in vector.reason


def test_the_reason_of_an_own_value_says_whose_it_is():
    reasons = [plan.row("batch_size").reason for plan in (plan_of(SPEED, env=NATIVE), plan_of(SPEED, *CART))]
    assert reasons == ["the game's own value in this tier", "ppo's own value in this tier"]


def test_action_repeat_reaches_the_effective_configuration():
    plan = plan_of("action_repeat=3", *CART, action_repeat=TYPED)
    assert plan.config.action_repeat == 3
    assert plan.row("action_repeat") in plan.notable()


def test_evaluation_beside_training_needs_evaluations_and_a_second_core():
    asked = (SPEED, "eval_every=1000", *CART)
    assert plan_of(*asked).config.eval_async
    assert plan_of(SPEED, *CART).row("eval_async")[1:3] == (True, False)
    one_core = plan_of(*asked, machine=MACHINE._replace(cores=1))
    assert one_core.row("eval_async").reason == "there is only one core"


def test_progress_csv_needs_the_training_log():
    typed = ("train_log_enabled=false", "train_log_to_file=true", "train_log_to_console=true")
    plan = plan_of(*typed, train_log_enabled=TYPED)
    row = plan.row("train_log_to_file")
    assert (row.requested, row.effective, row.reason) == (True, False, "train_log_enabled=false")
    assert plan.config.train_log_to_file is False
    assert plan.config.train_log_to_console is True, "[PERF] lines need no training log"
    assert plan_of("train_log_to_file=true").config.train_log_to_file is True


def test_infos_are_cut_where_that_saves_something_and_nobody_reads_them():
    row = plan_of("vec_env=auto", "lean_info=true", env=NATIVE).row("lean_info")
    assert (row.effective, row.reason) == (True, "a native game sends info only when an episode ends")
    dummy, shared = (("lean_info=true", *CART, f"vec_env={form}") for form in ("dummy", "shared"))
    row = plan_of(*dummy).row("lean_info")
    assert (row.effective, row.reason) == (False, "in one process infos cost nothing, but dropping them costs time")
    assert plan_of(*dummy, lean_info=TYPED).row("lean_info").effective is True
    assert plan_of(*shared).row("lean_info").effective is True
    reading = (*shared, "callbacks=[costs:Mean]")
    row = plan_of(*reading).row("lean_info")
    assert row.effective is False
    assert row.reason.startswith("callbacks may read any info")
    assert plan_of(*reading, lean_info=TYPED).row("lean_info").effective is True
    assert plan_of(*reading, "env.info_keys=[cost]").row("lean_info").effective is True


def test_profile_exact_switches_on_exact_flags_and_nothing_else():
    baseline, exact = (plan_of(f"+profile={name}", env=NATIVE).config for name in ("baseline", "exact"))
    changed = {
        flag.name: flag.flag_class for flag in FLAGS if getattr(exact, flag.name) != getattr(baseline, flag.name)
    }
    assert {"engine", "vec_env", "lean_info"} <= set(changed)
    assert set(changed.values()) == {"exact"}


def test_notable_rows_are_those_that_differ_from_stock_and_fast_paths_that_ended_off():
    names = {row.flag for row in plan_of(SPEED, env=NATIVE).notable()}
    assert {"engine", "vec_env", "num_envs", "lean_info"} <= names
    assert "use_amp" in names, "auto ended off"
    assert "use_amp" not in {row.flag for row in plan_of("+profile=exact", env=NATIVE).notable()}
    assert "updates_per_step" not in names


MEMORY = ("algo=maskable_recurrent_ppo", "vec_env=dummy")


@pytest.mark.parametrize(
    ("arguments", "env", "cores", "threads"),
    [
        ((), NATIVE, 16, 1),
        (("algo.net_arch=[512]", "vec_env=dummy"), PLAIN, 2, 2),
        ((*MEMORY, "algo.lstm_hidden_size=128"), PLAIN, 2, 1),
        ((*MEMORY, "algo.lstm_hidden_size=256"), PLAIN, 2, 2),
        (("algo.net_arch=[512]", "vec_env=dummy"), PLAIN, 999, 256),  # what eval reads back must be within the bounds
        (("vec_env=subproc",), PLAIN, 2, 1),
    ],
)
def test_torch_threads(arguments: tuple[str, ...], env: EnvFacts, cores: int, threads: int):
    plan = plan_of("torch_threads=auto", *arguments, env=env, machine=MACHINE._replace(cores=cores))
    assert plan.config.torch_threads == threads


def test_kernels_leave_wide_nets_to_torch():
    assert plan_of(SPEED, "algo.net_arch=[1024,64]").config.fused_update == "on"
    plan = plan_of(SPEED, "algo.net_arch=[1025,64]")
    assert plan.config.fused_update == "off"
    assert "layers of 1,025 units" in plan.row("fused_update").reason
    assert plan_of(SPEED, "algo.net_arch=[1025,64]", "fused_update=on").config.fused_update == "on"


@pytest.mark.parametrize("profile", ["baseline", "balance", "speed", "exact", "debug"])
def test_nan_guard_is_on_everywhere_and_says_what_the_stock_classes_leave_out(profile: str):
    plan = plan_of(f"+profile={profile}", *CART)
    assert plan.config.nan_guard == "stop"
    reason = plan.row("nan_guard").reason
    assert ("updates are not" in reason) == (plan.config.engine == "stock")
    off = plan_of(f"+profile={profile}", *CART, "nan_guard=false").row("nan_guard")
    assert (off.effective, off.reason) == ("off", "")


def test_what_is_found_out_later_is_an_event_on_the_record():
    plan = plan_of(SPEED, *CART)
    after = plan.after("fused_update", "off", "the policy is a CNN")
    assert (plan.config.fused_update, plan.events) == ("on", ())
    assert (after.config.fused_update, after.row("fused_update").reason) == ("off", "the policy is a CNN")
    event = {"flag": "fused_update", "effective": "off", "reason": "the policy is a CNN"}
    assert after.to_dict()["events"] == [event]
    assert len(after.after("fused_update", "off", "the policy is a CNN").events) == 1, "found again, after a resume"


def test_a_profile_keeps_its_updates_per_transition_where_other_envs_are_typed():
    typed = ("+profile=balance", "algo=dqn", "env.id=CartPole-v1", "num_envs=2")
    row = plan_of(*typed, updates_per_step="profile balance", num_envs=TYPED).row("updates_per_step")
    assert (row.requested, row.effective) == (6, 2)
    assert "for 8 envs; scaled to" in row.reason
    assert plan_of(*typed, updates_per_step=TYPED).row("updates_per_step").effective == 6
