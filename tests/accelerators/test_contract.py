"""What counts as changed: an override by a subclass, a method set on an instance; what a library wrote does not."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from fasttrain.accelerators.contract import first_change
from fasttrain.algos.ppo import PPO
from fasttrain.buffers.rollout import RolloutStorage


class Sampled(RolloutStorage):
    def minibatches(self, batch_size: int | None) -> Any:
        return super().minibatches(batch_size)


def bare(kind: type[Any]) -> Any:
    return kind.__new__(kind)


@pytest.mark.parametrize("kind", [Sampled, type("Deeper", (Sampled,), {})])
def test_an_override_is_named_with_the_class_that_has_it_and_the_one_that_lost_it(kind: type[Any]):
    expected = "Sampled.minibatches is overridden: compiled kernels compute RolloutStorage's own minibatches"
    assert first_change(bare(kind), ("add", "minibatches")) == expected
    assert first_change(bare(kind), ("add",)) == ""


def test_a_librarys_method_in_a_wrapper_of_the_users_counts(monkeypatch: pytest.MonkeyPatch):
    plain = PPO.train

    @functools.wraps(plain)
    def counted(self: PPO) -> None:
        plain(self)

    monkeypatch.setattr(PPO, "train", counted)
    assert first_change(bare(PPO), ("train",)) == "PPO.train is overridden: compiled kernels compute PPO's own train"
