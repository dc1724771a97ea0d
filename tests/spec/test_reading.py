from __future__ import annotations

from typing import Any

import pytest

from conftest import composed, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.precedence import UserInput, effective_values
from fasttrain.spec.reading import evaluation_config, evaluation_envs, from_mapping, with_eval_settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_envs=two"], "num_envs=two: expected a whole number"),
        (["env=gym"], "env.id and env.entry_point: neither is set"),
        (["env.id=A-v0", "env.entry_point=a:B"], "env.id and env.entry_point: both are set"),
        (["vec_env=subprocess"], "vec_env=subprocess: not one of auto, dummy, subproc.*did you mean 'subproc'"),
        (["+algo.gama=0.9"], "unknown key 'algo.gama'; did you mean 'algo.gamma'"),
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
