"""Cells: a process each, told apart by what they left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fasttrain.studies.study import Cell, last_line, merged, run_cell, why

SMALL = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "algo.rollout_size=512", "batch_size=64",
         "algo.n_epochs=1", "eval.episodes=4", "vec_env=dummy", "torch_threads=1", "checkup=off",
         "report=false")  # fmt: skip


def test_a_cell_leaves_its_summary_and_its_log(tmp_path: Path):
    cell, stopped = run_cell("train", [*SMALL, "total_timesteps=1024"], tmp_path / "it's", label="plain", seed=3)
    assert (cell.status, cell.exit_code, cell.error, stopped) == ("done", 0, "", False)
    assert cell.done
    assert cell.summary["env_steps"] == 1032  # two rollouts of 12 envs × 43 steps
    assert "[PERF]" in (cell.folder / "log.txt").read_text()
    stored = json.loads(json.dumps(cell.to_dict(tmp_path)))
    assert stored["folder"] == "it's"
    assert Cell.from_dict(stored, tmp_path).summary == cell.summary


def test_bad_input_is_illegal_and_says_why(tmp_path: Path):
    cell, _ = run_cell("train", ["num_env=3"], tmp_path)
    assert (cell.status, cell.done) == ("illegal", False)
    assert cell.error == "unknown key 'num_env'; did you mean 'num_envs' or 'eval.num_envs'?"


def test_a_sigterm_is_passed_on_and_the_cell_saves(tmp_path: Path):
    def stop_once_it_trains() -> None:
        episodes = tmp_path / "episodes.csv"
        while not episodes.exists() or episodes.read_text().count("\n") < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=stop_once_it_trains)
    killer.start()
    before = signal.getsignal(signal.SIGTERM)
    cell, stopped = run_cell("train", [*SMALL, "total_timesteps=1e9"], tmp_path)
    killer.join()
    assert stopped
    assert (cell.status, cell.summary["status"]) == ("stopped", "stopped")
    assert (tmp_path / "model.zip").is_file()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("base", "more", "expected"),
    [
        (["+profile=speed", "num_envs=4"], ["profile=baseline"], ["num_envs=4", "profile=baseline"]),
        (["num_envs=4", "seed=1"], ["num_envs=8"], ["seed=1", "num_envs=8"]),
        (["--config-dir=here", "a=1"], ["--config-dir=there"], ["--config-dir=here", "a=1", "--config-dir=there"]),
    ],
)
def test_later_overrides_replace_earlier_ones(base: list[str], more: list[str], expected: list[str]):
    assert merged(base, more) == expected


def test_what_ended_a_cell(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("one\nfasttrain: error: no such env\n\nlast\n")
    assert why(2, log) == "no such env"
    assert why(-9, log) == "killed by signal SIGKILL"
    assert why(0, log) == why(4, log) == ""
    log.write_text("")
    assert why(1, log) == "no output"


def test_what_a_cell_says_last_is_read_while_it_runs(tmp_path: Path):
    with pytest.raises(OSError, match="log.txt"):
        last_line(tmp_path)
    log = tmp_path / "log.txt"
    log.touch()
    assert last_line(tmp_path) == "starting"
    log.write_bytes(b"x" * 5000 + b"\n 12,000/40,000 steps 30 % \xc2\xb7 reward\x1b[2J 5\n\n")
    assert last_line(tmp_path) == "12,000/40,000 steps 30 % · reward\N{REPLACEMENT CHARACTER}[2J 5"
