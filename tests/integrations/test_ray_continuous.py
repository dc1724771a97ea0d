"""cluster=ray schedule=continuous: no transition is lost or repeated, lags are limited, lost actors are replaced."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from conftest import RunCommand
from fasttrain import PPO
from plain_env import first

pytest.importorskip("ray")
SMALL = ("+profile=speed", "report=false", "checkup=off", "eval.episodes=10", "torch_threads=1", "vec_env=dummy")
CLUSTER = ("cluster=ray", "schedule=continuous")
ENVS, STEPS = 5, 24
COUNTED = (*SMALL, *CLUSTER, "env.entry_point=test_ray_continuous:Counter", "algo=ppo", f"num_envs={ENVS}",
           f"algo.rollout_size={ENVS * STEPS}", "batch_size=40", "algo.n_epochs=2", "fused_update=off",
           "algo.entry_point=test_ray_continuous:Checked")  # fmt: skip


class Counter(gymnasium.Env[Any, Any]):
    """Observations: number of the env's episode, steps of the episode, last action. Odd episodes are truncated.

    Args:
        once: the copy that finds this file missing at step `at` ends its process.
        slow: the copy that finds this file missing at step `at` takes `slow_s` for each further step.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1e6, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, once: str = "", at: int = 100, slow: str = "", slow_s: float = 0.0) -> None:
        self.once, self.at, self.total, self.episode = Path(once), at, 0, -1
        self.key = float(np.random.default_rng().integers(2**20))  # tells one env from another
        self.slow, self.slow_s, self.sleep_s = Path(slow), slow_s, 0.0

    def seen(self, action: int) -> Any:
        return np.array([self.key, self.episode, self.steps, action], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.episode = 0, self.episode + 1
        return self.seen(-1), {}

    def step(self, action: Any) -> Any:
        self.steps, self.total = self.steps + 1, self.total + 1
        time.sleep(self.sleep_s)
        if self.once.name and self.total == self.at and first(self.once):
            os._exit(7)
        if self.slow.name and self.total == self.at and first(self.slow):
            self.sleep_s = self.slow_s
        over = self.steps >= 7
        return self.seen(int(action)), float(action), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


class Checked(PPO):
    """Keeps every rollout before its update."""

    def train(self) -> None:
        storage: Any = self.rollout_buffer.storage
        names = ("observations", "actions", "rewards", "episode_starts", "values", "advantages")
        kept = {name: np.array(getattr(storage, name)) for name in names}
        KEPT.append(kept | {"there": ~storage.left_out, "steps": self.num_timesteps})
        super().train()


KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_ray_continuous  # the module that `algo.entry_point` names

    monkeypatch.setattr(test_ray_continuous, "KEPT", KEPT)
    KEPT.clear()


def of_env(name: str, env: int) -> Any:
    """All transitions of one env in the order in which it made them."""
    return np.concatenate([each[name][:, env][each["there"][:, env]] for each in KEPT])


def test_every_transition_is_real_and_in_one_rollout(fasttrain: RunCommand):
    done = fasttrain(*COUNTED, "total_timesteps=960").ok()
    sizes = [int(each["there"].sum()) for each in KEPT]
    assert all(ENVS * STEPS <= size <= ENVS * STEPS + 2 for size in sizes), "at most what is left of a vector step"
    assert len({len(of_env("actions", env)) for env in range(ENVS)}) > 1 or len(sizes) == 8
    for env in range(ENVS):
        key, episode, steps, last = np.moveaxis(of_env("observations", env), -1, 0)
        actions, rewards = of_env("actions", env)[:, 0], of_env("rewards", env)
        assert len(set(key)) == 1
        assert (steps == np.arange(len(steps)) % 7).all()
        assert (np.diff(episode) == (steps[1:] == 0)).all()
        assert (last[1:][steps[1:] > 0] == actions[:-1][steps[1:] > 0]).all()
        assert (of_env("episode_starts", env) == (steps == 0)).all()
        cut = (steps == 6) & (episode % 2 == 1)
        assert (rewards[~cut] == actions[~cut]).all()
    summary = done.json("summary.json")
    assert summary["env_steps"] == KEPT[-1]["steps"] == sum(sizes)
    assert {length for _, length in done.episodes()} == {7}
    assert len(done.episodes()) == sum((of_env("observations", env)[:, 2] == 6).sum() for env in range(ENVS))


def test_lags_of_a_slow_actor_are_counted_and_what_is_too_old_is_dropped(fasttrain: RunCommand, tmp_path: Path):
    slow = (f"env.kwargs.slow={tmp_path / 'slow'}", "env.kwargs.slow_s=0.05", "env.kwargs.at=30")
    done = fasttrain(*COUNTED, *slow, "total_timesteps=2400", "max_lag=1").ok()
    lag = done.json("summary.json")["perf"]["lag"]
    there = np.array([each["there"].sum(axis=0) for each in KEPT])  # (rollouts, N)
    assert there.max() <= 2 * STEPS
    assert (there.sum(axis=1) <= ENVS * STEPS + 2).all()
    assert there.sum(axis=0).max() > 2 * there.sum(axis=0).min(), "fast actors do not wait for a slow one"
    assert lag["largest"] > 1
    assert 0 < lag["dropped"] < there.sum() / 2
    assert 0 < lag["mean"] < lag["largest"]


def test_a_lost_actor_is_replaced_and_its_episodes_end_with_a_value(fasttrain: RunCommand, tmp_path: Path):
    once = tmp_path / "once"
    done = fasttrain(*COUNTED, "total_timesteps=1920", f"env.kwargs.once={once}", "env.kwargs.at=60").ok()
    assert re.search(r"actor . \(envs . to .\): actor ended \(ActorDiedError\)", done.err)
    assert "1 envs or actors were replaced (actor ended: 1)" in done.out
    lost = [env for env in range(ENVS) if len(set(of_env("observations", env)[:, 0])) == 2]
    assert lost in ([0, 1, 2], [3, 4])
    for env in lost:
        key, _, steps, _ = np.moveaxis(of_env("observations", env), -1, 0)
        begun = int(np.flatnonzero(np.diff(key))[0]) + 1  # the first transition of the new env
        assert steps[begun] == 0
        assert of_env("episode_starts", env)[begun] == 1
    assert done.json("summary.json")["env_steps"] == sum(each["there"].sum() for each in KEPT)


def test_cartpole_is_learned_and_a_resumed_training_goes_on(fasttrain: RunCommand):
    typed = (*SMALL, *CLUSTER, "env.id=CartPole-v1", "algo=ppo", "num_envs=8", "algo.rollout_size=1024",
             "batch_size=128", "seed=1")  # fmt: skip
    first = fasttrain(*typed, "total_timesteps=15000", "checkpoint_every=5000").ok()
    fasttrain("resume", f"run={first.folder}", "total_timesteps=30000").ok()
    returns = [episode for episode, _ in first.episodes()]
    assert np.mean(returns[:50]) < 40
    assert np.mean(returns[-20:]) > 120
    assert first.json("summary.json")["env_steps"] >= 30_000
