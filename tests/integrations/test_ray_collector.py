"""What actors of cluster=ray send: statistics of env.normalize, and observations that a wrapper of SB3 changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

import fasttrain.runs.envs
from conftest import RunCommand
from fasttrain.integrations.ray_collector import Held
from test_ray_actors import CARTPOLE, SMALL, same

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


def test_actors_give_the_numbers_of_one_process_whose_statistics_move_after_each_rollout(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    together = fasttrain(*NORMALIZED, "cluster=ray").ok()
    monkeypatch.setattr(fasttrain_envs := fasttrain_module(), "VecNormalize", PerRollout)
    alone = fasttrain(*NORMALIZED).ok()
    assert fasttrain_envs.VecNormalize is PerRollout
    assert same(alone.folder, together.folder)
    one, other = (np.load(run.folder / "vecnormalize.npz") for run in (alone, together))
    assert sorted(one) == sorted(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert one["observations.count"] == pytest.approx(5 * 255 + 3 + 1e-4)  # all steps and the first observations
    returns = [run.json("summary.json")["greedy"]["return_mean"] for run in (alone, together)]
    assert returns[0] == returns[1]


def fasttrain_module() -> Any:
    return fasttrain.runs.envs
