from __future__ import annotations

from typing import Any

import pytest

from conftest import composed, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.config import ALGO_CLASSES
from fasttrain.spec.plain import to_dict
from fasttrain.spec.precedence import TYPED, UserInput, effective_values
from fasttrain.spec.reading import all_keys, evaluation_config, from_mapping, with_eval_settings

KINDS = [(profile, algo) for profile in ("baseline", "exact", "balance", "debug") for algo in ("ppo", "dqn")]


@pytest.mark.parametrize(("profile", "algo"), [*(("speed", algo) for algo in ALGO_CLASSES), *KINDS])
def test_profiles_compose_with_every_algorithm(profile: str, algo: str):
    config = configured(f"+profile={profile}", f"algo={algo}", "env.id=CartPole-v1")
    assert (config.env.game, config.env.kwargs) == (None, {}), "another game's defaults leaked into the plain gym group"
    if profile == "speed":
        assert isinstance(config.algo, ALGO_CLASSES[algo])
        assert from_mapping(to_dict(config)) == config


def test_values_are_of_the_default_job_its_game_and_its_profile():
    config = configured()
    assert (config.env.id, config.algo.name) == ("fasttrain/SkullKing-v0", "maskable_ppo")
    assert config.total_timesteps == config.own.total_timesteps == 3_000_000
    plain = ("env.id=CartPole-v1", "algo=ppo")
    lengths = [configured(*plain), configured(*plain, "total_timesteps=5e3", "eval.episodes=7")]
    assert [(each.total_timesteps, each.eval.episodes) for each in lengths] == [(100_000, 100), (5_000, 7)]
    speed, balance = configured("+profile=speed"), configured("+profile=balance")
    assert (speed.num_envs, balance.num_envs) == (12, 8)
    assert (speed.updates_per_step, balance.updates_per_step) == (10, 6)
    assert (speed.own.num_envs, balance.own.num_envs) == (256, 64)
    dqn = configured("+profile=speed", "algo=dqn", "env.id=CartPole-v1", "num_envs=3")
    assert (dqn.own.batch_size, dqn.warmup_steps, dqn.num_envs) == (256, 2000, 3)
    assert {"num_envs", "algo.gamma", "algo.buffer_size", "env.id", "profile"} <= set(all_keys())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_envs=two"], "num_envs=two: expected a whole number"),
        (["env=gym"], "env.id and env.entry_point: neither is set"),
        (["env.id=A-v0", "env.entry_point=a:B"], "env.id and env.entry_point: both are set"),
        (["vec_env=subprocess"], "vec_env=subprocess: not one of auto, dummy, subproc.*did you mean 'subproc'"),
        (["+algo.gama=0.9"], "unknown key 'algo.gama'; did you mean 'gamma'"),
        (["+gamma=0.9"], "unknown key 'gamma'; did you mean .*algo.gamma"),
        (["env.kwargs=5"], "env.kwargs=5: expected a mapping"),
        ([f"seed={10**400}"], "^seed=10+: expected a whole number"),
        (["algo.policy=MlpPolici"], "^algo.policy=MlpPolici: not one of auto, MlpPolicy, .*did you mean 'MlpPolicy'"),
        (["algo.name=abc"], "^algo.name=abc: not one of ppo"),
        (["algo=recurrent_ppo", "algo.policy=MlpPolicy"], "algo.policy=MlpPolicy: .*did you mean 'MlpLstmPolicy'"),
        (["algo=ppo", "+algo.tau=1"], r"^algo.tau has no effect with algo=ppo \(only for dqn, .*, tqc\); remove it$"),
    ],
)
def test_bad_input_is_named(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_an_algorithm_is_a_group():
    with pytest.raises(ConfigError, match="algo: choose"):
        from_mapping({**composed(), "algo": None})


def test_own_values_are_the_given_ones_then_the_games_then_the_algorithms():
    def own(*arguments: str) -> tuple[Any, ...]:
        config = configured(*arguments)
        own = config.own
        assert config.algo.learning_rate == own.learning_rate
        return own.batch_size, own.learning_rate, own.n_epochs, own.rollout_size, own.num_envs

    assert own("+profile=speed") == (1024, 1e-3, 4, 16_384, 256), "Skull King's"
    assert own("+profile=speed", "env.id=CartPole-v1", "algo=ppo") == (256, 1e-3, 10, 4_096, None), "PPO's"
    assert own("env.id=CartPole-v1", "algo=a2c") == (None, 7e-4, None, 40, None), "no minibatches, no epochs"
    tiers = (("balance", "ppo", 16_384), ("debug", "ppo", 512), ("speed", "recurrent_ppo", 1024))
    for profile, algo, size in tiers:
        assert configured(f"+profile={profile}", "env.id=CartPole-v1", f"algo={algo}").algo.rollout_size == size
    assert configured("+profile=speed", "algo.learning_rate=linear_1e-4").algo.learning_rate == "linear_1e-4"


def test_files_say_how_a_switch_is_on():
    def read(**values: Any) -> tuple[str, str]:
        config = from_mapping(effective_values({**composed(), "engine": "fast", **values}, (), UserInput([], {}))[0])
        return config.use_amp, config.use_compile

    old = {"amp_dtype": "bfloat16", "compile_mode": "default"}
    assert read(**old, use_amp="off", use_compile="auto") == ("off", "auto"), "the usual values of the other names"
    assert read(**old, use_amp="auto", use_compile=True) == ("auto", "on")
    other = {"amp_dtype": "float16", "compile_mode": "max-autotune"}
    assert read(**other, use_amp="off", use_compile=False) == ("off", "off"), "what is off has no mode"
    assert read(**other, use_amp="auto", use_compile="on") == ("float16", "max-autotune")


def test_files_may_use_the_other_names():
    plain = composed("env.id=CartPole-v1", "algo=ppo")
    old = {"num_workers": 4, "use_subproc_envs": True, "force_dummy_vec_env": False}
    config = from_mapping(effective_values({**plain, **old}, (), UserInput([], {}))[0])
    assert (config.workers, config.vec_env) == (4, "subproc")
    typed = effective_values({**plain, **old, "workers": 2}, (), UserInput([], {"workers": TYPED}))[0]
    assert from_mapping(typed).workers == 2, "typed by its own name"


def test_eval_takes_another_opponent_and_other_arguments_of_the_env_in_place_of_what_the_run_had():
    run = configured("opponent=self", "env.kwargs.num_players=3", "eval.env_kwargs.first=1")
    given = configured("opponent=random", "env.kwargs.num_players=5", "eval.episodes=6")
    found = with_eval_settings(run, given, ["run", "opponent", "env.kwargs.num_players", "eval.episodes"])
    kwargs = evaluation_config(found).env.kwargs
    assert (kwargs[str(run.env.spec.opponent_key)], kwargs["num_players"], kwargs["first"]) == ("random", 5, 1)
    assert found.eval.episodes == 6
    assert found.env.kwargs["num_players"] == 3, "what the run was trained with"
    with pytest.raises(ConfigError, match="opponent=self: only for training"):
        with_eval_settings(run, configured("opponent=self"), ["opponent"])
