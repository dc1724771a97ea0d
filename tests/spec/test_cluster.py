"""What cluster=ray cannot do, told before Ray is imported."""

from __future__ import annotations

import sys

import pytest

from conftest import RunCommand
from messages import assert_says, wrong_inputs

CARTPOLE = ("+profile=speed", "env.id=CartPole-v1", "num_envs=3", "checkup=off")


@pytest.mark.parametrize("typed", wrong_inputs("settings of a cluster"))
def test_wrong_settings_are_told(typed: str, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    done = fasttrain(*CARTPOLE, *typed.split())
    done.refused()
    assert_says("settings of a cluster", typed, done.err)
    fasttrain(*CARTPOLE, "algo=ppo", "cluster=ray").refused("cluster=ray needs Ray")
