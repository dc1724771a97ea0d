"""What the settings of a curriculum say, and which of them are refused."""

from __future__ import annotations

import math

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import check
from fasttrain.spec.curriculum import CurriculumConfig, Stage, check_curriculum, stages_of

TASKS = {"early": {"rounds": [1, 3]}, "late": {"rounds": [8, 10]}, "whole": {}}


def test_stages_begin_at_env_steps_or_at_a_mean() -> None:
    schedule = ([0, ["early"]], [1e6, ["early", "late"]], [{"win_rate": 0.6, "back": 0.5}, ["whole"]])
    assert stages_of(CurriculumConfig(tasks=TASKS, schedule=schedule)) == (
        Stage(0.0, None, -math.inf, ("early",)),
        Stage(1e6, None, -math.inf, ("early", "late")),
        Stage(0.6, "win_rate", 0.5, ("whole",)),
    )
    assert stages_of(CurriculumConfig(tasks=TASKS)) == (Stage(0.0, None, -math.inf, ("early", "late", "whole")),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": {}, "weights": {"late": 4}}, r"curriculum\.weights has no effect without tasks"),
        ({"tasks": {}, "by": "learnability"}, r"curriculum\.by has no effect without tasks"),
        ({"weights": {"lte": 4}}, r"no task is called lte.*did you mean 'late'"),
        ({"weights": {"late": -1}}, r"curriculum\.weights\.late=-1: must be 0 or more"),
        ({"weights": dict.fromkeys(TASKS, 0)}, "all tasks of a stage have the weight 0"),
        ({"weights": {"early": 0}, "schedule": ([0, ["early"]],)}, r"have the weight 0 \(early\)"),
        ({"by": "learnable"}, r"curriculum\.by=learnable: expected .*did you mean 'learnability'"),
        ({"by": "my:Own", "weights": {"late": 4}}, r"curriculum\.weights has no effect with curriculum\.by=my:Own"),
        ({"schedule": ([5, ["early"]],)}, "the first stage must begin at 0"),
        ({"schedule": ([{"win_rate": 0.5}, ["early"]],)}, "the first stage must begin at 0"),
        ({"schedule": ([0, ["early"]], [0, ["late"]])}, "each stage must begin later than the stage before"),
        ({"schedule": ([0, ["nobody"]],)}, "no task is called nobody"),
        ({"schedule": (["soon", ["early"]],)}, "expected a stage like"),
        ({"schedule": ([0, ["early"]], [{"score": 3}, ["late"]])}, "begins at a value of win_rate or reward"),
        ({"schedule": ([0, ["early"]], [{"win_rate": 0.5, "back": 0.5}, ["late"]])}, "`back` lower than win_rate"),
        ({"schedule": (3,)}, "expected a stage like"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_curriculum(CurriculumConfig(**{"tasks": TASKS, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["vec_env=vector", "env.backend=vector"])
def test_environments_that_reset_together_take_no_tasks(kind: str) -> None:
    with pytest.raises(ConfigError, match="options for the reset of single environments"):
        check(configured("env.id=CartPole-v1", "algo=ppo", kind, "curriculum.tasks={short: {}}"))


def test_the_command_line_reaches_them() -> None:
    given = configured("curriculum.tasks={early: {rounds: [1, 3]}}", "curriculum.weights={early: 2}").curriculum
    assert given.tasks == {"early": {"rounds": [1, 3]}}
    assert given.weights == {"early": 2.0}
