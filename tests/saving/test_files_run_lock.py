"""A run's folder belongs to one process at a time, for as long as that lives."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from conftest import RunCommand
from fasttrain.errors import ConfigError
from fasttrain.saving.files import LOCK, holder, lock_folder

HOLD = """
import subprocess, sys, time
from pathlib import Path
from fasttrain.saving.files import lock_folder

with lock_folder(Path(sys.argv[1])):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(99)
"""


@contextmanager
def held(folder: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Another process that has the lock, and a child of it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(process.stdout.readline()))
    try:
        yield process, child
    finally:
        process.kill()
        child.kill()
        process.communicate()


def test_a_second_process_is_refused_until_the_first_is_dead_or_at_its_end(tmp_path: Path) -> None:
    with held(tmp_path) as (process, child):
        with (
            pytest.raises(ConfigError, match=rf"run=.*: still going on \(process {process.pid}\)"),
            lock_folder(tmp_path),
        ):
            pass
        process.kill()
        process.wait()
        assert child.is_running()
        with pytest.raises(KeyError), lock_folder(tmp_path):
            raise KeyError("x")
        with lock_folder(tmp_path):
            for note, told in (("\x1b[2J", "unknown"), ("7", "7")):
                (tmp_path / LOCK).write_text(note)
                with pytest.raises(ConfigError, match=rf"still going on \(process {told}\)"), lock_folder(tmp_path):
                    pass


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_where_nothing_can_be_locked_it_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def unsupported(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with lock_folder(tmp_path), lock_folder(tmp_path):
        assert (tmp_path / LOCK).exists()
    with lock_folder(tmp_path / "nowhere"):
        pass


def test_a_run_that_goes_on_cannot_be_resumed(trained: RunCommand, fasttrain: RunCommand) -> None:
    done = trained("env.id=CartPole-v1", "algo=ppo", "total_timesteps=64", "algo.rollout_size=64", "batch_size=32",
                   "num_envs=2", "vec_env=dummy", "eval.episodes=2", "checkup=off", "report=false")  # fmt: skip
    before = {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file() and path.name != LOCK}
    with lock_folder(done.folder):
        again = fasttrain("resume", f"run={done.folder}", "total_timesteps=128")
    again.refused(f"still going on (process {os.getpid()})")
    assert before == {path: path.read_bytes() for path in before}


def test_without_the_lock_s_file_status_json_tells_who_works_there(tmp_path):
    told = {"phase": "training", "pid": os.getppid(), "host": platform.node(), "time": time.time()}
    (tmp_path / "status.json").write_text(json.dumps(told))
    assert holder(tmp_path) == str(os.getppid())
    with pytest.raises(ConfigError, match="still going on"), lock_folder(tmp_path):
        pass
    (tmp_path / "status.json").write_text(json.dumps({**told, "phase": "done"}))
    assert holder(tmp_path) == ""
