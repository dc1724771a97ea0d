from __future__ import annotations

import collections
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common.logger import KVWriter

from fasttrain.envs.names import arguments, callable_at, resolve_argument
from fasttrain.errors import EnvSpecError

SOURCE = """
import os
from os import system

def doubled(value):
    return 2 * value

def pair(first, second=0):
    return first, second

class Settings:
    def __init__(self, size, env=None):
        self.size, self.env = size, env
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "31_parts_names.py").write_text(SOURCE)
    (tmp_path / "levels").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return str(tmp_path)


def test_names_and_calls_inside_lists_and_mappings(folder: str):
    call = {
        "call": "31_parts_names:pair",
        "first": {"call": "31_parts_names:doubled", "value": 3},
        "second": ["math:pi"],
    }
    found = resolve_argument({"a": "31_parts_names:doubled", "b": [call, 1], 5: (call,)}, "env.kwargs.x", folder)
    assert found["a"](4) == 8
    assert (found["b"], found[5]) == ([(6, [math.pi]), 1], ((6, [math.pi]),))
    given = [1, [2]]
    assert resolve_argument(given, "x") == given
    assert resolve_argument(given, "x")[1] is not given[1]  # envs of one process share nothing


TEXTS = [
    "http://x:80",
    "3:1",
    "a:b",
    "10:30",
    "host:8080",
    "levels:easy",
    "queue:first",
    "time:day",
    "x: y",
    ":",
    "v1:b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_plain_texts_stay_texts(folder: str, text: str):
    assert resolve_argument(text, "env.kwargs.x", folder) == text
    assert resolve_argument({"call": 3, "x": text}, "x", folder) == {"call": 3, "x": text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("31_parts_names:doubld", "x=31_parts_names:doubld: module .* has no 'doubld'; did you mean 'doubled'"),
        ("31_part_names:doubled", "no module named '31_part_names'; did you mean '31_parts_names'"),
        ({"call": "nowhere_names:f"}, "x: nowhere_names:f: no module named 'nowhere_names'"),
        ({"call": "31_parts_names:pair"}, r"x: calling 31_parts_names:pair with \{\} failed: TypeError"),
        ({"call": "os:system", "command": "echo"}, "x: os:system is a part of Python's own library"),
        ({"call": "31_parts_names:system", "command": "echo"}, "is a part of Python's own library"),
        ({"call": "subprocess:Popen", "args": "echo"}, "is a part of Python's own library"),
        ({"call": "builtins:eval", "source": "1"}, "is a part of Python's own library"),
    ],
)
def test_what_is_told_in_place_of_a_call(folder: str, value: Any, text: str):
    with pytest.raises(EnvSpecError, match=text):
        resolve_argument(value, "x", folder)


def test_plain_data_types_are_called():
    assert resolve_argument({"call": "collections:OrderedDict", "a": 1}, "x") == collections.OrderedDict(a=1)


def test_what_a_call_lacks_is_supplied(folder: str):
    call = {"call": "31_parts_names:Settings", "size": 3}
    assert resolve_argument([call], "x", folder, {"env": lambda: "made"})[0].env == "made"
    assert resolve_argument(call | {"env": "mine"}, "x", folder, {"env": lambda: "made"}).env == "mine"
    assert arguments({"size": 1}, "x.", folder, {"env": lambda: "made"}) == {"size": 1}


def test_a_class_is_looked_at_before_it_is_called():
    assert callable_at("stable_baselines3.common.logger:CSVOutputFormat", "loggers: that", only=KVWriter)
    with pytest.raises(EnvSpecError, match=r"loggers: that must be derived from .*logger.KVWriter"):
        callable_at("collections:Counter", "loggers: that", only=KVWriter)
    with pytest.raises(EnvSpecError, match="loggers: that: expected a class, it is"):
        callable_at("os:getcwd", "loggers: that", os.getcwd(), only=KVWriter)
