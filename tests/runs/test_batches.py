from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RunCommand, configured
from fasttrain.runs.batches import has_vector_form

SHORT = ("total_timesteps=512", "eval.episodes=4", "num_envs=4", "algo=ppo", "algo.n_epochs=1")


@pytest.fixture(autouse=True)
def _counting_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "vec"))


def test_the_command_takes_a_registered_form_and_a_class(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", "env.id=CartPole-v1", "env.backend=vector", *SHORT)
    assert done.exit_code == 0, done.err
    summary = done.json("summary.json")
    assert {row["flag"]: row["effective"] for row in summary["plan"]}["vec_env"] == "vector"
    assert summary["quality"]["mean_length"] == summary["quality"]["mean_reward"]
    again = fasttrain("eval", f"run={done.folder}", "eval.episodes=4")
    assert again.exit_code == 0, again.err
    done = fasttrain(
        "+profile=speed",
        "env.entry_point=counting_vector:Counting",
        "env.backend=vector",
        "env.kwargs.mode=SameStep",
        *SHORT,
    )
    assert done.exit_code == 0, done.err
    assert done.json("summary.json")["quality"]["mean_reward"] == 4.5  # 3, 4, 5 and 6 steps


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            ("env.id=CartPole-v1", "engine=stock"),
            "resets in the step after an episode's end, and algo=ppo with engine=stock",
        ),
        (("env.id=CartPole-v1", "env.frame_stack=2"), "env.frame_stack with the VectorEnv of env.id=CartPole-v1"),
        (("env.id=CartPole-v1", "vec_env=shared"), "vec_env=shared with env.backend=vector"),
        (("env.id=Pendulum-v1",), "env.id=Pendulum-v1 has no vector_entry_point"),
        (
            ("env.entry_point=counting_vector:Counting", "env.wrappers=[a:B]"),
            "env.wrappers=['a:B'] does not go with a VectorEnv",
        ),
    ],
)
def test_what_does_not_go_together_is_told(typed: tuple[str, ...], told: str, fasttrain: RunCommand):
    refused = fasttrain("+profile=speed", "env.backend=vector", *typed, *SHORT)
    assert refused.exit_code == 2
    assert told in refused.err


@pytest.mark.parametrize(
    ("typed", "has"),
    [
        (("+profile=speed",), True),
        (("+profile=balance",), True),
        (("+profile=exact",), False),
        (("+profile=baseline",), False),
        (("+profile=speed", "env.id=Acrobot-v1"), False),
        (("+profile=speed", "action_repeat=2"), False),
        (("+profile=speed", "env.id=NoSuchEnv-v3"), False),
    ],
)
def test_auto_considers_it_where_nothing_is_asked_of_single_envs(typed: tuple[str, ...], has: bool):
    assert has_vector_form(configured("env.id=CartPole-v1", "algo=ppo", *typed)) is has
