"""Videos of a policy: `fasttrain play run=FOLDER output=game.mp4`, and `video.every` during training. The env returns a
picture after each reset and step with `render_mode="rgb_array"`. imageio writes the file, .mp4 with imageio-ffmpeg.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from fasttrain.batch import OPPONENTS_TURN as TURN
from fasttrain.envs.make import make_env
from fasttrain.envs.masks import property_of
from fasttrain.envs.retrace import close_env
from fasttrain.envs.user_code import attribute_of, blame
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.runs.envs import Statistics, env_spec, wrapped
from fasttrain.runs.evaluate import MAX_EPISODE_STEPS
from fasttrain.saving.env_state import own_random_state
from fasttrain.saving.files import into_place
from fasttrain.spec.config import Config
from fasttrain.spec.reading import second_env_hint, with_fixed_opponent
from fasttrain.vec.base import close_envs

PACKAGES = {".mp4": ("imageio", "imageio_ffmpeg"), ".gif": ("imageio",)}
USUAL_FPS, MOST_FPS_OF_GIF = 30.0, 50.0  # viewers slow down GIFs with more frames per second
MOST_S = 60.0  # length of a video that is made during training
LEAST_PIXELS = 200  # pixels of the shorter side; smaller pictures are enlarged by an integer factor
# render_mode → which command needs it, and what `render` must return.
ASKED = {"ansi": ("play shows text", "a str"), "rgb_array": ("a video takes pictures", "an array (height, width, 3)")}


class Filmed(NamedTuple):
    """A video: episodes as (return, decisions, last info), its length, and whether all episodes are complete."""

    finished: list[tuple[float, int, dict[str, Any]]]
    seconds: float
    whole: bool


def drawn_env(config: Config, mode: str) -> gymnasium.Env[Any, Any]:
    """The run's env under `render_mode=mode`. Raises ConfigError if the env has no such mode."""
    asks, returns = ASKED[mode]
    if config.env.backend != "gymnasium":
        what = "play shows one Gymnasium env as text" if mode == "ansi" else "a video shows one Gymnasium env"
        raise ConfigError(f"{what}: env.backend={config.env.backend} has no such env")
    spec = dataclasses.replace(env_spec(config), lean_info=False, two_sided=False)
    env = make_env(spec)
    modes = list((env.metadata or {}).get("render_modes") or [])
    close_env(env)
    if mode not in modes:
        film = "use output=game.mp4 for a video, or " * (mode == "ansi" and "rgb_array" in modes)
        have = f"only as {', '.join(map(str, modes))}" if modes else "not at all"
        raise ConfigError(
            f"{spec.option} draws itself {have}, but {asks}: {film}give it a render() that returns {returns} under "
            f"render_mode={mode!r}, and name {mode!r} in metadata['render_modes']"
        )
    return make_env(dataclasses.replace(spec, kwargs={**spec.kwargs, "render_mode": mode}))


def check_packages(key: str, ending: str = ".mp4") -> None:
    """Raises ConfigError if the packages that write such a file are not installed. `key`: the setting that needs it."""
    if missing := [name.replace("_", "-") for name in PACKAGES[ending] if find_spec(name) is None]:
        raise ConfigError(f"{key} needs {' and '.join(missing)}: pip install 'fasttrain[video]'")


def check_every(config: Config) -> None:
    """Raises ConfigError if the videos of `video.every` cannot be made. Called before training."""
    check_packages(f"video.every={config.video.every}")
    with own_random_state(config.seed):
        close_env(drawn_env(with_fixed_opponent(config), "rgb_array"))


class Filming(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives `film` the pictures of the first `episodes` episodes, but not of the episode that autoreset begins then."""

    def __init__(self, env: gymnasium.Env[Any, Any], film: Film, episodes: int) -> None:
        super().__init__(env)
        self._film, self.episodes = film, episodes

    def reset(self, **more: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**more)
        if self.episodes:
            self._draw()
        return result

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._draw()
        self.episodes -= bool(result[2] or result[3])
        return result

    def _draw(self) -> None:
        try:
            drawn = self.env.render()
        except Exception as error:
            raise EnvSpecError(f"render() failed under render_mode='rgb_array': {blame(error)}") from error
        self._film.add(drawn)


class Film:
    """Writes pictures into a video file."""

    def __init__(self, file: Path, fps: float) -> None:
        import imageio.v2 as imageio

        self.is_gif = file.suffix == ".gif"
        self.fps, self.pictures = min(fps, MOST_FPS_OF_GIF) if self.is_gif else fps, 0
        options: dict[str, Any] = {"fps": fps, "macro_block_size": 1, "ffmpeg_log_level": "error",
                                   "output_params": ["-threads", "1"]}  # fmt: skip # the trainer uses the other cores
        if self.is_gif:
            options = {"duration": 1000 / self.fps, "loop": 0}
        self._writer: Any = imageio.get_writer(file, mode="I", **options)

    def add(self, drawn: object) -> None:
        """Add a picture. Raises EnvSpecError if `drawn` is no picture."""
        self._writer.append_data(picture(drawn))
        self.pictures += 1

    @property
    def seconds(self) -> float:
        return self.pictures / self.fps

    def close(self) -> None:
        self._writer.close()


def picture(drawn: object) -> NDArray[np.uint8]:  # (height, width, 3); video formats need even height and width
    """The picture that an env drew; small ones are enlarged. Raises EnvSpecError if it is no picture."""
    pixels = np.asarray(drawn)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or not pixels.size:
        found = f"{type(drawn).__name__} {pixels.dtype} {pixels.shape}"
        raise EnvSpecError(
            f"render() gave {found} under render_mode='rgb_array': a uint8 array (height, width, 3) is needed"
        )
    pixels = pixels[..., :3]
    factor = math.ceil(LEAST_PIXELS / min(pixels.shape[:2]))
    pixels = pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = pixels.shape[:2]
    return np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def film(
    config: Config,
    model: BaseAlgorithm,
    statistics: Statistics | None,
    file: Path,
    episodes: int,
    deterministic: bool,
    seed: int,
    most_s: float = math.inf,
) -> Filmed:
    """Play episodes in a new env and write a video of at most `most_s` seconds; an error leaves no file. Ctrl-C ends
    the video earlier. `config.env.kwargs` name the opponents. Raises ConfigError or EnvSpecError if the env draws no
    pictures.
    """
    with own_random_state(seed), into_place(file) as draft:
        drawn = drawn_env(config, "rgb_array")
        shown = Film(draft, _fps(drawn, config.action_repeat))
        filming = Filming(drawn, shown, episodes)
        env = wrapped(DummyVecEnv([lambda: filming]), config, statistics)
        try:
            env.seed(seed)
            finished: list[tuple[float, int, dict[str, Any]]] = []
            with suppress(KeyboardInterrupt):
                _play(model, env, filming, deterministic, lambda: shown.seconds < most_s, finished)
        finally:
            close_envs(env)
            shown.close()
    return Filmed(finished, shown.seconds, not filming.episodes)


def _fps(env: gymnasium.Env[Any, Any], action_repeat: int) -> float:
    """Frames per second of the video, which has one frame per decision."""
    try:
        fps = float((env.metadata or {}).get("render_fps") or USUAL_FPS)
    except (TypeError, ValueError):
        fps = USUAL_FPS
    return max(1.0, (fps if 0 < fps < math.inf else USUAL_FPS) / action_repeat)


def _play(
    model: BaseAlgorithm,
    env: VecEnv,
    filming: Filming,
    deterministic: bool,
    goes_on: Callable[[], bool],
    finished: list[tuple[float, int, dict[str, Any]]],
) -> None:
    """Play until all episodes are filmed. In a two-sided game the model decides for both sides."""
    has_masks = env.has_attr("action_masks")
    seats = Seats(model, filming, has_masks, deterministic)
    observations, total, decisions = env.reset(), 0.0, 0
    while filming.episodes and goes_on() and decisions < MAX_EPISODE_STEPS:
        masks = np.stack(env.env_method("action_masks")) if has_masks else None
        observations, rewards, dones, infos = env.step(seats.actions(observations, masks))
        total, decisions = total + float(rewards[0]), decisions + 1
        if dones[0]:
            seats.forget()
            finished.append((total, decisions, infos[0]))
            total, decisions = 0.0, 0


def recorded(config: Config, model: BaseAlgorithm, statistics: Statistics | None, file: Path) -> str:
    """Make a video during training. Returns a line about the video, or about the error."""
    name = f"{file.parent.name}/{file.name}"
    try:
        file.parent.mkdir(exist_ok=True)
        seed = config.eval.seed
        made = film(with_fixed_opponent(config), model, statistics, file, 1, True, seed, MOST_S)
    except Exception as error:
        return f"[VIDEO] {name} could not be made ({blame(error)}{second_env_hint(config)}); the run goes on"
    rewards = [total for total, _, _ in made.finished]
    what = f"reward {np.mean(rewards):.3g}" if rewards else "which is not the whole episode"
    return f"[VIDEO] {name}: {made.seconds:.0f} s, {what}"


# --- one model for several players of a game


def opponents_decide(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether an opponent makes the next decision."""
    read = property_of(env, TURN)
    return bool(read() if read else attribute_of(env, TURN))


class Seats:
    """Lets a model decide for all players, with a recurrent state for each. If the env does not name the opponent that
    decides (`seat_to_decide`), all opponents share one state.
    """

    def __init__(
        self, model: BaseAlgorithm, env: gymnasium.Env[Any, Any], has_masks: bool, deterministic: bool
    ) -> None:
        self._predict: Any = model.predict
        self._env, self._deterministic = env, deterministic
        self.masked = has_masks and "action_masks" in inspect.signature(model.predict).parameters
        self._states: dict[Any, Any] = {}

    def forget(self) -> None:
        """To be called when an episode begins."""
        self._states = {}

    def actions(self, observations: object, masks: NDArray[np.bool_] | None) -> NDArray[Any]:
        """The action (1, …) for one row of observations and masks."""
        seat = opponents_decide(self._env)
        seat = attribute_of(self._env, "seat_to_decide", seat) if seat else seat
        begins = np.array([seat not in self._states])
        extra = {"action_masks": masks} if self.masked else {}
        actions: NDArray[Any]
        actions, self._states[seat] = self._predict(
            observations, state=self._states.get(seat), episode_start=begins, deterministic=self._deterministic, **extra
        )
        return actions
