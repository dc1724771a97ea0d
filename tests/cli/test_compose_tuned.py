"""`+tuned=NAME`: settings for one environment, which win over the profile and give way to what is typed."""

from __future__ import annotations

import json
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
    for words in ((f"tuned={file.stem}", "profile=speed"), ("+profile=speed", f"+tuned={file.stem}")):
        found = configured(words)
        assert (found.env.id, found.num_envs) == (meant["env"]["id"], meant["num_envs"])
        assert (found.batch_size, found.total_timesteps) == (meant["batch_size"], meant["total_timesteps"])
        algo: Any = found.algo
        for key, value in meant["algo"].items():
            assert getattr(algo, key) == value, key
    assert configured([f"tuned={file.stem}", "num_envs=3"]).num_envs == 3


def sources(*arguments: str) -> dict[str, str]:
    options, typed = split_options(arguments)
    with composer(read_options(options)) as hydra:
        return hydra.configured(read(typed, {}))[1]


@pytest.mark.parametrize("typed", ["[speed,exact]", "[ speed , exact ]"])
def test_of_several_profiles_the_last_that_says_something_is_its_source(typed: str):
    found = sources(f"profile={typed}", "tuned=acrobot")
    told = ("updates_per_step", "use_amp", "algo.n_epochs", "env.id")
    assert [found[key] for key in told] == ["profile exact", "profile speed", "tuned acrobot", "tuned acrobot"]


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
    for typed, workers in (("[speed,sb3]", 2), ("[sb3,later]", 3), ("[later,sb3]", 2)):
        assert configured([*start, f"+profile={typed}"]).workers == workers
    found = configured([*start, "+profile=[speed,sb3]", "workers=4"])
    assert (found.workers, found.batch_size) == (4, 128)
    assert sources(*start, "+profile=[speed,sb3]")["batch_size"] == "profile sb3"


def test_a_file_in_place_of_ours_is_somebodys_choice(tmp_path: Path):
    text = "defaults: [config, {override env: gym}, {override algo: ppo}, _self_]\nenv: {id: CartPole-v1}\nnum_envs: 3"
    (tmp_path / "mine.yaml").write_text(text)
    found = sources("--config-dir", str(tmp_path), "--config-name", "mine", "seed=1")
    assert (found["num_envs"], found["seed"]) == ("config mine", "command line")
    with pytest.raises(ConfigError, match="^--config-name=x: no such YAML file in --config-dir"):
        sources("--config-name", "x")


def test_a_run_says_where_its_values_come_from(fasttrain: RunCommand):
    done = fasttrain("tuned=cartpole", "profile=speed", "total_timesteps=512", "vec_env=dummy", "eval.episodes=2")
    assert done.exit_code == 0, done.err
    plan = json.loads((done.folder / "plan.json").read_text())["flags"]
    rows = {row["flag"]: row for row in plan}
    assert (rows["num_envs"]["source"], rows["num_envs"]["effective"]) == ("tuned cartpole", 8)
    assert rows["vec_env"]["source"] == "command line"
    assert rows["lean_info"]["source"] == "profile speed"


def test_an_unknown_name_is_answered_with_those_there_are(fasttrain: RunCommand):
    refused = fasttrain("tuned=cartpol")
    assert refused.exit_code == 2
    assert "did you mean 'cartpole'?" in refused.err
