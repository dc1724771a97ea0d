from __future__ import annotations

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import (
    ENOUGH_UPDATES,
    check_no_secret,
    check_path,
    parse_schedule,
    short_run_warning,
    updates_of,
)
from fasttrain.spec.groups import MAX_SEED
from fasttrain.spec.removed import lookup


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("num_envs=0", "num_envs=0: must be at least 1"),
        ("algo.gamma=1.5", "algo.gamma=1.5: must lie between 0 and 1"),
        ("algo.learning_rate=-1", "algo.learning_rate=-1.0: must be positive"),
        ("algo.learning_rate=linear_x", "algo.learning_rate=linear_x: expected a number, or a schedule"),
        ("algo.learning_rate=lin_1e-3", "did you mean 'linear'"),
        ("batch_size=20000", "batch_size=20000 is larger than algo.rollout_size=16384"),
        ("workers=9", "workers=9 is more than num_envs=8"),
        ("vec_env=native env.id=CartPole-v1", "no native batch"),
        ("device=gpu", "device=gpu: expected auto, cpu, cuda"),
        ("algo=dqn algo.buffer_size=10", "batch_size=64 is larger than algo.buffer_size=10"),
        ("algo.net_arch={actor:[64]}", "the keys are pi and vf"),
        ("algo.net_arch=[0]", "every width must be at least 1"),
        ("algo.net_arch=[1000000000]", "every width must be at least 1 and at most 1,000,000"),
        ("algo=recurrent_ppo algo.shared_lstm=true", "^algo.shared_lstm=true contradicts algo.enable_critic_lstm"),
        ("algo=recurrent_ppo algo.n_lstm_layers=0", "^algo.n_lstm_layers=0: must be at least 1$"),
        ("seed=4294967295", "^seed=4294967295: must lie between 0 and 4293967295$"),
        ("eval.seed=4293967296", "^eval.seed=4293967296: must lie between 0 and 4293967295$"),
        ("torch_threads=257", "^torch_threads=257: must lie between 1 and 256$"),
        ("device='cpu:x'", "^device=cpu:x: expected auto"),
        ("env.id=", "^env.id=: expected text$"),
        ("algo.learning_rate=linear_nan", "^algo.learning_rate=linear_nan: expected a number, or a schedule"),
        ("algo.clip_range='nan'", "^algo.clip_range=nan: expected a number, or a schedule"),
        ("algo.learning_rate=.nan", "^algo.learning_rate=.nan: expected a number"),
        ("algo.learning_rate=inf", "^algo.learning_rate=inf: expected a number"),
        ("algo.learning_rate=1e300", "^algo.learning_rate=1e.300: must be at most 1000000$"),
        ("algo.learning_rate=linear_1e7", "^algo.learning_rate=linear_1e7: must be at most 1000000$"),
        ("algo.ent_coef=1e300", "^algo.ent_coef=1e.300: must lie between 0 and 1000000$"),
        ("algo.vf_coef=1e300", "^algo.vf_coef=1e.300: must lie between 0 and 1000000$"),
        ("algo.max_grad_norm=1e300", "^algo.max_grad_norm=1e.300: must lie between 0 and 1000000$"),
        ("algo=dqn algo.train_freq=0", "^algo.train_freq=0: expected a number of vector steps, or .1, episode.$"),
        ("algo=dqn algo.train_freq=[1,day]", "^algo.train_freq=.*day.*: expected a number of vector steps"),
        ("algo=dqn algo.train_freq=[episode]", "^algo.train_freq=.*: expected a number of vector steps"),
        ("algo=dqn algo.train_freq=[1,episode]", "with num_envs=8: episodes of several envs end at different"),
        ("algo=dqn updates_per_step=0", "^updates_per_step=0: nothing would be learned; use 1 or more, or -1"),
        ("algo=dqn updates_per_step=-2", "^updates_per_step=-2: must be at least -1$"),
        ("algo=ppo algo.sde_sample_freq=4", "^algo.sde_sample_freq has no effect without algo.use_sde=true"),
        ("algo=sac algo.use_sde_at_warmup=true", "^algo.use_sde_at_warmup has no effect without algo.use_sde"),
        ("algo=ppo algo.use_sde=true algo.sde_sample_freq=-2", "^algo.sde_sample_freq=-2: must be at least -1"),
    ],
)
def test_what_makes_no_sense_is_named(overrides: str, message: str):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides.split())


def test_the_bounds_themselves_are_allowed():
    config = configured(f"seed={MAX_SEED}", f"eval.seed={MAX_SEED}", "torch_threads=256", "algo.learning_rate=1e6")
    assert (config.seed, config.eval.seed, config.torch_threads) == (MAX_SEED, MAX_SEED, 256)
    assert [lookup(config, f"algo.{key}") for key in ("gamma", "buffer_size")] == [0.99, None]


def test_schedules():
    assert parse_schedule(3e-4, "key") == (3e-4, 3e-4)
    assert parse_schedule("linear_3e-4", "key") == (3e-4, 0.0)
    assert parse_schedule("linear_3e-4_1e-4", "key") == (3e-4, 1e-4)
    assert configured("algo.clip_range=linear_0.2").algo.clip_range == "linear_0.2"


@pytest.mark.parametrize("path", ["", "a\0b", "a/" + "ä" * 128])
def test_what_no_file_can_be_called_is_refused(path: str):
    with pytest.raises(ConfigError, match="^run=.*: no file or folder can be called that$"):
        check_path("run", path)
    with pytest.raises(ConfigError, match="^run=x{60}…: no file or folder can be called that$"):
        configured(f"run={'x' * 256}")
    check_path("run", "a/" + "ä" * 127)
    check_path("run", None)


@pytest.mark.parametrize(
    "text",
    [
        "[{logger: wandb, api_key: abc}]", "[{logger:wandb,api_key:abc}]", "({'logger': 'wandb', 'api_key': 'abc'},)",
        '[{"token":"abc"}]', "[{a: [1, {b: 2}], token:abc}]", "[{logger: x, header: 'token: abc'}]", "[x, token=abc]",
    ],
)  # fmt: skip
def test_a_secret_is_refused_wherever_it_stands(text: str):
    with pytest.raises(ConfigError, match="would be stored"):
        check_no_secret("loggers", text)


def test_a_class_of_a_module_with_such_a_name_is_none():
    for text in ("[a:B,secret_roles:Stats]", "[{callback: secret_roles:Stats}]", "({'x': ['token_game:Log']},)"):
        check_no_secret("callbacks", text)


def test_a_training_too_short_for_a_tiers_large_batches_says_so():
    short = configured("+profile=speed", "total_timesteps=200000")
    assert updates_of(short) == 781
    told = "short: 200,000 steps are 781 updates (stock: 31,250); with fewer than about 1,900 updates, here 486,400"
    assert short_run_warning(short).startswith(told)
    enough = configured("+profile=speed", f"total_timesteps={ENOUGH_UPDATES * 1024 // 4}")
    assert (updates_of(enough), short_run_warning(enough)) == (ENOUGH_UPDATES, "")
    for others in (
        ("+profile=baseline", "total_timesteps=5000"),  # stock's own batches, however short
        ("+profile=speed", "algo=dqn", "env.id=CartPole-v1", "total_timesteps=5000"),
        ("+profile=speed", "total_timesteps=200000", "batch_size=64", "algo.n_epochs=10"),
    ):
        assert short_run_warning(configured(*others)) == ""


def test_a_policy_is_one_of_stocks_or_a_class_of_the_users():
    with pytest.raises(ConfigError, match="algo.policy=MlpPolciy: not one of auto, .*, or module:Class of your own"):
        configured("env.id=CartPole-v1", "algo=ppo", "algo.policy=MlpPolciy")
    assert configured("env.id=CartPole-v1", "algo=ppo", "algo.policy=nets:Mine").algo.policy == "nets:Mine"
