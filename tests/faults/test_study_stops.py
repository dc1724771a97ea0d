"""Studies and sweeps that a signal reaches: the cell saves and ends, what is finished is kept, nobody is left."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from injector import Nursery, Training

# A cell that lasts until it is stopped; SIGINT is ignored where tests run in the background of a shell, SIGTERM is not.
ENDLESS = ("env.id=CartPole-v1", "algo=ppo", "num_envs=2", "vec_env=dummy", "checkup=off", "total_timesteps=1e9",
           "algo.rollout_size=256", "checkpoint_every=256", "eval.episodes=2", "torch_threads=1",
           "hydra.run.dir=run", "hydra.sweep.dir=run")  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and fork")
@pytest.mark.parametrize(
    ("arguments", "file", "again"),
    [
        (("compare", "candidates=[baseline,balance]", "seeds=1", "report=false"), "study.json",
         "fasttrain compare run={} goes on"),
        (("train", "-m", "seed=1,2"), "sweep.json", "hydra.sweep.dir={} on_existing=resume"),
    ],
    ids=["compare", "sweep"],
)  # fmt: skip
def test_sigterm_ends_the_cell_and_keeps_what_there_is(
    arguments: tuple[str, ...], file: str, again: str, tmp_path: Path, nursery: Nursery
) -> None:
    training = Training(nursery, tmp_path, (*arguments, *ENDLESS))
    folder = training.run
    assert training.until("write a checkpoint of a cell", lambda: [*folder.rglob("step_*")], pause_s=0.05)
    assert training.others(), "the cell is a process of its own"
    training.send(signal.SIGTERM)
    assert training.end() == 4, training.said()
    assert training.litter() == []
    (summary,) = folder.rglob("summary.json")  # of the one cell that had begun
    stopped = json.loads(summary.read_text())
    assert stopped["status"] == "stopped"
    assert stopped["env_steps"] >= 256
    assert [cell["status"] for cell in json.loads((folder / file).read_text())["cells"]] == ["stopped"]
    assert "Traceback" not in training.said()
    assert again.format(folder) in training.said().splitlines()[-1]
    cell = (summary.parent / "log.txt").read_text().splitlines()[-1]
    assert cell.startswith(f"stopped; saved in {summary.parent}: model.zip and the checkpoint of ")
    assert cell.endswith(f"; fasttrain resume run={summary.parent} goes on")
