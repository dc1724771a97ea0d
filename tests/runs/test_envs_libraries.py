"""The commands of docs/guides/env_libraries.md, shortened: each library trains by the command where it is installed."""

from __future__ import annotations

import csv
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from gymnasium import spaces
from stable_baselines3 import PPO

from conftest import RunCommand

PAGE = (Path(__file__).parents[2] / "docs" / "env_libraries.md").read_text(encoding="utf-8")
SHORT = ("total_timesteps=384", "num_envs=4", "algo.rollout_size=128", "batch_size=32", "algo.n_epochs=1",
         "eval.episodes=4", "env.max_episode_steps=40")  # fmt: skip
NO_LIMITS = (-float("inf"), float("inf"))


def command_of(library: str) -> list[str]:
    """What the page says to type, without the word fasttrain."""
    section = PAGE.partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    (line,) = re.findall(r"^fasttrain (\+.*)$", section, flags=re.MULTILINE)
    return shlex.split(line)


def test_every_library_of_the_page_is_here():
    assert set(re.findall(r"^## (\w+)$", PAGE, flags=re.MULTILINE)) == {"MiniGrid", "Box2D", "MuJoCo", "EnvPool"}


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(
    ("library", "module", "shape", "actions", "lowest", "highest"),
    [
        ("MiniGrid", "minigrid", (147,), spaces.Discrete(7), 0, 1),
        ("Box2D", "Box2D", (8,), spaces.Discrete(4), *NO_LIMITS),
        ("MuJoCo", "mujoco", (11,), spaces.Box(-1, 1, (3,)), 0, 40 * 20),  # healthy: 1 a step, and how fast it falls
        ("EnvPool", "envpool", (8,), spaces.Discrete(4), *NO_LIMITS),
    ],
)
def test_the_command_of_the_page_trains(
    library: str, module: str, shape: tuple[int, ...], actions: spaces.Space, lowest: float, highest: float,
    fasttrain: RunCommand,
):  # fmt: skip
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = fasttrain(*command_of(library), *SHORT)
    assert done.exit_code == 0, done.err
    summary = done.json("summary.json")
    assert summary["env_steps"] == 384
    quality = summary["quality"]
    assert lowest <= quality["mean_reward"] <= highest
    assert 1 < quality["mean_length"] <= 40
    with (done.folder / "episodes.csv").open() as file:
        episodes = [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]
    assert episodes
    assert all(lowest <= value <= highest and 1 <= length <= 40 for value, length in episodes)
    model = PPO.load(done.folder / "model.zip", device="cpu")
    assert model.observation_space.shape == shape
    assert model.action_space == actions
    assert model.num_timesteps == 384
    assert (done.folder / "vecnormalize.npz").exists() == (library == "MuJoCo")


@pytest.mark.filterwarnings("ignore")
def test_a_mission_is_read_or_refused_in_one_line(fasttrain: RunCommand):
    if find_spec("minigrid") is None:
        pytest.skip("minigrid is not installed")
    run = ("+profile=speed", "env.id=minigrid:MiniGrid-Empty-5x5-v0", "algo=ppo", *SHORT)
    refused = fasttrain(*run)
    assert refused.exit_code == 2
    assert "observes MissionSpace(" in refused.err
    assert "(env.wrappers)" in refused.err
    refused = fasttrain(*run, "env.wrappers=[minigrid.wrappers:ImgObsWrapper]")
    assert refused.exit_code == 2
    assert "Box(0, 255, (7, 7, 3), uint8) is too small for NatureCNN; add gymnasium.wrappers:Flatten" in refused.err
    done = fasttrain(*run, "env.wrappers=[minigrid.wrappers:FlatObsWrapper]")
    assert done.exit_code == 0, done.err
    (width,) = PPO.load(done.folder / "model.zip", device="cpu").observation_space.shape or ()
    assert width > 147, "the view and the mission's letters"


@pytest.mark.filterwarnings("ignore")
def test_supersuit_skips_frames_in_workers(fasttrain: RunCommand):
    if find_spec("supersuit") is None or find_spec("pettingzoo") is None:
        pytest.skip("supersuit, or the pettingzoo that it imports, is not installed")
    skips = "env.wrappers=[{wrapper: 'supersuit:frame_skip_v0', num_frames: 4}]"
    done = fasttrain("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=shared", "workers=2", skips, *SHORT)
    assert done.exit_code == 0, done.err
    with (done.folder / "episodes.csv").open() as file:
        episodes = [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]
    assert episodes
    for value, length in episodes:  # 1 a frame, up to 40 frames; the last step may be cut short
        assert 4 * (length - 1) < value <= 4 * length
        assert length <= 10
