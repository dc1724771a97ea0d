"""Videos: of a finished run, and on the way."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO

from conftest import RunCommand, configured
from fasttrain.deploy import video
from fasttrain.deploy.video import picture
from fasttrain.errors import EnvSpecError
from fasttrain.report.index import write_report
from fasttrain.spec.plain import to_dict
from fasttrain_games.skirmish.env import SkirmishEnv

needs_imageio = pytest.mark.skipif(
    any(video.find_spec(name) is None for name in video.PACKAGES[".mp4"]),
    reason="imageio and imageio-ffmpeg are not installed (the extra `video`)",
)
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:pygame|pkg_resources")

DOT = '''
import gymnasium as gym
import numpy as np


class Dot(gym.Env):
    """A dot goes to the right, five steps; `draws` says how well."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None, draws="well", modes=("rgb_array",), last=5):
        self.render_mode, self.draws, self.last = render_mode, draws, last
        self.metadata = {**self.metadata, "render_modes": list(modes)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self._seen(), {}

    def step(self, action):
        self.at += 1
        return self._seen(), float(action), self.at == self.last, False, {}

    def render(self):
        if self.draws == "late" and self.at == 3:
            raise RuntimeError("out of paint")
        if self.draws == "text":
            return "a dot"
        frame = np.zeros((7, 9, 3), np.uint8)
        frame[3, min(8, self.at)] = 255
        return frame

    def _seen(self):
        return np.array([min(1.0, self.at / self.last)], np.float32)
'''
ARGUMENTS = {
    "dot": ("env.entry_point=drawing:Dot", "algo=ppo"),
    "pole": ("env.id=CartPole-v1", "algo=ppo"),
    "skirmish": ("env=skirmish",),
}
SMALL = (*ARGUMENTS["dot"], "+profile=speed", "total_timesteps=512", "algo.rollout_size=128", "batch_size=64",
         "num_envs=2", "algo.n_epochs=1", "vec_env=dummy", "eval.episodes=4", "torch_threads=1", "checkup=off",
         "fused_update=off")  # fmt: skip


@pytest.fixture(autouse=True)
def _drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drawing.py").write_text(DOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


class Spaces(gym.Env[Any, Any]):
    """As much of `Dot` as a model needs."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)


MODELS: dict[str, Callable[[], Any]] = {
    "dot": lambda: PPO("MlpPolicy", Spaces(), n_steps=2, batch_size=2, seed=1, device="cpu"),
    "pole": lambda: PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=2, batch_size=2, seed=1, device="cpu"),
    "skirmish": lambda: MaskablePPO(
        "MlpPolicy", SkirmishEnv(**configured("env=skirmish").env.kwargs), n_steps=2, batch_size=2, seed=1, device="cpu"
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """The folder of a run by name, as training leaves it; its model is as it was made."""

    def made(name: str, *more: str) -> Path:
        path = tmp_path / "a run"
        path.mkdir()
        config = to_dict(configured(*ARGUMENTS[name], *more))
        (path / "plan.json").write_text(json.dumps({"config": config}))
        MODELS[name]().save(path / "model.zip")
        return path

    return made


def frames_of(file: Path) -> list[Any]:
    """By ffmpeg itself: imageio's reader leaves pipes open."""
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [
        get_ffmpeg_exe(),
        "-i",
        str(file),
        "-fps_mode",
        "passthrough",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    done = subprocess.run(command, capture_output=True, check=True)
    found = re.search(rb"Video: .*?, (\d{2,})x(\d+)", done.stderr)
    assert found is not None
    width, height = int(found[1]), int(found[2])
    return list(np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3))


@needs_imageio
@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_each_picture_of_each_episode_is_in_it(run: Callable[..., Path], fasttrain: RunCommand, ending: str):
    done = fasttrain("play", f"run={run('dot')}", f"output=game.{ending}", "play.episodes=2", "play.seed=3")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "Dot: ppo after 0 steps, play.seed=3",
        f"game.{ending}: 1.2 s",
        done.out.splitlines()[-1],
    ]
    assert done.out.splitlines()[-1].startswith("2 games, mean return ")
    frames = frames_of(Path(f"game.{ending}"))
    assert frames[0].shape[:2] == (7 * 29 + 1, 9 * 29 + 1), "enlarged by a whole factor, and made even"
    brightest = [int(frame[..., :3].sum(axis=(0, 2)).argmax()) // 29 for frame in frames]
    assert brightest == [0, 1, 2, 3, 4, 5] * 2
    assert not list(Path.cwd().glob(".saving-*"))


@needs_imageio
def test_cart_pole_at_its_own_pace(run: Callable[..., Path], fasttrain: RunCommand):
    pytest.importorskip("pygame", reason="CartPole draws by pygame")
    done = fasttrain("play", f"run={run('pole')}", "output=game.mp4", "play.seed=3")
    assert (done.exit_code, done.err) == (0, "")
    decisions = int(float(done.out.rpartition("mean return ")[2].split(",")[0]))
    frames = frames_of(Path("game.mp4"))
    assert len(frames) == decisions + 1
    assert frames[0].shape == (400, 600, 3)
    assert f"game.mp4: {(decisions + 1) / 50:.1f} s" in done.out


@needs_imageio
def test_actions_are_drawn_where_that_is_asked_for(run: Callable[..., Path], fasttrain: RunCommand):
    folder, totals = run("dot"), set()
    for seed in range(4):
        done = fasttrain("play", f"run={folder}", "output=game.gif", f"play.seed={seed}", "play.deterministic=false")
        totals.add(done.out.rpartition("mean return ")[2])
    assert len(totals) > 1


@needs_imageio
def test_in_a_two_sided_game_the_agent_plays_both_sides(run: Callable[..., Path], fasttrain: RunCommand):
    done = fasttrain("play", f"run={run('skirmish')}", "output=game.gif", "opponent=self", "play.seed=3")
    assert (done.exit_code, done.err) == (0, "")
    assert "game.gif: " in done.out
    assert "1 game, mean return" in done.out


@needs_imageio
def test_nothing_is_remembered_of_the_episode_before(
    run: Callable[..., Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    begun, predict = [], PPO.predict

    def noted(model: Any, *given: Any, **more: Any) -> Any:
        begun.extend(more["episode_start"].tolist())
        return predict(model, *given, **more)

    monkeypatch.setattr(PPO, "predict", noted)
    done = fasttrain("play", f"run={run('dot')}", "output=dots.gif", "play.episodes=2")
    assert (done.exit_code, done.err) == (0, "")
    assert [place for place, begins in enumerate(begun) if begins] == [0, 5]


@needs_imageio
@pytest.mark.parametrize(
    ("more", "typed", "message"),
    [
        ([], ["output=game.avi"], "output=game.avi: play writes videos; name a file that ends in .mp4 or .gif"),
        ([], ["output=no/game.mp4"], "output=no/game.mp4: name a file in a folder that exists"),
        ([], ["play.human=true"], "output=game.mp4 contradicts play.human=true"),
        ([], ["play.speed=9"], "play.speed=9 means nothing for output=game.mp4"),
        (["env.kwargs.modes=[human]"], [], "draws itself only as human, a video takes pictures: give it a render()"),
        (["env.kwargs.draws=text"], [], "render() gave str <U5 () under render_mode='rgb_array'"),
        (["env.kwargs.draws=late"], [], "render() failed under render_mode='rgb_array': RuntimeError: out of paint"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    run: Callable[..., Path], fasttrain: RunCommand, more: list[str], typed: list[str], message: str
):
    done = fasttrain("play", f"run={run('dot', *more)}", "output=game.mp4", *typed)
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert message in done.err
    assert not Path("game.mp4").exists()


def test_what_is_missing_is_named_with_the_way_to_get_it(
    run: Callable[..., Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    done = fasttrain("play", f"run={run('dot')}", "output=game.mp4")
    told = "output=game.mp4 needs imageio and imageio-ffmpeg: pip install 'fasttrain[video]'"
    assert (done.exit_code, done.err) == (2, f"fasttrain: error: {told}\n")
    done = fasttrain(*SMALL, "video.every=256")
    told = "video.every=256 needs imageio and imageio-ffmpeg: pip install 'fasttrain[video]'"
    assert (done.exit_code, done.err) == (2, f"fasttrain: error: {told}\n")


@pytest.mark.parametrize("wrong", ["text", None, np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3))])
def test_what_is_no_picture(wrong: Any):
    with pytest.raises(EnvSpecError, match=r"a uint8 array \(height, width, 3\) is due"):
        picture(wrong)


def test_pictures_with_transparency_and_large_ones():
    assert picture(np.zeros((301, 400, 4), np.uint8)).shape == (302, 400, 3)


@needs_imageio
@pytest.mark.parametrize("beside", ["true", "false"])
def test_on_the_way_videos_come_and_the_page_shows_them(fasttrain: RunCommand, beside: str):
    done = fasttrain(*SMALL, "video.every=256", "video.episodes=2", "eval_every=512", f"eval_async={beside}")
    assert (done.exit_code, done.err) == (0, "")
    assert sorted(path.name for path in (done.folder / "videos").iterdir()) == ["step_256.mp4", "step_512.mp4"]
    assert len(frames_of(done.folder / "videos" / "step_256.mp4")) == 12
    assert "[VIDEO] videos/step_256.mp4: 1 s, reward " in done.out
    assert len(done.json("summary.json")["evaluations"]) == 1, "a video is no evaluation"
    page = write_report(done.folder).read_text()
    assert page.index('src="videos/step_512.mp4"') < page.index('src="videos/step_256.mp4"')
    assert "media-src 'self' file:" in page


@needs_imageio
def test_a_video_changes_nothing_of_what_is_learned(fasttrain: RunCommand):
    returns = []
    for more in ([], ["video.every=128"]):
        done = fasttrain(*SMALL, "eval_async=false", *more)
        with (done.folder / "episodes.csv").open() as file:
            returns.append([row["return"] for row in csv.DictReader(file)])
    assert returns[0] == returns[1]


@needs_imageio
@pytest.mark.parametrize("beside", ["true", "false"])
def test_a_video_that_fails_costs_one_line(fasttrain: RunCommand, beside: str):
    done = fasttrain(*SMALL, "video.every=512", "env.kwargs.draws=late", f"eval_async={beside}")
    assert (done.exit_code, done.err) == (0, "")
    assert "[VIDEO] videos/step_512.mp4 was not made (" in done.out
    assert "out of paint" in done.out
    assert list((done.folder / "videos").iterdir()) == []


@needs_imageio
def test_a_long_episode_is_cut_after_a_minute(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(video, "MOST_S", 0.3)
    done = fasttrain(*SMALL, "video.every=512", "eval_async=false")
    assert "[VIDEO] videos/step_512.mp4: 0 s, which is not the whole episode" in done.out
    assert len(frames_of(done.folder / "videos" / "step_512.mp4")) == 3


@needs_imageio
def test_an_env_without_pictures_is_told_before_training(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "video.every=512", "env.kwargs.modes=[ansi]")
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert "draws itself only as ansi, a video takes pictures" in done.err
