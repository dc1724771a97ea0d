"""Wrong inputs to the command as a process of its own: closed pipes, signals, a working directory that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from wrong_inputs_envs import MODULES
from wrong_inputs_files import PACKAGE
from wrong_inputs_settings import ENV, Case, with_files

RUN = (*ENV, "algo=ppo")


class Ended(NamedTuple):
    """What an input came to."""

    code: int | None  # None: it hung, was taken, or raised
    text: str  # all that was printed
    how: str = ""  # accepted, hung, raised …


def _close(*fds: int) -> Callable[[], None]:
    def close() -> None:
        for fd in fds:
            os.close(fd)

    return close


def _to_a_closed_pipe(*fds: int) -> Callable[[], None]:
    def connect() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        for fd in fds:
            os.dup2(writing, fd)

    return connect


def _in_a_folder_that_is_gone() -> None:
    gone = Path.cwd() / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()


# Kind → what happens in the child before Python starts. `pass_fds` and the like would not do: it is about fds 0 to 2.
BEFORE: dict[str, Callable[[], None]] = {
    "stdin closed": _close(0),
    "stdout closed": _close(1),
    "stdout to a closed pipe": _to_a_closed_pipe(1),
    "working directory gone": _in_a_folder_that_is_gone,
    "working directory that cannot be written": lambda: os.chdir("/proc"),
    "stderr closed": _close(2),
    "stderr to a closed pipe": _to_a_closed_pipe(2),
}
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "no HOME": {"HOME": None},
    "a HOME that is not there": {"HOME": "/nothing/of/that/name"},
    "LANG=C": {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "COLUMNS=20": {"COLUMNS": "20"},
    "COLUMNS=0": {"COLUMNS": "0", "LINES": "0"},
    "COLUMNS=abc": {"COLUMNS": "abc"},
    "no TERM": {"TERM": None},
    "no PATH": {"PATH": None},
    "a TMPDIR that is not there": {"TMPDIR": "/nothing/of/that/name"},
    "a variable that is no text": {"NUM_ENVS": "\udcff"},
}
WORDLESS = ("stderr closed", "stderr to a closed pipe")  # nobody can be told
CTRL_C_AFTER_S = (0.05, 0.2, 0.4, 0.7, 1.0, 2.0)  # the last may come too late
BEGUN = "print('begun', flush=True); import runpy; runpy.run_module('fasttrain', run_name='__main__')"


def cases() -> Iterator[Case]:
    """All of them."""
    broken = with_files({"conf/profile/mine.yaml": PACKAGE + "num_envs: [1\n"})
    for way in BEFORE:
        named = () if way in WORDLESS else ("num_envs", "working directory", "output folder")
        yield Case(way, (*RUN, "num_envs=abc"), named)
        if way not in ("working directory gone", "working directory that cannot be written"):
            named = () if way in WORDLESS else ("mine.yaml",)
            yield Case(way, (*RUN, "--config-dir", "conf", "+profile=mine"), named, prepare=broken)
    yield Case("working directory gone", RUN, ("working directory",))
    yield Case("working directory that cannot be written", RUN, ("output folder",))
    for way in ENVIRONMENTS:
        yield Case(way, (*RUN, "num_envs=abc"), ("num_envs",))
        yield Case(way, (*RUN, "batch_size=9", "algo.n_steps=4"), ("batch_size", "num_envs"))
    for seconds in CTRL_C_AFTER_S:
        yield Case(f"Ctrl-C after {seconds:g} s", (*RUN, "num_envs=abc"), (), codes=(130, 2))
    for what in ("exits on import", "exits in init", "reads in init", "syntax", "not text", "raises in init",
                 "prints in init"):  # fmt: skip
        source = MODULES[what]
        for vec_env in ("dummy", "auto"):
            arguments = (
                "env.entry_point=game:Game",
                "algo=ppo",
                f"vec_env={vec_env}",
                "num_envs=2",
                "total_timesteps=8",
            )
            yield Case(f"env: {what}", arguments, ("game", "env.entry_point"), prepare=with_files({"game.py": source}))
    for values in ("num_envs=abc,0", "algo.n_steps=0,-1"):
        yield Case("sweep of wrong cells", ("-m", *RUN, values), ("num_envs", "algo.n_steps"))


def start(case: Case, folder: Path, most_s: float) -> Ended:
    """The process on the case; ended, with all that it started, when `most_s` is over."""
    environment = {**os.environ, **dict(case.environment)}
    for name, value in ENVIRONMENTS.get(case.kind, {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    with (folder.with_suffix(".txt")).open("w+b") as said:
        stops = case.kind.startswith("Ctrl-C")
        program = ["-c", BEGUN] if stops else ["-m", "fasttrain"]
        process = subprocess.Popen(
            [sys.executable, *program, *case.arguments], cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, preexec_fn=BEFORE.get(case.kind),
        )  # fmt: skip
        how = ""
        try:
            if stops:
                while not os.pread(said.fileno(), 5, 0) and process.poll() is None:  # Python's own start
                    time.sleep(0.005)
                time.sleep(float(case.kind.split()[2]))
                process.send_signal(signal.SIGINT)
            process.wait(most_s)
        except subprocess.TimeoutExpired:
            how = f"hung for {most_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        return Ended(None if how else process.returncode, said.read().decode("utf-8", "replace"), how)
