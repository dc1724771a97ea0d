from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fasttrain.errors import ConfigError
from fasttrain.saving.files import parse_json, read_json, write_json, yaml_values


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


def test_whatever_comes_in_it_is_strict_json(tmp_path: Path) -> None:
    hostile = {1: float("nan"), "\ud800": "a\x00\n</script>\udfff", None: np.float32("inf"), "n": np.int64(3)}
    write_json(tmp_path / "x.json", {"a": hostile})

    def refuse(token: str) -> None:
        raise ValueError(token)

    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=refuse)["a"]
    assert found == {"1": None, "?": "a\x00\n</script>?", "None": None, "n": 3}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b"a: [1, 2]", 5),
        (b"a: &a [1, 1]\nb: [*a, *a]", 13),
        (b"a: &a [1, *a]", 5),
        (b"", 1),
        (b"%", 0),
        (b"[" * 9_999, 0),
    ],
)
def test_values_of_a_yaml_are_counted_without_making_them(text: bytes, values: int) -> None:
    assert yaml_values(text) == values


def test_json_that_would_fill_memory_is_refused() -> None:
    assert parse_json(b'{"a": [1, 2]}', "x") == {"a": [1, 2]}
    for text in (b"[" * 10_000_000, b"[" * 100_000, b"1," * 30_000_000, b"\xff", b"9" * 10_000):
        with pytest.raises(ConfigError, match="^x (is no JSON|has too many parts)"):
            parse_json(text, "x")
