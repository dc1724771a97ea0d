from __future__ import annotations

import pytest

from conftest import composed, configured
from fasttrain.config import MAX_SEED, DQNConfig, PPOConfig, all_keys, from_mapping, lookup, parse_schedule, to_dict
from fasttrain.errors import ConfigError


def test_default_job_is_skull_king_with_maskable_ppo():
    config = configured()
    assert config.env.id == "fasttrain/SkullKing-v0"
    assert isinstance(config.algo, PPOConfig)
    assert config.algo.name == "maskable_ppo"
    assert config.total_timesteps == config.env.total_timesteps


@pytest.mark.parametrize("profile", ["baseline", "exact", "balance", "speed", "debug"])
@pytest.mark.parametrize("algo", ["maskable_ppo", "ppo", "dqn"])
def test_every_profile_composes_with_every_algorithm(profile: str, algo: str):
    config = configured(f"+profile={profile}", f"algo={algo}", "env.id=CartPole-v1")
    assert config.env.native_game is None, "another game's defaults leaked into the plain gym group"
    assert config.env.kwargs == {}


def test_profiles_choose_the_values_of_the_design():
    speed, balance = configured("+profile=speed"), configured("+profile=balance")
    assert (speed.num_envs, balance.num_envs) == (12, 8)
    assert (speed.updates_per_step, balance.updates_per_step) == (10, 6)
    assert (speed.own.native_num_envs, balance.own.native_num_envs) == (256, 64)
    dqn = configured("+profile=speed", "algo=dqn", "env.id=CartPole-v1")
    assert (dqn.own.batch_size, dqn.warmup_steps) == (256, 2000)


def test_command_line_beats_profile():
    assert configured("+profile=speed", "num_envs=3").num_envs == 3


@pytest.mark.parametrize("text", ["1e6", "1_000_000", "1000000"])
def test_timesteps_in_any_spelling(text: str):
    assert configured(f"total_timesteps={text}").total_timesteps == 1_000_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_envs=0"], "num_envs=0: must be at least 1"),
        (["num_envs=two"], "num_envs=two: expected a whole number"),
        (["algo.gamma=1.5"], "algo.gamma=1.5: must lie between 0 and 1"),
        (["algo.learning_rate=-1"], "algo.learning_rate=-1.0: must be positive"),
        (["algo.learning_rate=linear_x"], "algo.learning_rate=linear_x: expected a number, or a schedule"),
        (["batch_size=20000"], "batch_size=20000 is larger than algo.rollout_size=16384"),
        (["num_workers=9"], "num_workers=9 is more than num_envs=8"),
        (["force_dummy_vec_env=true", "vec_env=native"], "force_dummy_vec_env=true contradicts vec_env=native"),
        (["vec_env=native", "env.id=CartPole-v1"], "no native batch"),
        (["env=gym"], "env.id and env.entry_point: neither is set"),
        (["env.id=A-v0", "env.entry_point=a:B"], "env.id and env.entry_point: both are set"),
        (["device=gpu"], "device=gpu: expected auto, cpu, cuda"),
        (["vec_env=subprocess"], "vec_env=subprocess: not one of auto, dummy, subproc.*did you mean 'subproc'"),
        (["algo=dqn", "algo.buffer_size=10"], "batch_size=64 is larger than algo.buffer_size=10"),
        (["algo.net_arch={actor: [64]}"], "the keys are pi and vf"),
        (["algo.net_arch=[0]"], "every width must be at least 1"),
        (["+algo.gama=0.9"], "unknown key 'algo.gama'; did you mean 'gamma'"),
        (["+gamma=0.9"], "unknown key 'gamma'; did you mean .*algo.gamma"),
        (["env.kwargs=5"], "env.kwargs=5: expected a mapping"),
        (["seed=4294967295"], "^seed=4294967295: must be at most 4293967295$"),
        (["eval.seed=4293967296"], "^eval.seed=4293967296: must be at most 4293967295$"),
        ([f"seed={10**400}"], "^seed=10+: expected a whole number"),
        (["torch_threads=257"], "^torch_threads=257: must be at most 256$"),
        (["own.batch_size=1"], "^own.batch_size=1: must be at least 2$"),
        (["algo.learning_rate=linear_nan"], "^algo.learning_rate=linear_nan: expected a number, or a schedule"),
        (["algo.learning_rate=linear_inf"], "^algo.learning_rate=linear_inf: expected a number, or a schedule"),
        (["algo.clip_range='nan'"], "^algo.clip_range=nan: expected a number, or a schedule"),
        (["algo.learning_rate=.nan"], "^algo.learning_rate=.nan: expected a number"),
        (["algo.learning_rate=inf"], "^algo.learning_rate=inf: expected a number"),
        (["algo.learning_rate=1e300"], "^algo.learning_rate=1e.300: must be at most 1000000$"),
        (["algo.learning_rate=linear_1e7"], "^algo.learning_rate=linear_1e7: must be at most 1000000$"),
        (["algo.ent_coef=1e300"], "^algo.ent_coef=1e.300: must be at most 1000000$"),
        (["algo.vf_coef=1e300"], "^algo.vf_coef=1e.300: must be at most 1000000$"),
        (["algo.max_grad_norm=1e300"], "^algo.max_grad_norm=1e.300: must be at most 1000000$"),
        (["algo.policy=MlpPolici"], "^algo.policy=MlpPolici: not one of auto, MlpPolicy, .*did you mean 'MlpPolicy'"),
        (["algo.name=sac"], "^algo.name=sac: not one of ppo, maskable_ppo"),
        (
            ["algo=dqn", "+algo.rollout_size=64"],
            r"^algo.rollout_size means nothing for algo=dqn \(only for ppo, maskable_ppo\); leave it out$",
        ),
        (["algo=ppo", "+algo.tau=1"], r"^algo.tau means nothing for algo=ppo \(only for dqn\); leave it out$"),
    ],
)
def test_bad_input_is_named(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_the_bounds_themselves_are_allowed():
    config = configured(f"seed={MAX_SEED}", f"eval.seed={MAX_SEED}", "torch_threads=256", "algo.learning_rate=1e6")
    assert (config.seed, config.eval.seed, config.torch_threads) == (MAX_SEED, MAX_SEED, 256)
    assert configured("algo.policy=CnnPolicy").algo.policy == "CnnPolicy"


def test_schedules():
    assert parse_schedule(3e-4, "key") == ("constant", 3e-4)
    assert parse_schedule("linear_3e-4", "key") == ("linear", 3e-4)
    assert configured("algo.clip_range=linear_0.2").algo.clip_range == "linear_0.2"


def test_round_trip_through_plain_values():
    config = configured("+profile=speed", "algo=dqn", "env.id=CartPole-v1")
    assert isinstance(config.algo, DQNConfig)
    assert from_mapping(to_dict(config)) == config


def test_lookup_and_all_keys():
    config = configured()
    assert lookup(config, "algo.gamma") == 0.99
    assert lookup(config, "algo.buffer_size") is None
    assert {"num_envs", "algo.gamma", "algo.buffer_size", "env.id", "profile"} <= set(all_keys())


def test_algorithm_must_be_a_group():
    with pytest.raises(ConfigError, match="algo: choose"):
        from_mapping({**composed(), "algo": None})
