from __future__ import annotations

from contextlib import nullcontext

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import NOT_APPLICABLE, EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.stepping import needs_single_envs

SLOW = EnvFacts(native=False, step_s=5e-3)
WAITS = EnvFacts(native=False, step_s=5e-3, cpu_share=0.1)
CHEAP = EnvFacts(native=False, step_s=1e-6)
CART, TYPED = ("env.id=CartPole-v1", "algo=ppo"), "command line"


def plan_of(config: Config, env: EnvFacts = SLOW, cores: int = 2, windows: bool = False, **sources: str) -> RunSpec:
    return resolve(config, sources, env, Machine(cores, windows, False))


def fast(*arguments: str) -> Config:
    return configured("+profile=speed", *CART, *arguments)


@pytest.mark.parametrize(
    ("step_s", "num_envs", "cores", "expected"),
    [
        (5e-6, 8, 2, "dummy"),  # waking the workers alone costs more
        (20e-6, 64, 2, "shared"),
        (100e-6, 64, 1, "dummy"),
        (100e-6, 1, 8, "dummy"),
        (20e-6, 64, 8, "shared"),
        (20e-6, 8, 8, "dummy"),
        (74e-6, 8, 2, "dummy"),  # in workers 1.1 times as fast by estimate; a quarter must be gained
        (114e-6, 8, 2, "shared"),  # 1.3 times
        (None, 64, 8, "dummy"),
    ],
)
def test_auto_vec_env_by_what_was_measured(step_s: float | None, num_envs: int, cores: int, expected: str):
    plan = plan_of(fast(f"num_envs={num_envs}"), EnvFacts(False, step_s), cores)
    assert plan.config.vec_env == expected
    assert not step_s or "env.step takes" in plan.row("vec_env").reason


def test_the_reason_says_both_times_and_an_env_that_waits_gets_workers_even_on_one_core():
    reason = plan_of(fast("num_envs=64"), EnvFacts(False, 100e-6)).row("vec_env").reason
    assert reason == "env.step takes 100 µs: 64 envs one after another 6.53 ms, in 2 workers about 3.51 ms"
    assert plan_of(fast("num_envs=16"), WAITS, cores=1).config.vec_env == "shared"


@pytest.mark.parametrize(
    "needs", ["callbacks=[curriculum:Longer]", "env.wrappers=[scaled:Scaled]", "cluster.engine=ray"]
)
def test_auto_takes_no_vector_form_where_single_envs_are_reached_into(needs: str):
    row = plan_of(fast(needs), EnvFacts(False, 5e-6, vector_form=True)).row("vec_env")
    assert row.effective == "dummy"
    assert row.reason.startswith("env.step takes 5 µs")
    assert needs.split("=")[0] in row.reason
    assert needs_single_envs(fast()) == ""


def test_windows_gets_the_dummy_env_unless_typed():
    for profile, asked in (("baseline", "subproc"), ("speed", "shared")):
        config = configured(f"+profile={profile}", *CART, f"vec_env={asked}")
        assert plan_of(config, windows=True).config.vec_env == "dummy"
        assert plan_of(config, windows=True, vec_env=TYPED).config.vec_env == asked
    assert plan_of(fast(), windows=True).config.vec_env == "dummy"


def test_force_dummy_and_no_subproc():
    for asked in ("subproc", "shared"):
        config = configured("use_subproc_envs=false", f"vec_env={asked}")
        assert plan_of(config).config.vec_env == "dummy"
        with pytest.raises(ConfigError, match=f"vec_env={asked} contradicts workers=0"):
            plan_of(config, vec_env=TYPED, workers=TYPED)


def test_workers_of_stock_classes():
    with pytest.raises(ConfigError, match="one worker per env"):
        plan_of(configured(*CART, "num_workers=4"))
    assert plan_of(configured(*CART)).row("workers").effective == 8
    with pytest.raises(ConfigError, match="workers=4 has no effect with vec_env=dummy"):
        plan_of(configured("vec_env=dummy", *CART, "num_workers=4"), workers=TYPED)
    assert plan_of(fast("vec_env=dummy")).row("workers").effective == NOT_APPLICABLE


@pytest.mark.parametrize(
    ("arguments", "env", "cores", "workers"),
    [
        (["num_envs=64"], SLOW, 4, 4),
        (["num_envs=3"], SLOW, 4, 3),
        (["num_envs=64", "num_workers=7"], SLOW, 4, 7),
        (["num_envs=64"], WAITS, 2, 20),  # each computes a tenth of its time
        (["num_envs=64"], WAITS._replace(cpu_share=0.0), 2, 32),
        (["num_envs=12"], WAITS, 2, 12),
    ],
)
def test_workers_of_shared(arguments: list[str], env: EnvFacts, cores: int, workers: int):
    assert plan_of(fast("vec_env=shared", *arguments), env, cores).config.workers == workers


@pytest.mark.parametrize(
    ("arguments", "env", "cores", "schedule", "reason"),
    [
        ([], WAITS, 2, "lockstep", "the same seed gives the same run"),
        (["schedule=first_ready"], WAITS, 2, "first_ready", "no worker waits"),
        (["schedule=continuous"], WAITS, 2, "continuous", "envs do not wait for updates"),
        (["schedule=continuous", "workers=1"], WAITS, 2, "continuous", "envs do not wait for updates"),
        (["workers=1"], SLOW, 4, "lockstep", "only one worker"),
        (["vec_env=dummy"], SLOW, 4, "lockstep", "vec_env=dummy has no workers"),
        (["engine=stock", "fused_update=off"], SLOW, 4, "lockstep", "the stock classes do not have it"),
        (["env.frame_stack=2", "workers=2"], SLOW, 4, "lockstep", "env.frame_stack needs"),
        (["env.normalize=[obs]", "workers=2"], SLOW, 4, "lockstep", "env.normalize needs"),
    ],
)
def test_schedule(arguments: list[str], env: EnvFacts, cores: int, schedule: str, reason: str):
    plan = plan_of(fast("num_envs=16", "vec_env=shared", *arguments), env, cores)
    assert plan.config.schedule == schedule
    row = plan.row("schedule")
    assert reason in row.reason
    assert row.flag_class == ("exact" if schedule == "lockstep" else "trade-off")


@pytest.mark.parametrize(
    ("arguments", "typed", "text"),
    [
        (["schedule=continuous", "algo=recurrent_ppo"], "schedule", "recurrent_ppo has no importance weights"),
        (["schedule=continuous", "algo.use_sde=true"], "schedule", "one noise for all its steps"),
        (
            ["schedule=continuous", "vec_env=dummy"],
            "schedule",
            "has no workers .*vec_env=shared has",
        ),
        (["max_lag=2"], "max_lag", "max_lag=2 is for schedule=continuous"),
    ],
)
def test_what_cannot_go_on_during_an_update(arguments: list[str], typed: str, text: str):
    with pytest.raises(ConfigError, match=text):
        plan_of(fast("num_envs=16", "vec_env=shared", "algo=ppo", *arguments), WAITS, 2, **{typed: TYPED})
    with pytest.raises(ConfigError, match="max_lag=0: must be at least 1"):
        fast("max_lag=0")


def test_groups_need_workers_and_the_cores_for_them():
    with pytest.raises(ConfigError, match="schedule=first_ready: vec_env=dummy has no workers"):
        plan_of(fast("num_envs=16", "schedule=first_ready", "vec_env=dummy"), schedule=TYPED, vec_env=TYPED)
    wide = ["num_envs=16", "vec_env=shared", "num_workers=2", "algo.net_arch=[512,512]"]
    assert plan_of(fast(*wide, "schedule=lockstep"), cores=4).config.torch_threads == 4
    assert plan_of(fast(*wide, "schedule=first_ready"), cores=4).config.torch_threads == 1


def test_restart_takes_workers_or_is_refused():
    plan = plan_of(fast("env.on_env_error=restart"), CHEAP)
    assert plan.config.vec_env == "shared"
    assert "env.on_env_error=restart" in plan.row("vec_env").reason
    for asked in ("vec_env=dummy", "vec_env=subproc", "force_dummy_vec_env=true", "use_subproc_envs=false"):
        with pytest.raises(ConfigError, match="env.on_env_error=restart with vec_env="):
            plan_of(fast("env.on_env_error=restart", asked), CHEAP)
    with pytest.raises(ConfigError, match="env.on_env_error=restart with vec_env=native"):
        plan_of(configured("+profile=speed", "env.on_env_error=restart"), EnvFacts(True, None))


@pytest.mark.parametrize(("key", "value"), [("env.masks", "get_action_mask"), ("env.on_empty_mask", "raise")])
@pytest.mark.parametrize(
    ("arguments", "reads"),
    [("algo=ppo", False), ("algo=maskable_ppo engine=stock", True), ("algo=dqn engine=fast", True),
     ("algo=dqn engine=fast algo.use_masking=false", False), ("algo=dqn engine=stock", False)],
)  # fmt: skip
def test_what_is_said_of_masks_to_an_algorithm_that_reads_none(arguments: str, reads: bool, key: str, value: str):
    config = configured("env.id=CartPole-v1", f"{key}={value}", *arguments.split())
    plan_of(config)  # an env's own file may say it for all algorithms
    told = f"^{key} has no effect with algo={config.algo.name}"
    with nullcontext() if reads else pytest.raises(ConfigError, match=told):
        plan_of(config, **{key: TYPED})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["eval_every=500"], "play 8 games with the training's engines; the training's games wait meanwhile"),
        (["eval_every=500", "daemons.games_per_daemon=2"], "=2: evaluations end the training's games"),
        (["eval_every=500", "daemons.games_per_daemon=2", "daemons.count=6", "eval.num_envs=4"], "play 4 games"),
        (["eval_every=500", "eval.episodes=0"], "eval.episodes=0: no evaluation"),
        ([], ""),
    ],
)
def test_what_becomes_of_engines_in_evaluations_is_said(typed: list[str], said: str):
    engines = ("env.backend=daemons", "env.entry_point=m:G", "daemons.command=[e, '{port}']", "num_envs=8")
    row = plan_of(configured("+profile=speed", "algo=ppo", *engines, *typed)).row("eval_every")
    assert said in row.reason
    assert bool(said) == bool(row.reason)
