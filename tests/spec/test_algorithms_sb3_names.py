"""Every constructor argument of the stock classes as `algo.NAME=…`: taken as SB3 means it, or our setting is named."""

from __future__ import annotations

import inspect
import re

import pytest

from conftest import RunCommand, composed, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, INSTEAD, argument_message
from fasttrain.spec.precedence import ALIASES
from fasttrain.spec.reading import all_keys, from_mapping, key_message

STOCK = {name: spec.load(fast=False) for name, spec in ALGORITHMS.items() if not spec.ours_alone}
# No default of SB3's, or another.
VALUES = {"policy": "auto", "policy_kwargs": "{}", "n_steps": "4", "max_grad_norm": "1.0"}


def typed_of(algo: str, name: str) -> str:
    default = inspect.signature(STOCK[algo]).parameters[name].default
    if f"algo.{name}" in ALIASES and name == "seed":
        return "3"
    return VALUES.get(name, "null" if default in (None, inspect.Parameter.empty) else str(default).lower())


@pytest.mark.parametrize("algo", STOCK)
def test_every_argument_of_sb3_is_taken_or_named(algo: str):
    names = list(inspect.signature(STOCK[algo]).parameters)
    refused = [name for name in names if f"algo.{name}" not in ALIASES and argument_message(f"algo.{name}")]
    taken = {name: typed_of(algo, name) for name in names if name not in refused}
    config = configured(f"algo={algo}", *(f"algo.{name}={typed}" for name, typed in taken.items()))
    for name, typed in taken.items():
        if f"algo.{name}" in ALIASES:
            value = getattr(config, ALIASES[f"algo.{name}"].key)
            assert str(value).lower() == ("none" if typed == "null" else typed), name
    for name in refused:
        told = argument_message(f"algo.{name}")
        assert key_message(f"algo.{name}", [algo]) == told  # what Hydra refuses, without a plus
        with_it = composed(f"algo={algo}")
        with_it["algo"][name] = typed_of(algo, name)  # what a plus does
        with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
            from_mapping(with_it)
        assert "\n" not in told


def test_settings_that_are_named_exist_and_none_is_refused_that_could_be_taken():
    keys = set(all_keys())
    for name, told in INSTEAD.items():
        assert f"algo.{name}" not in keys
        assert set(re.findall(r"([a-z_][a-z_.]*)=", told)) <= keys
    assert argument_message("batch_size") == argument_message("algo.gama") == argument_message("env.seed") == ""
    assert argument_message("algo.replay_buffer_kwargs.x").startswith(
        "algo.replay_buffer_kwargs.x is no setting here: use "
    )


def test_the_command_line_says_it_in_one_line(fasttrain: RunCommand):
    told = "error: algo.verbose is no setting here: use train_log_to_console=true or false\n"
    fasttrain("+algo.verbose=1").refused(told)


def test_both_names_of_one_setting_are_an_error_where_they_differ():
    assert configured("algo.batch_size=96", "batch_size=96").batch_size == 96
    with pytest.raises(ConfigError, match="^algo.batch_size=64 contradicts batch_size=32: they are one setting"):
        configured("algo.batch_size=64", "batch_size=32")
