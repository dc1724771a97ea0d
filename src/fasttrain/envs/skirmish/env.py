"""SkirmishEnv: one game as a Gymnasium environment, played by the same kernels as the native batch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import BoolArray, Float32Array, Slots
from fasttrain.envs.retrace import bytes_of, load_bytes
from fasttrain.envs.skirmish.actions import head_values, named_heads, replace_illegal
from fasttrain.envs.skirmish.game import SkirmishGame
from fasttrain.envs.skirmish.options import OpponentMix
from fasttrain.envs.skirmish.render import BoardView, check_render_mode, draw_board, outcome_line, render_board
from fasttrain.envs.skirmish.words import action_in_words, choice_in_words
from fasttrain.errors import ConfigError

_FIRST = np.zeros(1, np.int64)
_FIRST.flags.writeable = False


class SkirmishEnv(gymnasium.Env[Float32Array, Any]):
    """One game of Skirmish; same seed and same actions give the trajectory of a `SkirmishGame` of any size.

    As in the batch, the next game begins when one ends; `reset()` without a seed after an ended episode hands out that
    game, any other `reset()` begins a new one.

    `on_illegal` says what happens to an action outside the mask. "replace", the default, takes the lowest legal value
    of each illegal head instead and counts the action in `info["illegal_actions"]` (of the episode so far), because
    generic tools sample the whole action space; "raise" raises EnvError as the batch does.

    Args:
        render_mode: None, "ansi" or "rgb_array".
        on_illegal: "replace" or "raise".
        action_mode: as `SkirmishGame`, or "dict": the heads by name.
        **options: see `SkirmishGame`. `reward_debug` puts `reward_terms`, sums of the episode so far, into every info.

    Raises:
        ConfigError: a value out of range, an unknown name, or a wrong file.
        TypeError: an unknown render mode or argument.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        render_mode: str | None = None,
        on_illegal: str = "replace",
        action_mode: str = "heads",
        **options: Any,
    ) -> None:
        self.render_mode = check_render_mode(render_mode)
        if on_illegal not in ("replace", "raise"):
            raise ConfigError(f"on_illegal={on_illegal!r}: choose 'replace' or 'raise'")
        self._replace_illegal = on_illegal == "replace"
        game = SkirmishGame(1, "heads" if action_mode == "dict" else action_mode, **options)
        self._game = game
        self.observation_space = game.observation_space
        self.action_space = named_heads(game.options) if action_mode == "dict" else game.action_space
        self._masks = np.zeros((1, game.mask_width), np.bool_)
        self._observations = np.zeros((1, *game.observation_space.shape), np.float32)
        self._slots = Slots(
            observations=self._observations,
            actions=np.zeros((1, *(game.action_space.shape or ())), np.int64),
            rewards=np.zeros(1, np.float32),
            terminations=np.zeros(1, np.bool_),
            truncations=np.zeros(1, np.bool_),
            action_masks=self._masks,
        )
        game.bind(self._slots)
        self._next_game_begun = False
        self._illegal_actions = 0

    @property
    def opponents_ns(self) -> int:
        """Nanoseconds spent in the opponent's turns since construction."""
        return self._game.opponents_ns

    @property
    def opponents_turn(self) -> bool:
        """Whether the side to decide is the opponent (with opponent "self")."""
        return bool(self._game.opponents_turn[0]) and not self._next_game_begun

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start a game; returns its first observation and an empty info. `options` are not used."""
        super().reset(seed=seed)
        if seed is not None or not self._next_game_begun:
            self._game.reset(_FIRST, [seed])
        self._next_game_begun = False
        self._illegal_actions = 0
        return self._observation(), {}

    def get_state(self) -> dict[str, Any]:
        """Where the game is, for `set_state`: plain values and arrays."""
        return {"begun": self._next_game_begun, **bytes_of(self._arrays())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError, ValueError: no game can be there.
        """
        arrays = load_bytes(self._arrays(), state)
        self._game.load_state_arrays(arrays)
        self._observations[:], self._masks[:] = arrays["observations"], arrays["masks"]
        self._next_game_begun, self._illegal_actions = bool(state["begun"]), 0

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {**self._game.state_arrays(), "observations": self._observations, "masks": self._masks}

    def step(self, action: Any) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """One decision; the info is empty but for illegal actions, debugging and, at the end, the episode's.

        Raises:
            EnvError: an illegal action with `on_illegal="raise"`, or no `reset()` yet.
        """
        game, slots = self._game, self._slots
        info: dict[str, Any] = {}
        values = head_values(game.options, action)
        if self._replace_illegal and self._masks.any():
            self._illegal_actions += replace_illegal(game.options, self._masks[0], values)
        slots.actions.reshape(-1)[:] = values
        game.step()
        if self._illegal_actions:
            info["illegal_actions"] = self._illegal_actions
        reward = float(slots.rewards[0])
        self._next_game_begun = bool(slots.terminations[0])
        if self._next_game_begun:
            info.update(game.episode_info(0))
            return game.final_observations[0].copy(), reward, True, False, info
        if game.options.reward_debug:
            info["reward_terms"] = game.reward_terms(0)
        return self._observation(), reward, False, False, info

    def action_masks(self) -> BoolArray:
        """(A,) bool, True = legal: the mask of the next decision, head after head."""
        mask: BoolArray = self._masks[0].copy()
        return mask

    def set_opponents(self, mix: OpponentMix) -> None:
        """Change the opponent from the next game on; see `SkirmishGame.set_opponents`."""
        self._game.set_opponents(mix)

    def peek(self) -> dict[str, Any]:
        """Every field of the game: for tests and tools."""
        return self._game.peek(0)

    def view(self) -> BoardView:
        """What there is to draw."""
        return self._game.view(0)

    def describe_action(self, action: Any) -> str:
        """What `action` would do now."""
        values = head_values(self._game.options, action).tolist()
        return action_in_words(self._game.options, self.view(), values, self.peek()["cursor"])

    def describe_choice(self, part: int, value: int) -> str:
        """What a value of one head would do now."""
        return choice_in_words(self._game.options, self.view(), part, value, self.peek()["cursor"])

    def render(self) -> Any:
        """The board as text ("ansi") or as a picture (H, W, 3) uint8 ("rgb_array").

        After an episode's end it is the next game's board, below a line about how the last one ended.
        """
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array":
            return draw_board(self.view())
        outcome = f"{outcome_line(self._game.episode_info(0))}\n" if self._next_game_begun else ""
        return outcome + render_board(self.view())

    def _observation(self) -> Float32Array:
        observation: Float32Array = self._observations[0].copy()
        return observation
