"""What the last info of an episode says, under the names that the user gives it."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.runs.evaluate import summarise
from fasttrain.spec.infos import SCORES, InfoReader, held_by

KEYS = InfoReader("victory", ("vp", "damage"), "how")
ENDS = [
    (1.0, 10, {"victory": True, "vp": 9, "damage": np.float32(2.5), "how": "time", "episode": {}}),
    (3.0, 20, {"victory": 0, "vp": 11, "damage": 3.5, "how": "fell"}),
]


def test_the_users_names_are_read_as_the_usual_ones():
    told = KEYS.read(ENDS[1][2])
    assert (told["is_win"], told["end_reason"], told[SCORES]) == (False, "fell", {"vp": 11.0, "damage": 3.5})
    assert told["victory"] == 0
    assert SCORES not in ENDS[1][2]


def test_named_scores_have_means_and_intervals():
    found = summarise(ENDS, KEYS)
    assert (found["win_rate"], found["vp"], found["damage"]) == (0.5, 10.0, 3.0)
    assert found["scores"] == ["vp", "damage"]
    low, high = found["ci95"]["vp"]
    assert (low + high) / 2 == pytest.approx(10.0)
    assert high - 10 == pytest.approx(12.706, abs=1e-3), "Student's with one degree of freedom"
    assert found["end_reason"] == {"time": 0.5, "fell": 0.5}
    assert "untold" not in found


def test_keys_that_no_info_has_are_named_with_what_there_was():
    found = summarise(ENDS, InfoReader("won", ("vp", "how"), "why"))
    assert found["untold"]["missing"] == ["env.result.win=won", "env.result.end=why", "env.result.scores=[how]"]
    assert found["untold"]["held"] == ["victory (0)", "vp (11)", "damage (3.5)", "how (fell)"]
    assert (found["scores"], found["win_rate"]) == (["vp"], None)


def test_where_nothing_but_reward_is_told_the_last_info_is_listed():
    assert summarise(ENDS)["untold"] == {"missing": [], "held": held_by(ENDS[1][2])}
    assert "untold" not in summarise([(1.0, 3, {"TimeLimit.truncated": True, "episode": {}})]), "nothing to name"
    assert "untold" not in summarise([(1.0, 3, {"is_success": True, "vp": 3})])
    assert held_by({"board": np.zeros(3), "text": "x" * 99, "episode": 3}) == [f"text ({'x' * 19}…)"]


def test_a_study_may_be_judged_by_a_score():
    assert configured("env.id=CartPole-v1", "env.result.scores=[vp]", "gate.metric=vp").gate.metric == "vp"
    with pytest.raises(ConfigError, match=r"^gate.metric=vp: expected auto, win_rate, mean_reward, tail, or one of"):
        configured("env.id=CartPole-v1", "gate.metric=vp")
    with pytest.raises(ConfigError, match=r"^env.result.scores: mean_reward is told already"):
        configured("env.id=CartPole-v1", "env.result.scores=[mean_reward]")
