from __future__ import annotations

from pathlib import Path

import torch
from stable_baselines3.common.save_util import load_from_zip_file

from conftest import RunCommand
from fasttrain_studies.population import typed_value
from study_toys import SMALL


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_from_zip_file(folder / "model.zip", device="cpu")[1]["policy"]  # type: ignore[index]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_each_model_is_the_model_of_a_single_run(fasttrain: RunCommand):
    done = fasttrain("population=3", *SMALL, "population.settings=[{algo.gamma: 0.9}, {algo.gamma: 0.99}]").ok()
    study = done.json("study.json")
    by_name = {(cell["label"], cell["seed"]): done.folder / cell["folder"] for cell in study["cells"]}
    assert sorted(by_name) == [("gamma=0.9", 0), ("gamma=0.9", 1), ("gamma=0.99", 0)]
    alone = fasttrain("train", *SMALL, "algo.gamma=0.9", "seed=1").ok()
    assert same(weights(by_name["gamma=0.9", 1]), weights(alone.folder))
    assert not same(weights(by_name["gamma=0.9", 0]), weights(alone.folder))
    rewards = [row["mean_reward"]["value"] for row in study["rows"]]
    assert rewards == sorted(rewards, reverse=True)
    assert study["best"]["model"] == study["rows"][0]["name"]
    assert "gamma=0.9: mean reward" in done.out
    assert "over 2 seeds" in done.out


def test_a_model_with_an_error_is_named_and_the_others_go_on(fasttrain: RunCommand):
    broken = "population.settings=[{}, {env.entry_point: toys:Corridor, env.id: null, env.kwargs: {length: none}}]"
    done = fasttrain("population=2", *SMALL, broken)
    assert done.exit_code == 1
    assert [cell["status"] for cell in done.json("study.json")["cells"]].count("done") == 1
    assert "env.kwargs={'length': 'none'}" in done.out.partition("best: ")[0]


def test_without_evaluations_no_model_is_the_best(fasttrain: RunCommand):
    assert "best: " not in fasttrain("population=2", *SMALL, "eval.episodes=0").ok().out


def test_settings_become_overrides():
    values = (0.5, None, "a=b", [1, "x"], {"size": 3, "on": True})
    assert [typed_value(value) for value in values] == ["0.5", "null", "'a=b'", "[1, 'x']", "{size: 3, on: true}"]


def test_a_population_in_a_file_is_refused_at_once(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/many.yaml").write_text("# @package _global_\npopulation:\n  size: 2\n")
    typed = ("--config-dir", str(tmp_path), "+profile=many")
    fasttrain("population", *typed).refused("population.size stands in a file, which each model would read too")
    fasttrain("train", *typed).refused("population.size has no effect with train")
