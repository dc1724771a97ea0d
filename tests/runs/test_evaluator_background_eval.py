"""Evaluation in a process beside training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import evaluator
from fasttrain.runs.envs import build_vec_env, env_facts, this_machine
from fasttrain.runs.evaluate import evaluate_both
from fasttrain.runs.evaluator import MOST_WAITING, BackgroundEvaluation
from fasttrain.runs.models import build_algorithm
from fasttrain.spec.plan import resolve
from fasttrain.vec.process import WorkerLostError
from worker_toys import signals_rained

SMALL = ("+profile=speed", "vec_env=native", "num_envs=4", "eval.episodes=6", "algo.rollout_size=256", "batch_size=64")


@pytest.fixture
def game(tmp_path: Path) -> Any:
    config = resolve(configured(*SMALL), {}, env_facts(configured(*SMALL)), this_machine()).config
    env = build_vec_env(config, 4, 0)
    model = build_algorithm(config, env, PhaseClock())
    evaluation = BackgroundEvaluation(config, tmp_path, lambda file: model.save(file))
    yield config, model, evaluation
    evaluation.close()
    env.close()


def wait_for(evaluation: BackgroundEvaluation) -> Any:
    result = evaluation.wait(lambda: True)
    assert result is not None
    return result


def test_it_gives_what_an_evaluation_in_the_trainer_gives_and_leaves_its_random_state_alone(game: Any):
    config, model, evaluation = game
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    evaluation.submit(1000, 2.5)
    assert evaluation.waiting[0][:2] == (1000, 2.5)
    result = wait_for(evaluation)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    expected = evaluate_both(model, config, Console(quiet=True), sampled=False)["greedy"]
    assert (result.env_steps, result.wall_s, result.quality) == (1000, 2.5, expected)
    assert result.seconds > 0
    assert result.file == evaluation.folder / "1000" / "best_model.zip"
    assert evaluation.wait(lambda: True) is None, "nothing is waited for"


def test_snapshots_are_taken_when_submitted_and_come_back_in_order(game: Any):
    _, model, evaluation = game
    with signals_rained():  # on it, while it starts and while it plays: they are for the trainer
        evaluation.submit(1, 0.0)
        with torch.no_grad():
            for parameter in model.policy.parameters():
                parameter.normal_()
        for step in range(2, 5):
            evaluation.submit(step, 0.0)
        assert [step for step, _, _ in evaluation.waiting] == list(range(1, 1 + MOST_WAITING))
        assert evaluation.left_out == 4 - MOST_WAITING
        first = wait_for(evaluation)
    second = wait_for(evaluation)
    assert (first.env_steps, second.env_steps) == (1, 2)
    assert first.quality != second.quality
    process = psutil.Process(evaluation._process.process.pid)
    evaluation.close()
    assert not process.is_running()
    assert not evaluation.folder.exists()


def test_a_snapshot_that_cannot_be_read_is_an_error_with_its_cause(game: Any):
    _, _, evaluation = game
    evaluation._save = lambda file: file.write_bytes(b"no zip")
    evaluation.submit(1, 0.0)
    with pytest.raises(WorkerLostError, match=r"\w+: "):
        wait_for(evaluation)


def test_a_process_that_dies_is_an_error(game: Any):
    _, _, evaluation = game
    evaluation.submit(1, 0.0)
    os.kill(evaluation._process.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="the process that evaluates ended with exit code"):
        wait_for(evaluation)


def test_waiting_ends_when_it_is_told_to(game: Any):
    _, _, evaluation = game
    evaluation.submit(1, 0.0)
    assert evaluation.wait(lambda: False) is None


def test_the_process_ends_with_a_trainer_that_is_killed(tmp_path: Path):
    script = tmp_path / "killed_trainer.py"
    script.write_text(
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from conftest import configured\n"
        "from fasttrain.runs.evaluator import BackgroundEvaluation\n"
        "if __name__ == '__main__':\n"
        "    evaluation = BackgroundEvaluation(configured('env.id=CartPole-v1', 'algo=ppo'), Path(sys.argv[1]),\n"
        "                                      lambda file: file.write_bytes(b''))\n"
        "    evaluation.submit(1, 0.0)\n"
        "    print(evaluation._process.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    tests = str(Path(__file__).resolve().parents[1])
    trainer = subprocess.Popen([sys.executable, str(script), str(tmp_path), tests], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    process = psutil.Process(int(trainer.stdout.readline()))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    gone, _ = psutil.wait_procs([process], timeout=200)
    assert gone


def test_a_process_that_cannot_be_started_is_an_error_and_leaves_nothing(game: Any, monkeypatch: pytest.MonkeyPatch):
    _, _, evaluation = game
    failing = MagicMock(side_effect=OSError(12, "Cannot allocate memory"))
    monkeypatch.setattr(evaluator, "PipedProcess", failing)
    with pytest.raises(WorkerLostError, match=r"cannot be started \(\[Errno 12\] Cannot allocate memory\)"):
        evaluation.submit(100, 1.0)
    assert evaluation.waiting == []
    evaluation.close()
