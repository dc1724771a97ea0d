"""What studies add to a configuration."""

from __future__ import annotations

import pytest

from conftest import configured
from fasttrain.errors import ConfigError


def test_the_figure_that_is_judged_has_a_name():
    cartpole = "env.id=CartPole-v1", "algo=ppo"
    assert configured(*cartpole).gate.metric == "auto"
    for metric in ("tail", "vp"):
        assert configured(*cartpole, "env.result.scores=[vp]", f"gate.metric={metric}").gate.metric == metric
    with pytest.raises(ConfigError, match="gate.metric=vp: expected auto, win_rate, mean_reward, tail, or one of"):
        configured(*cartpole, "gate.metric=vp")
