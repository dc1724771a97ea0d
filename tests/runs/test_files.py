from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.runs.files import read_json, write_json


def test_what_is_not_finite_becomes_null(tmp_path: Path):
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": "text"}})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [1.5, None], "c": {"d": "text"}}


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path: Path):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert read_json(tmp_path / "x.json") == {"a": 1}


def test_reading_what_is_no_object_gives_an_empty_one(tmp_path: Path):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"a":')
    assert read_json(tmp_path / "list.json") == read_json(tmp_path / "half.json") == read_json(tmp_path / "none") == {}
