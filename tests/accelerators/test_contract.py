"""What counts as changed: an override by a subclass, a method set on an instance; what a library wrote does not."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from fasttrain.accelerators.contract import first_change
from fasttrain.algos.ppo import PPO


def bare(kind: type[Any]) -> Any:
    return kind.__new__(kind)


def test_a_librarys_method_in_a_wrapper_of_the_users_counts(monkeypatch: pytest.MonkeyPatch):
    plain = PPO.train

    @functools.wraps(plain)
    def counted(self: PPO) -> None:
        plain(self)

    monkeypatch.setattr(PPO, "train", counted)
    assert first_change(bare(PPO), ("train",)) == "PPO.train is overridden: compiled kernels compute PPO's own train"
