"""Studies and sweeps that a signal reaches: the cell saves and ends, what is finished is kept, nobody is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 120.0
# A cell that lasts until it is stopped; SIGINT is ignored where tests run in the background of a shell, SIGTERM is not.
ENDLESS = ("env.id=CartPole-v1", "algo=ppo", "num_envs=2", "vec_env=dummy", "checkup=off", "total_timesteps=1e9",
           "algo.rollout_size=256", "checkpoint_every=256", "eval.episodes=2", "torch_threads=1")  # fmt: skip
COMMANDS = {
    "compare": ("compare", "candidates=[baseline,balance]", "seeds=1", "report=false", *ENDLESS),
    "sweep": ("train", "-m", "seed=1,2", *ENDLESS),
}


def until(what: str, holds: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"no {what}; exit code {process.returncode}; its output:\n{log.read_text()}")
        time.sleep(0.05)


@pytest.mark.parametrize("name", COMMANDS)
def test_sigterm_ends_the_cell_and_keeps_what_there_is(name: str, tmp_path: Path) -> None:
    folder, log = tmp_path / "study", tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "fasttrain",
        *COMMANDS[name],
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
    try:
        until("checkpoint of a cell", lambda: [*folder.rglob("step_*")], process, log)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "the cell is a process of its own"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 4, log.read_text()
        _, alive = psutil.wait_procs(children, timeout=5.0)
        assert not alive
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            each.kill()
        process.kill()
        process.wait()
    (summary,) = folder.rglob("summary.json")  # of the one cell that had begun
    stopped = json.loads(summary.read_text())
    assert stopped["status"] == "stopped"
    assert stopped["env_steps"] >= 256
    stored = json.loads((folder / {"compare": "study.json", "sweep": "sweep.json"}[name]).read_text())
    assert [cell["status"] for cell in stored["cells"]] == ["stopped"]
    said = log.read_text()
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    again = {
        "compare": f"fasttrain compare run={folder} goes on",
        "sweep": f"hydra.sweep.dir={folder} on_existing=resume",
    }
    assert again[name] in last
    cell = (summary.parent / "log.txt").read_text().splitlines()[-1]
    assert cell.startswith(f"stopped; saved in {summary.parent}: model.zip and the checkpoint of ")
    assert cell.endswith(f"; fasttrain resume run={summary.parent} goes on")
