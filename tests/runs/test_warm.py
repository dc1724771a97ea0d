from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fasttrain.runs import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux only")
PARENT = "PARENT_OF_RUN"


@pytest.fixture
def server() -> Iterator[warm.Server]:
    server = warm.Server()
    yield server
    server.close()


def run(server: warm.Server, log: Path, *arguments: str, **environment: str) -> warm.Forked:
    with log.open("w") as file:
        return server.start(arguments, file, {**os.environ, **environment}, os.sched_getaffinity(0))


def test_a_forked_run_has_the_output_exit_code_and_environment_of_its_own(server: warm.Server, tmp_path: Path):
    plain = subprocess.run([sys.executable, "-m", "fasttrain", "--version"], capture_output=True, text=True, check=True)
    first, wrong = run(server, tmp_path / "a", "--version"), run(server, tmp_path / "b", "num_env=3")
    other = run(server, tmp_path / "c", "--cfg", "job", FASTTRAIN_NUM_ENVS="7", FASTTRAIN_ENV="")
    assert [each.wait(60) for each in (first, wrong, other)] == [0, 2, 0]
    assert (tmp_path / "a").read_text() == plain.stdout
    assert "unknown key 'num_env'" in (tmp_path / "b").read_text()
    assert "num_envs: 7" in (tmp_path / "c").read_text()


def test_a_run_that_is_killed_says_by_which_signal_and_others_go_on(server: warm.Server, tmp_path: Path):
    endless = "env.id=CartPole-v1", "algo=ppo", "total_timesteps=1e9", f"hydra.run.dir={tmp_path}", "checkup=off"
    long = run(server, tmp_path / "a", *endless)
    with pytest.raises(subprocess.TimeoutExpired):
        long.wait(0.0)
    long.kill()
    assert long.wait(60) == -signal.SIGKILL
    assert run(server, tmp_path / "b", "--version").wait(60) == 0


def test_a_server_that_was_killed_is_replaced(tmp_path: Path):
    with (tmp_path / "log").open("w") as log:
        assert warm.start(["--version"], log, os.environ, PARENT).wait(60) == 0
        warm._servers[0].process.kill()
        warm._servers[0].process.wait()
        assert warm.start(["--version"], log, os.environ, PARENT).wait(60) == 0


def test_where_nothing_is_forked_a_run_is_a_process_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with (tmp_path / "log").open("w") as log:
        process = warm.start(["--version"], log, os.environ, PARENT)
        assert isinstance(process, subprocess.Popen)
        assert process.wait(60) == 0
