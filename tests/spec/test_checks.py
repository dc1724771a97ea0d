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
from messages import assert_says, wrong_inputs


@pytest.mark.parametrize("overrides", wrong_inputs("settings that make no sense"))
def test_what_makes_no_sense_is_named(overrides: str):
    with pytest.raises(ConfigError) as told:
        configured(*overrides.split())
    assert_says("settings that make no sense", overrides, str(told.value))


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
