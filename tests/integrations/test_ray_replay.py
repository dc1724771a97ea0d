"""cluster=ray with DQN and SAC: what actors do, what the learner stores and updates, lost actors, resumed trainings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from test_ray_continuous import Counter

from conftest import RunCommand
from fasttrain import DQN
from plain_env import PlainEnv

pytest.importorskip("ray")
SMALL = ("+profile=speed", "report=false", "checkup=off", "eval.episodes=10", "torch_threads=1", "vec_env=dummy",
         "cluster=ray")  # fmt: skip
MASKED = (*SMALL, "env.entry_point=test_ray_replay:Masked", "algo=dqn", "num_envs=5", "algo.buffer_size=5000",
          "warmup_steps=100", "updates_per_step=3", "algo.train_freq=2", "fused_update=off", "prefetch=off",
          "algo.entry_point=test_ray_replay:Kept")  # fmt: skip


class Masked(Counter):
    """The action steps % 5 is illegal."""

    observation_space = spaces.Box(-1.0, 1e7, (4,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, once: str = "", at: int = 60) -> None:
        super().__init__(once, at)

    def action_masks(self) -> Any:
        return np.arange(5) != self.steps % 5

    def step(self, action: Any) -> Any:
        assert action != self.steps % 5, "an illegal action"
        return super().step(action)


class Picture(PlainEnv):
    """The last axis of the image has the channels. All its numbers are the steps of the episode."""

    observation_space, length = spaces.Box(0, 255, (40, 48, 3), np.uint8), 7

    def seen(self) -> Any:
        return np.full((40, 48, 3), self.time, np.uint8)

    def paid(self, action: Any) -> Any:
        return 0.0


class Kept(DQN):
    """Keeps the last model."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        MODELS[:] = [self]
        super().train(gradient_steps, batch_size)


MODELS: list[Any] = []


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_ray_replay  # the module that `algo.entry_point` names

    monkeypatch.setattr(test_ray_replay, "MODELS", MODELS)


@pytest.mark.parametrize("more", [(), ("algo.prioritized=true", "algo.n_steps=3")], ids=["plain", "prioritized n-step"])
def test_transitions_and_masks_are_those_of_the_envs_and_updates_are_as_many(fasttrain: RunCommand, more: Any):
    done = fasttrain(*MASKED, *more, "total_timesteps=1500").ok()
    model = MODELS[0]
    stored, rows = model.replay_buffer, model.replay_buffer.pos
    assert model.num_timesteps == done.json("summary.json")["env_steps"] == 1500 == rows * 5
    assert model._n_updates == 3 * (1500 - 100) // 10  # after each two vector steps of 5 envs
    for env in range(5):
        key, episode, steps, _ = np.moveaxis(stored.observations[:rows, env], -1, 0)
        after, actions = stored.next_observations[:rows, env], stored.actions[:rows, env, 0]
        assert len(set(key)) == 1
        assert steps.tolist() == (np.arange(rows) % 7).tolist()
        assert (after[:, 2] == steps + 1).all()
        assert (after[:, 3] == actions).all()
        assert (after[:, 1] == episode).all()
        assert (actions != steps % 5).all()
        over = steps == 6
        assert (stored.dones[:rows, env] == over).all()
        assert (stored.timeouts[:rows, env] == over & (episode % 2 == 1)).all()
        assert (stored.rewards[:rows, env] == actions).all()
    assert len(done.episodes()) == 5 * (rows // 7)
    assert {length for _, length in done.episodes()} == {7}


def test_a_lost_actor_is_replaced_and_its_last_transitions_are_not_learned(fasttrain: RunCommand, tmp_path: Path):
    once = tmp_path / "once"
    done = fasttrain(*MASKED, "total_timesteps=1500", f"env.kwargs.once={once}").ok()
    assert re.search(r"actor . \(envs . to .\): actor ended \(ActorDiedError\)", done.err)
    assert "1 envs or actors were replaced (actor ended: 1)" in done.out
    model, found = MODELS[0], 0
    stored, rows = model.replay_buffer, model.replay_buffer.pos
    for env in range(5):
        keys = stored.observations[:rows, env, 0]
        if len(set(keys)) > 1:
            found += 1
            begun = int(np.flatnonzero(np.diff(keys))[0]) + 1  # the first transition of the new env
            assert stored.void[begun - 1, env]
            assert stored.observations[begun, env, 2] == 0
    assert found in (2, 3)
    assert stored.void.sum() == found


def test_dqn_learns_cartpole_and_a_resumed_training_goes_on(fasttrain: RunCommand):
    typed = (*SMALL, "env.id=CartPole-v1", "algo=dqn", "num_envs=4", "seed=1", "checkpoint_every=5000",
             "algo.learning_rate=1e-3", "batch_size=64", "algo.target_update_interval=10", "algo.train_freq=64",
             "algo.exploration_fraction=0.16", "algo.exploration_final_eps=0.04", "updates_per_step=128",
             "warmup_steps=1000", "fused_update=on")  # fmt: skip
    begun = fasttrain(*typed, "total_timesteps=20000").ok()
    fasttrain("resume", f"run={begun.folder}", "total_timesteps=40000").ok()
    returns = [episode for episode, _ in begun.episodes()]
    assert begun.json("summary.json")["env_steps"] >= 40_000
    assert np.mean(returns[:30]) < 40
    assert np.mean(returns[-100:]) > 80


def test_sac_updates_as_often_as_in_one_process(fasttrain: RunCommand):
    typed = ("env.id=Pendulum-v1", "algo=sac", "num_envs=3", "warmup_steps=300", "algo.net_arch=[32]",
             "total_timesteps=900", "updates_per_step=2")  # fmt: skip
    alone, together = fasttrain(*SMALL, *typed, "cluster=off").ok(), fasttrain(*SMALL, *typed).ok()
    for done in (alone, together):
        assert done.json("summary.json")["env_steps"] == 900
        assert len(done.episodes()) == 3
    one, other = (done.json("summary.json")["perf"]["updates"] for done in (alone, together))
    assert one == other == 400


def test_images_are_transposed_as_in_one_process(fasttrain: RunCommand):
    typed = [each.replace(":Masked", ":Picture") for each in MASKED]
    fasttrain(*typed, "total_timesteps=150", "eval.episodes=1").ok()
    drawn = MODELS[0].replay_buffer.sample(64)
    assert MODELS[0]._last_obs.shape == (5, 3, 40, 48)
    assert drawn.observations.shape == (64, 3, 40, 48)
    assert (drawn.next_observations == drawn.observations[:, :1, :1, :1] + 1).all()
