"""cluster=ray: the same numbers as one process, actors that are lost, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_zip_file

import pig_games
from conftest import RunCommand
from plain_env import DrawnEnv, first

SMALL = ("+profile=speed", "report=false", "checkup=off", "eval.episodes=4", "torch_threads=1")
CARTPOLE = (*SMALL, "env.id=CartPole-v1", "algo=ppo", "algo.rollout_size=256", "batch_size=64", "num_envs=3",
            "vec_env=dummy", "total_timesteps=1024", "env.max_episode_steps=30")  # fmt: skip
PARTS = (*SMALL, "env.entry_point=test_ray_actors:Parts", "algo=maskable_ppo", "algo.rollout_size=192", "num_envs=3",
         "batch_size=64", "vec_env=dummy", "total_timesteps=2000")  # fmt: skip
TOY = (*SMALL, "env.entry_point=test_ray_actors:Failing", "algo=ppo", "algo.rollout_size=128", "batch_size=32",
       "num_envs=4", "vec_env=dummy", "fused_update=off")  # fmt: skip


class Failing(DrawnEnv):
    """Ends its process, or raises, at the step `at` of the only copy that finds the file `once` missing."""

    def __init__(self, once: str = "", at: int = 100, kind: str = "exit") -> None:
        self.once, self.at, self.kind, self.total = Path(once), at, kind, 0

    def step(self, action: Any) -> Any:
        self.total += 1
        if self.once.name and self.total == self.at and first(self.once):
            if self.kind == "raise":
                raise ValueError("the board fell off the table")
            os._exit(7)
        return super().step(action)


class Parts(DrawnEnv):
    """A Dict of two keys, and masks."""

    observation_space = spaces.Dict({"board": DrawnEnv.observation_space, "hand": spaces.MultiBinary(3)})

    def seen(self) -> Any:
        return {"board": super().seen(), "hand": np.ones(3, np.int8)}

    def action_masks(self) -> Any:
        return np.array([True, self.time % 2 == 0])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_from_zip_file(folder / "model.zip", device="cpu")[1]["policy"]  # type: ignore[index]


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return pytest.importorskip("ray")


@pytest.mark.parametrize(
    "typed",
    [
        CARTPOLE,
        PARTS,
        (*SMALL, "total_timesteps=16384", "num_envs=64"),
        ("algo=recurrent_ppo", *(text for text in CARTPOLE if text != "algo=ppo")),
        (*SMALL, "algo=maskable_recurrent_ppo", "total_timesteps=8192", "algo.rollout_size=4096", "num_envs=8"),
    ],
    ids=["truncated episodes", "masked dict", "masked native game", "recurrent", "recurrent with masks"],
)
def test_with_kernels_actors_give_the_numbers_of_one_process(typed: tuple[str, ...], fasttrain: RunCommand, ray: Any):
    typed = (*typed, "fused_update=on")
    alone, together = fasttrain(*typed).ok(), fasttrain(*typed, "cluster=ray").ok()
    assert same(alone.folder, together.folder)
    one, other = (
        [(row["env_steps"], row["env"], row["return"], row["length"]) for row in run.table("episodes.csv")]
        for run in (alone, together)
    )
    assert one == other
    assert len(one) > 5


def test_a_lost_actor_is_replaced_and_its_rollout_left_out(fasttrain: RunCommand, ray: Any, tmp_path: Path):
    once = tmp_path / "once"
    done = fasttrain(*TOY, "total_timesteps=640", f"env.kwargs.once={once}", "env.kwargs.at=40", "cluster=ray").ok()
    told = r"fasttrain: warning: actor . \(envs . to .\): actor ended \(ActorDiedError\); its part of the rollout is"
    assert re.search(told, done.err)
    assert once.exists()
    summary = done.json("summary.json")
    assert summary["env_steps"] == 704  # the steps of the lost actor are not counted
    assert "1 envs or actors were replaced (actor ended: 1); 64 env steps were lost" in done.out


def test_an_error_of_the_env_is_told_and_what_cannot_work_is_refused(fasttrain: RunCommand, ray: Any, tmp_path: Path):
    failed = fasttrain(*TOY, f"env.kwargs.once={tmp_path / 'once'}", "env.kwargs.kind=raise", "cluster=ray")
    assert failed.exit_code == 1
    assert re.search(r"actor \d \(envs \d to \d\): .*ValueError: the board fell off the table", failed.err)
    fasttrain(*CARTPOLE, "cluster=ray", "cluster.address=127.0.0.1:1").refused(
        "cluster.address=127.0.0.1:1: nothing answers there"
    )
    fasttrain(*CARTPOLE, "cluster=ray", "num_envs=64", "cluster.actors=64").refused("each actor uses one")


def test_actors_play_games_of_external_engines_each_with_its_own(fasttrain: RunCommand, ray: Any):
    typed = (*SMALL, *pig_games.overrides(), "algo=maskable_ppo", "algo.rollout_size=128", "batch_size=32",
             "num_envs=4", "total_timesteps=384", "cluster=ray")  # fmt: skip
    done = fasttrain(*typed).ok()
    summary = done.json("summary.json")
    assert summary["env_steps"] == 384
    assert summary["episodes"] == len(done.table("episodes.csv")) > 0
    assert {row["env"] for row in done.table("episodes.csv")} <= {"0", "1", "2", "3"}
    assert not [each for each in psutil.process_iter(["cmdline"]) if "pig_engine.py" in str(each.info["cmdline"])]
