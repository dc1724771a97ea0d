"""What an env tells is data: whatever stands in an info, what fits is read and the rest is said once."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec import infos
from fasttrain.spec.infos import InfoReader, candidate_entries, plain, sb3_statistics, score_diff_of, win_of


class Broken:
    """Of which nothing can be asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Side(Enum):
    RED = "r"


STRANGE: list[Any] = [
    None, "white", [1, 2], {"red": None}, (), b"x", np.array([True, False]), np.array([1.0]), np.array("3:1"),
    float("nan"), float("inf"), 10**400, 1j, Broken(), object(), lambda: 0, np.array(None), {"enemy_turn_ms": None},
]  # fmt: skip
STRANGE_BY_NAME = [*(value for value in STRANGE if type(value) is not dict), {"ball": [1, 2]}, {"ball": Broken()}]


@pytest.mark.parametrize("name", infos.FORMS)
def test_what_does_not_fit_is_left_out_and_said_once(name: str):
    fits = {"end_reason": (str, float), "reward_terms": (), "perf": ()}.get(name, ())
    for value in STRANGE_BY_NAME if name in ("reward_terms", "perf") else STRANGE:
        if isinstance(plain(value), fits) or (name == "perf" and type(value) is dict and "ball" in value):
            continue
        said: list[str] = []
        reader = InfoReader(warn=said.append)
        told = reader.read({name: value, 3: 4, "other": 5}, 2)
        reader.read({name: value})
        assert {key: each for key, each in told.items() if each != {}} == {3: 4, "other": 5}
        assert len(said) == 1
        assert said[0].startswith(f'info["{name}"] of env 2 is ')
        assert "left out: " in said[0]


def test_what_fits_is_read_out_of_any_form_of_number():
    terms = {"goal": np.float32(0.5), 1: True, "ball": []}
    told = InfoReader().read({"is_win": np.bool_(False), "vp_diff": np.array(3), "end_reason": Side.RED, "turn": 7,
                              "reward_terms": terms, "scores": [12, 7]})  # fmt: skip
    assert (win_of(told), score_diff_of(told), told["end_reason"], told["turn"]) == (False, 3, "RED", 7)
    assert told["reward_terms"] == {"goal": 0.5, "1": True}
    assert told["scores"] == [12, 7], "the env's own affair"
    for value in ("False", [False], np.array([True, False]), 0.7, 2, -1, "won"):
        assert win_of(InfoReader().read({"is_success": value})) is None
    assert win_of(InfoReader().read({"is_win": "red", "is_success": 1.0})) is True


def test_a_text_is_a_win_where_it_is_the_value_that_was_named():
    said: list[str] = []
    assert win_of(InfoReader("winner", warn=said.append).read({"winner": "enemy"})) is None
    assert "set env.result.win_value to the value that means a win" in said[0]
    named = InfoReader("winner", win_value="model")
    assert [win_of(named.read({"winner": who})) for who in ("model", "enemy", None, np.array("model"), [1])] == [
        True, False, False, True, None]  # fmt: skip
    assert win_of(InfoReader("is_success", win_value=2).read({"is_success": 2})) is True
    assert configured("env.id=CartPole-v1", "env.result.win=winner", "env.result.win_value=2").env.result.win_value == 2
    with pytest.raises(ConfigError, match=r"^env.result.win_value=model with env.result.win=None: set both"):
        configured("env.id=CartPole-v1", "env.result.win_value=model")


def test_what_is_listed_or_averaged_may_be_anything_too():
    assert candidate_entries(dict(enumerate(STRANGE))) == ["1 (white)", "8 (3:1)", "9 (nan)", "10 (inf)"]
    for value in STRANGE:
        assert sb3_statistics({"episode": value, "is_success": value}) == {}
    record = {"r": float("nan"), "l": 3, "t": 0.1}
    assert sb3_statistics({"episode": record, "is_success": 0.5}) == {"episode": record, "is_success": 0.5}
    assert infos.enemy_turn_ms({"perf": 0.9}) == infos.enemy_turn_ms({"perf": {"enemy_turn_ms": "fast"}}) == 0.0
    assert infos.enemy_turn_ms({"perf": {"enemy_turn_ms": np.float32(2)}}) == 2.0
