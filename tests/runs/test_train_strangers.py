from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import RunCommand
from fasttrain import train
from fasttrain.errors import ConfigError

ENVS = Path(__file__).resolve().parent.parent / "envs"
TINY = ("+profile=speed", "num_envs=2", "total_timesteps=64", "algo.n_steps=32", "batch_size=32", "algo.n_epochs=1",
        "algo.net_arch=[8]", "eval.episodes=2", "report=false")  # fmt: skip


class Case(NamedTuple):
    """How a shape is trained, and what must come of it."""

    arguments: tuple[str, ...]
    returns: tuple[float, float] = (0, 10)  # of all episodes: the least and the most
    found: tuple[str, ...] = ()  # codes of the checkup
    said: str = ""  # among what is printed
    episodes: int = 12  # of five steps, in twice 32


MASKED, FREE = ("algo=maskable_ppo", "vec_env=dummy"), ("algo=ppo", "vec_env=dummy")
CASES = {
    "Cards": Case((*MASKED, "env.masks=valid_action_mask"), (10, 10)),
    "OldCards": Case(MASKED, (10, 10), said="has the old gym interface, which is adapted"),
    "Jobs": Case(MASKED, (10, 10)),
    "Board": Case(MASKED, (10, 10), ("empty_mask",), "counted as legal", 10),
    "War": Case(("algo=maskable_ppo", "vec_env=shared", "workers=2", "env.result={win: winner, win_value: model}"),
                (0, 25)),
    "Network": Case(("algo=maskable_ppo", "env.backend=vector"), (10, 10)),
    "Robot": Case(FREE, (-2.5, 0)),
    "Army": Case(FREE),
    "Table": Case(FREE),
    "Numbers": Case(FREE),
    "Proxy": Case((*FREE,), found=("unpicklable_info",)),
    "Window": Case((*FREE, "env.max_episode_steps=5")),
    "Own": Case(FREE, found=("reused_array",)),
    "Ported": Case(FREE, said="close() of an env failed"),
    "Router": Case(("algo=ppo", "num_envs=1"), episodes=12),
    "World": Case(("algo=ppo", "vec_env=auto"), found=("copies_not_independent",)),
    "Duel": Case((*FREE, "env.kwargs.opponent={call: 'strangers:Opponent', strength: 0.5}"), (-2.5, 7.5)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _envs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENVS))


@pytest.mark.parametrize("name", CASES)
def test_an_env_of_a_strangers_shape_trains(fasttrain: RunCommand, name: str):
    case = CASES[name]
    done = fasttrain(*TINY, f"env.entry_point=strangers:{name}", *case.arguments).ok()
    assert case.said in done.out
    summary = done.json("summary.json")
    returns = [value for value, _ in done.episodes()]
    assert (len(returns), summary["quality"]["episodes"]) == (case.episodes, 2)
    least, most = case.returns
    assert all(least <= value <= most for value in [*returns, summary["quality"]["mean_reward"]])
    if (done.folder / "checkup.json").exists():
        assert tuple(one["code"] for one in done.json("checkup.json")["findings"]) == case.found


def test_what_an_env_changes_in_the_process_is_told_once(fasttrain: RunCommand):
    done = fasttrain(*TINY, *FREE, "env.entry_point=strangers:Strict", "eval_every=32", "eval_async=false").ok()
    assert done.err.count("an env changed numpy.seterr") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*FREE, "env.entry_point=strangers:Two", "env.kwargs.what=seen"), "Tuple"),
        ((*MASKED, "env.entry_point=strangers:Cards"), "env.masks=valid_action_mask"),
    ],
)
def test_what_cannot_train_is_refused_in_a_sentence(fasttrain: RunCommand, arguments: tuple[str, ...], told: str):
    fasttrain(*TINY, *arguments).refused(told)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        *((how, "info_not_dict: info is ") for how in ("list", "none", "text")),
        *((how, "reset() must return (observation, info), it returned ")
          for how in ("list at reset", "two numbers", "two keys")),
        ("package", "it needs a package that is not installed: run `"),
        ("async", "step() is `async def`, which nothing awaits; make it a plain `def`"),
    ],
)  # fmt: skip
def test_what_answers_wrongly_is_refused_by_the_checkup(fasttrain: RunCommand, how: str, told: str):
    fasttrain(*TINY, *FREE, "env.entry_point=strangers:Wrong", f"env.kwargs.how={how}").refused(told)


def test_a_package_that_is_missing_later_is_named(fasttrain: RunCommand):
    done = fasttrain(*TINY, *FREE, "env.entry_point=strangers:Wrong", "env.kwargs.how=package", "checkup=off")
    assert done.exit_code == 2
    assert "env 0, step 1 of its episode: it needs a package that is not installed: run `" in done.err


@pytest.mark.filterwarnings("default")
def test_an_odd_env_trains_in_workers_and_what_is_lost_is_told_in_a_line(fasttrain: RunCommand):
    done = fasttrain(*TINY, "algo=ppo", "vec_env=shared", "workers=1", "env.entry_point=strangers:Proxy").ok()
    assert "fasttrain: warning: info entries of env 0 cannot be pickled and are left out: lock\n" in done.err
    assert "shared.py" not in done.err


def test_what_no_plan_can_hold_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"env.kwargs": {"opponent": np.ones(2)}}
    with pytest.raises(ConfigError, match=r"env\.kwargs\.opponent"):
        train("strangers:Duel", algo="ppo", settings=settings)
