"""fasttrain doctor from end to end, on a small run; the trainings that try a change are played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import RunCommand
from fasttrain_studies import doctor as module
from fasttrain_studies.advice import Candidate
from fasttrain_studies.doctor import Doctor
from fasttrain_studies.study import Cell

SMALL = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=4", "torch_threads=1",
         "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=4")  # fmt: skip
SLOW = Candidate((("algo.n_epochs", 2),), ("update",), "half the updates")


@pytest.fixture(autouse=True)
def _looks_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.05)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Overrides of the cells that would have run; the changed side is twice as fast."""
    started: list[list[str]] = []

    def run_cell(command: str, overrides: Sequence[str], folder: Path, label: str = "") -> tuple[Cell, bool]:
        started.append(list(overrides))
        speed = 200.0 if "algo.n_epochs=2" in overrides else 100.0 - len(started)
        return Cell(label, list(overrides), folder, 0, "", 1.0, summary={"steps_per_s": speed}), False

    monkeypatch.setattr(module, "run_cell", run_cell)
    monkeypatch.setattr(module, "advise", lambda now, again, tell: [module.Advice(SLOW, 0.8)])
    return started


def test_it_measures_advises_tries_and_stores(fasttrain: RunCommand, cells: list[list[str]]):
    done = fasttrain("doctor", *SMALL, "total_timesteps=999", "stop.max_minutes=5").ok()
    stored = done.json("doctor.json")
    assert stored["status"] == "done"
    assert set(stored["alone_steps_per_s"]) == {"env", "policy", "update", "storing", "logging"}
    seconds = stored["seconds_per_step"]
    limit = 1 / (seconds["env"] + seconds["policy"] + seconds["update"])
    assert stored["limit_steps_per_s"] == pytest.approx(limit)
    assert stored["share_of_limit"] == pytest.approx(stored["steps_per_s"] / limit)
    (advice,) = stored["advice"]
    assert (advice["change"], advice["expected_gain"]) == ("algo.n_epochs=2", 0.8)
    assert advice["real_gain"] == pytest.approx(200 / 99 - 1), "the better of two of each"
    assert ["algo.n_epochs=2" in cell for cell in cells] == [False, True, True, False]
    assert all(cell.count("algo.n_epochs=4") + cell.count("algo.n_epochs=2") == 1 for cell in cells)
    assert not any(text.startswith(("stop", "doctor", "total_timesteps=999")) for cell in cells for text in cell)
    for words in ("Machine: ", "stepping the envs", "Limit of this configuration", "% of the limit", "+80 % expected"):
        assert words in done.out


def test_advice_comes_from_measuring_again(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TRIED", 0)
    done = fasttrain("doctor", *SMALL).ok()
    for advice in done.json("doctor.json")["advice"]:
        assert advice["expected_gain"] >= 0.05
        assert advice["real_gain"] is None
    assert "What would make it faster:" in done.out or "None of the changes considered makes the run faster" in done.out


@pytest.mark.parametrize("test", ["policy", "update", "logging"])
def test_one_part_alone(fasttrain: RunCommand, test: str):
    done = fasttrain("doctor", *SMALL, "--test", test).ok()
    stored = done.json("doctor.json")
    assert test in stored["alone_steps_per_s"]
    assert (stored["limit_steps_per_s"], stored["advice"]) == (None, [])
    assert "Limit of" not in done.out


def test_a_finished_run_brings_its_configuration_and_its_speed(fasttrain: RunCommand, cells: list[list[str]]):
    run = fasttrain(*SMALL, "total_timesteps=128", "eval.episodes=0", "report=false", "live=off").ok()
    done = fasttrain("doctor", f"run={run.folder}").ok()
    stored = done.json("doctor.json")
    assert stored["steps_per_s"] == pytest.approx(run.json("summary.json")["steps_per_s"])
    assert stored["of_run"] == str(run.folder)
    assert "algo.rollout_size=64" in stored["overrides"]
    assert "algo.rollout_size=64" in cells[0]
    assert "The run: " in done.out
    for content, told in (("{", "plan.json is no JSON"), ("[]", "holds no configuration")):
        (run.folder / "plan.json").write_text(content)
        fasttrain("doctor", f"run={run.folder}").refused(told)


def test_ctrl_c_leaves_what_was_measured(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: Doctor) -> None:
        self.samples["env"] = [2e-6, 2e-6]
        raise KeyboardInterrupt

    monkeypatch.setattr(Doctor, "examine", interrupted)
    done = fasttrain("doctor", *SMALL)
    assert done.exit_code == 4
    stored = done.json("doctor.json")
    assert (stored["status"], stored["alone_steps_per_s"]) == ("stopped", {"env": 500_000.0})
    assert "stopped; these are the results so far" in done.out
