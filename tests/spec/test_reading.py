from __future__ import annotations

from typing import Any

import pytest

from conftest import composed, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.precedence import UserInput, effective_values
from fasttrain.spec.reading import evaluation_config, evaluation_envs, from_mapping, with_eval_settings
from messages import assert_says, wrong_inputs


@pytest.mark.parametrize("overrides", wrong_inputs("settings that cannot be read"))
def test_bad_input_is_named(overrides: str):
    with pytest.raises(ConfigError) as told:
        configured(*overrides.split())
    assert_says("settings that cannot be read", overrides, str(told.value))
    with pytest.raises(ConfigError, match="^seed=10+: expected a whole number"):
        configured(f"seed={10**400}")


def test_an_algorithm_is_a_group():
    with pytest.raises(ConfigError, match="algo: choose"):
        from_mapping({**composed(), "algo": None})


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


@pytest.mark.parametrize(("vec_env", "envs"), [("dummy", 8), ("native", 64)])
def test_evaluations_play_in_so_many_envs(vec_env: str, envs: int):
    assert evaluation_envs(configured("eval.episodes=100", f"vec_env={vec_env}")) == envs


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
