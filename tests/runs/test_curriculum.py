from __future__ import annotations

import json
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest

from conftest import Finished, RunCommand
from fasttrain.errors import EnvError
from fasttrain.runs.curriculum import TaskSampler
from fasttrain.spec.curriculum import CurriculumConfig
from messages import assert_says, wrong_inputs

TASKS = {"a": {}, "b": {}, "c": {}}
CORRIDOR = ("+profile=speed", "algo=ppo", "env.entry_point=toys:Corridor", "num_envs=4", "algo.rollout_size=128",
            "batch_size=64", "algo.net_arch=[8]", "total_timesteps=1000", "eval.episodes=4", "checkup=off",
            "report=false", "curriculum.tasks={short: {length: 3}, long: {length: 15}}")  # fmt: skip


def sampler(**settings: Any) -> TaskSampler:
    return TaskSampler(CurriculumConfig(tasks=TASKS, **settings), seed=0)


def shares(draws: TaskSampler, count: int = 20_000) -> list[float]:
    drawn = Counter(draws.sample() for _ in range(count))
    return [drawn[name] / count for name in TASKS]


def test_tasks_are_drawn_by_their_weights() -> None:
    assert shares(sampler(weights={"b": 4, "c": 0})) == pytest.approx([0.2, 0.8, 0.0], abs=0.012)


def test_learnability_prefers_what_is_won_in_half_of_the_episodes() -> None:
    draws = sampler(by="learnability")
    for episode in range(100):
        for task, won in (("a", True), ("b", episode % 2 == 0), ("c", False)):
            draws.on_episode(task, 0.0, 1, won)
    chances = draws.probabilities()
    p = np.array([101, 51, 1]) / 102  # with one win and one loss added
    expected = 0.9 * p * (1 - p) / (p * (1 - p)).sum() + 0.1 / 3
    np.testing.assert_allclose(chances, expected)
    assert chances[1] > 0.85


def test_learnability_needs_to_be_told_who_won() -> None:
    with pytest.raises(EnvError, match="does not report whether an episode was won"):
        sampler(by="learnability").on_episode("a", 1.0, 1, None)


def test_stages_of_a_schedule_follow_env_steps_though_a_mean_before_was_never_reached() -> None:
    draws = sampler(schedule=([0, ["a"]], [{"win_rate": 0.6}, ["b"]], [1000, ["b", "c"]], [{"reward": 3}, ["a", "c"]]))
    draws.on_step(999)
    assert (draws.stage, shares(draws, 100)) == (0, [1.0, 0.0, 0.0])
    draws.on_step(1000)
    assert draws.stage == 2
    assert shares(draws)[0] == 0.0


def test_a_stage_begins_by_a_mean_and_ends_where_it_falls_below_another() -> None:
    draws = sampler(schedule=([0, ["a"]], [{"win_rate": 0.6, "back": 0.3}, ["b"]]))

    def play(count: int, won: bool) -> int:
        for _ in range(count):
            draws.on_episode("a", 0.0, 1, won)
        draws.on_step(0)
        return draws.stage

    assert play(99, won=True) == 0, "a mean of fewer than 100 episodes is none"
    assert play(1, won=True) == 1
    assert play(99, won=False) == 1
    assert play(1, won=False) == 0
    assert play(60, won=True) == 0, "the episodes of the other stage count no more"
    assert play(40, won=False) == 1


def test_episodes_that_were_drawn_in_the_stage_before_do_not_begin_the_next_stage() -> None:
    schedule = ([0, ["a"]], [{"win_rate": 0.6}, ["b"]], [{"win_rate": 0.5}, ["c"]])
    draws = TaskSampler(CurriculumConfig(tasks=TASKS, schedule=schedule), seed=0, in_advance=150)

    def play(count: int) -> int:
        for _ in range(count):
            draws.on_episode("a", 0.0, 1, True)
        draws.on_step(0)
        return draws.stage

    assert play(100) == 1
    assert play(249) == 1
    resumed = TaskSampler(CurriculumConfig(tasks=TASKS, schedule=schedule), seed=0, in_advance=150)
    resumed.state = draws.state
    draws = resumed
    assert play(1) == 2


def test_a_stored_state_goes_on_with_the_same_draws() -> None:
    settings: dict[str, Any] = {"by": "learnability", "schedule": ([0, ["a", "b"]], [10, ["b", "c"]])}
    one, other = sampler(**settings), sampler(**settings)
    for step in range(20):
        one.on_episode(one.sample(), 1.0, 1, step % 3 == 0)
        one.on_step(step)
    other.state = one.state
    assert [other.sample() for _ in range(50)] == [one.sample() for _ in range(50)]
    np.testing.assert_array_equal(other.probabilities(), one.probabilities())


def episodes(run: Finished) -> list[tuple[str, str]]:
    return [(row["task"], row["return"]) for row in run.table("episodes.csv")]


def test_all_vectorized_environments_play_the_same_tasks(fasttrain: RunCommand) -> None:
    whole = fasttrain(*CORRIDOR, "vec_env=dummy").ok()
    told = episodes(whole)
    assert {task for task, _ in told} == {"short", "long"}
    assert episodes(fasttrain(*CORRIDOR, "vec_env=shared", "workers=2")) == told
    figures = whole.json("summary.json")["tasks"]
    assert sum(each["episodes"] for each in figures.values()) == len(told)
    assert figures["short"]["value_error"] > 0
    assert "tasks: short " in whole.out
    # Evaluations play without tasks: the untrained policy rarely walks 8 cells in 16 steps, where most episodes end.
    quality = whole.json("summary.json")["quality"]
    assert quality["mean_length"] == 16 or quality["win_rate"] > 0


def test_the_progress_line_names_the_stage(fasttrain: RunCommand) -> None:
    run = fasttrain(*CORRIDOR, "vec_env=dummy", "curriculum.schedule=[[0, [short]], [256, [long]]]")
    assert "tasks: stage 2 of 2, short " in run.ok().out


class OwnTask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Names its own task in the info."""

    def step(self, action: Any) -> Any:
        *answer, info = self.env.step(action)
        return (*answer, {**info, "task": "walk"})


class Nothing:
    """Draws no task."""


class EveryOther:
    """A curriculum as a user writes one."""

    def __init__(self, tasks: list[str], first: int = 0) -> None:
        self.tasks, self.state, self.won = tasks, first, list[bool | None]()

    def sample(self) -> str:
        self.state += 1
        return self.tasks[self.state % len(self.tasks)]

    def on_step(self, env_steps: int) -> None:
        assert env_steps > 0

    def on_episode(self, task: str, episode_return: float, length: int, won: bool | None) -> None:
        assert task in self.tasks
        assert length >= 3
        assert won is (episode_return == 1.0)


class Unsaved(EveryOther):
    """Its state is an object."""

    def __init__(self, tasks: list[str]) -> None:
        super().__init__(tasks)
        self.state: Any = {"drawn": {1, 2}}


def test_a_curriculum_of_the_users_own_draws(fasttrain: RunCommand) -> None:
    run = fasttrain(*CORRIDOR, "vec_env=dummy", "num_envs=1", "checkpoint_every=256",
                    "curriculum.by={curriculum: 'test_curriculum:EveryOther', first: 1}").ok()  # fmt: skip
    played = [task for task, _ in episodes(run)]
    assert played == ["short" if index % 2 == 0 else "long" for index in range(len(played))]
    (*_, newest) = sorted((run.folder / "checkpoints").iterdir())
    stored = json.loads((newest / "state.json").read_text())["curriculum"]["draws"]
    assert stored == 1 + len(played) + 2, "one more is under way, and one is drawn in advance"


@pytest.mark.parametrize("typed", wrong_inputs("curricula"))
def test_wrong_curricula_end_in_one_line(typed: str, fasttrain: RunCommand) -> None:
    done = fasttrain(*CORRIDOR, "vec_env=dummy", *typed.split())
    done.refused()
    assert_says("curricula", typed, done.err)


def test_a_native_game_takes_its_own_options(fasttrain: RunCommand) -> None:
    small = ("+profile=speed", "num_envs=8", "algo.rollout_size=128", "batch_size=64", "algo.net_arch=[8]",
             "report=false", "total_timesteps=1500", "eval.episodes=4", "checkup=off")  # fmt: skip
    run = fasttrain(*small, "curriculum.tasks={early: {rounds: [1, 3]}, late: {rounds: [10, 10]}}")
    turns = {row["task"]: row["length"] for row in run.table("episodes.csv")}
    assert turns == {"early": str(3 + 1 + 2 + 3), "late": "11"}  # a bid a round, and its cards
    both = fasttrain(*small, "opponent=self", "curriculum.tasks={late: {rounds: [10, 10]}}").ok()
    assert both.json("summary.json")["tasks"]["late"]["episodes"] > 0
    fasttrain(*small, "curriculum.tasks={early: {round: 3}}").refused("no reset option 'round'")
