"""An engine refuses an action and asks for the same decision again: memory is then what it was before that decision."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fasttrain
import pig_games
from conftest import configured
from fasttrain.algos.self_play import SnapshotPool
from fasttrain.runs.callbacks import pool_for
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain_engines.settings import DaemonsConfig, Timeouts
from fasttrain_engines.vec_env import DaemonVecEnv
from toys import single_thread

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
one_thread = pytest.fixture(autouse=True)(single_thread)
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


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("schedule", ["lockstep", "first_ready"])
def test_memory_is_what_walking_through_each_envs_decisions_gives(pigs: DaemonVecEnv, schedule: str, kernels: bool):
    model = model_of(pigs, kernels)
    model.collector.schedule = schedule
    model.learn(ENVS * STEPS)
    model.collect_rollouts(pigs, model._init_callback(None), model.rollout_buffer, STEPS)
    assert pigs.times().refused > 5
    rollout = model.rollout_buffer
    out = rollout.storage._left_out if schedule == "lockstep" else np.zeros((STEPS, ENVS), np.bool_)
    assert (out.sum() > 5) == (schedule == "lockstep")
    assert (out & (rollout.episode_starts != 0)).any() or schedule != "lockstep", "a first decision was refused too"
    seen, starts = torch.from_numpy(rollout.observations), torch.from_numpy(rollout.episode_starts)
    for index in range(ENVS):
        begun = (rollout.hidden_states_pi, rollout.cell_states_pi)
        states = tuple(torch.tensor(part[0, :, index : index + 1]) for part in begun)
        for step in range(STEPS):
            assert np.allclose(rollout.hidden_states_pi[step, :, index], states[0][:, 0], atol=1e-5), (index, step)
            if out[step, index]:
                after = starts[step + 1, index] if step + 1 < STEPS else model._last_episode_starts[index]
                assert bool(after) == bool(starts[step, index])
                continue
            with torch.no_grad():
                _, states = model.policy._process_sequence(
                    seen[step, index : index + 1], states, starts[step, index : index + 1], model.policy.lstm_actor
                )
        assert torch.allclose(model._last_lstm_states.pi[0][0, index], states[0][0, 0], atol=1e-5)


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


def test_what_is_refused_twice_or_first_is_forgotten(pigs: DaemonVecEnv):
    model, refused, shown = model_of(pigs), np.zeros(ENVS, np.bool_), pigs.reset()
    pool = SnapshotPool(model, ENVS, size=1, again=lambda: refused)
    masks, everyone = np.ones((ENVS, 2), np.bool_), np.arange(ENVS)

    def remembered() -> Any:
        return {name: np.array(part) for name, part in pool.memory_arrays().items()}

    def ask(*again: int) -> Any:
        refused[:] = np.isin(everyone, again)
        rows = np.array(again or everyone)
        pool.act(shown[rows], masks[rows], rows)
        return remembered()

    ask()
    second = ask()
    for _ in range(2):
        assert all(np.array_equal(part, second[name]) for name, part in ask(0, 2).items())
    pool.episode_over(1, {})
    first = ask()
    assert not np.array_equal(first["pi/0"], second["pi/0"])
    assert all(np.allclose(part, first[name], atol=1e-6) for name, part in ask(1).items())
