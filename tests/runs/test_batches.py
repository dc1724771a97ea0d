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


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ([CARTPOLE, "engine=stock"], "resets in the step after an episode's end, and algo=ppo with engine=stock"),
        ([CARTPOLE, "env.frame_stack=2"], "which env.frame_stack does not allow"),
        ([CARTPOLE, "vec_env=shared"], "vec_env=shared with env.backend=vector"),
        (["env.id=Pendulum-v1"], "env.id=Pendulum-v1 has no vector_entry_point"),
        ([COUNTING, "env.wrappers=[a:B]"], "env.wrappers=['a:B'] does not go with a VectorEnv"),
    ],
)
def test_what_does_not_go_together_is_told(typed: list[str], told: str, vector: RunCommand):
    vector(*typed).refused(told)


@pytest.mark.parametrize(
    ("typed", "has"),
    [
        (["+profile=speed"], True),
        (["+profile=exact"], False),
        (["+profile=speed", "env.id=Acrobot-v1"], False),
        (["+profile=speed", "action_repeat=2"], False),
        (["+profile=speed", "env.id=NoSuchEnv-v3"], False),
    ],
)
def test_auto_considers_it_where_nothing_is_asked_of_single_envs(typed: list[str], has: bool):
    assert has_vector_form(configured(CARTPOLE, "algo=ppo", *typed)) is has


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
