"""Wrong inputs by the thousand with `-m campaign`, a sample of them otherwise; and that what is bad is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import wrong_inputs
from wrong_inputs import Case, Ended, in_this_process, judged, settings
from wrong_inputs_by_hand import SMALL_RUN, by_hand

from fasttrain.spec.reading import all_keys

pytestmark = pytest.mark.skipif(os.name == "nt", reason="closed descriptors and signals of POSIX")
SAMPLE = 25
CASES: dict[str, Callable[[], list[Case]]] = {"settings": lambda: [*settings(0)], "hand": lambda: [*by_hand()]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """What gives a small finished run, trained when first asked for."""
    folder = tmp_path_factory.mktemp("trained") / "run"

    def once() -> Path:
        if not (folder / "summary.json").exists():
            command = [sys.executable, "-m", "fasttrain", *SMALL_RUN, f"hydra.run.dir={folder}"]
            subprocess.run(command, cwd=folder.parent, check=True, stdout=subprocess.DEVNULL)
        return folder

    return once


@pytest.mark.parametrize(
    "count", [SAMPLE, pytest.param(None, marks=[pytest.mark.campaign, pytest.mark.timeout(0)])], ids=["sample", "all"]
)
@pytest.mark.parametrize("part", CASES)
def test_wrong_inputs_are_told_in_one_line(
    part: str, count: int | None, tmp_path: Path, trained: Callable[[], Path]
) -> None:
    cases = CASES[part]()
    tried = random.Random(1).sample(cases, count) if count else cases
    judgements = ((case, judged(case, in_this_process(case, tmp_path / "case", trained))) for case in tried)
    assert [f"{case}: {wrong}" for case, wrong in judgements if wrong] == []


def test_every_setting_is_tried() -> None:
    tried = {argument.partition("=")[0] for case in settings(0) for argument in case.arguments}
    assert set(all_keys()) - tried <= {"profile", "tuned", "algo"}


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        ((2, "fasttrain: error: num_envs=0: must be at least 1\n"), ""),
        ((2, "loading\nfasttrain: error: num_envs=0: must be at least 1\n"), ""),
        ((2, ""), "wordless: "),
        ((2, "fasttrain: error: a number is wrong\nnum_envs\n"), "does not name num_envs: fasttrain: error: a number"),
        ((1, "fasttrain: error: num_envs=0\n"), "exit code 1, not 2: fasttrain: error: num_envs=0"),
        ((2, "Traceback (most recent call last)\nfasttrain: error: num_envs=0\n"), "traceback: fasttrain: error: num"),
        ((None, "", "hung for 60 s"), "hung for 60 s"),
    ],
)
def test_what_is_bad(ended: tuple[object, ...], wrong: str) -> None:
    told = judged(Case("out of range", ("num_envs=0",), ("num_envs",)), Ended(*ended))  # type: ignore[arg-type]
    assert told.startswith(wrong) if wrong else not told


def test_an_input_that_is_taken_and_one_that_hangs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=1", "batch_size=8", "algo.n_steps=8")
    taken = Case("right", small, ("num_envs",))
    assert judged(taken, in_this_process(taken, tmp_path / "taken", lambda: tmp_path)).startswith("accepted")
    monkeypatch.setattr(wrong_inputs, "MOST_S", 0.2)
    monkeypatch.setattr("fasttrain.cli._dispatch", lambda arguments: [None for _ in iter(int, 1)])
    assert judged(taken, in_this_process(taken, tmp_path / "hangs", lambda: tmp_path)).startswith("hung for 0.2 s")


def _to_a_closed_pipe(*fds: int) -> Callable[[], None]:
    def connect() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        for fd in fds:
            os.dup2(writing, fd)

    return connect


def _in_a_folder_that_is_gone() -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path.cwd().rmdir()


PROCESSES: dict[str, tuple[Callable[[], None] | None, dict[str, str], str]] = {  # before it starts, environment, told
    "stdin closed": (lambda: os.close(0), {}, "num_envs"),
    "stdout closed": (lambda: os.close(1), {}, "num_envs"),
    "stdout to a closed pipe": (_to_a_closed_pipe(1), {}, "num_envs"),
    "stderr to a closed pipe": (_to_a_closed_pipe(2), {}, ""),
    "working directory gone": (_in_a_folder_that_is_gone, {}, "working directory"),
    "working directory that cannot be written": (lambda: os.chdir("/proc"), {}, "output folder"),
    "a HOME that is not there": (None, {"HOME": "/nothing/of/that/name"}, "num_envs"),
    "ASCII": (None, {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}, "num_envs"),
    "no width": (None, {"COLUMNS": "0", "LINES": "0"}, "num_envs"),
    "a TMPDIR that is not there": (None, {"TMPDIR": "/nothing/of/that/name"}, "num_envs"),
    "a variable that is no text": (None, {"NUM_ENVS": "\udcff"}, "num_envs"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", PROCESSES)
def test_a_process_tells_it_too(way: str, tmp_path: Path) -> None:
    before, environment, told = PROCESSES[way]
    command = [sys.executable, "-m", "fasttrain", *SMALL_RUN[:-1], "num_envs=abc"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, preexec_fn=before, timeout=120,
        stdin=subprocess.DEVNULL, capture_output=True, errors="replace",
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
