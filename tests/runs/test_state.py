from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import Finished, RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.parts import Course
from fasttrain.runs.progress import LearningCurve, Progress
from fasttrain.runs.state import (
    check_identity,
    course_state,
    curve_state,
    identity,
    is_retraced,
    load_course,
    load_curve,
    load_progress,
    load_stopping,
    place_of,
    progress_state,
    stopping_state,
)
from fasttrain.runs.stopping import Stopping
from fasttrain.saving.checkpoints import CheckpointFolder
from fasttrain.spec.groups import StopConfig
from toys import toy_gym_vec


def travelled(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_progress_counts_on():
    progress = Progress(1000, PhaseClock())
    progress.env_steps, progress.updates = 500, 40
    for number in range(5):
        progress.add_episode(float(number), {"is_win": number > 2, "score_diff": 2, "reward_terms": {"vp": 1.5}})
    fresh = Progress(1000, PhaseClock())
    state = travelled(progress_state(progress))
    load_progress(fresh, state)
    assert fresh.before_s == state["wall_s"] > 0
    again = travelled(progress_state(fresh))
    assert {**again, "wall_s": 0} == {**state, "wall_s": 0}
    assert (fresh.episodes, fresh.mean_return, fresh.win_rate) == (5, 2.0, 0.4)


def test_a_longer_horizon_joins_stretches_of_the_curve():
    curve, longer = LearningCurve(1000), LearningCurve(2000)
    for step in range(1000):
        curve.add(step, step / 10, 1.0)
    load_curve(longer, travelled(curve_state(curve)))
    assert [each[:2] for each in curve_state(longer)["stretches"]] == [[index, 2] for index in range(500)]


@pytest.mark.parametrize("rising", [True, False])
def test_rules_that_stop_decide_as_if_never_interrupted(rising: bool):
    config = StopConfig(patience=0.2)
    whole, first, second = (Stopping(config, 100_000) for _ in range(3))
    for step in range(60_000):
        for stopping in (whole, first if step < 31_234 else second):
            if step == 31_234 and stopping is second:
                load_stopping(second, travelled(stopping_state(first)))
            if step % 10 == 0:
                stopping.add(step, step / 100 if rising or step < 20_000 else 200.0 + step % 7)
    assert stopping_state(second) == stopping_state(whole)
    assert (second.reason(0.0, 0) is None) == rising


def test_intervals_go_on_and_changed_ones_begin_from_here():
    def course(log_every: int, eval_every: int, every: int) -> Course:
        config = configured(f"log_every={log_every}", f"eval_every={eval_every}", f"self_play.every={every}")
        return Course(config)

    first, fresh = course(10, 100, 40), course(10, 70, 8)
    first.log.due(25)
    first.evaluate.due(250)
    progress: Any = SimpleNamespace(updates=25, env_steps=250)
    load_course(fresh, travelled(course_state(first, takes_snapshots=True)), progress)
    assert (fresh.log.following, fresh.snapshot.following) == (30, 40)
    assert fresh.evaluate.following == 280, "the next multiple of 70"


def test_the_place_of_an_error_is_named_once():
    env = toy_gym_vec(2)
    env.reset()
    env.envs[1].step = lambda action: (np.zeros(7), 0.0, False, False, {})  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broadcast") as caught:
        env.step(np.zeros(2, np.int64))
    assert place_of(caught.value) == "env 1, "


@pytest.fixture
def run(trained: RunCommand) -> Finished:
    done = trained("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "checkup=off",
                   "eval.episodes=2", "total_timesteps=512", "checkpoint_every=256")  # fmt: skip
    shutil.rmtree(done.folder / "checkpoints" / "step_000000000512")
    return done


def changed(folder: Path, **parts: object) -> None:
    """State with other parts, and the manifest that fits it: as if somebody had written it so."""
    state = {**json.loads((folder / "state.json").read_text()), **parts}
    files = {name: (folder / name).read_bytes() for name in ("arrays.npz", "model.zip")}
    CheckpointFolder(folder.parent).publish(256, {"state.json": json.dumps(state).encode(), **files})


@pytest.mark.parametrize(
    ("part", "value"),
    [("random", {}), ("run", {"progress": 3, "resumed_at": []}), ("model", {"counters": {"num_timesteps": "many"}}),
     ("envs", {}), ("random", {"python": None, "numpy": 3})],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_error(run: Finished, fasttrain: RunCommand, part: str, value: object):
    folder = run.folder / "checkpoints" / "step_000000000256"
    assert {path.name for path in folder.iterdir()} == {"state.json", "arrays.npz", "model.zip", "manifest.json"}
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        assert {"model/_last_obs", "envs/game/games", "random/torch", "model/policy_optimizer/0/exp_avg"} <= set(arrays)
    changed(folder, **{part: value})
    fasttrain("resume", f"run={run.folder}").refused("the checkpoint")


def test_python_envs_are_noted_and_settings_that_one_side_lacks_are_not_compared():
    plain = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")
    assert is_retraced(configured(*plain))
    assert not is_retraced(configured("+profile=speed", "vec_env=native", "checkpoint_every=10"))
    found = identity(configured(*plain))
    settings = found.pop("settings")
    assert found == {"algo": "ppo", "env": "CartPole-v1", "num_envs": 12}
    others = {"seed=3": "seed", "algo.gamma=0.9": "algo.gamma", "env.kwargs.sutton_barto_reward=true": "env.kwargs"}
    for typed, key in others.items():
        other = identity(configured(*plain, typed))["settings"]
        assert [name for name in other if other[name] != settings[name]] == [key]
    today = configured("env.entry_point=fasttrain_games.skullking.env:SkullKingEnv")
    stored = identity(today)
    del stored["settings"]["algo.gamma"]
    stored["settings"]["of_another_version"] = 1
    check_identity(stored, today)
    stored["settings"]["env.entry_point"] = "another"
    with pytest.raises(ConfigError, match="trained with another env.entry_point"):
        check_identity(stored, today)
