from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fasttrain.cli.commands import read_options
from fasttrain.cli.compose import composer, conf_dir, configured
from fasttrain.cli.library import _group
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


def test_an_unknown_name_is_answered_with_those_there_are():
    assert configured(["tuned=acrobot", "profile=speed", "num_envs=3"]).num_envs == 3
    with pytest.raises(ConfigError, match="did you mean 'cartpole'?"):
        configured(["tuned=cartpol"])


def sources(*arguments: str) -> dict[str, str]:
    options, typed = split_options(arguments)
    with composer(read_options(options)) as hydra:
        return hydra.configured(read(typed, {}))[1]


@pytest.mark.parametrize("entry", ["/profile/speed", "speed", "/profile/speed@_global_"])
def test_a_profile_built_upon_another_keeps_the_sources_of_both(entry: str, tmp_path: Path):
    (tmp_path / "profile").mkdir()
    text = f"# @package _global_\ndefaults:\n  - {entry}\n  - _self_\nnum_envs: 3\n"
    (tmp_path / "profile" / "mine.yaml").write_text(text)
    found = sources("--config-dir", str(tmp_path), "+profile=mine", "env.id=Pendulum-v1", "algo=sac", "seed=1")
    told = ("num_envs", "updates_per_step", "lean_info", "seed")
    assert [found[key] for key in told] == ["profile mine", "profile speed", "profile speed", "command line"]
    (tmp_path / "profile" / "mine.yaml").write_text(text.partition("num_envs")[0])
    assert sources("--config-dir", str(tmp_path), "+profile=mine")["num_envs"] == "profile speed", "says nothing itself"


def test_another_name_in_a_file_counts_where_it_stands(tmp_path: Path):
    (tmp_path / "profile").mkdir()
    for name, text in (("sb3", "num_workers: 2\nalgo: {batch_size: 128}"), ("later", "workers: 3")):
        (tmp_path / "profile" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    start = ("--config-dir", str(tmp_path), "env.id=CartPole-v1", "algo=ppo")
    for typed, workers in (("[sb3,later]", 3), ("[later,sb3]", 2)):
        assert configured([*start, f"+profile={typed}"]).workers == workers
    found = configured([*start, "+profile=[speed,sb3]", "workers=4"])
    assert (found.workers, found.batch_size) == (4, 128)
    assert sources(*start, "+profile=[speed,sb3]")["batch_size"] == "profile sb3"


GAME = ("env.backend=daemons", "env.entry_point=game:Game", "daemons.command=[java, Engine, --port, '{port}']")


@pytest.mark.parametrize("typed", ["daemons=small_jvm", "+daemons=small_jvm"])
def test_it_sets_flags_alone(typed: str):
    found = configured([*GAME, typed, "daemons.count=3"]).daemons
    assert "-XX:ActiveProcessorCount={threads}" in found.jvm_flags
    assert (found.count, found.command[0]) == (3, "java")
    assert configured([*GAME, typed, "daemons.jvm_flags=[-Xmx64m]"]).daemons.jvm_flags == ("-Xmx64m",)


def test_a_file_of_an_engines_package_is_known_by_its_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"daemons=smal_jvm: no such daemons.*did you mean 'small_jvm'"):
        configured([*GAME, "daemons=smal_jvm"])
    assert (_group("go"), _group("skullking"), _group("CartPole-v1")) == ("go", "skullking", "gym")
    found = configured(["env=go", "env.kwargs.size=5"])
    assert (found.env.backend, found.daemons.command[0], found.daemons.games_per_daemon) == ("daemons", "gnugo", 1)
    typed = ["env.backend=daemons", "env.entry_point=fasttrain.daemons.go:Go", "daemons.command=[gnugo]",
             "daemons.games_per_daemon=1"]  # fmt: skip
    assert configured(typed).env.entry_point == configured(typed).env.entry_point == "fasttrain_engines.go:Go"
    told = "fasttrain: env.entry_point=fasttrain.daemons.go:Go is fasttrain_engines.go:Go now\n"
    assert capsys.readouterr().err == told
