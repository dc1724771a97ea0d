from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pig_games
from conftest import RunCommand, configured
from fasttrain.envs.checkup import CheckupResult
from fasttrain.runs import check
from fasttrain.runs.batches import checkup_of_game, has_vector_form
from fasttrain_engines.vec_env import DaemonVecEnv
from messages import assert_says, wrong_inputs

SHORT = ("total_timesteps=512", "eval.episodes=4", "num_envs=4", "algo=ppo", "algo.n_epochs=1", "env.backend=vector")
CARTPOLE, COUNTING = "env.id=CartPole-v1", "env.entry_point=counting_vector:Counting"
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs signals")
Look = Callable[..., CheckupResult]


@pytest.fixture
def vector(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "vec"))
    return lambda *arguments: fasttrain("+profile=speed", *SHORT, *arguments)


def test_the_command_takes_a_registered_form_and_a_class(vector: RunCommand, fasttrain: RunCommand):
    done = vector(CARTPOLE).ok()
    summary = done.json("summary.json")
    assert {row["flag"]: row["effective"] for row in summary["plan"]}["vec_env"] == "vector"
    assert summary["quality"]["mean_length"] == summary["quality"]["mean_reward"]
    fasttrain("eval", f"run={done.folder}", "eval.episodes=4").ok()
    done = vector(COUNTING, "env.kwargs.mode=SameStep").ok()
    assert done.json("summary.json")["quality"]["mean_reward"] == 4.5  # 3, 4, 5 and 6 steps


@pytest.mark.parametrize("typed", wrong_inputs("VectorEnvs"))
def test_what_does_not_go_together_is_told(typed: str, vector: RunCommand):
    done = vector(*typed.split())
    done.refused()
    assert_says("VectorEnvs", typed, done.err)


def test_auto_considers_it_where_nothing_is_asked_of_single_envs():
    assert has_vector_form(configured(CARTPOLE, "algo=ppo", "+profile=speed"))
    for typed in ("env.id=Acrobot-v1", "action_repeat=2", "env.id=NoSuchEnv-v3"):
        assert not has_vector_form(configured(CARTPOLE, "algo=ppo", "+profile=speed", typed)), typed
    assert not has_vector_form(configured(CARTPOLE, "algo=ppo", "+profile=exact"))


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    monkeypatch.chdir(pig_games.ENGINES)

    def one(*arguments: Any, game: str = "pig:Pig") -> CheckupResult:
        with closing(DaemonVecEnv(game, {}, 1, pig_games.settings(*arguments), 2, 1, tmp_path)) as games:
            return checkup_of_game(games, use_masks=True, max_steps=200, max_seconds=60.0)

    return one


@POSIX
@pytest.mark.parametrize("game", ["pig:Pig", "pig:PigByRequest"])
def test_an_honest_game_has_no_findings_and_plays_the_same_from_a_seed(look: Look, game: str):
    result = look(game=game)
    assert (result.findings, result.not_checked) == ((), ())
    assert result.costs is not None
    assert result.costs.has_masks
    assert result.reward_range == (-1.0, 1.0)


@POSIX
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("refuse=0.3", "mask_not_respected", r"refused \d+ of \d+ actions"),
        ("close=0.02", "lost_games", r"\d+ of \d+ games were lost \(closed\)"),
    ],
)
def test_a_fault_of_the_engine_is_a_warning(look: Look, fault: str, code: str, text: str):
    (finding,) = look("--fault", fault).findings
    assert (finding.severity, finding.code) == ("warning", code)
    assert re.search(text, finding.message)


@POSIX
def test_check_shows_what_a_decision_costs(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(check.LONG, "max_steps", 100)
    done = fasttrain("check", *pig_games.overrides("--think-ms", "1")).ok()
    assert done.out.startswith("Checkup of env.entry_point=pig:Pig: ")
    assert "\nnothing found\n" in done.out
    assert done.json("checkup.json")["costs"]["step_s"] > 0.001
