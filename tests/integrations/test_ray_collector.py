"""What actors of cluster=ray send: statistics of env.normalize, and observations that a wrapper of SB3 changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize
from test_ray_actors import CARTPOLE, PARTS, SMALL, same

from conftest import RunCommand
from fasttrain_integrations.ray_collector import Held
from plain_env import PlainEnv

pytest.importorskip("ray")
STEPS = 85  # of a rollout: 256 transitions of 3 envs
NORMALIZED = (*CARTPOLE, "fused_update=on", "env.normalize=[obs,reward]")


class PerRollout(VecNormalize):
    """Moves its statistics after each rollout, as actors with 2 and 1 envs do: moments of each, merged in order."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.stored: list[tuple[Any, Any]] = []

    def step_wait(self) -> Any:
        if self.num_envs == 1:  # an evaluation's env
            return super().step_wait()
        self.training = False
        ended, self.returns = self.returns, self.returns.copy()
        answer = super().step_wait()
        self.stored.append((self.old_obs.copy(), ended * self.gamma + self.old_reward))
        self.returns = np.where(answer[2], 0.0, self.stored[-1][1])
        self.training = True
        if len(self.stored) == STEPS:
            for rows in (slice(0, 2), slice(2, 3)):
                for rms, index in ((self.obs_rms, 0), (self.ret_rms, 1)):
                    seen = RunningMeanStd(0.0, np.shape(rms.mean))
                    for stored in self.stored:
                        seen.update(stored[index][rows])
                    rms.combine(seen)
            self.stored = []
        return answer


class Images(PlainEnv):
    """Images with the channels last, which SB3 transposes in a wrapper around the vector env."""

    observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def seen(self) -> Any:
        return self.np_random.integers(0, 255, (36, 36, 3), np.uint8)


def test_actors_give_the_numbers_of_one_process_whose_statistics_move_after_each_rollout(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    together = fasttrain(*NORMALIZED, "cluster=ray", "checkpoint_every=510").ok()
    monkeypatch.setattr("fasttrain.runs.envs.VecNormalize", PerRollout)
    alone = fasttrain(*NORMALIZED).ok()
    assert same(alone.folder, together.folder)
    one, other = (np.load(run.folder / "vecnormalize.npz") for run in (alone, together))
    assert sorted(one) == sorted(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert one["observations.count"] == pytest.approx(5 * 255 + 3 + 1e-4)  # all steps and the first observations
    qualities = [run.json("summary.json")["quality"] for run in (alone, together)]
    assert qualities[0] == qualities[1]
    monkeypatch.undo()
    fasttrain("export", f"run={together.folder}", "format=torchscript").ok()
    fasttrain("resume", f"run={together.folder}", "total_timesteps=2040").ok()
    with np.load(together.folder / "vecnormalize.npz") as later:
        assert later["observations.count"] == pytest.approx(8 * 255 + 3 + 1e-4)


@pytest.mark.parametrize(
    "typed",
    [
        (*PARTS, "env.normalize=[obs]", "fused_update=on"),
        (*SMALL, "env.entry_point=test_ray_collector:Images", "algo=ppo", "num_envs=3", "algo.rollout_size=64",
         "batch_size=16", "algo.n_epochs=1"),
        (*SMALL, "env.id=CartPole-v1", "algo=recurrent_ppo", "algo.cell=gru", "num_envs=2",
         "algo.rollout_size=64", "batch_size=16", "env.normalize=[reward]"),
    ],
    ids=["normalised dict", "images with the channels last", "GRU"],
)  # fmt: skip
def test_a_training_with_actors_ends_well(typed: tuple[str, ...], fasttrain: RunCommand, monkeypatch: Any):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    typed = (
        *(text for text in typed if not text.startswith("total_timesteps")),
        "total_timesteps=200",
        "vec_env=dummy",
    )
    done = fasttrain(*dict.fromkeys(typed), "cluster=ray").ok()
    assert done.json("summary.json")["status"] == "done"


def test_held_statistics_stay_and_what_is_seen_since_can_be_merged():
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(40, 2)), rng.normal(3.0, size=(30, 2))
    given = RunningMeanStd(0.0, (2,))
    given.update(before)
    held = Held(given)
    for row in after.reshape(10, 3, 2):
        held.update(row)
    assert np.array_equal(held.mean, before.mean(0))
    given.combine(held.seen)
    every = np.concatenate([before, after])
    np.testing.assert_allclose(given.mean, every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(given.var, every.var(0), rtol=1e-12)
