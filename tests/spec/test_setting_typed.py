from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import Switch, build, convert, did_you_mean


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    count: int
    rate: float
    inner: Inner
    name: str | None = None
    kind: Literal["a", "b"] = "a"
    switch: Switch = "auto"
    widths: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None


def outer(**values: Any) -> Outer:
    return build(Outer, {"count": 1, "rate": 0.5, "inner": {"size": 3}, **values})


def test_builds_nested_dataclasses():
    assert outer() == Outer(count=1, rate=0.5, inner=Inner(3))


@pytest.mark.parametrize(
    ("value", "expected"), [("1e6", 1_000_000), (1e6, 1_000_000), (7, 7), ("1_000", 1000), (2**62 + 1, 2**62 + 1)]
)
def test_whole_numbers_in_any_spelling(value: Any, expected: int):
    result = convert(value, int, "key")
    assert result == expected
    assert type(result) is int


@pytest.mark.parametrize("value", [1.5, "abc", True, None, [1], float("nan"), float("inf"), "", 10**400])
def test_what_is_no_whole_number_is_refused_by_name(value: Any):
    with pytest.raises(ConfigError, match=r"^key=.*expected a whole number"):
        convert(value, int, "key")


@given(st.integers(-(2**70), 2**70))
def test_integers_survive_exactly(value: int):
    assert convert(value, int, "key") == value


@pytest.mark.parametrize(("value", "expected"), [(True, "on"), (False, "off"), ("on", "on"), ("1", "on"), (0, "off")])
def test_switches_accept_yaml_booleans(value: Any, expected: str):
    assert convert(value, Switch, "use_amp") == expected


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("off", False), (1, True), (0, False), (True, True)])
def test_booleans(value: Any, expected: bool):
    assert convert(value, bool, "key") is expected


def test_boolean_refuses_other_words():
    with pytest.raises(ConfigError, match="key=maybe: expected true or false"):
        convert("maybe", bool, "key")


def test_unknown_key_suggests():
    with pytest.raises(ConfigError, match=r"unknown key 'inner.sise'; did you mean 'size'\?"):
        outer(inner={"sise": 3})


def test_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"missing key 'count'"):
        build(Outer, {"rate": 1.0, "inner": {"size": 1}})


def test_literal_names_the_choices():
    with pytest.raises(ConfigError, match="kind=c: not one of a, b"):
        outer(kind="c")


def test_union_of_list_and_mapping():
    assert outer(widths=[64, 64]).widths == (64, 64)
    assert outer(widths={"pi": [8]}).widths == {"pi": (8,)}
    with pytest.raises(ConfigError, match=r"widths=x: expected a list; or expected a mapping"):
        outer(widths="x")


def test_did_you_mean_finds_contained_names():
    assert did_you_mean("envs", ["num_envs", "gamma"]) == "; did you mean 'num_envs'?"
    assert did_you_mean("zzz", ["num_envs"]) == ""


def test_did_you_mean_never_suggests_the_word_itself():
    assert did_you_mean("gamma", ["gamma"]) == ""
    assert did_you_mean("algo.rollout_size", ["algo.rollout_size", "own.rollout_size"]) == (
        "; did you mean 'own.rollout_size'?"
    )


def test_did_you_mean_ignores_case():
    assert did_you_mean("mlppolicy", ["MlpPolicy"]) == "; did you mean 'MlpPolicy'?"
    with pytest.raises(ConfigError, match="kind=A: not one of a, b; did you mean 'a'"):
        outer(kind="A")
