"""An engine refuses an action and asks for the same decision again: memory is then what it was before that decision."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fasttrain
import pig_games
from conftest import configured
from fasttrain.runs.callbacks import pool_for
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain_engines.settings import DaemonsConfig, Timeouts
from fasttrain_engines.vec_env import DaemonVecEnv
from recurrent_cases import assert_walked

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
HERE = Path(__file__).resolve().parent.parent
ENVS, STEPS = 3, 24


@pytest.fixture
def pigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonVecEnv]:
    """Games whose engine refuses every third action."""
    monkeypatch.chdir(pig_games.ENGINES)
    env = DaemonVecEnv("pig:Pig", {}, ENVS, pig_games.settings("--fault", "refuse=0.3"), 2, 1, tmp_path)
    env.seed(3)
    yield env
    env.close()


def model_of(env: Any, kernels: bool = False, **settings: Any) -> Any:
    model: Any = fasttrain.MaskableRecurrentPPO(
        "MlpLstmPolicy", env, n_steps=STEPS, batch_size=ENVS * STEPS, n_epochs=1, seed=3, device="cpu",
        policy_kwargs={"lstm_hidden_size": 16}, **settings,
    )  # fmt: skip
    if kernels:
        model.use_engine("kernels")
    return model


@pytest.mark.parametrize(("schedule", "kernels"), [("lockstep", True), ("first_ready", False)])
def test_memory_is_what_walking_through_each_envs_decisions_gives(pigs: DaemonVecEnv, schedule: str, kernels: bool):
    model = model_of(pigs, kernels)
    model.collector.schedule = schedule
    model.learn(ENVS * STEPS)
    model.collect_rollouts(pigs, model._init_callback(None), model.rollout_buffer, STEPS)
    assert pigs.times().refused > 5
    out = model.rollout_buffer.storage.left_out if schedule == "lockstep" else np.zeros((STEPS, ENVS), np.bool_)
    assert (out.sum() > 5) == (schedule == "lockstep")
    first = out & (model.rollout_buffer.episode_starts != 0)
    assert first.any() or schedule != "lockstep", "a first decision was refused too"
    assert_walked(model, out, 1e-5)


@pytest.mark.usefixtures("forked_workers")
def test_opponents_forget_what_was_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    command = (sys.executable, "-S", str(HERE / "alternating_engine.py"))
    settings = DaemonsConfig(command=command, count=2, games_per_daemon=1, timeouts_s=Timeouts(start=15.0))
    env = SelfPlayVecEnv(DaemonVecEnv("alternating_games:Alternating", {}, 2, settings, 2, two_sided=True))
    try:
        model = model_of(env)
        pool: Any = pool_for(configured("opponent=self"), model, env)
        shown: list[Any] = []

        class Stubborn:
            def act(self, observations: Any, action_masks: Any, envs: Any) -> Any:
                shown.append((envs.tolist(), observations.copy()))
                pool.act(observations, action_masks, envs)
                # Game 0's opponent names what a second decision must not.
                return np.where(action_masks[:, 3] & (envs == 0), 3, 1)

            def episode_over(self, number: int, info: Any) -> None:
                pool.episode_over(number, info)

        env.set_opponent(Stubborn())
        env.reset()
        env.step_slots(np.array([2, 2]))  # the learner begins: the second decision is the opponents'
        assert [envs for envs, _ in shown] == [[0, 1], [0]], "one was asked twice"
        assert (shown[0][1][0] == shown[1][1][0]).all()
        _, once = model.predict(shown[0][1], None, np.ones(2, np.bool_), action_masks=np.ones((2, 4), np.bool_))
        for part, name in enumerate(("pi/0", "pi/1")):
            assert np.abs(pool.memory_arrays()[name] - once[part]).max() < 1e-6
        assert np.abs(once[0]).max() > 1e-3
        assert not pool.memory_arrays()["starts"].any()
    finally:
        env.close()
