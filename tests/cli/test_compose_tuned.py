"""`+tuned=NAME`: settings for one environment, which win over the profile and give way to what is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RunCommand
from fasttrain.cli.compose import composed_before, conf_dir, configured, keys_of_files
from fasttrain.spec.precedence import normalise

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


@pytest.mark.parametrize("typed", ["[speed,exact]", "[ speed , exact ]"])
def test_several_profiles_are_told_apart(typed: str):
    found = keys_of_files(composed_before(normalise([f"profile={typed}", "tuned=acrobot"], {})).hydra)
    assert list(found) == ["profile speed", "profile exact", "tuned acrobot"]
    assert "updates_per_step" in found["profile speed"]
    assert "algo.n_epochs" in found["tuned acrobot"]


@pytest.mark.parametrize("entry", ["/profile/speed", "speed", "/profile/speed@_global_"])
def test_a_profile_built_upon_another_keeps_the_sources_of_both(entry: str, tmp_path: Path):
    (tmp_path / "profile").mkdir()
    text = f"# @package _global_\ndefaults:\n  - {entry}\n  - _self_\nnum_envs: 3\n"
    (tmp_path / "profile" / "mine.yaml").write_text(text)
    composed = composed_before(["+profile=mine", f"hydra.searchpath=[file://{tmp_path}]"])
    found = keys_of_files(composed.hydra)
    assert list(found) == ["profile speed", "profile mine"]
    assert found["profile mine"] == ["num_envs"]
    assert "updates_per_step" in found["profile speed"]
    assert (composed.num_envs, composed.updates_per_step) == (3, 10)


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
