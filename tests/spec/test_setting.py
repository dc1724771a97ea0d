"""What is read off a declaration."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fasttrain.errors import ConfigError
from fasttrain.spec.setting import (
    Switch,
    build,
    convert,
    declared,
    defaults_of,
    did_you_mean,
    flags_of,
    setting,
    settings_of,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = setting(0.5, "how fast", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Outer:
    envs: int = setting(8, "copies", "trade-off", least=1, may_change=True)
    updates: int = setting(1, "updates", "exact", stock=4, needs="off_policy", ours=True)
    names: tuple[str, ...] = setting((), "names")
    more: dict[str, int] = setting({}, "more")
    inner: Inner = Inner()


def test_settings_are_dotted_and_say_what_was_declared():
    found = dict(settings_of(Outer))
    assert [*found] == ["envs", "updates", "names", "more", "inner.rate"]
    assert (declared(found["envs"]).text, declared(found["envs"]).may_change) == ("copies", True)
    with pytest.raises(ConfigError, match="^inner.rate=2.0: must lie between 0 and 1$"):
        build(Outer, {"inner": {"rate": 2}})


def test_defaults_are_plain_values_and_each_ones_own():
    first, second = defaults_of(Outer), defaults_of(Outer)
    assert first == {"envs": 8, "updates": 1, "names": [], "more": {}, "inner": {"rate": 0.5}}
    first["more"]["a"] = 1
    assert second["more"] == {} == Outer().more


@pytest.mark.parametrize("off_policy", [True, False])
def test_flags_are_the_settings_that_have_a_class(off_policy: bool):
    envs, updates = flags_of(Outer)
    assert (envs.name, envs.flag_class, envs.stock, envs.ours) == ("envs", "trade-off", 8, False)
    assert (updates.stock, updates.ours) == (4, True), "stock's value, where it is not the default"
    spec = SimpleNamespace(off_policy=off_policy)
    assert envs.fits(spec)
    assert updates.fits(spec) == off_policy


# --- typed values


@dataclass(frozen=True)
class Size:
    size: int


@dataclass(frozen=True)
class Shape:
    count: int
    rate: float
    inner: Size
    kind: Literal["a", "b"] = "a"
    widths: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None


def shape(**values: Any) -> Shape:
    return build(Shape, {"count": 1, "rate": 0.5, "inner": {"size": 3}, **values})


def test_builds_nested_dataclasses_and_unions():
    assert shape() == Shape(count=1, rate=0.5, inner=Size(3))
    assert shape(widths=[64, 64]).widths == (64, 64)
    assert shape(widths={"pi": [8]}).widths == {"pi": (8,)}


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [("1e6", int, 1_000_000), (1e6, int, 1_000_000), ("1_000", int, 1000), (2**62 + 1, int, 2**62 + 1),
     (-(2**70), int, -(2**70)), (True, Switch, "on"), (False, Switch, "off"), ("on", Switch, "on"),
     ("1", Switch, "on"), (0, Switch, "off"), ("true", bool, True), ("off", bool, False), (1, bool, True),
     (0, bool, False)],
)  # fmt: skip
def test_a_value_in_any_spelling(value: Any, kind: Any, expected: Any):
    result = convert(value, kind, "key")
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize("value", [1.5, "abc", True, None, [1], float("nan"), float("inf"), "", 10**400])
def test_what_is_no_whole_number_is_refused_by_name(value: Any):
    with pytest.raises(ConfigError, match=r"^key=.*expected a whole number"):
        convert(value, int, "key")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"sise": 3}}, r"unknown key 'inner.sise'; did you mean 'size'\?"),
        ({"kind": "c"}, "kind=c: not one of a, b"),
        ({"kind": "A"}, "kind=A: not one of a, b; did you mean 'a'"),
        ({"widths": "x"}, "widths=x: expected a list or a mapping"),
    ],
)
def test_what_fits_no_declaration_is_named(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        shape(**values)


def test_missing_keys_and_other_words_for_booleans_are_named():
    with pytest.raises(ConfigError, match=r"missing key 'count'"):
        build(Shape, {"rate": 1.0, "inner": {"size": 1}})
    with pytest.raises(ConfigError, match="key=maybe: expected true or false"):
        convert("maybe", bool, "key")


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [("envs", ["num_envs", "gamma"], "num_envs"), ("zzz", ["num_envs"], ""), ("gamma", ["gamma"], ""),
     ("algo.rollout_size", ["algo.rollout_size", "own.rollout_size"], "own.rollout_size"),
     ("mlppolicy", ["MlpPolicy"], "MlpPolicy")],
)  # fmt: skip
def test_did_you_mean(word: str, names: list[str], meant: str):
    assert did_you_mean(word, names) == (f"; did you mean '{meant}'?" if meant else "")
