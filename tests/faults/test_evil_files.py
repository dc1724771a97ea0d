"""Malicious files (evil_files.py): none runs code, writes elsewhere or eats memory; and the same would, if trusted."""

from __future__ import annotations

import dataclasses
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
from evil_files import MODEL, PICKLED, RUN, STATISTICS, Bomb, Evil, evil_files, pickled_key

from conftest import RunCommand, configured
from fasttrain.cli.commands import implementation
from fasttrain.errors import FastTrainError

MOST_GROWTH_MB = 60  # the bombs here would take 150 MB to 8 TB
TYPED = {  # to have a run opened, beside run=FOLDER
    "eval": (),
    "export": ("format=torchscript",),
    "play": ("play.speed=1e9", "play.episodes=1", "play.seed=0"),
    "resume": ("total_timesteps=192",),
}


OPENED: set[str] = set()


def opened(command: str, run: Path) -> tuple[int, str]:
    """Exit code and message, as the command line gives them, without Hydra, which takes longer."""
    config = dataclasses.replace(configured(*TYPED[command]), run=str(run))
    typed = dict.fromkeys(("run", *(text.partition("=")[0] for text in TYPED[command])), "command line")
    (run / "opened").mkdir()
    try:
        return implementation(command)(config, typed, run / "opened", [f"run={run}"]), ""
    except (FastTrainError, MemoryError) as error:
        return getattr(error, "exit_code", 2), str(error)


def outside(folder: Path) -> dict[Path, bytes]:
    """Everything below `folder` but the run, links not followed into it."""
    run = folder / "run"
    return {path: path.read_bytes() for path in folder.rglob("*") if run not in path.parents and path.is_file()}


def peak_mb() -> float:
    """The process's highest use of memory, of Linux's own count; elsewhere 0."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


@pytest.mark.parametrize("evil", [*evil_files()], ids=lambda evil: evil.name)
def test_it_is_refused_in_one_line_or_not_looked_at(evil: Evil, trained: RunCommand, tmp_path: Path):
    folder = tmp_path / "here"
    folder.mkdir()
    run, canary = folder / "run", folder / "executed"
    trained(*RUN).folder.rename(run)
    if evil.command not in OPENED:  # its imports are not the file's
        OPENED.add(evil.command)
        assert opened(evil.command, trained(*RUN).folder) == (0, "")
    evil.spoil(run, canary)
    before = outside(folder)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest use of memory so far
    at_first = peak_mb()
    code, said = opened(evil.command, run)
    grown = peak_mb() - at_first
    assert not canary.exists(), "it ran code"
    assert outside(folder) == before
    assert grown < MOST_GROWTH_MB
    assert code == (2 if evil.refused else 0), said
    assert "\n" not in said


@pytest.mark.parametrize("what", ["model", "statistics"])
def test_the_payload_does_run_where_it_is_trusted(
    fasttrain: RunCommand, trained: RunCommand, tmp_path: Path, what: str
):
    """Else the test above would show nothing."""
    run, canary = trained(*RUN).folder, tmp_path / "executed"
    if what == "model":
        pickled_key("lr_schedule")(run, canary)
    else:
        (run / STATISTICS).unlink()
        (run / PICKLED).write_bytes(pickle.dumps(Bomb(canary)))
    fasttrain("eval", f"run={run}")
    assert (run / MODEL).is_file()
    assert not canary.exists()
    with suppress(AttributeError):  # what it left are no statistics
        fasttrain("eval", f"run={run}", "--trust")
    assert canary.exists()
