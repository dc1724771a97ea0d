"""Profiles that studies write: Hydra reads them back as what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RunCommand, configured
from fasttrain.runs.view import make_console
from fasttrain.studies.study import Study, settings


def test_a_written_profile_composes_to_its_values(tmp_path: Path, fasttrain: RunCommand):
    values = settings(configured("+profile=speed"))
    values.update({"batch_size": 512, "use_amp": "off", "workers": 2, "lean_info": False})
    study = Study("tune", tmp_path / "it's a study", [], make_console())
    file = study.write_profile("mine", values, "two\nlines", {"batch_size": "measured: 1.3×"})
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# two\n# lines\nengine: fast\n")
    assert "batch_size: 512 # measured: 1.3×\n" in text
    done = fasttrain(*study.use_profile("mine"), "total_timesteps=256", "algo.rollout_size=512", "eval.episodes=2",
                     "report=false", "checkup=off", "num_envs=8")  # fmt: skip
    assert done.exit_code == 0, done.err
    plan = done.json("plan.json")
    effective = {row["flag"]: (row["effective"], row["source"]) for row in plan["flags"]}
    assert effective["batch_size"] == (512, "profile mine")
    assert effective["engine"] == ("fast", "profile mine")


def test_the_command_that_uses_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Study("tune", tmp_path / "a b", [], make_console()).say_profile("mine", tmp_path / "mine.yaml")
    told = f"written to {tmp_path}/mine.yaml: fasttrain --config-dir '{tmp_path}/a b/conf' +profile=mine"
    assert told in capsys.readouterr().out


def test_it_can_be_used_by_config_dir(tmp_path: Path, fasttrain: RunCommand):
    Study("tune", tmp_path, [], make_console()).write_profile("mine", {"engine": "fast", "batch_size": 128}, "", {})
    done = fasttrain("--config-dir", str(tmp_path / "conf"), "+profile=mine", "vec_env=dummy", "total_timesteps=256",
                     "algo.rollout_size=256", "num_envs=4", "eval.episodes=2", "report=false",
                     "env.kwargs.opponents=random")  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.json("plan.json")["config"]["batch_size"] == 128
