from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from conftest import configured
from fasttrain.runs import evaluator
from fasttrain.runs.evaluator import Evaluator, Result
from fasttrain.saving.files import Saving
from fasttrain_vec.process import WorkerLostError

CONFIG = configured("env.id=CartPole-v1", "algo=ppo")


def quality(reward: float, episodes: int = 5) -> dict[str, Any]:
    none = dict.fromkeys(("mean_reward", "win_rate", "score_diff"))
    return {"episodes": episodes, "mean_reward": reward, "win_rate": None, "score_diff": None, "ci95": none}


class Beside:
    """In the place of the process: gives results back when told to."""

    def __init__(self, config: Any, folder: Path, save: Any) -> None:
        self.folder, self.save, self.waiting, self.left_out, self.closed = folder, save, [], 0, False
        self.rewards: list[float | WorkerLostError] = []
        self.asked: list[tuple[bool, Path | None]] = []

    def submit(self, env_steps: int, wall_s: float, measure: bool, video: Path | None) -> None:
        self.asked.append((measure, video))
        file = self.folder / str(env_steps) / "best_model.zip"
        file.parent.mkdir()
        self.save(file)
        (file.parent / "best_model.opponents.pt").touch()
        self.waiting.append((env_steps, wall_s, file))

    def poll(self) -> Result | None:
        if not self.rewards:
            return None
        reward = self.rewards.pop(0)
        env_steps, wall_s, file = self.waiting.pop(0)
        if isinstance(reward, WorkerLostError):
            raise reward
        return Result(env_steps, wall_s, quality(reward), 2.0, file)

    def wait(self, keep_on: Any) -> Result | None:
        return self.poll() if self.waiting and keep_on() else None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(evaluator, "BackgroundEvaluation", Beside)
    said: list[str] = []
    saved: list[str] = []
    rewards = iter([1.0, 3.0, 2.0])

    def save(file: Path) -> None:
        saved.append(file.name)
        file.write_text(f"saved in {file.parent.name}")

    def make(beside: bool, num_envs: int = 8, **of: Any) -> Evaluator:
        config = dataclasses.replace(CONFIG, eval_async=beside, num_envs=num_envs)
        return Evaluator(config, tmp_path, lambda: quality(next(rewards)), save, said.append, Saving(said.append), **of)

    return make, said, saved, tmp_path


def test_in_the_training_the_best_is_saved(parts: Any):
    make, said, saved, _ = parts
    evaluator = make(beside=False)
    for step in (10, 20, 30):
        evaluator.evaluate(step, step / 10)
        evaluator.collect()
    evaluator.finish(lambda: True)
    assert [row["mean_reward"] for row in evaluator.log.rows] == [1.0, 3.0, 2.0]
    assert saved == ["best_model.zip", "best_model.zip"]
    assert said[1] == "[EVAL] 20 steps: mean reward 3"


def test_beside_it_the_best_snapshot_becomes_the_best_model(parts: Any):
    make, said, _, folder = parts
    evaluator = make(beside=True)
    beside = evaluator.background
    for step in (10, 20, 30):
        evaluator.evaluate(step, step / 10)
    evaluator.collect()
    assert evaluator.log.rows == [], "nothing has come back"
    beside.rewards = [1.0, 3.0]
    evaluator.collect()
    assert [row["env_steps"] for row in evaluator.log.rows] == [10]
    evaluator.collect()
    assert (folder / "best_model.zip").read_text() == "saved in 20"
    beside.rewards, beside.left_out = [2.0], 4
    evaluator.finish(lambda: True)
    assert [(row["env_steps"], row["wall_s"]) for row in evaluator.log.rows] == [(10, 1.0), (20, 2.0), (30, 3.0)]
    left = {path.name for path in folder.iterdir()}
    assert left == {"best_model.opponents.pt", "best_model.zip", "evaluations.csv"}
    assert evaluator.beside_s == 6.0
    assert beside.closed
    assert "waiting for 1 evaluations that were due during training" in said
    assert "4 evaluations were left out: one takes longer than eval_every steps" in said


def test_a_video_is_no_evaluation(parts: Any):
    make, said, saved, folder = parts
    evaluator = make(beside=False, film=lambda file: f"filmed {file.relative_to(folder)}")
    evaluator.evaluate(10, 1.0, measure=False, film=True)
    assert (said, saved, evaluator.log.rows) == ([f"filmed {Path('videos/step_10.mp4')}"], [], [])
    evaluator = make(beside=True)
    evaluator.evaluate(10, 1.0, measure=False, film=True)
    evaluator.evaluate(20, 1.0)
    assert evaluator.background.asked == [(False, folder / "videos" / "step_10.mp4"), (True, None)]


def test_a_best_model_that_could_not_be_written_is_tried_again(parts: Any, monkeypatch: pytest.MonkeyPatch):
    make, said, _, folder = parts
    full = iter([True])

    def replace(part: Path, target: Path, replace: Any = os.replace) -> None:
        if target.suffix == ".zip" and next(full, False):
            raise OSError(28, "No space left on device")
        replace(part, target)

    monkeypatch.setattr("fasttrain.runs.evaluator.os.replace", replace)
    evaluator = make(beside=True)
    evaluator.background.rewards = [1.0, 0.5, 2.0]
    for step in (10, 20, 30):
        evaluator.evaluate(step, step / 10)
        evaluator.collect()
        assert evaluator.best_reward == {10: float("-inf"), 20: 0.5, 30: 2.0}[step]
    assert (folder / "best_model.zip").read_text() == "saved in 30"
    assert "warning: best_model.zip could not be written ([Errno 28] No space left on device); the run goes on" in said
    assert evaluator.saving.failed == {}


@pytest.mark.parametrize(
    ("num_envs", "hint"), [(8, ""), (1, "; perhaps no second env can be open beside the training's env")]
)
def test_where_the_process_fails_evaluation_goes_on_in_the_training(parts: Any, num_envs: int, hint: str):
    make, said, _, _ = parts
    evaluator = make(beside=True, num_envs=num_envs)
    beside = evaluator.background
    for steps in (10, 20, 30):
        evaluator.evaluate(steps, 1.0)
    beside.rewards = [WorkerLostError("it has died")]
    evaluator.saving.failed["a snapshot to evaluate"] = "no room"
    evaluator.collect()
    assert beside.closed
    lost = "(2 that waited are lost)"
    assert said == [
        f"[EVAL] no evaluation beside training: it has died{hint} {lost}; from now on the training itself evaluates"
    ]
    assert evaluator.saving.failed == {}, "no snapshot is missed"
    evaluator.evaluate(40, 2.0)
    assert [row["env_steps"] for row in evaluator.log.rows] == [40]


def test_what_never_comes_back_is_given_up_and_a_stopped_run_waits_for_nothing(parts: Any):
    make, said, _, _ = parts
    for goes_on, last in ((False, []), (True, ["1 evaluations were given up: they took too long"])):
        evaluator = make(beside=True)
        evaluator.evaluate(10 + goes_on, 1.0)
        evaluator.finish(lambda goes_on=goes_on: goes_on)
        assert (evaluator.log.rows, said[-1:]) == ([], last)
