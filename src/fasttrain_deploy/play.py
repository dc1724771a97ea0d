"""`fasttrain play run=FOLDER`: watch a trained agent play in the terminal, or play against it.

Any env with `render_mode="ansi"` can be watched; `output=game.mp4` films one that has `rgb_array` (`video.py`), and
`output=games.npz` keeps the learner's decisions for `fasttrain clone`. An env may also have these methods and
attributes:

- `describe_action(action) -> str`: an action in words ("plays yellow 7");
- `describe_choice(part, value) -> str`: a value of one sub-action in words, for a person who chooses;
- `describe_step() -> str`: what happened since the learner's last decision, if the picture does not show it;
- `player_names`: names of the learner and of the others in the env's text, a pair that `play` sets;
- `opponents_turn` and the opponent "self" (`envs.protocol.TwoSidedGame`): needed to play against the agent;
- `seat_to_decide`: which of several opponents decides, so that a recurrent agent has a state for each of them.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import OPPONENTS_TURN as TURN
from fasttrain.batch import each_array
from fasttrain.envs.user_code import attribute_of
from fasttrain.errors import ConfigError
from fasttrain.runs.demonstrations import Decision, stacked
from fasttrain.runs.envs import Statistics, env_spec, wrapped
from fasttrain.runs.evaluate import load_run, named_run, summarise
from fasttrain.runs.video import PACKAGES, Seats, check_packages, drawn_env, film, opponents_decide
from fasttrain.runs.view import activity, make_console
from fasttrain.saving.env_state import own_random_state
from fasttrain.spec.config import SELF
from fasttrain.spec.infos import InfoReader, plain, truth, win_of
from fasttrain.spec.policies import goals_of
from fasttrain.spec.reading import is_self_play, with_opponent
from fasttrain.spec.setting import Named
from fasttrain.terminal import shown
from fasttrain.vec.base import close_envs
from fasttrain_deploy.acting import best_choices
from fasttrain_deploy.settings import Config

MOST_LINES = 60  # up to so many legal actions are shown in words, one per line; more as numbers
IN_OUTCOME = ("is_win", "is_success", "is_draw", "end_reason", "turn", TURN)  # info entries that `_outcome` shows


class PlayedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps an episode's last picture and the text about its last step, because the vectorized env resets at once."""

    step_text = ""
    last_picture: object = ""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.tell, self.word = attribute_of(env, "describe_step"), attribute_of(env, "describe_action")

    def step(self, action: object) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if self.tell:
            self.step_text = str(self.tell())
        if result[2] or result[3]:
            self.last_picture = self.env.render()
        return result

    def words(self, action: object) -> str:
        """The action in the env's words, or as a number."""
        if self.word:
            return str(self.word(action))
        return str(action.tolist() if isinstance(action, np.ndarray) else action)

    def choice_words(self, part: int, value: int, count: int) -> str:
        """A value of one of `count` sub-actions in the env's words; empty if the env has no words for it."""
        if describe := attribute_of(self.env, "describe_choice"):
            return str(describe(part, value))
        return self.words(value) if count == 1 and self.word else ""


def main(config: Config, sources: Mapping[str, str], folder: Path, overrides: Sequence[str]) -> int:
    """Play the episodes, one decision after the other. It is no error if the user stops early."""
    where, console = named_run("play", config, sources, "model", "opponent", "output", "play."), make_console()
    recording = None if config.output is None or not config.output.endswith(".npz") else Path(config.output)
    target = None if config.output is None or recording is not None else check_output(config, sources)
    file = "best_model.zip" if config.model == "best" else "model.zip"
    with activity(console, "loading the model"):
        trained, model, statistics = load_run(where, file, config.trust)
    asked = dataclasses.replace(cast("Config", trained), play=config.play, output=config.output)
    trained = _seated(asked, config.opponent)
    seed = secrets.randbelow(10**6) if config.play.seed is None else config.play.seed
    if target is not None:
        return _to_video(trained, model, statistics, target, seed, console)
    played = PlayedEnv(_textual_env(trained))
    env = wrapped(DummyVecEnv([lambda: played]), trained, statistics)
    show(console, f"{_title(trained, model)}, play.seed={seed}", "bold")
    play = Play(trained, model, env, played, console)
    try:
        with own_random_state(seed):
            env.seed(seed)
            play.episodes()
    except (EOFError, KeyboardInterrupt):
        show(console, "\nstopped")
    finally:
        close_envs(env)
    if recording is not None and play.decisions:
        stacked(play.decisions, play.has_masks).save(recording)
        show(console, f"{config.output}: {len(play.decisions)} decisions of whole games")
    show(console, _summary(play.finished, play.reader, "you" if config.play.human else "the agent"), "bold")
    return 0


def check_output(config: Config, typed: Iterable[str]) -> Path:
    """The file of `play output=…`. Raises ConfigError if it cannot be written, or another option conflicts."""
    file = Path(str(config.output))
    if file.suffix not in PACKAGES:
        raise ConfigError(f"output={file}: play writes videos; name a file that ends in {' or '.join(PACKAGES)}")
    if config.play.human:
        raise ConfigError(f"output={file} contradicts play.human=true: a video shows only the agent; remove one")
    if "play.speed" in typed:
        raise ConfigError(f"play.speed={config.play.speed:g} has no effect with output={file}: the env sets the fps")
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"output={file}: name a file in a folder that exists")
    check_packages(f"output={file}", file.suffix)
    return file.absolute()  # an env may change the working directory


def _to_video(
    trained: Config, model: BaseAlgorithm, statistics: Statistics | None, file: Path, seed: int, console: Console
) -> int:
    """Film the episodes into `file` and print the results."""
    settings = trained.play
    show(console, f"{_title(trained, model)}, play.seed={seed}", "bold")
    try:
        with activity(console, f"filming to {file.name}"):
            made = film(trained, model, statistics, file, settings.episodes, settings.deterministic, seed)
    except OSError as error:  # imageio raises this with ffmpeg's message
        raise ConfigError(f"output={trained.output}: it could not be written ({error})") from error
    cut = "" if made.whole else ", not to their end"
    show(console, f"{trained.output}: {made.seconds:.1f} s{cut}")
    show(console, _summary(made.finished, InfoReader.of(trained.env), "the agent"), "bold")
    return 0


def show(console: Console, text: str, style: str = "") -> None:
    """Print `text`, a line or an env's picture, with the ANSI colours in it."""
    line = Text.from_ansi(text)
    line.plain = shown(line.plain)  # replaces control characters one for one, so that colours stay in place
    line.stylize(style)
    console.print(line, soft_wrap=True, highlight=False)


def _seated(trained: Config, opponent: Named | None) -> Config:
    """The configuration with players: those of the training, the requested opponent, or a person."""
    if opponent is not None and (not isinstance(opponent, str) or ":" in opponent):
        raise ConfigError(f"opponent={opponent}: classes are only for training; name one of the game's opponents")
    if trained.play.human and opponent is not None:
        raise ConfigError(f"opponent={opponent} contradicts play.human=true: there the agent plays the other side")
    if trained.play.human and trained.env.spec.opponent_key is None:
        none = f"env {trained.env.name} has no opponents that the agent could play"
        raise ConfigError(f"play.human=true: {none}; use play.human=false to watch")
    asked = SELF if trained.play.human else opponent
    seated = trained if asked is None else cast("Config", with_opponent(trained, asked))
    if is_self_play(seated) and seated.env.frame_stack > 1:
        raise ConfigError(
            f"play with env.frame_stack={seated.env.frame_stack}: one stack would mix frames of both sides; watch the "
            "agent against one of the game's own opponents"
        )
    if is_self_play(seated) and goals_of(seated):
        raise ConfigError("play with goal_every: both sides would share goals; choose one of the game's own opponents")
    return seated


def _textual_env(trained: Config) -> gymnasium.Env[Any, Any]:
    """The run's env, drawn as text. Raises ConfigError if it has no text form, or the players do not fit."""
    env = drawn_env(trained, "ansi")
    option = env_spec(trained).option
    if is_self_play(trained) and attribute_of(env, TURN) is None:
        env.close()
        raise ConfigError(f"{option} cannot be played from both sides: it has no property {TURN}")
    if isinstance(env.action_space, spaces.Box) and trained.play.human:
        env.close()
        raise ConfigError(f"play.human=true: the actions of {option} are numbers {env.action_space}, not choices")
    if attribute_of(env, "player_names") is not None:
        others = "agent" if is_self_play(trained) else "bot"
        env.set_wrapper_attr("player_names", ("you" if trained.play.human else "agent", others))
    return env


def _title(trained: Config, model: BaseAlgorithm) -> str:
    key = trained.env.spec.opponent_key
    against_whom = f", opponents: {trained.env.kwargs.get(key)}" if key and not trained.play.human else ""
    you = ", you against the agent" if trained.play.human else ""
    return f"{trained.env.name}: {trained.algo.name} after {model.num_timesteps:,} steps{you}{against_whom}"


class Play:
    """Plays episodes of one env in the terminal. `finished`: (return, decisions, last info) of each episode."""

    def __init__(self, trained: Config, model: BaseAlgorithm, env: VecEnv, played: PlayedEnv, console: Console) -> None:
        self.settings, self.model, self.env, self.played, self.console = trained.play, model, env, played, console
        self.has_masks = env.has_attr("action_masks")
        self.seats = Seats(model, played, self.has_masks, self.settings.deterministic)
        self.reader = InfoReader.of(trained.env, lambda line: show(console, f"  {line}"))
        self.finished: list[tuple[float, int, dict[str, Any]]] = []
        self.decisions: list[Decision] = []  # the learner's decisions in whole episodes

    def episodes(self) -> None:
        """Play all episodes. Raises EOFError if the person stops."""
        observations: Any = self.env.reset()
        for number in range(1, self.settings.episodes + 1):
            observations = self._episode(number, observations)

    def _episode(self, number: int, observations: object) -> object:
        """Play one episode; returns the first observations of the next one."""
        total, decisions, over, made = 0.0, 0, False, list[Decision]()
        self.seats.forget()
        while not over:
            masks = np.stack(self.env.env_method("action_masks")) if self.has_masks else None
            if opponents_decide(self.played):
                actions = self.seats.actions(observations, masks)
                if not self.played.tell:  # else `describe_step` tells the opponent's action later
                    self._show(f"opponent: {self.played.words(actions[0])}")
            else:
                decisions += 1
                of = f" of {self.settings.episodes}" if self.settings.episodes > 1 else ""
                self._show(f"\n--- game {number}{of}, decision {decisions}", "dim")
                self._show(str(self.played.render()))
                actions = self._ask(masks) if self.settings.human else self._watch(observations, masks)
                seen = each_array(lambda part: np.array(part[0]), observations)
                made.append(Decision(seen, actions[0], None if masks is None else masks[0], not made))
            observations, rewards, dones, infos = self.env.step(actions)
            if made:
                made[-1].reward += float(rewards[0])
            over, total = bool(dones[0]), total + float(rewards[0])
            if self.played.step_text and (over or not opponents_decide(self.played)):
                self._show(self.played.step_text)
        if made:
            made[-1].truncated = bool(truth(infos[0].get("TimeLimit.truncated")))
        infos[0] = self.reader.read(infos[0])
        self.finished.append((total, decisions, infos[0]))
        self.decisions += made
        self._show(f"\n{self.played.last_picture}")
        self._show(f"game {number}: {_outcome(infos[0])}, {decisions} decisions, return {total:.3g}", "bold")
        if facts := ", ".join(_facts(infos[0])):
            self._show(f"  {facts}")
        return observations

    def _watch(self, observations: object, masks: NDArray[np.bool_] | None) -> NDArray[Any]:
        """The agent's action (1, …), shown at the pace of play.speed."""
        actions = self.seats.actions(observations, masks)
        choices = best_choices(self.model, observations, masks if self.seats.masked else None)
        words = self.played.words
        self._show(f"agent {words(actions[0])}" if self.played.word else f"agent: {words(actions[0])}", "bold")
        if len(choices) == 1:
            self._show("  its only legal choice")
        elif choices:
            rated = ", ".join(f"{words(choice.action)} {choice.text}" for choice in choices)
            self._show(f"  {choices[0].kind}: {rated}")
        if self.settings.speed > 0:
            time.sleep(1 / self.settings.speed)
        else:
            self._read("  Enter to go on, q to stop: ")
        return actions

    def _show(self, text: str, style: str = "") -> None:
        show(self.console, text, style)

    def _read(self, prompt: str) -> str:
        """A line from the keyboard. Raises EOFError at the end of input, or for `q`."""
        line = self.console.input(Text(prompt)).strip()
        if not sys.stdin.isatty():  # a terminal shows the typed line by itself
            self._show(line)
        if line.lower() in ("q", "quit"):
            raise EOFError("stopped by q")
        return line

    def _ask(self, masks: NDArray[np.bool_] | None) -> NDArray[Any]:
        """Ask the person for an action (1, …): one number per sub-action. Asks again until it is legal."""
        space: Any = self.played.action_space
        dims = action_dims(space)
        legal = np.ones(sum(dims), np.bool_) if masks is None else masks[0]
        parts = np.split(legal, np.cumsum(dims)[:-1])
        chosen = [self._ask_part(np.flatnonzero(part).tolist(), place, len(parts)) for place, part in enumerate(parts)]
        return np.array(chosen, space.dtype).reshape(1, *space.shape)

    def _ask_part(self, numbers: list[int], place: int, count: int) -> int:
        if count > 1 and len(numbers) == 1:  # a single legal choice is taken without a question
            return numbers[0]
        words = [self.played.choice_words(place, number, count) for number in numbers]
        if all(words) and len(numbers) <= MOST_LINES:
            for number, word in zip(numbers, words, strict=True):
                self._show(f"  {number:>3}  {word}")
        else:
            self._show(f"  legal: {', '.join(_ranges(numbers))}")
        part = f" {place + 1} of {count}" if count > 1 else ""
        while True:
            line = self._read(f"your choice{part} (a number, q to stop): ")
            if line.isdecimal() and int(line) in numbers:
                return int(line)
            self._show(f"  {line!r} is none of the legal choices: {', '.join(_ranges(numbers))}")


def _summary(finished: Sequence[tuple[float, int, dict[str, Any]]], reader: InfoReader, who: str) -> str:
    if not finished:
        return "no game finished"
    result = summarise(finished, reader)
    count = result["episodes"]
    parts = [f"{count} game{'s' if count > 1 else ''}", f"mean return {result['mean_reward']:.3g}"]
    if result["win_rate"] is not None:
        parts.append(f"{who} won {sum(bool(win_of(reader.read(info))) for *_, info in finished)} of {count}")
    if result["score_diff"] is not None:
        parts.append(f"mean score difference {result['score_diff']:+.1f}")
    return ", ".join(parts)


def _outcome(info: Mapping[str, Any]) -> str:
    """`won`, `lost` or `draw`, with the env's end reason if it has one."""
    won, reason = win_of(info), str(info.get("end_reason", ""))
    if won is not None:
        word = "draw" if info.get("is_draw") else "won" if won else "lost"
        return f"{word} ({reason})" if reason not in ("", word) else word
    return reason or ("cut off by the limit of steps" if truth(info.get("TimeLimit.truncated")) else "over")


def _facts(info: Mapping[str, Any]) -> Iterator[str]:
    """The numbers and texts of an episode's last info, without those that `_outcome` shows."""
    for key, value in info.items():
        if key in IN_OUTCOME or str(key).startswith(("TimeLimit", "terminal_", "_")):
            continue
        if (scalar := plain(value)) is not None:
            yield f"{key} {scalar:.3g}" if isinstance(scalar, float) else f"{key} {scalar}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """1, 2, 3, 7 → "1-3", "7"."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            first, last = numbers[start], numbers[end - 1]
            yield str(first) if first == last else f"{first}-{last}"
            start = end
