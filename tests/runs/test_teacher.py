from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces

from conftest import Finished, RunCommand
from fasttrain.runs.teacher import divergence
from messages import assert_says, wrong_inputs

CORRIDOR = ("+profile=speed", "algo=ppo", "env.entry_point=toys:Corridor", "vec_env=dummy", "num_envs=4", "checkup=off",
            "batch_size=32", "algo.rollout_size=64", "eval.episodes=4", "total_timesteps=256", "report=false",
            "loggers=[csv]", "log_every=1")  # fmt: skip


def kl(space: spaces.Space[Any], wanted: Any, found: Any, masks: Any = None) -> float:
    evaluated = SimpleNamespace(logits=torch.tensor(found))
    model = SimpleNamespace(action_space=space, policy=SimpleNamespace(log_std=torch.zeros(2)))
    teacher = SimpleNamespace(log_std=torch.zeros(2))
    batch = SimpleNamespace(action_masks=None if masks is None else torch.tensor(masks))
    return float(divergence(model, teacher, torch.tensor(wanted), evaluated, batch))  # type: ignore[arg-type]


def test_the_divergence_is_that_of_the_distributions() -> None:
    wanted, found = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    by_hand = (0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert kl(spaces.Discrete(2), wanted, found) == pytest.approx(by_hand)
    both = np.hstack([wanted, wanted]), np.hstack([found, found])
    assert kl(spaces.MultiDiscrete([2, 2]), *both) == pytest.approx(2 * by_hand)
    assert kl(spaces.Discrete(2), wanted, found, [[True, False], [True, True]]) == pytest.approx(0, abs=1e-7)
    means = np.array([[1.0, 2.0]]), np.array([[0.0, 0.0]])
    assert kl(spaces.Box(-1, 1, (2,)), *means) == pytest.approx((1 + 4) / 2)


@pytest.fixture
def teacher(trained: RunCommand) -> Finished:
    return trained(*CORRIDOR, "total_timesteps=2048", "algo.learning_rate=0.01")


def logged(run: Finished) -> list[float]:
    return [float(row["train/teacher_kl"]) for row in run.table("progress.csv") if row.get("train/teacher_kl")]


def test_a_run_with_a_relative_path_is_resumed_from_another_folder(
    teacher: Finished, fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(teacher.folder.parent)
    name = teacher.folder.name
    run = fasttrain(*CORRIDOR, f"algo.teacher={name}", f"init_from={name}/model.zip", "checkpoint_every=64").ok()
    assert run.json("plan.json")["config"]["algo"]["teacher"] == str(teacher.folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fasttrain("resume", f"run={run.folder}", "total_timesteps=512").ok()


def test_the_term_is_logged_pulls_and_fades(teacher: Finished, fasttrain: RunCommand) -> None:
    strong = fasttrain(*CORRIDOR, f"algo.teacher={teacher.folder}", "algo.teacher_coef=5", "total_timesteps=1024").ok()
    divergences = logged(strong)
    assert divergences[-1] < 0.3 * divergences[0]
    file = f"algo.teacher={teacher.folder / 'model.zip'}"
    assert logged(fasttrain(*CORRIDOR, file, "algo.teacher_coef=5", "total_timesteps=1024")) == divergences
    fading = logged(fasttrain(*CORRIDOR, f"algo.teacher={teacher.folder}", "algo.learning_rate=1e-9"))
    assert len(fading) == 4
    assert fading[0] / fading[2] == pytest.approx(0.75 / 0.25, rel=0.1), "a quarter of the training is left then"
    assert fading[3] == 0
    even = logged(fasttrain(*CORRIDOR, file, "algo.learning_rate=1e-9", "algo.teacher_coef=5"))
    assert even[3] == pytest.approx(even[0], rel=0.1), "one number does not fade"
    assert "loss is set on the instance" in strong.out
    rows = {row["flag"]: (row["requested"], row["effective"]) for row in strong.json("plan.json")["flags"]}
    assert rows["fused_update"] == ("auto", "off"), "kernels step aside"
    assert stable_baselines3.PPO.load(strong.folder / "model.zip", device="cpu").num_timesteps == 1024


@pytest.mark.parametrize("typed", wrong_inputs("teachers"))
def test_what_cannot_teach_is_refused(typed: str, teacher: Finished, fasttrain: RunCommand) -> None:
    folder = str(teacher.folder)
    done = fasttrain(*CORRIDOR, *typed.replace("FOLDER", folder).split())
    done.refused()
    assert_says("teachers", typed, done.err.replace(folder, "FOLDER"))
