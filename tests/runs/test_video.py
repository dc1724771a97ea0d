from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO

from conftest import RunCommand, configured
from fasttrain.errors import EnvSpecError
from fasttrain.runs import video
from fasttrain.runs.video import picture
from fasttrain.spec.plain import to_dict
from fasttrain_report.index import write_report
from messages import assert_says, wrong_inputs
from plain_env import PlainEnv

needs_imageio = pytest.mark.skipif(
    any(video.find_spec(name) is None for name in video.PACKAGES[".mp4"]),
    reason="imageio and imageio-ffmpeg are not installed (the extra `video`)",
)
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:pygame|pkg_resources")


class Dot(PlainEnv):
    """A dot goes to the right, five steps; `draws` says how well."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space, length = gym.spaces.Box(0, 1, (1,), np.float32), 5

    def __init__(self, render_mode: Any = None, draws: str = "well", modes: Any = ("rgb_array",)) -> None:
        self.render_mode, self.draws = render_mode, draws
        self.metadata = {**self.metadata, "render_modes": list(modes)}

    def paid(self, action: Any) -> float:
        return float(action)

    def render(self) -> Any:
        if self.draws == "late" and self.time == 3:
            raise RuntimeError("out of paint")
        frame = np.zeros((7, 9, 3), np.uint8)
        frame[3, min(8, self.time)] = 255
        return "a dot" if self.draws == "text" else frame

    def seen(self) -> Any:
        return np.array([self.time / self.length], np.float32)


ARGUMENTS = {"dot": (f"env.entry_point={__name__}:Dot", "algo=ppo"), "pole": ("env.id=CartPole-v1", "algo=ppo")}
SMALL = (*ARGUMENTS["dot"], "+profile=speed", "total_timesteps=256", "algo.rollout_size=128", "batch_size=64",
         "num_envs=2", "algo.n_epochs=1", "vec_env=dummy", "eval.episodes=4", "torch_threads=1", "checkup=off",
         "fused_update=off")  # fmt: skip


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


TINY: dict[str, Any] = {"n_steps": 2, "batch_size": 2, "seed": 1, "device": "cpu"}
MODELS: dict[str, Callable[[], Any]] = {
    "dot": lambda: PPO("MlpPolicy", Dot(), **TINY),
    "pole": lambda: PPO("MlpPolicy", gym.make("CartPole-v1"), **TINY),
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
        *["-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
    ]
    done = subprocess.run(command, capture_output=True, check=True)
    found = re.search(rb"Video: .*?, (\d{2,})x(\d+)", done.stderr)
    assert found is not None
    return list(np.frombuffer(done.stdout, np.uint8).reshape(-1, int(found[2]), int(found[1]), 3))


@needs_imageio
@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_each_picture_of_each_episode_is_in_it_and_nothing_is_remembered_of_the_one_before(
    run: Callable[..., Path], fasttrain: RunCommand, ending: str, monkeypatch: pytest.MonkeyPatch
):
    begun, predict = [], PPO.predict

    def noted(model: Any, *given: Any, **more: Any) -> Any:
        begun.extend(more["episode_start"].tolist())
        return predict(model, *given, **more)

    monkeypatch.setattr(PPO, "predict", noted)
    done = fasttrain("play", f"run={run('dot')}", f"output=game.{ending}", "play.episodes=2", "play.seed=3")
    assert (done.exit_code, done.err) == (0, "")
    assert done.out.startswith(f"Dot: ppo after 0 steps, play.seed=3\ngame.{ending}: 1.2 s\n2 games, mean return ")
    frames = frames_of(Path(f"game.{ending}"))
    assert frames[0].shape[:2] == (7 * 29 + 1, 9 * 29 + 1), "enlarged by a whole factor, and made even"
    brightest = [int(frame[..., :3].sum(axis=(0, 2)).argmax()) // 29 for frame in frames]
    assert brightest == [0, 1, 2, 3, 4, 5] * 2
    assert not list(Path.cwd().glob(".saving-*"))
    assert [place for place, begins in enumerate(begun) if begins] == [0, 5]


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
@pytest.mark.parametrize("typed", wrong_inputs("videos"))
def test_wrong_input_is_one_line_and_leaves_nothing(run: Callable[..., Path], fasttrain: RunCommand, typed: str):
    of_the_run, of_play = ([typed], []) if typed.startswith("env.") else ([], [typed])
    done = fasttrain("play", f"run={run('dot', *of_the_run)}", "output=game.mp4", *of_play)
    done.refused()
    assert_says("videos", typed, done.err)
    assert not Path("game.mp4").exists()


def test_missing_packages_are_named(run: Callable[..., Path], fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    told = " needs imageio and imageio-ffmpeg: "
    fasttrain("play", f"run={run('dot')}", "output=game.mp4").refused(f"error: output=game.mp4{told}")
    fasttrain(*SMALL, "video.every=256").refused(f"error: video.every=256{told}")


@pytest.mark.parametrize("wrong", ["text", None, np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3))])
def test_what_is_no_picture(wrong: Any):
    with pytest.raises(EnvSpecError, match=r"a uint8 array \(height, width, 3\) is needed"):
        picture(wrong)
    assert picture(np.zeros((301, 400, 4), np.uint8)).shape == (302, 400, 3), "with transparency, and a large one"


@needs_imageio
def test_beside_training_videos_come_and_the_page_shows_them(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "video.every=128", "eval_every=256", "eval_async=true")
    assert (done.exit_code, done.err) == (0, "")
    assert sorted(path.name for path in (done.folder / "videos").iterdir()) == ["step_128.mp4", "step_256.mp4"]
    assert len(frames_of(done.folder / "videos" / "step_128.mp4")) == 6
    assert "[VIDEO] videos/step_128.mp4: 1 s, reward " in done.out
    summary = done.json("summary.json")
    assert len(summary["evaluations"]) == 1, "a video is no evaluation"
    assert summary["eval_beside_s"] > 0
    assert (done.folder / "best_model.zip").is_file()
    assert not (done.folder / "evaluating").exists()
    page = write_report(done.folder).read_text()
    assert page.index('src="videos/step_256.mp4"') < page.index('src="videos/step_128.mp4"')
    assert "media-src 'self' file:" in page


@needs_imageio
def test_a_video_in_the_training_changes_nothing_of_what_is_learned_and_is_cut_after_a_minute(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(video, "MOST_S", 0.3)
    runs = [fasttrain(*SMALL, "eval_async=false", *more) for more in ([], ["video.every=128"])]
    assert runs[0].episodes() == runs[1].episodes()
    assert "[VIDEO] videos/step_256.mp4: 0 s, which is not the whole episode" in runs[1].out
    assert len(frames_of(runs[1].folder / "videos" / "step_256.mp4")) == 3


@needs_imageio
def test_a_video_that_fails_costs_one_line(fasttrain: RunCommand, run: Callable[..., Path]):
    done = fasttrain(*SMALL, "video.every=256", "env.kwargs.draws=late", "eval_async=false")
    assert (done.exit_code, done.err) == (0, "")
    assert "[VIDEO] videos/step_256.mp4 could not be made (" in done.out
    assert "out of paint" in done.out
    assert list((done.folder / "videos").iterdir()) == []
    fasttrain(*SMALL, "video.every=256", "env.kwargs.modes=[ansi]").refused(
        "draws itself only as ansi, but a video takes p"
    )
    fasttrain("play", f"run={run('dot', 'env.kwargs.draws=late')}", "output=game.mp4").refused(
        "render() failed under render_mode='rgb_array': RuntimeError: out of paint"
    )
    assert not Path("game.mp4").exists()
