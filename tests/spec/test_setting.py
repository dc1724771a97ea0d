"""What is read off a declaration."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from fasttrain.spec.setting import declared, defaults_of, flags_of, ranges_of, setting, settings_of


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
    assert ranges_of(found) == {"envs": (1, None), "inner.rate": (0, 1)}


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
