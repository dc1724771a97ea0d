from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fasttrain.errors import ConfigError
from fasttrain.saving.files import Saving, clean, into_place, parse_json, read_json, write_json, yaml_values


def test_a_failed_write_keeps_the_file_and_what_is_no_object_is_read_as_an_empty_one(tmp_path: Path):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert read_json(tmp_path / "x.json") == {"a": 1}
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"a":')
    assert [read_json(tmp_path / name) for name in ("list.json", "half.json", "none")] == [{}, {}, {}]


def test_whatever_comes_in_it_is_strict_json(tmp_path: Path) -> None:
    hostile = {1: float("nan"), "\ud800": "a\x00\n</script>\udfff", None: np.float32("inf"), "n": np.int64(3)}
    write_json(tmp_path / "x.json", {"a": hostile, "b": [1.5, float("inf")], "c": {"d": "text"}})

    def refuse(token: str) -> None:
        raise ValueError(token)

    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=refuse)
    assert found.pop("a") == {"1": None, "?": "a\x00\n</script>?", "None": None, "n": 3}
    assert found == {"b": [1.5, None], "c": {"d": "text"}}


@pytest.mark.parametrize(
    ("text", "values"),
    [(b"a: [1, 2]", 5), (b"a: &a [1, 1]\nb: [*a, *a]", 13), (b"a: &a [1, *a]", 5), (b"", 1), (b"%", 0),
     (b"[" * 3_000, 0)],
)  # fmt: skip
def test_values_of_a_yaml_are_counted_without_making_them(text: bytes, values: int) -> None:
    assert yaml_values(text) == values


def test_json_that_would_fill_memory_is_refused() -> None:
    assert parse_json(b'{"a": [1, 2]}', "x") == {"a": [1, 2]}
    for text in (b"[" * 10_000_000, b"[" * 100_000, b"1," * 30_000_000, b"\xff", b"9" * 10_000):
        with pytest.raises(ConfigError, match="^x (is no JSON|has too many values)"):
            parse_json(text, "x")


# --- what cannot be written is said once, and what is replaced stays until the new one is whole


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
