"""sb3-contrib's ActionMasker among `env.wrappers`: its masks arrive in all ways of stepping, whatever is around it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from conftest import RunCommand

MASKER = "wrapper: 'sb3_contrib.common.wrappers:ActionMasker', action_mask_fn"
BY_METHOD = ("env.entry_point=hunt:Hunt", f"env.wrappers=[{{{MASKER}: legal}}]")
BY_FUNCTION = ("env.id=hunt:Hunt-v0", f"env.wrappers=[{{{MASKER}: 'hunt:legal'}}]")
AROUND = (
    "env.entry_point=hunt:Hunt",
    f"env.wrappers=[{{{MASKER}: legal}}, {{wrapper: 'gymnasium.wrappers:TimeLimit', max_episode_steps: 6}}, "
    "'stable_baselines3.common.atari_wrappers:ClipRewardEnv', 'gymnasium.wrappers:RecordEpisodeStatistics']",
    "env.frame_stack=2",
    "env.normalize=[obs]",
)
RUN = ("algo=maskable_ppo", "num_envs=4", "total_timesteps=192", "algo.n_steps=24", "batch_size=24", "algo.n_epochs=1",
       "eval.episodes=4", "checkup=off")  # fmt: skip
WAYS = {
    "dummy": ("+profile=speed", "vec_env=dummy"),
    "shared": ("+profile=speed", "vec_env=shared", "workers=2"),
    "groups": ("+profile=speed", "vec_env=shared", "workers=2", "schedule=first_ready"),
    "stock": ("+profile=baseline", "vec_env=dummy"),
}


@pytest.fixture(autouse=True)
def _hunt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("dummy", BY_FUNCTION),
        ("shared", AROUND),
        ("groups", BY_METHOD),
        ("stock", BY_METHOD),
        ("stock", AROUND),
    ],
)
def test_masks_reach_the_policy(way: str, named: tuple[str, ...], fasttrain: RunCommand):
    done = fasttrain(*WAYS[way], *named, *RUN)
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    mean, length = (6.0, 6) if named is AROUND else (24.0, 8)
    assert (quality["mean_reward"], quality["mean_length"]) == (mean, length)
    with (done.folder / "episodes.csv").open() as file:
        played = [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]
    assert played == [(mean, length)] * (192 // length)


def test_masks_reach_dqn_and_stocks_workers(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", *BY_FUNCTION, "algo=dqn", "num_envs=4", "total_timesteps=128", "warmup_steps=32",
                     "eval.episodes=4", "checkup=off", "vec_env=shared", "workers=2")  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.json("summary.json")["quality"]["mean_reward"] == 24.0
    done = fasttrain("+profile=baseline", *BY_METHOD, *RUN, "vec_env=subproc", "num_envs=2")
    assert done.exit_code == 0, done.err
    assert done.json("summary.json")["quality"]["mean_reward"] == 24.0


def test_a_name_that_only_the_innermost_env_has_is_told(fasttrain: RunCommand):
    refused = fasttrain("+profile=speed", "env.id=hunt:Hunt-v0", BY_METHOD[1], *RUN)
    assert refused.exit_code == 2
    assert "'OrderEnforcing' object has no attribute 'legal'" in refused.err
    refused = fasttrain("+profile=speed", BY_FUNCTION[0], BY_FUNCTION[1].replace("hunt:legal", "hunt:legl"), *RUN)
    assert refused.exit_code == 2
    assert "ActionMasker, action_mask_fn=hunt:legl: module 'hunt' has no 'legl'; did you mean 'legal'?" in refused.err
