from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RunCommand
from fasttrain.cli.commands import read_options
from fasttrain.cli.compose import composer, conf_dir, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.precedence import read, split_options

FILES = sorted((conf_dir() / "tuned").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_holds_what_a_run_takes(file: Path):
    meant: Any = yaml.safe_load(file.read_text())
    found = configured(["+profile=speed", f"+tuned={file.stem}", "seed=3"])
    assert (found.env.id, found.num_envs, found.seed) == (meant["env"]["id"], meant["num_envs"], 3)
    assert (found.batch_size, found.total_timesteps) == (meant["batch_size"], meant["total_timesteps"])
    for key, value in meant["algo"].items():
        assert getattr(found.algo, key) == value, key


def test_a_setting_of_a_tuned_file_that_does_not_fit_is_told_with_the_file(fasttrain: RunCommand):
    fasttrain("+tuned=cartpole", "algo=dqn").refused("error: tuned=cartpole: algo.n_epochs has no effect with algo=dqn")


def test_an_unknown_name_is_answered_with_those_there_are():
    assert configured(["tuned=acrobot", "profile=speed", "num_envs=3"]).num_envs == 3
    with pytest.raises(ConfigError, match="did you mean 'cartpole'?"):
        configured(["tuned=cartpol"])


def sources(*arguments: str) -> dict[str, str]:
    options, typed = split_options(arguments)
    with composer(read_options(options)) as hydra:
        return hydra.configured(read(typed, {}))[1]


GAME = ("env.backend=daemons", "env.entry_point=game:Game", "daemons.command=[java, Engine, --port, '{port}']")


def test_a_file_of_an_engines_package_is_known_by_its_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"daemons=smal_jvm: no such daemons.*did you mean 'small_jvm'"):
        configured([*GAME, "daemons=smal_jvm"])
    found = configured(["env=go", "env.kwargs.size=5"])
    assert (found.env.backend, found.daemons.command[0], found.daemons.games_per_daemon) == ("daemons", "gnugo", 1)
    typed = ["env.backend=daemons", "env.entry_point=fasttrain.daemons.go:Go", "daemons.command=[gnugo]",
             "daemons.games_per_daemon=1"]  # fmt: skip
    assert configured(typed).env.entry_point == configured(typed).env.entry_point == "fasttrain_engines.go:Go"
    told = "fasttrain: env.entry_point=fasttrain.daemons.go:Go is now fasttrain_engines.go:Go\n"
    assert capsys.readouterr().err == told
