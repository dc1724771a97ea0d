"""What cannot be written is said once, tried again, and known at the end; what is replaced stays until it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.saving.files import Saving, clean, into_place


def test_a_failure_is_said_once_and_forgotten_when_it_works() -> None:
    said: list[str] = []
    saving = Saving(said.append)
    for _ in range(2):
        with saving.of("a.csv"):
            raise OSError(28, "No space left on device")
    assert said == ["warning: a.csv could not be written ([Errno 28] No space left on device); the run goes on"]
    with saving.of("b.csv"):
        pass
    assert saving.failed == {"a.csv": "[Errno 28] No space left on device"}
    with saving.of("c.zip"):
        raise RuntimeError("[Errno 28] No space left on device")
    with saving.of("d.zip"):
        raise PermissionError(13, "Permission denied")
    assert saving.missing() == [
        "a.csv, c.zip ([Errno 28] No space left on device)", "d.zip ([Errno 13] Permission denied)"
    ]  # fmt: skip
    for name in ("a.csv", "c.zip", "d.zip"):
        with saving.of(name):
            pass
    assert (saving.failed, saving.missing()) == ({}, [])


def test_other_errors_are_errors() -> None:
    with pytest.raises(KeyError), Saving(lambda line: None).of("a.csv"):
        raise KeyError("x")


def test_what_is_replaced_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "model.zip"
    target.write_text("old")
    with Saving(lambda line: None).of("model.zip"), into_place(target) as draft:
        draft.write_text("hal")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["model.zip"]
    assert target.read_text() == "old"
    with into_place(target) as draft:
        draft.write_text("new")
        draft.with_name("model.opponents.pt").write_text("pool")
    assert target.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.opponents.pt", "model.zip"]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("plan.json", "mine.tmp", "evaluating/64.zip")]
    drafts = ("plan.json.tmp", "evaluations.csv.tmp", "report.html.tmp")
    left = [tmp_path / name for name in (".saving-7/model.zip", "evaluating/.saving-7/64.zip", *drafts)]
    for path in (*kept, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    clean(tmp_path)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in left)
    assert not list(tmp_path.rglob(".saving-*"))
