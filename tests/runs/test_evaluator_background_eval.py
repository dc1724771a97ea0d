from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from rich.console import Console
from untouched import untouched

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import evaluator
from fasttrain.runs.envs import build_vec_env, env_facts, this_machine
from fasttrain.runs.evaluate import evaluate_both
from fasttrain.runs.evaluator import MOST_WAITING, BackgroundEvaluation
from fasttrain.runs.models import build_algorithm
from fasttrain.spec.plan import resolve
from fasttrain_vec.process import WorkerLostError
from worker_toys import signals_rained

SMALL = ("+profile=speed", "vec_env=native", "num_envs=4", "eval.episodes=4", "algo.rollout_size=256", "batch_size=64")


@pytest.fixture(scope="module")
def game() -> Iterator[Any]:
    config = resolve(configured(*SMALL), {}, env_facts(configured(*SMALL)), this_machine()).config
    env = build_vec_env(config, 4, 0)
    yield config, build_algorithm(config, env, PhaseClock())
    env.close()


@pytest.fixture
def begin(game: Any, tmp_path: Path) -> Iterator[Callable[[Callable[[Path], Any]], BackgroundEvaluation]]:
    made = []

    def one(save: Callable[[Path], Any] = game[1].save) -> BackgroundEvaluation:
        made.append(BackgroundEvaluation(game[0], tmp_path, save))
        return made[-1]

    yield one
    for evaluation in made:
        evaluation.close()


def wait_for(evaluation: BackgroundEvaluation) -> Any:
    result = evaluation.wait(lambda: True)
    assert result is not None
    return result


def test_it_gives_what_an_evaluation_in_the_trainer_gives_of_the_model_as_it_was_in_order(game: Any, begin: Any):
    config, model = game
    evaluation = begin()
    expected = evaluate_both(model, config, Console(quiet=True), sampled=False)["greedy"]
    with signals_rained():  # on it, while it starts and while it plays: they are for the trainer
        with untouched(model):
            evaluation.submit(1, 2.5)
        assert evaluation.wait(lambda: False) is None, "it ends when it is told to"
        with torch.no_grad():
            for parameter in model.policy.parameters():
                parameter.normal_()
        for step in range(2, 5):
            evaluation.submit(step, 0.0)
        assert [step for step, _, _ in evaluation.waiting] == list(range(1, 1 + MOST_WAITING))
        assert evaluation.left_out == 4 - MOST_WAITING
        first = wait_for(evaluation)
    assert (first.env_steps, first.wall_s, first.quality) == (1, 2.5, expected)
    assert first.seconds > 0
    assert first.file == evaluation.folder / "1" / "best_model.zip"
    second = wait_for(evaluation)
    assert second.env_steps == 2
    assert first.quality != second.quality
    assert evaluation.wait(lambda: True) is None, "nothing is waited for"
    (pid,) = (process.pid for process in multiprocessing.active_children())
    evaluation.close()
    assert not psutil.pid_exists(pid)
    assert not evaluation.folder.exists()


def test_a_process_that_dies_or_cannot_read_its_snapshot_is_an_error(begin: Any):
    evaluation = begin(lambda file: file.write_bytes(b"no zip"))
    evaluation.submit(1, 0.0)
    with pytest.raises(WorkerLostError, match=r"\w+: "):
        wait_for(evaluation)
    evaluation.close()
    evaluation = begin()
    evaluation.submit(1, 0.0)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="the process that evaluates ended with exit code"):
        wait_for(evaluation)


KILLED = """
import multiprocessing, time
from pathlib import Path
from fasttrain.runs.evaluator import BackgroundEvaluation
from fasttrain.cli.compose import configured
if __name__ == "__main__":
    config = configured(["env.id=CartPole-v1", "algo=ppo"])
    evaluation = BackgroundEvaluation(config, Path(), lambda file: file.write_bytes(b""))
    evaluation.submit(1, 0.0)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
"""


def test_the_process_ends_with_a_trainer_that_is_killed(tmp_path: Path):
    (tmp_path / "trainer.py").write_text(KILLED)
    trainer = subprocess.Popen([sys.executable, "trainer.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    process = psutil.Process(int(trainer.stdout.readline()))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    gone, _ = psutil.wait_procs([process], timeout=200)
    assert gone


def test_a_process_that_cannot_be_started_is_an_error_and_leaves_nothing(begin: Any, monkeypatch: pytest.MonkeyPatch):
    failing = MagicMock(side_effect=OSError(12, "Cannot allocate memory"))
    monkeypatch.setattr(evaluator, "PipedProcess", failing)
    evaluation = begin()
    with pytest.raises(WorkerLostError, match=r"cannot be started \(\[Errno 12\] Cannot allocate memory\)"):
        evaluation.submit(100, 1.0)
    assert evaluation.waiting == []
