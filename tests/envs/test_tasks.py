from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.envs.tasks import TaskOptions, task_options_of
from fasttrain.errors import EnvSpecError
from toys import Corridor

TASKS = {"short": {"length": 3}, "long": {"length": 15}}


def finished_info(env: TaskOptions) -> dict[str, Any]:
    done, info = False, dict[str, Any]()
    while not done:
        *_, terminated, truncated, info = env.step(1)
        done = terminated or truncated
    return info


def test_an_episode_begins_with_the_options_of_the_chosen_task_and_its_last_info_names_it() -> None:
    core = Corridor()
    env = TaskOptions(core, TASKS)
    env.reset(seed=0)
    assert core.length == 8
    assert "task" not in finished_info(env)
    for number, length, name in ((1, 3, "short"), (2, 15, "long")):
        env.set_task(number)
        env.reset(options={"other": 1})
        assert core.length == length
        assert finished_info(env)["task"] == name
    env.set_task(0)
    env.reset()
    assert core.length == 8


def test_the_task_of_an_episode_is_the_one_that_was_chosen_before_it_began() -> None:
    env = TaskOptions(Corridor(), TASKS)
    env.set_task(1)
    env.reset()
    env.set_task(2)
    assert finished_info(env)["task"] == "short"
    env.reset()
    assert finished_info(env)["task"] == "long"


def test_the_choice_may_be_memory_that_another_process_writes() -> None:
    core = Corridor()
    env, shared = TaskOptions(core, TASKS), np.zeros(4, np.int64)
    env.choice = shared[2:3]
    shared[2] = 2
    env.reset()
    assert core.length == 15


class Passed(Corridor):
    """Hands the options on in one of several ways before it reads them."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.way = way

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=None if options is None else self.way(options))


@pytest.mark.parametrize(
    "way",
    [
        dict,
        lambda given: {**given},
        lambda given: dict(**given),
        lambda given: dict(given.items()),
        lambda given: given,
        lambda given: given.copy(),
        lambda given: given | {"other": 1},
        lambda given: {"length": 1} | given,
        lambda given: {"length": given.setdefault("length", 1)},
    ],
)
def test_options_may_be_read_in_any_way(way: Any) -> None:
    core = Passed(way)
    env = TaskOptions(TimeLimit(OrderEnforcing(core), 50), TASKS)
    env.set_task(2)
    env.reset()
    assert core.length == 15


@pytest.mark.parametrize(
    ("option", "reads", "told"),
    [
        ("length", False, r"curriculum\.tasks\.short: .* did not read length"),
        ("lenght", True, r"did not read lenght.* It looked for length.*did you mean 'length'"),
    ],
)
def test_an_option_that_the_environment_does_not_read_is_refused(option: str, reads: bool, told: str) -> None:
    env = TaskOptions(Corridor(reads=reads), {"short": {option: 3}})
    env.set_task(1)
    with pytest.raises(EnvSpecError, match=told):
        env.reset()


def test_make_env_adds_it_where_there_are_tasks() -> None:
    with_tasks = make_env(EnvSpec(entry_point="toys:Corridor", tasks=TASKS, lean_info=True))
    assert task_options_of(with_tasks) is not None
    assert task_options_of(make_env(EnvSpec(entry_point="toys:Corridor"))) is None
    with_tasks.get_wrapper_attr("set_task")(1)
    with_tasks.reset(seed=0)
    assert finished_info(with_tasks)["task"] == "short"  # type: ignore[arg-type]
